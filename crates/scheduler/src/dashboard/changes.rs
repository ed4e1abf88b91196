//! What has changed between two looks at the state, found without a hook in it: by a hash of what each page shows.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use tessera_core::gpu::Health;
use tessera_core::units::NodeName;

use super::known::{self, GpuNode, Known};
use crate::state::{Look, State};

/// The state in hashes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Prints {
    nodes: HashMap<NodeName, u64>,
    waiting: u64,
    quota: u64,
}

/// What is different.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Changes {
    /// By name.
    pub(super) nodes: Vec<String>,
    /// Whether the pods that wait are others, or ask for something else.
    pub(super) waiting: bool,
    pub(super) quota: bool,
}

impl Prints {
    pub(super) fn of(look: &impl Look) -> Self {
        let mut nodes = HashMap::new();
        look.each_node(|state, name| {
            if let Some(known) = known::node(state, name) {
                nodes.insert(name.clone(), node(state, name, known));
            }
        });
        let (waiting, quota) = look.look(|state| {
            // In no order, so summed up in none.
            let waiting = state.gpu_pods().filter(|(_, pod)| pod.node.is_none());
            let prints = waiting.map(|(uid, pod)| print(&(uid, &pod.annotations, &pod.namespace, &pod.name)));
            (prints.fold(0, u64::wrapping_add), print(&format!("{:?}", state.quota().0)))
        });
        Self { nodes, waiting, quota }
    }

    /// What has changed since `earlier`.
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

fn node(state: &State, name: &NodeName, known: Known<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    match known {
        Known::Gpus(GpuNode { spec, agent, place, .. }) => {
            (spec.dialects, agent, &place.pool, &spec.node.instance_type).hash(&mut hasher);
            for card in spec.node.gpus() {
                (card.minor, card.memory, &card.model, card.health == Health::Healthy).hash(&mut hasher);
            }
            // What a node's GPUs carry is the sum of its grants.
            state.ledger().grants_on(name).for_each(|grant| grant.hash(&mut hasher));
        }
        Known::Unreadable(problem) => problem.hash(&mut hasher),
        Known::NoGpus => {}
    }
    hasher.finish()
}

fn print(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
