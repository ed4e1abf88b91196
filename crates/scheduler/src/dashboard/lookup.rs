//! Read access of the views to the state. Only this file depends on how the state stores nodes and
//! pods.

use tessera_core::grant::PodGrant;
use tessera_core::ledger::NodeGrant;
use tessera_core::node::NodeState;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit, gpushare, hami, vcuda, whole};
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
    /// Value of the node's condition `Ready`, or `None` without it.
    pub(super) ready: Option<bool>,
    /// True if the node accepts no new pods.
    pub(super) cordoned: bool,
}

impl GpuNode<'_> {
    /// Returns whether kube-scheduler may place new pods on the node, as far as its status tells.
    pub(super) fn takes_pods(&self) -> bool {
        !self.cordoned && self.ready != Some(false)
    }
}

/// GPUs of a node that are not free.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holder<'a> {
    pub(super) grant: &'a PodGrant,
    /// The pod that holds the GPUs; `None` for a claim, a booking in doubt and a reserved place.
    pub(super) pod: Option<&'a GpuPod>,
    /// Namespace and name of the claim that holds the GPUs.
    pub(super) claim: Option<(&'a str, &'a str)>,
    /// The object that a reserved place is kept for.
    pub(super) reserved_for: Option<&'a str>,
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

pub(super) const DIALECTS: [(Dialect, &str); 5] = [
    (Dialect::Nvidia, "nvidia"),
    (Dialect::Gputopology, "gputopology"),
    (Dialect::Gpushare, "gpushare"),
    (Dialect::Vcuda, "vcuda"),
    (Dialect::Hami, "hami"),
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
            ready: record.ready,
            cordoned: record.cordoned,
        }),
        _ => NodeLookup::NoGpus,
    })
}

/// Returns the pods with GPUs of a node, then the bookings in doubt, then the reserved places.
pub(super) fn holders<'a>(state: &'a State, node: &NodeName) -> impl Iterator<Item = Holder<'a>> {
    let with_gpus = state.ledger().counted_on(node).filter(|counted| !counted.grant().containers.is_empty());
    with_gpus.map(|counted| match counted {
        NodeGrant::Held(grant) => Holder {
            grant,
            pod: state.pod(&grant.pod),
            claim: state.claim_name(&grant.pod),
            reserved_for: None,
        },
        NodeGrant::InDoubt(grant) => Holder { grant, pod: None, claim: None, reserved_for: None },
        NodeGrant::Reserved(grant) => {
            let reserved_for = state.ledger().reservation_owner(&grant.pod);
            Holder { grant, pod: None, claim: None, reserved_for }
        }
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
        "hami" => return hami::PER_GPU.iter().any(|resource| names(pod, resource)),
        _ => return false,
    };
    names(pod, resource)
}

fn names(pod: &GpuPod, resource: &str) -> bool {
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
