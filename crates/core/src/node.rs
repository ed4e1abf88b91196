//! One node: what it has, and what is left of it.

use std::sync::Arc;

use crate::gpu::{Gpu, GpuKind, Health};
use crate::gpu_set::GpuSet;
use crate::grant::{GpuUsage, Hold, PodGrant};
use crate::topology::Topology;
use crate::units::{GpuIndex, MiB, MilliCpu, NodeName, Percent};

/// What a node has, as its agent and Kubernetes describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: NodeName,
    /// Its GPUs; each GPU's index is its position.
    gpus: Vec<Gpu>,
    kinds: Kinds,
    /// Those of its GPUs that new grants may use.
    healthy: GpuSet,
    /// What joins them.
    topology: Topology,
    /// CPU that pods may use.
    pub cpu: MilliCpu,
    /// Main memory that pods may use.
    pub memory: MiB,
    /// The instance type, by which static tables list their sets.
    pub instance_type: Option<String>,
}

/// The kinds of GPUs of a node, with the GPUs of each. Decisions read the GPUs' memory here: nodes that are alike share it.
pub(crate) type Kinds = Arc<[(GpuKind, GpuSet)]>;

/// A description of a node that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadNode {
    /// The GPUs are not numbered 0, 1, 2, ...
    #[error(
        "node {node}: GPU at position {position} has index {index}; list the GPUs by index, without gaps"
    )]
    Order {
        /// Which node.
        node: NodeName,
        /// Where in the list.
        position: usize,
        /// What stands there.
        index: GpuIndex,
    },
    /// More GPUs than a node may have.
    #[error("node {node} has {count} GPUs; at most {} are supported", GpuSet::CAPACITY)]
    TooMany {
        /// Which node.
        node: NodeName,
        /// How many GPUs.
        count: usize,
    },
    /// Links of another number of GPUs.
    #[error("node {node} has {gpus} GPUs, but its topology describes {linked}")]
    Topology {
        /// Which node.
        node: NodeName,
        /// How many GPUs.
        gpus: usize,
        /// How many the topology has.
        linked: usize,
    },
}

/// A node and what all its pods together take of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    node: Arc<Node>,
    used: Vec<GpuUsage>,
    /// The GPUs of each pod that holds any, in ascending order of their masks: they come back together.
    held: Vec<GpuSet>,
    cpu_used: MilliCpu,
    memory_used: MiB,
}

/// What is left of a GPU for shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuRoom {
    /// Compute not promised.
    pub compute_percent: Percent,
    /// Memory not promised.
    pub memory: MiB,
}

// === impl Node ===

impl Node {
    /// A node of these GPUs and links.
    pub fn new(
        name: NodeName,
        gpus: Vec<Gpu>,
        topology: Topology,
        cpu: MilliCpu,
        memory: MiB,
    ) -> Result<Self, BadNode> {
        if gpus.len() > GpuSet::CAPACITY {
            return Err(BadNode::TooMany { node: name, count: gpus.len() });
        }
        if topology.count() != gpus.len() {
            return Err(BadNode::Topology { node: name, gpus: gpus.len(), linked: topology.count() });
        }
        let misplaced = gpus.iter().enumerate().find(|(position, gpu)| gpu.index.position() != *position);
        if let Some((position, gpu)) = misplaced {
            return Err(BadNode::Order { node: name, position, index: gpu.index });
        }
        let mut kinds: Vec<(GpuKind, GpuSet)> = Vec::new();
        for gpu in &gpus {
            let kind = gpu.kind();
            match kinds.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, set)) => *set = set.with(gpu.index),
                None => kinds.push((kind, GpuSet::EMPTY.with(gpu.index))),
            }
        }
        let healthy = healthy(&gpus);
        Ok(Self { name, gpus, kinds: kinds.into(), healthy, topology, cpu, memory, instance_type: None })
    }

    /// Its GPUs by index.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// One GPU.
    #[must_use]
    pub fn gpu(&self, index: GpuIndex) -> Option<&Gpu> {
        self.gpus.get(index.position())
    }

    /// The kinds of GPUs it has, with the GPUs of each.
    #[must_use]
    pub fn kinds(&self) -> &[(GpuKind, GpuSet)] {
        &self.kinds
    }

    /// What joins the GPUs.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The same node, of whose GPUs these are broken too.
    #[must_use]
    pub fn with_unhealthy(&self, gpus: GpuSet) -> Self {
        let mut node = self.clone();
        for gpu in node.gpus.iter_mut().filter(|gpu| gpus.contains(gpu.index)) {
            gpu.health = Health::Unhealthy;
        }
        node.healthy = healthy(&node.gpus);
        node
    }

    /// The same node, its links and kinds read from equal ones that others use too.
    pub(crate) fn sharing(self, topology: Topology, kinds: Kinds) -> Self {
        debug_assert_eq!((&self.topology, &self.kinds), (&topology, &kinds));
        Self { topology, kinds, ..self }
    }

    pub(crate) fn shared_kinds(&self) -> &Kinds {
        &self.kinds
    }

    /// The kind of a GPU: the same for GPUs that are alike but for their health.
    pub(crate) fn kind(&self, gpu: GpuIndex) -> Option<&GpuKind> {
        self.kinds.iter().find(|(_, gpus)| gpus.contains(gpu)).map(|(kind, _)| kind)
    }
}

fn healthy(gpus: &[Gpu]) -> GpuSet {
    gpus.iter().filter(|gpu| gpu.health == Health::Healthy).map(|gpu| gpu.index).collect()
}

// === impl NodeState ===

impl NodeState {
    /// A node nobody uses.
    #[must_use]
    pub fn empty(node: Arc<Node>) -> Self {
        let used = vec![GpuUsage::default(); node.gpus.len()];
        Self { node, used, held: Vec::new(), cpu_used: MilliCpu::ZERO, memory_used: MiB::ZERO }
    }

    /// What the node has.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The same, to keep.
    #[must_use]
    pub fn shared_node(&self) -> Arc<Node> {
        Arc::clone(&self.node)
    }

    /// What all pods together take of a GPU.
    #[must_use]
    pub fn used(&self, gpu: GpuIndex) -> GpuUsage {
        self.used.get(gpu.position()).copied().unwrap_or_default()
    }

    /// What is left of a GPU for shares. Never negative, even where pods that bypassed us hold too much.
    #[must_use]
    pub fn room(&self, gpu: GpuIndex) -> GpuRoom {
        self.node.kind(gpu).map_or_else(GpuRoom::default, |kind| GpuRoom::of(kind.memory, self.used(gpu)))
    }

    /// What is left of a GPU in percent of what is scarcer there; nothing of an unhealthy one.
    #[must_use]
    pub fn percent_left(&self, gpu: GpuIndex) -> u8 {
        self.percent_left_with(gpu, GpuUsage::default())
    }

    /// Likewise, once `more` of it is taken.
    pub(crate) fn percent_left_with(&self, gpu: GpuIndex, more: GpuUsage) -> u8 {
        let Some(kind) = self.node.kind(gpu).filter(|_| self.node.healthy.contains(gpu)) else { return 0 };
        let used = self.used(gpu).plus(more);
        if used.is_none() {
            return 100;
        }
        let room = GpuRoom::of(kind.memory, used);
        let compute_percent = u64::from(room.compute_percent.0);
        let memory = room.memory.0.saturating_mul(100).checked_div(kind.memory.0).unwrap_or(compute_percent);
        u8::try_from(compute_percent.min(memory)).unwrap_or(100)
    }

    /// What is left of all GPUs together, in GPUs.
    #[must_use]
    pub fn gpus_left(&self) -> f64 {
        let percents = self.node.healthy.iter().map(|gpu| u32::from(self.percent_left(gpu)));
        f64::from(percents.sum::<u32>()) / 100.0
    }

    /// Healthy GPUs nobody holds anything of.
    #[must_use]
    pub fn idle(&self) -> GpuSet {
        self.node.healthy.iter().filter(|gpu| self.used(*gpu).is_none()).collect()
    }

    /// Whether `hold` can be added on a GPU: it is healthy and has the room, all of it for a whole GPU.
    #[must_use]
    pub fn fits(&self, gpu: GpuIndex, hold: Hold) -> bool {
        self.node.healthy.contains(gpu) && self.has_room(gpu, hold)
    }

    /// Whether a GPU, in whatever health, has the room for `hold`.
    #[must_use]
    pub(crate) fn has_room(&self, gpu: GpuIndex, hold: Hold) -> bool {
        match hold {
            Hold::Whole => gpu.position() < self.used.len() && self.used(gpu).is_none(),
            Hold::Share { compute_percent, memory } => {
                let room = self.room(gpu);
                !self.used(gpu).whole && compute_percent <= room.compute_percent && memory <= room.memory
            }
        }
    }

    /// The GPUs of each pod that holds any.
    #[must_use]
    pub fn held(&self) -> &[GpuSet] {
        &self.held
    }

    /// CPU not promised.
    #[must_use]
    pub fn cpu_left(&self) -> MilliCpu {
        self.node.cpu.saturating_sub(self.cpu_used)
    }

    /// Main memory not promised.
    #[must_use]
    pub fn memory_left(&self) -> MiB {
        self.node.memory.saturating_sub(self.memory_used)
    }

    /// Takes what a pod holds. GPUs the node does not have are passed over.
    pub fn add(&mut self, grant: &PodGrant) {
        self.take(grant.cpu, grant.memory, grant.footprint());
    }

    pub(crate) fn take(
        &mut self,
        cpu: MilliCpu,
        memory: MiB,
        footprint: impl Iterator<Item = (GpuIndex, GpuUsage)>,
    ) {
        self.cpu_used += cpu;
        self.memory_used += memory;
        let mut gpus = GpuSet::EMPTY;
        for (gpu, usage) in footprint {
            self.add_usage(gpu, usage);
            gpus = gpus.with(gpu);
        }
        let gpus = gpus.intersection(self.node.topology.gpus());
        if !gpus.is_empty() {
            let place = self.held.partition_point(|other| other.mask() < gpus.mask());
            self.held.insert(place, gpus);
        }
    }

    /// Takes some more of one GPU.
    pub(crate) fn add_usage(&mut self, gpu: GpuIndex, usage: GpuUsage) {
        if let Some(known) = self.used.get_mut(gpu.position()) {
            *known = known.plus(usage);
        }
    }
}

// === impl GpuRoom ===

impl GpuRoom {
    fn of(gpu_memory: MiB, used: GpuUsage) -> Self {
        if used.whole {
            return Self::default();
        }
        Self {
            compute_percent: Percent::WHOLE.saturating_sub(used.compute_percent),
            memory: gpu_memory.saturating_sub(used.memory),
        }
    }
}
