//! A node: its GPUs and host resources, and what is left of them.

use std::sync::Arc;

use crate::gpu::{Gpu, GpuKind, Health};
use crate::gpu_set::GpuSet;
use crate::grant::{GpuUsage, Hold, PodGrant};
use crate::request::Request;
use crate::topology::Topology;
use crate::units::{Count, GpuIndex, MiB, MilliCpu, NodeName, Percent};

/// The GPUs and host resources of a node, as its agent and Kubernetes report them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The name of the node.
    pub name: NodeName,
    /// The GPUs; the index of each GPU is its position.
    gpus: Vec<Gpu>,
    kinds: Kinds,
    /// The GPUs that new grants may use.
    healthy: GpuSet,
    /// The links between the GPUs.
    topology: Topology,
    /// The CPU that pods may use.
    pub cpu: MilliCpu,
    /// The main memory that pods may use.
    pub memory: MiB,
    /// The instance type, which static tables refer to.
    pub instance_type: Option<String>,
    /// The number of pods with parts of GPUs that each GPU has devices for; `None` where devices do not limit them.
    pub slots_per_gpu: Option<u16>,
    /// True if the node serves no shares of GPUs, so its kubelet would reject pods with shares.
    pub whole_gpus_only: bool,
}

/// The kinds of GPUs of a node, with the GPUs of each kind. Equal nodes share one list.
pub(crate) type Kinds = Arc<[(GpuKind, GpuSet)]>;

/// The error for an impossible description of a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadNode {
    /// The GPUs are not numbered 0, 1, 2 and so on.
    #[error(
        "node {node}: GPU at position {position} has index {index}; list the GPUs by index, without gaps"
    )]
    Order {
        /// The node that is described wrongly.
        node: NodeName,
        /// The position in the list.
        position: usize,
        /// The index at that position.
        index: GpuIndex,
    },
    /// The node has more GPUs than supported.
    #[error("node {node} has {count} GPUs; at most {} are supported", GpuSet::CAPACITY)]
    TooMany {
        /// The node that is described wrongly.
        node: NodeName,
        /// The number of GPUs.
        count: usize,
    },
    /// The topology describes another number of GPUs.
    #[error("node {node} has {}, but its topology describes {linked}", Count(*.gpus, "GPU"))]
    Topology {
        /// The node that is described wrongly.
        node: NodeName,
        /// The number of GPUs.
        gpus: usize,
        /// The number of GPUs in the topology.
        linked: usize,
    },
}

/// A node and what all its pods together use of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    node: Arc<Node>,
    used: Vec<GpuUsage>,
    /// The GPUs of each pod that holds any, ascending by mask. They become free together.
    held: Vec<GpuSet>,
    cpu_used: MilliCpu,
    memory_used: MiB,
}

/// The free part of a GPU that shares can use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuRoom {
    /// The free compute.
    pub compute_percent: Percent,
    /// The free memory.
    pub memory: MiB,
}

// === impl Node ===

impl Node {
    /// Creates a node with these GPUs and links.
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
        Ok(Self {
            name,
            gpus,
            kinds: kinds.into(),
            healthy,
            topology,
            cpu,
            memory,
            instance_type: None,
            slots_per_gpu: None,
            whole_gpus_only: false,
        })
    }

    /// Returns the GPUs by index.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// Returns one GPU.
    #[must_use]
    pub fn gpu(&self, index: GpuIndex) -> Option<&Gpu> {
        self.gpus.get(index.position())
    }

    /// Returns what a request holds on one GPU; nothing on a GPU that the node does not have.
    #[must_use]
    pub fn hold(&self, request: Request, gpu: GpuIndex) -> Hold {
        Hold::of(request, self.kind(gpu).map(|kind| kind.memory).unwrap_or_default())
    }

    /// Returns what a request holds on each of these GPUs.
    #[must_use]
    pub fn holds(&self, request: Request, gpus: GpuSet) -> Vec<(GpuIndex, Hold)> {
        gpus.iter().map(|gpu| (gpu, self.hold(request, gpu))).collect()
    }

    /// Returns the kinds of GPUs with the GPUs of each kind.
    #[must_use]
    pub fn kinds(&self) -> &[(GpuKind, GpuSet)] {
        &self.kinds
    }

    /// Returns the links between the GPUs.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the same node with these GPUs marked unhealthy as well.
    #[must_use]
    pub fn with_unhealthy(&self, gpus: GpuSet) -> Self {
        let mut node = self.clone();
        for gpu in node.gpus.iter_mut().filter(|gpu| gpus.contains(gpu.index)) {
            gpu.health = Health::Unhealthy;
        }
        node.healthy = healthy(&node.gpus);
        node
    }

    /// Returns the same node with equal links and kinds that other nodes share.
    pub(crate) fn sharing(self, topology: Topology, kinds: Kinds) -> Self {
        debug_assert_eq!((&self.topology, &self.kinds), (&topology, &kinds));
        Self { topology, kinds, ..self }
    }

    pub(crate) fn shared_kinds(&self) -> &Kinds {
        &self.kinds
    }

    /// Returns the kind of a GPU, which does not depend on its health.
    pub(crate) fn kind(&self, gpu: GpuIndex) -> Option<&GpuKind> {
        self.kinds.iter().find(|(_, gpus)| gpus.contains(gpu)).map(|(kind, _)| kind)
    }
}

fn healthy(gpus: &[Gpu]) -> GpuSet {
    gpus.iter().filter(|gpu| gpu.health.is_healthy()).map(|gpu| gpu.index).collect()
}

// === impl NodeState ===

impl NodeState {
    /// Creates the state of an unused node.
    #[must_use]
    pub fn empty(node: Arc<Node>) -> Self {
        let used = vec![GpuUsage::default(); node.gpus.len()];
        Self { node, used, held: Vec::new(), cpu_used: MilliCpu::ZERO, memory_used: MiB::ZERO }
    }

    /// Returns the node.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Returns a shared reference to the node.
    #[must_use]
    pub fn shared_node(&self) -> Arc<Node> {
        Arc::clone(&self.node)
    }

    /// Returns what all pods together use of a GPU.
    #[must_use]
    pub fn used(&self, gpu: GpuIndex) -> GpuUsage {
        self.used.get(gpu.position()).copied().unwrap_or_default()
    }

    /// Returns what is left of a GPU for shares; zero where pods that bypassed the scheduler hold
    /// too much.
    #[must_use]
    pub fn room(&self, gpu: GpuIndex) -> GpuRoom {
        self.node.kind(gpu).map_or_else(GpuRoom::default, |kind| GpuRoom::of(kind.memory, self.used(gpu)))
    }

    /// Returns everything that is free of a healthy GPU as a hold, or `None` if nothing is.
    #[must_use]
    pub fn free_hold(&self, gpu: GpuIndex) -> Option<Hold> {
        if !self.node.healthy.contains(gpu) {
            return None;
        }
        if self.used(gpu).is_none() {
            return Some(Hold::Whole);
        }
        let GpuRoom { compute_percent, memory } = self.room(gpu);
        Hold::Whole.limited_to(Hold::Share { compute_percent, memory })
    }

    /// Returns the free percentage of a GPU, counted by the scarcer of compute and memory; 0 for an
    /// unhealthy GPU.
    #[must_use]
    pub fn percent_left(&self, gpu: GpuIndex) -> u8 {
        self.percent_left_with(gpu, GpuUsage::default())
    }

    /// Returns the free percentage of a GPU once `more` of it is used.
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

    /// Returns the free capacity of all GPUs, in GPUs.
    #[must_use]
    pub fn gpus_left(&self) -> f64 {
        let percents = self.node.healthy.iter().map(|gpu| u32::from(self.percent_left(gpu)));
        f64::from(percents.sum::<u32>()) / 100.0
    }

    /// Returns the free capacity of the GPUs that are partly used, in GPUs.
    #[must_use]
    pub fn left_on_partly_used(&self) -> f64 {
        let percents = self.node.healthy.iter().map(|gpu| u32::from(self.percent_left(gpu)));
        f64::from(percents.filter(|percent| *percent < 100).sum::<u32>()) / 100.0
    }

    /// Returns the healthy GPUs that no pod uses.
    #[must_use]
    pub fn idle(&self) -> GpuSet {
        self.node.healthy.iter().filter(|gpu| self.used(*gpu).is_none()).collect()
    }

    /// Returns whether a GPU is healthy and has room for `hold`. A whole GPU must be unused.
    #[must_use]
    pub fn fits(&self, gpu: GpuIndex, hold: Hold) -> bool {
        self.node.healthy.contains(gpu) && self.has_room(gpu, hold)
    }

    /// Returns whether a GPU has room for `hold`, whatever its health.
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

    /// Returns whether a GPU has a device left for one more pod with a part of it. Pods of all dialects count, also
    /// those that hold other devices: so a GPU never has more pods than its number of slots says.
    #[must_use]
    pub(crate) fn has_slot(&self, gpu: GpuIndex) -> bool {
        self.node.slots_per_gpu.is_none_or(|slots| self.pod_count(gpu) < usize::from(slots))
    }

    /// Returns the number of pods that hold a GPU or a part of it.
    pub(crate) fn pod_count(&self, gpu: GpuIndex) -> usize {
        self.held.iter().filter(|held| held.contains(gpu)).count()
    }

    /// Returns the GPUs of each pod that holds any.
    #[must_use]
    pub fn held(&self) -> &[GpuSet] {
        &self.held
    }

    /// Returns the free CPU.
    #[must_use]
    pub fn cpu_left(&self) -> MilliCpu {
        self.node.cpu.saturating_sub(self.cpu_used)
    }

    /// Returns the free main memory.
    #[must_use]
    pub fn memory_left(&self) -> MiB {
        self.node.memory.saturating_sub(self.memory_used)
    }

    /// Adds what a pod holds. GPUs that the node does not have are ignored.
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

    /// Adds usage to one GPU.
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
