//! Situations that the agent must handle, as data.
//!
//! One list runs on the embedded kubelet and on a real one, so that each verifies the other.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Pods that are on the node at the same time.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Situation {
    /// Description for the log.
    pub name: String,
    /// True if the pods are bound in the reverse order of their creation.
    #[serde(default)]
    pub bound_in_reverse: bool,
    /// Pods in the order of their creation.
    pub pods: Vec<SituationPod>,
}

/// A pod and its expected outcome.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SituationPod {
    /// Name of the pod.
    pub name: String,
    /// Number of copies. Each copy is granted the next of the GPUs.
    copies: Option<u8>,
    /// Containers in the order in which the kubelet admits them.
    pub containers: Vec<SituationContainer>,
    /// Part of the message of an expected rejection.
    pub refused: Option<String>,
}

/// A container and what it must find.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SituationContainer {
    /// Name of the container.
    pub name: String,
    /// Role of the container in its pod.
    #[serde(default)]
    pub role: SituationRole,
    /// Requested amounts by resource.
    pub resources: BTreeMap<String, String>,
    /// GPUs granted by the scheduler. Empty for a pod that bypassed the scheduler.
    #[serde(default)]
    pub granted: Vec<u8>,
    /// Expected environment variables beside `NVIDIA_VISIBLE_DEVICES`.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// Expected limit on each GPU. Absent for whole GPUs.
    limits: Option<ExpectedLimit>,
}

/// When a container runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SituationRole {
    /// An init container: runs to its end before the others start.
    Init,
    /// A sidecar: starts before the main containers and runs beside them.
    Sidecar,
    /// A main container: runs as long as the pod.
    #[default]
    Main,
}

/// The limit of a container on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct ExpectedLimit {
    /// Memory in MiB.
    pub mib: u64,
    /// Percentage of the GPU's time.
    pub percent: u32,
}

/// The outcome of a pod.
#[derive(Debug)]
pub enum PodOutcome {
    /// The pod runs, with these containers by name.
    Running(BTreeMap<String, ContainerObservation>),
    /// The kubelet rejected the pod with this message.
    Refused(String),
}

/// What a container finds of its GPUs.
#[derive(Debug)]
pub struct ContainerObservation {
    /// Environment variables. Empty for a container that no longer runs.
    pub env: BTreeMap<String, String>,
    /// Limits in force, by GPU.
    pub limits: Option<BTreeMap<u8, ExpectedLimit>>,
    /// GPUs in the annotations of the pod.
    pub annotated: Vec<u8>,
}

/// A node with a kubelet and the agent.
#[allow(async_fn_in_trait, reason = "one task runs all situations")]
pub trait NodeUnderTest {
    /// The error of the node itself, as opposed to a wrong outcome.
    type Error: std::fmt::Display;

    /// Returns the UUID of a GPU.
    fn uuid(&self, gpu: u8) -> String;
    /// Creates a pod.
    async fn create_pod(&self, pod: &SituationPod) -> Result<(), Self::Error>;
    /// Binds a pod to the node, with its grant in the same write if it has one.
    async fn bind_pod(&self, pod: &SituationPod) -> Result<(), Self::Error>;
    /// Waits until the pod runs or is rejected.
    async fn outcome(&self, pod: &SituationPod) -> Result<PodOutcome, Self::Error>;
    /// Verifies that kubelet, annotations and limits agree, then deletes all pods.
    async fn check_and_clear(&self) -> Result<(), Self::Error>;
}

/// Reasons why a situation fails.
#[derive(Debug, thiserror::Error)]
pub enum SituationError<E> {
    /// The node itself failed.
    #[error("{0:#}")]
    Node(E),
    /// A pod had another outcome than expected.
    #[error("pod {pod}: {mismatch}")]
    Pod {
        /// Name of the pod.
        pod: String,
        /// What is different.
        mismatch: Mismatch,
    },
}

/// A difference between the expected and the actual outcome of a pod.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// The pod runs although it should be rejected, or the other way round.
    #[error("{outcome}, expected rejection: {expected:?}")]
    Outcome {
        /// The actual outcome.
        outcome: String,
        /// Part of the message of the expected rejection.
        expected: Option<String>,
    },
    /// A container is not there.
    #[error("container {0} is missing")]
    NoContainer(String),
    /// The annotations name other GPUs than the grant.
    #[error("container {container}: annotated with GPUs {annotated:?}, granted {granted:?}")]
    Gpus {
        /// Name of the container.
        container: String,
        /// GPUs in the annotations.
        annotated: Vec<u8>,
        /// GPUs of the grant.
        granted: Vec<u8>,
    },
    /// An environment variable is missing or has another value.
    #[error("container {container}: {variable} is missing in {env:?}")]
    Environment {
        /// Name of the container.
        container: String,
        /// The expected variable as `NAME=value`.
        variable: String,
        /// All variables of the container.
        env: BTreeMap<String, String>,
    },
    /// Other limits are in force than expected.
    #[error("container {container}: the limits are {found:?}, expected {expected:?}")]
    Limits {
        /// Name of the container.
        container: String,
        /// Limits in force.
        found: Option<BTreeMap<u8, ExpectedLimit>>,
        /// Expected limits.
        expected: Option<BTreeMap<u8, ExpectedLimit>>,
    },
}

/// Returns all situations.
pub fn all() -> Result<Vec<Situation>, serde_json::Error> {
    serde_json::from_str(include_str!("situations.json"))
}

impl Situation {
    /// Runs the situation on a node.
    pub async fn run<N: NodeUnderTest>(&self, node: &N) -> Result<(), SituationError<N::Error>> {
        let pods: Vec<SituationPod> = self.pods.iter().flat_map(SituationPod::each).collect();
        for pod in &pods {
            node.create_pod(pod).await.map_err(SituationError::Node)?;
        }
        let mut order: Vec<&SituationPod> = pods.iter().collect();
        if self.bound_in_reverse {
            order.reverse();
        }
        for pod in order {
            node.bind_pod(pod).await.map_err(SituationError::Node)?;
        }
        for pod in &pods {
            let outcome = node.outcome(pod).await.map_err(SituationError::Node)?;
            let checked = pod.check(&outcome, |gpu| node.uuid(gpu));
            checked.map_err(|mismatch| SituationError::Pod { pod: pod.name.clone(), mismatch })?;
        }
        node.check_and_clear().await.map_err(SituationError::Node)
    }
}

impl SituationPod {
    /// Returns whether the pod bypassed the scheduler.
    #[must_use]
    pub fn is_unplaced(&self) -> bool {
        self.containers.iter().all(|container| container.granted.is_empty())
    }

    fn each(&self) -> Vec<Self> {
        let Some(copies) = self.copies else { return vec![self.clone()] };
        let copy = |number: u8| {
            let mut copy = Self { name: format!("{}-{number}", self.name), copies: None, ..self.clone() };
            for container in &mut copy.containers {
                let place = usize::from(number) % container.granted.len().max(1);
                container.granted = container.granted.get(place).copied().into_iter().collect();
            }
            copy
        };
        (0..copies).map(copy).collect()
    }

    /// Compares the outcome with the expected one.
    fn check(&self, outcome: &PodOutcome, uuid: impl Fn(u8) -> String) -> Result<(), Mismatch> {
        match (outcome, &self.refused) {
            (PodOutcome::Refused(message), Some(expected)) if message.contains(expected) => Ok(()),
            (PodOutcome::Running(views), None) => self.containers.iter().try_for_each(|container| {
                let view = views.get(&container.name);
                container.check(view.ok_or_else(|| Mismatch::NoContainer(container.name.clone()))?, &uuid)
            }),
            (outcome, expected) => {
                Err(Mismatch::Outcome { outcome: format!("{outcome:?}"), expected: expected.clone() })
            }
        }
    }
}

impl SituationContainer {
    fn check(&self, view: &ContainerObservation, uuid: impl Fn(u8) -> String) -> Result<(), Mismatch> {
        let container = self.name.clone();
        if !self.granted.is_empty() && view.annotated != self.granted {
            let (annotated, granted) = (view.annotated.clone(), self.granted.clone());
            return Err(Mismatch::Gpus { container, annotated, granted });
        }
        // An init container has ended: its environment cannot be read, and it needs no limits.
        if self.role == SituationRole::Init {
            return Ok(());
        }
        let visible = view.annotated.iter().map(|gpu| uuid(*gpu)).collect::<Vec<_>>().join(",");
        let expected = self.env.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in expected.chain([("NVIDIA_VISIBLE_DEVICES", visible.as_str())]) {
            if view.env.get(name).map(String::as_str) != Some(value) {
                let variable = format!("{name}={value}");
                return Err(Mismatch::Environment { container, variable, env: view.env.clone() });
            }
        }
        let expected = self.limits.map(|limit| view.annotated.iter().map(|gpu| (*gpu, limit)).collect());
        if view.limits != expected {
            return Err(Mismatch::Limits { container, found: view.limits.clone(), expected });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuid(gpu: u8) -> String {
        format!("GPU-{gpu}")
    }

    fn running(annotated: &[u8], visible: &str, limit: Option<ExpectedLimit>) -> PodOutcome {
        let env = BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_owned(), visible.to_owned())]);
        let limits = limit.map(|limit| annotated.iter().map(|gpu| (*gpu, limit)).collect());
        let view = ContainerObservation { env, limits, annotated: annotated.to_vec() };
        PodOutcome::Running(BTreeMap::from([("main".to_owned(), view)]))
    }

    #[test]
    fn detects_a_wrong_gpu_a_wrong_limit_and_a_wrong_message() {
        let situations = all().unwrap();
        let pod = |name: &str| {
            let pods =
                situations.iter().flat_map(|situation| situation.pods.iter().flat_map(SituationPod::each));
            pods.into_iter().find(|pod| pod.name == name).unwrap()
        };
        let limit = ExpectedLimit { mib: 10_240, percent: 30 };
        assert_eq!(pod("vcuda").check(&running(&[5], "GPU-5", Some(limit)), uuid), Ok(()));
        for wrong in [
            running(&[5], "GPU-4", Some(limit)),
            running(&[4], "GPU-4", Some(limit)),
            running(&[5], "GPU-5", None),
            running(&[5], "GPU-5", Some(ExpectedLimit { percent: 31, ..limit })),
            PodOutcome::Refused("no".into()),
        ] {
            assert!(pod("vcuda").check(&wrong, uuid).is_err(), "{wrong:?}");
        }
        assert!(pod("lonely").check(&running(&[5], "GPU-5", None), uuid).is_err());
        assert!(pod("lonely").check(&PodOutcome::Refused("something else".into()), uuid).is_err());
        assert_eq!(pod("equal-9").containers[0].granted, [0], "copies take the GPUs in turn");
    }
}
