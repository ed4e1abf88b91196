//! A pod's question, read once for all nodes.

use std::borrow::Cow;
use std::collections::BTreeMap;

use tessera_core::placement::Policy;
use tessera_core::request::{PodRequest, Request};
use tessera_core::units::MiB;

use crate::foreign::dialect::DialectSet;
use crate::foreign::dialect::MemoryUnit;
use crate::foreign::objects::{Pod, PodSpec};
use crate::foreign::pod_spec::BadPod;
use crate::tessera::preferences::{self, BadPreference};

/// Whoever knows which policy places a pod.
pub trait PolicyResolver {
    /// The policy of a pod that wishes this one, or none in particular.
    fn policy(&self, wished: Option<Policy>) -> Policy;
}

/// What a pod asks of every node.
#[derive(Debug)]
pub struct ParsedPod<'a> {
    /// Whose quota it counts against.
    pub namespace: &'a str,
    /// How its GPUs are chosen.
    pub policy: Policy,
    /// What it asks for.
    pub shape: RequestShape,
}

/// What a pod asks for, whoever it is: pods of like shape get the same answer from a node's GPUs.
#[derive(Clone, Debug)]
pub struct RequestShape {
    /// The vocabularies it asks in.
    pub dialects: DialectSet,
    gib: PodRequest,
    /// Where it is another request: on nodes that count memory in MiB. Those that count in blocks ask for a multiple of it.
    mib: Option<PodRequest>,
}

/// A question nobody can answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPodObject {
    /// What it asks for.
    #[error(transparent)]
    Pod(#[from] BadPod),
    /// How it wants it.
    #[error(transparent)]
    Wish(#[from] BadPreference),
}

impl<'a> ParsedPod<'a> {
    /// Reads a pod.
    pub fn new(
        policies: &impl PolicyResolver,
        namespace: &'a str,
        spec: &PodSpec,
        annotations: &BTreeMap<String, String>,
    ) -> Result<Self, BadPodObject> {
        let wishes = preferences::parse(annotations)?;
        let request = |unit| {
            spec.request(unit).map(|request| PodRequest { link_sensitivity: wishes.traffic, ..request })
        };
        let gib = request(MemoryUnit::GiB)?;
        let mib = request(MemoryUnit::MiB)?;
        let claims = spec.claims(MemoryUnit::GiB)?;
        let dialects = claims.iter().fold(DialectSet::default(), |set, claim| set.with(claim.dialect));
        let shape = RequestShape { dialects, mib: (gib != mib).then_some(mib), gib };
        Ok(Self { namespace, policy: policies.policy(wishes.policy), shape })
    }

    /// Reads a pod as it was sent.
    pub fn of(policies: &impl PolicyResolver, pod: &'a Pod) -> Result<Self, BadPodObject> {
        Self::new(policies, &pod.metadata.namespace, &pod.spec, &pod.metadata.annotations)
    }

    /// What it asks of a node that counts memory in `unit`.
    #[must_use]
    pub fn request(&self, unit: MemoryUnit) -> Cow<'_, PodRequest> {
        self.shape.request(unit)
    }

    /// Whether it asks for GPUs at all.
    #[must_use]
    pub fn wants_gpu(&self) -> bool {
        self.shape.gib.wants_gpu()
    }
}

impl RequestShape {
    /// Whether it is the same on every node.
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

    /// What it is on a node that counts memory in `unit`.
    #[must_use]
    pub fn request(&self, unit: MemoryUnit) -> Cow<'_, PodRequest> {
        match (unit, &self.mib) {
            (MemoryUnit::GiB, _) | (_, None) => Cow::Borrowed(&self.gib),
            (MemoryUnit::MiB, Some(mib)) => Cow::Borrowed(mib),
            (MemoryUnit::Blocks(size), Some(mib)) => {
                let mut scaled = mib.clone();
                for container in &mut scaled.containers {
                    if let Some(Request::Memory(memory)) = &mut container.request {
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

    struct Always;

    impl PolicyResolver for Always {
        fn policy(&self, _: Option<Policy>) -> Policy {
            Policy::Simple
        }
    }

    #[test]
    fn the_nodes_unit_gives_memory_its_meaning() {
        let pod: Pod = serde_json::from_str(
            r#"{"spec":{"containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"6"}}}]}}"#,
        )
        .unwrap();
        let ask = ParsedPod::of(&Always, &pod).unwrap();
        for (unit, mib) in [(MemoryUnit::GiB, 6144), (MemoryUnit::MiB, 6), (MemoryUnit::Blocks(256), 1536)] {
            let expected = PodRequest::of_mains([Request::Memory(MiB(mib))]);
            assert_eq!(ask.request(unit).containers[0].request, expected.containers[0].request, "{unit}");
        }
    }

    #[test]
    fn shapes_are_alike_by_what_is_asked_for_not_by_name() {
        let shape = |container: &str, resource: &str, amount: &str| {
            let json = format!(
                r#"{{"spec":{{"containers":[{{"name":"{container}","resources":{{"limits":{{"{resource}":"{amount}"}}}}}}]}}}}"#
            );
            let pod: Pod = serde_json::from_str(&json).unwrap();
            ParsedPod::of(&Always, &pod).unwrap().shape
        };
        let one = shape("c", "aliyun.com/gpu-mem", "6");
        assert!(one.is_like(&shape("d", "aliyun.com/gpu-mem", "6")));
        assert!(!one.is_like(&shape("c", "aliyun.com/gpu-mem", "7")));
        let whole = shape("c", "aliyun.com/gpu", "1");
        assert!(!one.is_like(&whole));
        assert!(!whole.is_like(&shape("c", "nvidia.com/gpu", "1")), "not every node serves both");
    }
}
