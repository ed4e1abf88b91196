//! Read access of the views to the state. Only this file depends on how the state stores nodes and
//! pods.

use tessera_core::grant::PodGrant;
use tessera_core::ledger::NodeGrant;
use tessera_core::node::NodeState;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit, gpushare, vcuda, whole};
use tessera_wire::foreign::objects::Resources;
use tessera_wire::tessera::agent_address::AgentAddress;
use tessera_wire::{foreign::dialect::DialectSet, tessera::parsed_node::ParsedNode};

use crate::state::{GpuPod, State};

/// A node with GPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct GpuNode<'a> {
    pub(super) spec: &'a ParsedNode,
    pub(super) state: &'a NodeState,
    /// The pool of the node for quotas.
    pub(super) pool: Option<&'a str>,
    /// The address of the node's agent.
    pub(super) agent: Option<&'a AgentAddress>,
}

/// GPUs of a node that are not free.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holder<'a> {
    pub(super) grant: &'a PodGrant,
    /// The pod that holds the GPUs; `None` for a booking in doubt.
    pub(super) pod: Option<&'a GpuPod>,
}

/// The result of looking up a node.
#[derive(Clone, Copy, Debug)]
pub(super) enum NodeLookup<'a> {
    Gpus(GpuNode<'a>),
    /// The node object cannot be parsed.
    Unreadable(&'a str),
    /// The node has no GPUs.
    NoGpus,
}

pub(super) const DIALECTS: [(Dialect, &str); 4] = [
    (Dialect::Nvidia, "nvidia"),
    (Dialect::Gputopology, "gputopology"),
    (Dialect::Gpushare, "gpushare"),
    (Dialect::Vcuda, "vcuda"),
];

/// Looks up a node.
pub(super) fn node<'a>(state: &'a State, name: &NodeName) -> Option<NodeLookup<'a>> {
    let (record, ledger) = state.node(name)?;
    Some(match (&record.spec, ledger) {
        (Err(bad), _) => NodeLookup::Unreadable(bad.text()),
        (Ok(spec), Some(node)) if !spec.node.gpus().is_empty() => NodeLookup::Gpus(GpuNode {
            spec,
            state: node,
            pool: state.quota_labels(name).and_then(|labels| labels.pool.as_deref()),
            agent: record.agent.as_ref(),
        }),
        _ => NodeLookup::NoGpus,
    })
}

/// Returns the pods with GPUs of a node, then the bookings in doubt.
pub(super) fn holders<'a>(state: &'a State, node: &NodeName) -> impl Iterator<Item = Holder<'a>> {
    let with_gpus = state.ledger().counted_on(node).filter(|counted| !counted.grant().containers.is_empty());
    with_gpus.map(|counted| match counted {
        NodeGrant::Held(grant) => Holder { grant, pod: state.pod(&grant.pod) },
        NodeGrant::InDoubt(grant) => Holder { grant, pod: None },
    })
}

/// Finds a GPU pod by name.
pub(super) fn pod<'a>(state: &'a State, namespace: &str, name: &str) -> Option<(&'a PodUid, &'a GpuPod)> {
    state.gpu_pods().find(|(_, pod)| pod.namespace == namespace && pod.name == name)
}

/// Returns the names of the dialects in a set.
pub(super) fn dialect_names(serves: DialectSet) -> Vec<&'static str> {
    let member = |dialect: Dialect| serves.covers(DialectSet::default().with(dialect));
    DIALECTS.iter().filter(|(dialect, _)| member(*dialect)).map(|(_, word)| *word).collect()
}

/// Returns whether any container requests resources of this dialect. The function compares resource
/// names only, because it runs for thousands of pods.
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

/// Returns the name of a dialect.
pub(super) fn dialect_name(dialect: Dialect) -> &'static str {
    DIALECTS.iter().find(|(known, _)| *known == dialect).map_or("", |(_, word)| *word)
}

/// Returns the memory unit of the pod's node, or the default unit.
pub(super) fn unit_of(state: &State, node: Option<&NodeName>) -> MemoryUnit {
    match node.and_then(|name| self::node(state, name)) {
        Some(NodeLookup::Gpus(node)) => node.spec.unit,
        _ => MemoryUnit::default(),
    }
}
