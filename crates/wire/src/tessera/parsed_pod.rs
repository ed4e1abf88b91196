//! Parses a pod's request, policy and preferences once, so that all nodes can be judged with them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use tessera_core::placement::Policy;
use tessera_core::request::{ContainerRequest, ContainerRole, MemoryRequest, PodRequest, Request, Share};
use tessera_core::units::MiB;

use crate::foreign::dialect::{Dialect, DialectSet, MemoryUnit};
use crate::foreign::objects::{Pod, PodSpec};
use crate::foreign::pod_spec::BadPod;
use crate::tessera::gpu_wishes::GpuWishes;
use crate::tessera::memory_limit;
use crate::tessera::preferences::{self, BadPreferences};

/// Determines the placement policy of a pod.
pub trait PolicyResolver {
    /// Returns the policy of a pod that prefers `preferred`.
    fn policy(&self, preferred: Option<Policy>) -> Policy;
}

/// A pod parsed from its Kubernetes object.
#[derive(Debug)]
pub struct ParsedPod<'a> {
    /// Namespace whose quota the pod counts against.
    pub namespace: &'a str,
    /// Policy that chooses the pod's GPUs.
    pub policy: Policy,
    /// Requested resources.
    pub shape: RequestShape,
}

/// The requested resources of a pod, independent of its identity. Pods of the same shape get the
/// same verdict from a node's GPUs.
#[derive(Clone, Debug)]
pub struct RequestShape {
    /// Dialects that the pod uses.
    pub dialects: DialectSet,
    /// The request on nodes that count memory in GiB.
    gib: PodRequest,
    /// The request on nodes that count memory in MiB, or `None` if it equals `gib`. Nodes that
    /// count in blocks multiply it.
    mib: Option<PodRequest>,
}

/// A pod whose request or preferences are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPodObject {
    /// The request is invalid.
    #[error(transparent)]
    Pod(#[from] BadPod),
    /// Preferences are invalid.
    #[error(transparent)]
    Preferences(#[from] BadPreferences),
    /// A container requests GPUs by resources and by a claim. The files of both grants have the same place.
    #[error(
        "container {0} requests GPUs by resources and by a claim; request all of them by claims, or in two containers"
    )]
    ClaimBesideResources(String),
    /// A container requests more memory than it may use.
    #[error(
        "container {container} requests {requested} of a GPU, and {} allows it only {limit}; write at least \
         what the container requests",
        memory_limit::KEY
    )]
    LimitBelowRequest {
        /// Name of the container.
        container: String,
        /// Requested memory of each GPU.
        requested: MiB,
        /// Value of the annotation.
        limit: MiB,
    },
}

impl<'a> ParsedPod<'a> {
    /// Parses the parts of a pod.
    pub fn new(
        policies: &impl PolicyResolver,
        namespace: &'a str,
        spec: &PodSpec,
        annotations: &BTreeMap<String, String>,
    ) -> Result<Self, BadPodObject> {
        let preferences = preferences::parse_all(annotations)?;
        let GpuWishes { mut selection, node_policy, gpu_policy } = preferences.wishes;
        let claims = spec.claims(MemoryUnit::GiB)?;
        selection.needs_slot = claims
            .iter()
            .any(|claim| claim.dialect == Dialect::Hami && matches!(claim.request, Request::Share(_)));
        let request = |unit| {
            let link_sensitivity = preferences.link_sensitivity;
            spec.request(unit).map(|request| PodRequest {
                link_sensitivity,
                selection: selection.clone(),
                ..request
            })
        };
        let gib = request(MemoryUnit::GiB)?;
        let mib = request(MemoryUnit::MiB)?;
        if let Some(limit) = preferences.memory_limit {
            // No node counts memory in smaller units, so what is too much here is too much everywhere.
            check_limit(&mib, limit)?;
        }
        let dialects = claims.iter().fold(DialectSet::default(), |set, claim| set.with(claim.dialect));
        let shape = RequestShape { dialects, mib: (gib != mib).then_some(mib), gib };
        let policy = policies.policy(preferences.policy).with(gpu_policy, node_policy);
        Ok(Self { namespace, policy, shape })
    }

    /// Parses a pod object.
    pub fn of(policies: &impl PolicyResolver, pod: &'a Pod) -> Result<Self, BadPodObject> {
        Self::new(policies, &pod.metadata.namespace, &pod.spec, &pod.metadata.annotations)
    }

    /// Adds what the claims of the pod request. All containers may use the claims at the same time.
    #[must_use]
    pub fn with_claims(mut self, requests: &[Request]) -> Self {
        for request in requests {
            let shape = &mut self.shape;
            for pod in [Some(&mut shape.gib), shape.mib.as_mut()].into_iter().flatten() {
                pod.containers.push(ContainerRequest {
                    name: "(claim)".to_owned(),
                    role: ContainerRole::Main,
                    request: Some(*request),
                });
            }
        }
        self
    }

    /// Returns the request on a node that counts memory in `unit`.
    #[must_use]
    pub fn request(&self, unit: MemoryUnit) -> Cow<'_, PodRequest> {
        self.shape.request(unit)
    }

    /// Returns whether the pod requests GPUs.
    #[must_use]
    pub fn wants_gpu(&self) -> bool {
        self.shape.gib.wants_gpu()
    }
}

/// Checks that no container requests more memory than it may use.
fn check_limit(request: &PodRequest, limit: MiB) -> Result<(), BadPodObject> {
    for container in &request.containers {
        if let Some(Request::Share(Share { memory: MemoryRequest::Amount(requested), .. })) =
            container.request
            && requested > limit
        {
            let container = container.name.clone();
            return Err(BadPodObject::LimitBelowRequest { container, requested, limit });
        }
    }
    Ok(())
}

impl RequestShape {
    /// Returns whether both shapes request the same on every node.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let Self { dialects, gib, mib } = self;
        *dialects == other.dialects
            && gib.is_like(&other.gib)
            && match (mib, &other.mib) {
                (None, None) => true,
                (Some(mib), Some(other)) => mib.is_like(other),
                _ => false,
            }
    }

    /// Returns the request on a node that counts memory in `unit`.
    #[must_use]
    pub fn request(&self, unit: MemoryUnit) -> Cow<'_, PodRequest> {
        match (unit, &self.mib) {
            (MemoryUnit::GiB, _) | (_, None) => Cow::Borrowed(&self.gib),
            (MemoryUnit::MiB, Some(mib)) => Cow::Borrowed(mib),
            (MemoryUnit::Blocks(size), Some(mib)) => {
                let mut scaled = mib.clone();
                for (container, in_gib) in scaled.containers.iter_mut().zip(&self.gib.containers) {
                    let differs = container.request != in_gib.request;
                    if let Some(Request::Share(Share { memory: MemoryRequest::Amount(memory), .. })) =
                        &mut container.request
                        && differs
                    {
                        *memory = MiB(memory.0.saturating_mul(u64::from(size)));
                    }
                }
                Cow::Owned(scaled)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct AlwaysSimple;

    impl PolicyResolver for AlwaysSimple {
        fn policy(&self, _: Option<Policy>) -> Policy {
            Policy::Simple
        }
    }

    #[test]
    fn scales_memory_by_the_unit_of_the_node() {
        let pod: Pod = serde_json::from_str(
            r#"{"spec":{"containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"6"}}}]}}"#,
        )
        .unwrap();
        let pod = ParsedPod::of(&AlwaysSimple, &pod).unwrap();
        for (unit, mib) in [(MemoryUnit::GiB, 6144), (MemoryUnit::MiB, 6), (MemoryUnit::Blocks(256), 1536)] {
            let expected = PodRequest::of_mains([Request::memory(MiB(mib))]);
            assert_eq!(pod.request(unit).containers[0].request, expected.containers[0].request, "{unit}");
        }
    }

    #[test]
    fn a_limit_below_the_request_is_refused_in_words() {
        let read = |limit: &str| {
            let pod = format!(
                r#"{{"metadata":{{"annotations":{{"tessera.dev/gpu-memory-limit":"{limit}"}}}},"spec":{{"containers":[
                    {{"name":"c","resources":{{"limits":{{"nvidia.com/gpu":"1","nvidia.com/gpumem":"8192"}}}}}}]}}}}"#
            );
            let pod: Pod = serde_json::from_str(&pod).unwrap();
            ParsedPod::of(&AlwaysSimple, &pod).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(read("8Gi"), Ok(()));
        assert_eq!(
            read("4Gi").unwrap_err(),
            "container c requests 8192 MiB of a GPU, and tessera.dev/gpu-memory-limit allows it only 4096 MiB; \
             write at least what the container requests"
        );
        assert!(read("4").unwrap_err().starts_with("tessera.dev/gpu-memory-limit: found \"4\""));
    }

    #[test]
    fn shapes_compare_requests_not_names() {
        let shape = |container: &str, resource: &str, amount: &str| {
            let json = format!(
                r#"{{"spec":{{"containers":[{{"name":"{container}","resources":{{"limits":{{"{resource}":"{amount}"}}}}}}]}}}}"#
            );
            let pod: Pod = serde_json::from_str(&json).unwrap();
            ParsedPod::of(&AlwaysSimple, &pod).unwrap().shape
        };
        let one = shape("c", "aliyun.com/gpu-mem", "6");
        assert!(one.is_like(&shape("d", "aliyun.com/gpu-mem", "6")));
        assert!(!one.is_like(&shape("c", "aliyun.com/gpu-mem", "7")));
        let whole = shape("c", "aliyun.com/gpu", "1");
        assert!(!one.is_like(&whole));
        assert!(!whole.is_like(&shape("c", "nvidia.com/gpu", "1")), "not every node serves both");
    }
}
