//! A pod's question, read once for all nodes.

use std::collections::BTreeMap;

use tessera_core::placement::Policy;
use tessera_core::request::PodRequest;
use tessera_wire::dialect::MemoryUnit;
use tessera_wire::node_spec::Serves;
use tessera_wire::objects::{Pod, PodSpec};
use tessera_wire::pod_spec::BadPod;
use tessera_wire::wishes::{self, BadWish};

use crate::state::State;

/// What a pod asks of every node.
#[derive(Debug)]
pub struct Ask<'a> {
    /// Whose quota it counts against.
    pub namespace: &'a str,
    /// How its cards are chosen.
    pub policy: Policy,
    /// The vocabularies it asks in.
    pub dialects: Serves,
    gib: PodRequest,
    /// Where it is another request: on nodes that count memory in MiB.
    mib: Option<PodRequest>,
}

/// A question nobody can answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAsk {
    /// What it asks for.
    #[error(transparent)]
    Pod(#[from] BadPod),
    /// How it wants it.
    #[error(transparent)]
    Wish(#[from] BadWish),
}

impl<'a> Ask<'a> {
    /// Reads a pod.
    pub fn new(
        state: &State,
        namespace: &'a str,
        spec: &PodSpec,
        annotations: &BTreeMap<String, String>,
    ) -> Result<Self, BadAsk> {
        let wishes = wishes::parse(annotations)?;
        let request =
            |unit| spec.request(unit).map(|request| PodRequest { traffic: wishes.traffic, ..request });
        let gib = request(MemoryUnit::GiB)?;
        let mib = request(MemoryUnit::MiB)?;
        let claims = spec.claims(MemoryUnit::GiB)?;
        let dialects = claims.iter().fold(Serves::default(), |set, claim| set.with(claim.dialect));
        Ok(Self {
            namespace,
            policy: state.policy(wishes.policy),
            dialects,
            mib: (gib != mib).then_some(mib),
            gib,
        })
    }

    /// Reads a pod as it was sent.
    pub fn of(state: &State, pod: &'a Pod) -> Result<Self, BadAsk> {
        Self::new(state, &pod.metadata.namespace, &pod.spec, &pod.metadata.annotations)
    }

    /// What it asks of a node that counts memory in `unit`.
    #[must_use]
    pub fn request(&self, unit: MemoryUnit) -> &PodRequest {
        match (unit, &self.mib) {
            (MemoryUnit::MiB, Some(mib)) => mib,
            _ => &self.gib,
        }
    }

    /// Whether it asks for cards at all.
    #[must_use]
    pub fn wants_gpu(&self) -> bool {
        self.gib.wants_gpu()
    }
}
