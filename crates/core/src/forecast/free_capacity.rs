//! The free capacity of a cluster at one moment, prepared for many classes of pods.

use crate::gpu::GpuKind;
use crate::node::{Kinds, NodeState};
use crate::units::MilliCpu;
use crate::workload::PodClass;

/// A copy of all that a forecast reads of the nodes with GPUs.
///
/// The copy is the smaller part of the work, so the ledger may change while the forecast is made.
#[derive(Clone, Debug, Default)]
pub struct FreeCapacity {
    pub(super) nodes: Vec<FreeNode>,
    /// The free percentage of each GPU: grouped by node and by kind of GPU, ascending within a
    /// kind.
    percents: Vec<u8>,
}

/// The free capacity of one node.
#[derive(Clone, Debug)]
pub(super) struct FreeNode {
    /// The kinds of GPUs of the node.
    pub(super) kinds: Kinds,
    cpu: MilliCpu,
    /// The free capacity of all GPUs of the node, in GPUs.
    gpus_left: f64,
    /// The position of the node's first GPU in `percents`.
    begin: usize,
}

/// How much of a cluster's GPUs is free, in GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CapacitySummary {
    /// The number of all GPUs, used or not.
    pub all_gpus: f64,
    /// The free capacity.
    pub free: f64,
    /// The part of the free capacity that is on partly used GPUs.
    pub free_on_partly_used: f64,
}

impl<'a> FromIterator<&'a NodeState> for FreeCapacity {
    fn from_iter<T: IntoIterator<Item = &'a NodeState>>(nodes: T) -> Self {
        let mut remains = Self::default();
        nodes
            .into_iter()
            .filter(|state| !state.node().gpus().is_empty())
            .for_each(|state| remains.add(state));
        remains
    }
}

impl FreeCapacity {
    /// Returns whether no node has a GPU.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns the totals.
    #[must_use]
    pub fn summary(&self) -> CapacitySummary {
        #[expect(clippy::cast_precision_loss, reason = "no cluster has 2^52 GPUs")]
        let all_gpus = self.percents.len() as f64;
        let partly_used = self.percents.iter().filter(|percent| (1..100).contains(*percent));
        CapacitySummary {
            all_gpus,
            free: self.nodes.iter().map(|node| node.gpus_left).sum(),
            free_on_partly_used: partly_used.map(|percent| f64::from(*percent) / 100.0).sum(),
        }
    }

    /// Returns the different kinds of GPUs.
    pub(super) fn kinds(&self) -> Vec<&GpuKind> {
        let mut kinds: Vec<&GpuKind> = Vec::new();
        for (kind, _) in self.nodes.iter().flat_map(|node| node.kinds.iter()) {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        kinds
    }

    /// Returns the kind and the free percentage of each GPU that is partly used.
    pub(super) fn partly_used(&self) -> impl Iterator<Item = (&GpuKind, u8)> {
        let of_nodes = self.nodes.iter().flat_map(|node| {
            let kinds = node.kinds.iter().flat_map(|(kind, gpus)| std::iter::repeat_n(kind, gpus.len()));
            kinds.zip(self.percents[node.begin..].iter().copied())
        });
        of_nodes.filter(|(_, percent)| (1..100).contains(percent))
    }

    /// Returns the free capacity, in GPUs, of the nodes that can take a pod of this class.
    pub(super) fn gpus_serving(&self, class: &PodClass) -> f64 {
        self.nodes.iter().filter(|node| self.could_serve(node, class)).map(|node| node.gpus_left).sum()
    }

    fn add(&mut self, state: &NodeState) {
        let begin = self.percents.len();
        for (_, gpus) in state.node().kinds() {
            let kind = self.percents.len();
            self.percents.extend(gpus.iter().map(|gpu| state.percent_left(gpu)));
            self.percents[kind..].sort_unstable();
        }
        let kinds = Kinds::clone(state.node().shared_kinds());
        self.nodes.push(FreeNode { kinds, cpu: state.cpu_left(), gpus_left: state.gpus_left(), begin });
    }

    fn could_serve(&self, node: &FreeNode, class: &PodClass) -> bool {
        if class.cpu > node.cpu {
            return false;
        }
        let mut percents = &self.percents[node.begin..];
        let mut fitting = 0;
        for (kind, gpus) in node.kinds.iter() {
            let (left, others) = percents.split_at(gpus.len());
            percents = others;
            if class.accepts(&kind.model) {
                let percent = class.percent_of(kind);
                fitting += left.len() - left.partition_point(|left| usize::from(*left) < percent);
            }
        }
        fitting >= class.gpu_count()
    }
}
