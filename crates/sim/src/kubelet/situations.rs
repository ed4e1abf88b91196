//! What the agent must make of pods, as data. One list is played on the embedded kubelet and on a real one, so that neither is
//! believed more than the other.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Pods that are on the node at the same time.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Situation {
    /// In words.
    pub name: String,
    /// Whether they are bound in another order than they were made.
    #[serde(default)]
    pub bound_in_reverse: bool,
    /// In the order they are made.
    pub pods: Vec<SituationPod>,
}

/// A pod, and what must become of it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SituationPod {
    /// Its name.
    pub name: String,
    /// How many there are; each is granted the next of the GPUs.
    copies: Option<u8>,
    /// Its containers, in the order the kubelet takes them.
    pub containers: Vec<SituationContainer>,
    /// What its owner is told when it cannot be served.
    pub refused: Option<String>,
}

/// A container, and what it must find.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SituationContainer {
    /// Its name.
    pub name: String,
    /// When it runs.
    #[serde(default)]
    pub role: ContainerRole,
    /// What it asks for.
    pub resources: BTreeMap<String, String>,
    /// The GPUs it was granted; none where nobody placed the pod.
    #[serde(default)]
    pub granted: Vec<u8>,
    /// What else its environment must say.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// What it may use of its GPU; none for whole GPUs.
    limits: Option<ExpectedLimit>,
}

/// When a container runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerRole {
    /// Before the others, and then no more.
    Init,
    /// Beside the others, from before they begin.
    Sidecar,
    /// For as long as the pod does.
    #[default]
    Main,
}

/// What a container may use of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct ExpectedLimit {
    /// Memory.
    pub mib: u64,
    /// Compute.
    pub percent: u32,
}

/// What became of a pod.
#[derive(Debug)]
pub enum PodOutcome {
    /// It runs; what its containers see, by name.
    Running(BTreeMap<String, ContainerView>),
    /// It was turned away, in these words.
    Refused(String),
}

/// What a container sees of its GPUs.
#[derive(Debug)]
pub struct ContainerView {
    /// Its environment; empty where it cannot be asked.
    pub env: BTreeMap<String, String>,
    /// The limits in force, by GPU.
    pub limits: Option<BTreeMap<u8, ExpectedLimit>>,
    /// The GPUs its pod's annotations name.
    pub annotated: Vec<u8>,
}

/// A node with a kubelet and the agent.
#[allow(async_fn_in_trait, reason = "played by one task")]
pub trait NodeUnderTest {
    /// The UUID of a GPU.
    fn uuid(&self, gpu: u8) -> String;
    /// Makes a pod.
    async fn create_pod(&self, pod: &SituationPod) -> Result<(), String>;
    /// Binds a pod to the node, with its grant in the same write where it has one.
    async fn bind_pod(&self, pod: &SituationPod) -> Result<(), String>;
    /// Waits until something has become of it.
    async fn outcome(&self, pod: &SituationPod) -> Result<PodOutcome, String>;
    /// Compares all allocations, and ends all pods.
    async fn check_and_clear(&self) -> Result<(), String>;
}

/// All situations there are.
pub fn all() -> Result<Vec<Situation>, serde_json::Error> {
    serde_json::from_str(include_str!("situations.json"))
}

impl Situation {
    /// Plays it on a node.
    pub async fn run(&self, node: &impl NodeUnderTest) -> Result<(), String> {
        let pods: Vec<SituationPod> = self.pods.iter().flat_map(SituationPod::each).collect();
        for pod in &pods {
            node.create_pod(pod).await?;
        }
        let mut order: Vec<&SituationPod> = pods.iter().collect();
        if self.bound_in_reverse {
            order.reverse();
        }
        for pod in order {
            node.bind_pod(pod).await?;
        }
        for pod in &pods {
            let outcome = node.outcome(pod).await?;
            pod.check(&outcome, |gpu| node.uuid(gpu)).map_err(|wrong| format!("{}: {wrong}", pod.name))?;
        }
        node.check_and_clear().await
    }
}

impl SituationPod {
    /// Whether nobody has placed it.
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

    /// Whether what became of it is right.
    fn check(&self, outcome: &PodOutcome, uuid: impl Fn(u8) -> String) -> Result<(), String> {
        match (outcome, &self.refused) {
            (PodOutcome::Refused(words), Some(expected)) if words.contains(expected) => Ok(()),
            (PodOutcome::Running(seen), None) => {
                for asked in &self.containers {
                    let found = seen.get(&asked.name).ok_or_else(|| format!("{} is not seen", asked.name))?;
                    asked.check(found, &uuid).map_err(|wrong| format!("{}: {wrong}", asked.name))?;
                }
                Ok(())
            }
            (outcome, expected) => Err(format!("{outcome:?}, expected a refusal of {expected:?}")),
        }
    }
}

impl SituationContainer {
    fn check(&self, seen: &ContainerView, uuid: impl Fn(u8) -> String) -> Result<(), String> {
        if !self.granted.is_empty() && seen.annotated != self.granted {
            return Err(format!("its pod says GPUs {:?}, granted were {:?}", seen.annotated, self.granted));
        }
        // What runs no more cannot be asked, and needs no limits.
        if self.role == ContainerRole::Init {
            return Ok(());
        }
        let visible = seen.annotated.iter().map(|gpu| uuid(*gpu)).collect::<Vec<_>>().join(",");
        let expected = self.env.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in expected.chain([("NVIDIA_VISIBLE_DEVICES", visible.as_str())]) {
            if seen.env.get(name).map(String::as_str) != Some(value) {
                return Err(format!("{name}={value} is missing in {:?}", seen.env));
            }
        }
        let limits = self.limits.map(|limit| seen.annotated.iter().map(|gpu| (*gpu, limit)).collect());
        if seen.limits != limits {
            return Err(format!("the limits are {:?}, expected {limits:?}", seen.limits));
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

    fn seen(annotated: &[u8], visible: &str, limit: Option<ExpectedLimit>) -> PodOutcome {
        let env = BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_owned(), visible.to_owned())]);
        let limits = limit.map(|limit| annotated.iter().map(|gpu| (*gpu, limit)).collect());
        PodOutcome::Running(BTreeMap::from([(
            "main".to_owned(),
            ContainerView { env, limits, annotated: annotated.to_vec() },
        )]))
    }

    #[test]
    fn a_wrong_gpu_a_wrong_limit_and_a_wrong_word_are_noticed() {
        let situations = all().unwrap();
        let pod = |name: &str| {
            let pods =
                situations.iter().flat_map(|situation| situation.pods.iter().flat_map(SituationPod::each));
            pods.into_iter().find(|pod| pod.name == name).unwrap()
        };
        let limit = ExpectedLimit { mib: 10_240, percent: 30 };
        assert_eq!(pod("vcuda").check(&seen(&[5], "GPU-5", Some(limit)), uuid), Ok(()));
        for wrong in [
            seen(&[5], "GPU-4", Some(limit)),
            seen(&[4], "GPU-4", Some(limit)),
            seen(&[5], "GPU-5", None),
            seen(&[5], "GPU-5", Some(ExpectedLimit { percent: 31, ..limit })),
            PodOutcome::Refused("no".into()),
        ] {
            assert!(pod("vcuda").check(&wrong, uuid).is_err(), "{wrong:?}");
        }
        assert!(pod("lonely").check(&seen(&[5], "GPU-5", None), uuid).is_err());
        assert!(pod("lonely").check(&PodOutcome::Refused("something else".into()), uuid).is_err());
        assert_eq!(pod("equal-9").containers[0].granted, [0], "copies take the GPUs in turn");
    }
}
