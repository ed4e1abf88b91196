//! Detects changes between two points in time by hashes of what each page shows.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use tessera_core::units::NodeName;

use super::lookup::{self, GpuNode, NodeLookup};
use crate::state::{State, StateAccess};

/// Hashes of the state.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Fingerprints {
    nodes: HashMap<NodeName, u64>,
    waiting: u64,
    quota: u64,
}

/// The differences between two sets of hashes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Changes {
    /// Names of changed nodes.
    pub(super) nodes: Vec<String>,
    /// True if the set of waiting pods or their annotations changed.
    pub(super) waiting: bool,
    pub(super) quota: bool,
}

impl Fingerprints {
    pub(super) fn of(access: &impl StateAccess) -> Self {
        let mut nodes = HashMap::new();
        access.for_each_node(|state, name| {
            if let Some(known) = lookup::node(state, name) {
                nodes.insert(name.clone(), node(state, name, known));
            }
        });
        let (waiting, quota) = access.with_state(|state| {
            // The pods have no order, so the hashes are added up.
            let waiting = state.gpu_pods().filter(|(_, pod)| pod.node.is_none());
            let prints = waiting.map(|(uid, pod)| print(&(uid, &pod.annotations, &pod.namespace, &pod.name)));
            (prints.fold(0, u64::wrapping_add), print(&format!("{:?}", state.quota().0)))
        });
        Self { nodes, waiting, quota }
    }

    /// Returns the changes since `earlier`.
    pub(super) fn since(&self, earlier: &Self) -> Changes {
        let changed = |(name, print): &(&NodeName, &u64)| earlier.nodes.get(*name) != Some(*print);
        let gone = earlier.nodes.keys().filter(|name| !self.nodes.contains_key(*name));
        let nodes = self.nodes.iter().filter(changed).map(|(name, _)| name).chain(gone);
        let mut nodes: Vec<String> = nodes.map(ToString::to_string).collect();
        nodes.sort_unstable();
        Changes { nodes, waiting: self.waiting != earlier.waiting, quota: self.quota != earlier.quota }
    }
}

impl Changes {
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn node(state: &State, name: &NodeName, known: NodeLookup<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    match known {
        NodeLookup::Gpus(GpuNode { spec, agent, pool, ready, cordoned, .. }) => {
            (spec.dialects, agent, pool, &spec.node.instance_type, ready, cordoned).hash(&mut hasher);
            for gpu in spec.node.gpus() {
                (gpu.minor, gpu.memory, &gpu.model, gpu.health.problem()).hash(&mut hasher);
            }
            // The usage of a node's GPUs is the sum of its grants.
            state.ledger().counted_on(name).for_each(|counted| counted.hash(&mut hasher));
        }
        NodeLookup::Unreadable(problem) => problem.hash(&mut hasher),
        NodeLookup::NoGpus => {}
    }
    hasher.finish()
}

fn print(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
