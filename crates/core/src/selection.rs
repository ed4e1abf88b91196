//! Selection: which GPUs a pod may use, beside the amounts that it requests.

use std::collections::BTreeSet;

use crate::gpu::{Gpu, Model};
use crate::gpu_set::GpuSet;
use crate::grant::{GpuUsage, Hold};
use crate::node::NodeState;
use crate::units::GpuIndex;

/// The GPUs that a pod accepts. The default accepts all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct GpuSelection {
    /// The texts of which a model must contain one, in lower case; empty for any model.
    pub use_models: Vec<String>,
    /// The texts of which a model must contain none, in lower case.
    pub avoid_models: Vec<String>,
    /// The UUIDs of the accepted GPUs; empty for any GPU.
    pub use_uuids: BTreeSet<String>,
    /// The UUIDs of the rejected GPUs.
    pub avoid_uuids: BTreeSet<String>,
    /// True if the pod accepts only GPUs that no other pod uses.
    pub idle_only: bool,
    /// True if the pod takes one of the devices into which a GPU is split, so that it accepts only GPUs with one left.
    pub needs_slot: bool,
    /// Whether all GPUs of a container belong to one NUMA node.
    pub numa: NumaBinding,
    /// How the policies `binpack` and `spread` compare GPUs for shares; `None` for their own order.
    pub weights: Option<ScoringWeights>,
}

/// How much each used part of a GPU counts when GPUs are compared for a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScoringWeights {
    /// The weight of the number of pods on the GPU.
    pub slot: u32,
    /// The weight of the compute that pods hold.
    pub core: u32,
    /// The weight of the memory that pods hold.
    pub memory: u32,
}

/// Whether all GPUs of a container belong to one NUMA node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NumaBinding {
    /// GPUs of any NUMA nodes.
    #[default]
    Any,
    /// GPUs of one NUMA node where one has enough of them, otherwise of any.
    Preferred,
    /// GPUs of one NUMA node. Nodes without enough of them on one are rejected.
    Required,
}

impl GpuSelection {
    /// Returns whether the pod accepts all GPUs.
    #[must_use]
    pub fn accepts_all(&self) -> bool {
        // The weights order GPUs and reject none.
        let Self {
            use_models,
            avoid_models,
            use_uuids,
            avoid_uuids,
            idle_only,
            needs_slot,
            numa,
            weights: _,
        } = self;
        [use_models, avoid_models].iter().all(|names| names.is_empty())
            && [use_uuids, avoid_uuids].iter().all(|uuids| uuids.is_empty())
            && !idle_only
            && !needs_slot
            && *numa == NumaBinding::Any
    }

    /// Returns whether the pod accepts a GPU, whatever else uses it.
    #[must_use]
    pub fn accepts(&self, gpu: &Gpu) -> bool {
        self.accepts_model(&gpu.model) && self.accepts_uuid(gpu)
    }

    fn accepts_uuid(&self, gpu: &Gpu) -> bool {
        let uuid: &str = &gpu.uuid.0;
        (self.use_uuids.is_empty() || self.use_uuids.contains(uuid)) && !self.avoid_uuids.contains(uuid)
    }

    /// Returns whether the pod accepts GPUs of a model.
    pub(crate) fn accepts_model(&self, model: &Model) -> bool {
        // Most pods name no model, and every kind of GPU of every node is asked about.
        if self.use_models.is_empty() && self.avoid_models.is_empty() {
            return true;
        }
        let model = model.0.to_lowercase();
        let is_named = |names: &[String]| names.iter().any(|name| model.contains(name.as_str()));
        (self.use_models.is_empty() || is_named(&self.use_models)) && !is_named(&self.avoid_models)
    }

    /// Returns those of the GPUs with room and of an accepted model that the pod accepts.
    pub(crate) fn of(&self, node: &NodeState, gpus: GpuSet) -> GpuSet {
        if self.accepts_all() {
            return gpus;
        }
        let accepted = node.node().gpus().iter().filter(|gpu| gpus.contains(gpu.index));
        let accepted = accepted.filter(|gpu| self.accepts_uuid(gpu));
        accepted
            .filter(|gpu| !self.idle_only || node.used(gpu.index).is_none())
            .filter(|gpu| !self.needs_slot || node.has_slot(gpu.index))
            .map(|gpu| gpu.index)
            .collect()
    }

    /// Returns the GPUs of one NUMA node where the pod wants that: the fewest that suffice, of equals those with the
    /// lowest index. The result is `None` where the binding cannot be kept.
    pub(crate) fn on_numa_node(
        &self,
        node: &NodeState,
        gpus: GpuSet,
        required: GpuSet,
        count: usize,
    ) -> Option<GpuSet> {
        if self.numa == NumaBinding::Any || count < 2 {
            return Some(gpus);
        }
        let all = node.node().gpus();
        let of = |numa: u16| -> GpuSet {
            all.iter().filter(|gpu| gpu.numa == Some(numa)).map(|gpu| gpu.index).collect()
        };
        let groups = all.iter().filter_map(|gpu| gpu.numa).map(|numa| gpus.intersection(of(numa)));
        let suffices = |group: &GpuSet| group.len() >= count && group.is_superset(required);
        let tightest = groups.filter(suffices).min_by_key(|group| (group.len(), group.lowest()));
        match self.numa {
            NumaBinding::Required => tightest,
            NumaBinding::Any | NumaBinding::Preferred => Some(tightest.unwrap_or(gpus)),
        }
    }
}

impl ScoringWeights {
    /// Number of pods that fill a GPU, as far as scores are concerned: HAMi's default number of devices per GPU.
    const FULL_SLOTS: u64 = 10;

    /// Parts into which a whole GPU is divided in scores.
    const PARTS: u64 = 1_000_000;

    /// Returns how full a GPU is once it holds `more`, in weighted parts. Only scores of the same weights are
    /// comparable.
    pub(crate) fn fullness(self, node: &NodeState, gpu: GpuIndex, more: Hold) -> u64 {
        let memory = node.node().gpu(gpu).map(|gpu| gpu.memory.0).unwrap_or_default();
        let used = node.used(gpu).plus(GpuUsage::of(more));
        let pods = node.pod_count(gpu) as u64 + 1;
        let part = |amount: u64, whole: u64| amount.saturating_mul(Self::PARTS) / whole.max(1);
        let weighted = [
            (self.slot, part(pods, Self::FULL_SLOTS)),
            (self.core, part(u64::from(used.compute_percent.0), 100)),
            (self.memory, part(used.memory.0, memory)),
        ];
        weighted
            .iter()
            .fold(0, |sum, (weight, part)| sum.saturating_add(u64::from(*weight).saturating_mul(*part)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::grant::{ContainerGrant, PodGrant};
    use crate::node::Node;
    use crate::placement::{Policy, explain, place};
    use crate::request::{ContainerRole, MemoryRequest, PodRequest, Request, Share};
    use crate::topology::Topology;
    use crate::units::{MiB, MilliCpu, Percent};

    /// Returns a node with GPUs of two models; GPUs 0 to 2 and 3 to 7 belong to one NUMA node each. GPU 4 is in use.
    fn node() -> NodeState {
        node_with(None)
    }

    fn node_with(slots_per_gpu: Option<u16>) -> NodeState {
        let gpu = |index: u8| Gpu {
            numa: Some(u16::from(index / 3).min(1)),
            ..Gpu::new(
                GpuIndex(index),
                format!("GPU-{index}").as_str().into(),
                if index < 5 { "NVIDIA A100-SXM4-80GB" } else { "NVIDIA H200" }.into(),
                MiB(80_000),
            )
        };
        let gpus = (0..8).map(gpu).collect();
        let mut node = Node::new("n".into(), gpus, Topology::unknown(8), MilliCpu(0), MiB(0)).unwrap();
        node.slots_per_gpu = slots_per_gpu;
        let mut state = NodeState::empty(Arc::new(node));
        let hold = Hold::Share { compute_percent: Percent(10), memory: MiB(1000) };
        state.add(&PodGrant {
            pod: "uid".into(),
            node: "n".into(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers: vec![ContainerGrant {
                container: "c".to_owned(),
                role: ContainerRole::Main,
                holds: vec![(GpuIndex(4), hold)],
            }],
        });
        state
    }

    fn pod(count: u8, selection: GpuSelection) -> PodRequest {
        let memory = MemoryRequest::Amount(MiB(1000));
        let share = Share { count, compute_percent: Percent(10), memory };
        PodRequest { selection, ..PodRequest::of_mains([Request::Share(share)]) }
    }

    fn check(count: u8, selection: GpuSelection, expected: Result<&str, &str>) {
        let placement = place(&node(), &pod(count, selection), &Policy::Simple, GpuSet::EMPTY);
        let found = placement.map(|placement| placement.gpus[0].to_string());
        let found = found.map_err(|error| error.to_string());
        assert_eq!(found.as_deref().map_err(String::as_str), expected);
    }

    fn texts<T: FromIterator<String>>(all: &[&str]) -> T {
        all.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn selects_by_model_and_by_uuid() {
        let all = GpuSelection::default;
        check(2, GpuSelection { use_models: texts(&["h200", "h100"]), ..all() }, Ok("5,6"));
        check(1, GpuSelection { avoid_models: texts(&["a100"]), ..all() }, Ok("5"));
        check(2, GpuSelection { use_uuids: texts(&["GPU-7", "GPU-2"]), ..all() }, Ok("2,7"));
        check(1, GpuSelection { avoid_uuids: texts(&["GPU-0", "GPU-1"]), ..all() }, Ok("2"));
        let none = "fewer than 1 GPU that the annotations allow";
        check(1, GpuSelection { use_models: texts(&["t4"]), ..all() }, Err(none));
    }

    #[test]
    fn binds_to_one_numa_node() {
        let bound = |numa| GpuSelection { numa, ..GpuSelection::default() };
        check(2, bound(NumaBinding::Required), Ok("0,1"));
        check(4, bound(NumaBinding::Required), Ok("3,4,5,6"));
        check(6, bound(NumaBinding::Required), Err("no NUMA node with 6 GPUs for the pod"));
        check(6, bound(NumaBinding::Preferred), Ok("0,1,2,3,4,5"));
    }

    #[test]
    fn takes_only_idle_gpus_where_the_pod_wants_that() {
        let idle = GpuSelection { idle_only: true, ..GpuSelection::default() };
        check(5, idle.clone(), Ok("0,1,2,3,5"));
        check(8, idle.clone(), Err("fewer than 8 idle GPUs"));
        let why = explain(&node(), &pod(8, idle), &Policy::Simple).unwrap();
        let used = why.gpus[4].1.map(|reason| reason.to_string());
        assert_eq!(used.as_deref(), Some("in use, and an annotation demands an idle GPU"));
    }

    #[test]
    fn takes_only_gpus_with_a_slot_left() {
        let placed = |slots_per_gpu, needs_slot, count| {
            let state = node_with(slots_per_gpu);
            let pod = pod(count, GpuSelection { needs_slot, ..GpuSelection::default() });
            let placement = place(&state, &pod, &Policy::Simple, GpuSet::EMPTY);
            placement.map(|placement| placement.gpus[0].to_string()).map_err(|error| error.to_string())
        };
        let all = Ok("0,1,2,3,4,5,6,7".to_owned());
        assert_eq!(placed(Some(1), true, 7), Ok("0,1,2,3,5,6,7".to_owned()));
        assert_eq!(
            placed(Some(1), true, 8),
            Err("fewer than 8 GPUs with a free slot of nvidia.com/gpu".to_owned())
        );
        assert_eq!(placed(Some(2), true, 8), all);
        assert_eq!(placed(Some(1), false, 8), all);
        assert_eq!(placed(None, true, 8), all);
        let needs_slot = GpuSelection { needs_slot: true, ..GpuSelection::default() };
        let why = explain(&node_with(Some(1)), &pod(8, needs_slot), &Policy::Simple).unwrap();
        let reason = why.gpus[4].1.map(|reason| reason.to_string());
        assert_eq!(reason.as_deref(), Some("no slot of nvidia.com/gpu left, of 1"));
    }

    #[test]
    fn gpus_and_nodes_may_follow_different_policies() {
        let pair = Policy::Simple.with(Some(Policy::Spread), Some(Policy::Binpack));
        let placed =
            |policy: &Policy| place(&node(), &pod(1, GpuSelection::default()), policy, GpuSet::EMPTY);
        let (both, gpus, nodes) = (placed(&pair), placed(&Policy::Spread), placed(&Policy::Binpack));
        assert_eq!(both.as_ref().unwrap().gpus, gpus.unwrap().gpus);
        assert!(both.unwrap().score > 0.0 && nodes.unwrap().score > 0.0);
    }

    /// GPU 4 holds 10 % and 1000 MiB of one pod; all others are idle. With the weight on memory, a second pod makes
    /// GPU 4 the fullest; `spread` takes the emptiest one.
    #[test]
    fn weights_decide_which_gpu_is_the_fullest() {
        let weights = |slot, core, memory| Some(ScoringWeights { slot, core, memory });
        let check = |policy: &Policy, weights, use_uuids: &[&str], expected: &str| {
            let selection = GpuSelection { use_uuids: texts(use_uuids), weights, ..GpuSelection::default() };
            let placement = place(&loaded(), &pod(1, selection), policy, GpuSet::EMPTY).unwrap();
            assert_eq!(placement.gpus[0].to_string(), expected, "{weights:?}");
        };
        // GPU 4 has more memory in use, GPU 5 more compute, GPU 6 more pods.
        let busy = ["GPU-4", "GPU-5", "GPU-6"];
        check(&Policy::Binpack, weights(0, 0, 1), &busy, "4");
        check(&Policy::Binpack, weights(0, 1, 0), &busy, "5");
        check(&Policy::Binpack, weights(1, 0, 0), &busy, "6");
        check(&Policy::Spread, weights(0, 0, 1), &busy, "6");
        check(&Policy::Spread, weights(1, 1, 1), &[], "0");
        check(&Policy::Binpack, None, &busy, "4");
    }

    /// Returns the node with one large pod in memory on GPU 4, one in compute on GPU 5, and three small ones on GPU 6.
    fn loaded() -> NodeState {
        let mut state = node();
        let mut add = |gpu: u8, compute_percent, memory| {
            let hold = Hold::Share { compute_percent: Percent(compute_percent), memory: MiB(memory) };
            state.add(&PodGrant {
                pod: "uid".into(),
                node: "n".into(),
                cpu: MilliCpu::ZERO,
                memory: MiB::ZERO,
                containers: vec![ContainerGrant {
                    container: "c".to_owned(),
                    role: ContainerRole::Main,
                    holds: vec![(GpuIndex(gpu), hold)],
                }],
            });
        };
        add(4, 1, 40_000);
        add(5, 60, 5_000);
        (0..3).for_each(|_| add(6, 5, 500));
        state
    }
}
