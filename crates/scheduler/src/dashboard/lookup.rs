//! What the views read of the state. The one file here that knows how the state keeps it.

use tessera_core::grant::PodGrant;
use tessera_core::node::NodeState;
use tessera_core::quota::QuotaLabels;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit, gpushare, vcuda, whole};
use tessera_wire::foreign::objects::Resources;
use tessera_wire::{foreign::dialect::DialectSet, tessera::parsed_node::ParsedNode};

use crate::state::{GpuPod, State};

/// A node with GPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct GpuNode<'a> {
    pub(super) spec: &'a ParsedNode,
    pub(super) state: &'a NodeState,
    pub(super) place: &'a QuotaLabels,
    /// Where its agent answers.
    pub(super) agent: Option<&'a str>,
}

/// A pod that holds something of a node, and what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holder<'a> {
    pub(super) uid: &'a PodUid,
    pub(super) grant: &'a PodGrant,
    /// Who it is; absent for a booking whose pod is gone.
    pub(super) pod: Option<&'a GpuPod>,
}

/// A node as the state names it.
#[derive(Clone, Copy, Debug)]
pub(super) enum NodeLookup<'a> {
    Gpus(GpuNode<'a>),
    /// What it says of itself cannot be read.
    Unreadable(&'a str),
    /// Without GPUs, or known to the watch alone.
    NoGpus,
}

pub(super) const DIALECTS: [(Dialect, &str); 4] = [
    (Dialect::Nvidia, "nvidia"),
    (Dialect::Gputopology, "gputopology"),
    (Dialect::Gpushare, "gpushare"),
    (Dialect::Vcuda, "vcuda"),
];

/// One node.
pub(super) fn node<'a>(state: &'a State, name: &NodeName) -> Option<NodeLookup<'a>> {
    let (record, ledger) = state.node(name)?;
    Some(match (&record.spec, ledger) {
        (Err(error), _) => NodeLookup::Unreadable(error),
        (Ok(spec), Some(state)) if !spec.node.gpus().is_empty() => {
            NodeLookup::Gpus(GpuNode { spec, state, place: &record.place, agent: record.agent.as_deref() })
        }
        _ => NodeLookup::NoGpus,
    })
}

/// Who holds something of a node's GPUs, by UID.
pub(super) fn holders<'a>(state: &'a State, node: &NodeName) -> impl Iterator<Item = Holder<'a>> {
    let with_gpus = state.ledger().grants_on(node).filter(|grant| !grant.containers.is_empty());
    with_gpus.map(|grant| Holder { uid: &grant.pod, grant, pod: state.pod(&grant.pod) })
}

/// A pod by name.
pub(super) fn pod<'a>(state: &'a State, namespace: &str, name: &str) -> Option<(&'a PodUid, &'a GpuPod)> {
    state.gpu_pods().find(|(_, pod)| pod.namespace == namespace && pod.name == name)
}

/// The words for the members of a set of dialects.
pub(super) fn words(serves: DialectSet) -> Vec<&'static str> {
    let member = |dialect: Dialect| serves.covers(DialectSet::default().with(dialect));
    DIALECTS.iter().filter(|(dialect, _)| member(*dialect)).map(|(_, word)| *word).collect()
}

/// Whether any container asks in the dialect of this word, by the names of its resources: thousands of pods are looked at.
pub(super) fn asks_in(pod: &GpuPod, word: &str) -> bool {
    let resource = match word {
        "nvidia" => whole::NVIDIA.resource,
        "gputopology" => whole::GPUTOPOLOGY.resource,
        "gpushare" => gpushare::MEMORY,
        "vcuda" => vcuda::CORE,
        _ => return false,
    };
    let named = |resources: &Resources| {
        resources.limits.contains_key(resource) || resources.requests.contains_key(resource)
    };
    pod.spec.containers_with_roles().any(|(container, _)| named(&container.resources))
}

/// The word for a dialect.
pub(super) fn word(dialect: Dialect) -> &'static str {
    DIALECTS.iter().find(|(known, _)| *known == dialect).map_or("", |(_, word)| *word)
}

/// What a pod's memory is counted in: by its node, where it has one that says.
pub(super) fn unit_of(state: &State, node: Option<&NodeName>) -> MemoryUnit {
    match node.and_then(|name| self::node(state, name)) {
        Some(NodeLookup::Gpus(node)) => node.spec.unit,
        _ => MemoryUnit::default(),
    }
}
