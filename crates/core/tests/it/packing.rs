//! Invariants of policy `tessera` for shares: it does not break up idle GPUs without need, whatever
//! it has learned and however often it has forgotten it.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use tessera_core::forecast::{Forecast, FreeCapacity, Learner};
use tessera_core::gpu::Gpu;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::{Placement, Policy, place, score};
use tessera_core::request::{PodRequest, Request};
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, Percent};
use tessera_core::workload::Workload;

/// What happens next in the cluster.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A pod arrives.
    Arrival,
    /// The pod that was placed at this position, counted modulo the number of pods, ends.
    End(usize),
    /// The scheduler restarts and sees the pods that are there.
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => Just(Step::Arrival),
        4 => any::<usize>().prop_map(Step::End),
        1 => Just(Step::Restart),
    ]
}

const GPU_MEMORY: MiB = MiB(16_384);
/// Thousandths of a CPU and main memory of each node, per GPU.
const CPU_PER_GPU: u64 = 12_000;
const MIB_PER_GPU: u64 = 96_000;

fn node(number: usize, gpus: u8) -> Arc<Node> {
    node_with(number, gpus, "T4", GPU_MEMORY)
}

fn node_with(number: usize, gpus: u8, model: &str, memory: MiB) -> Arc<Node> {
    let gpu = |index| {
        Gpu::new(GpuIndex(index), format!("GPU-{number}-{index}").as_str().into(), model.into(), memory)
    };
    let topology = Topology::unknown(usize::from(gpus));
    let gpu_list = (0..gpus).map(gpu).collect();
    let name = format!("n{number}");
    let (cpu, memory) = (MilliCpu(CPU_PER_GPU * u64::from(gpus)), MiB(MIB_PER_GPU * u64::from(gpus)));
    Arc::new(Node::new(name.as_str().into(), gpu_list, topology, cpu, memory).unwrap())
}

/// A cluster under policy `tessera`, as the scheduler drives it.
struct World {
    nodes: Vec<NodeState>,
    pods: Vec<(usize, PodGrant, PodRequest)>,
    learner: Learner,
    forecast: Arc<Forecast>,
    placed: usize,
}

impl World {
    fn new(gpu_counts: &[u8]) -> Self {
        let nodes = gpu_counts.iter().enumerate();
        Self::of(nodes.map(|(number, gpus)| NodeState::empty(node(number, *gpus))).collect())
    }

    fn of(nodes: Vec<NodeState>) -> Self {
        let learner = Learner::new(Workload::guess(nodes.iter().map(NodeState::node)));
        Self { nodes, pods: Vec::new(), learner, forecast: Arc::default(), placed: 0 }
    }

    fn restart(&mut self) {
        self.learner = Learner::new(Workload::guess(self.nodes.iter().map(NodeState::node)));
        self.pods.iter().for_each(|(_, _, pod)| self.learner.see(pod));
        // The first pods are placed before there is a forecast.
        self.forecast = Arc::default();
    }

    fn end(&mut self, position: usize) {
        if self.pods.is_empty() {
            return;
        }
        let (node, ..) = self.pods.swap_remove(position % self.pods.len());
        let mut state = NodeState::empty(self.nodes[node].shared_node());
        let left = self.pods.iter().filter(|(other, ..)| *other == node);
        left.for_each(|(_, grant, _)| state.add(grant));
        self.nodes[node] = state;
    }

    /// Places a pod on the best node. Returns whether its GPU was idle, if the pod fits anywhere.
    fn arrive(&mut self, pod: &PodRequest, forecasts: bool) -> Option<bool> {
        self.learner.see(pod);
        let capacity: FreeCapacity = self.nodes.iter().collect();
        if forecasts && self.learner.is_due(capacity.summary()) {
            self.forecast = Arc::new(self.learner.forecast(&capacity));
        }
        let node = self.best_node(pod)?;
        let placement = place(&self.nodes[node], pod, &self.policy(), GpuSet::EMPTY).unwrap();
        let gpu = placement.gpus[0].lowest().unwrap();
        let was_idle = self.nodes[node].used(gpu).is_none();
        self.add(node, pod, &placement);
        Some(was_idle)
    }

    fn policy(&self) -> Policy {
        Policy::Tessera(Arc::clone(&self.forecast))
    }

    /// Returns the first node with the highest score.
    fn best_node(&self, pod: &PodRequest) -> Option<usize> {
        let policy = self.policy();
        let scores = self.nodes.iter().enumerate();
        let scores = scores.filter_map(|(node, state)| Some((score(state, pod, &policy).ok()?, node)));
        scores.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))).map(|(_, node)| node)
    }

    fn add(&mut self, node: usize, pod: &PodRequest, placement: &Placement) {
        let grant = PodGrant {
            pod: format!("uid-{}", self.placed).as_str().into(),
            node: self.nodes[node].node().name.clone(),
            cpu: pod.cpu,
            memory: pod.memory,
            containers: placement.grants(self.nodes[node].node(), pod),
        };
        self.nodes[node].add(&grant);
        self.pods.push((node, grant, pod.clone()));
        self.placed += 1;
    }

    /// Places a pod with a share on one GPU of a node.
    fn add_share(&mut self, node: usize, gpu: u8, pod: &PodRequest) {
        let gpus = vec![GpuSet::EMPTY.with(GpuIndex(gpu))];
        let placement = place(&self.nodes[node], pod, &Policy::Simple, GpuSet::EMPTY).unwrap();
        self.add(node, pod, &Placement { gpus, ..placement });
    }

    /// Returns whether a GPU that is already in use has room for the pod.
    fn has_room_on_used_gpu(&self, pod: &PodRequest) -> bool {
        let hold = tessera_core::grant::Hold::of(pod.containers[0].request.unwrap(), GPU_MEMORY);
        let on_node = |node: &NodeState| {
            let used = node.node().gpus().iter().filter(|gpu| !node.used(gpu.index).is_none());
            used.clone().any(|gpu| node.fits(gpu.index, hold))
        };
        self.nodes.iter().any(on_node)
    }
}

fn share(compute_percent: u32, memory_percent: u32) -> PodRequest {
    let memory = MiB(GPU_MEMORY.0 * u64::from(memory_percent) / 100);
    let request = Request::share(Percent(compute_percent), memory);
    // Pods request half of their part of the host, so that GPUs are what runs out.
    let part = u64::from(compute_percent.max(memory_percent));
    let (cpu, host_memory) = (MilliCpu(CPU_PER_GPU * part / 200), MiB(MIB_PER_GPU * part / 200));
    PodRequest { cpu, memory: host_memory, ..PodRequest::of_mains([request]) }
}

#[test]
fn the_node_with_the_fewest_idle_gpus_is_filled_whatever_its_gpus_in_use_have_left() {
    let mut world = World::new(&[8, 8]);
    (0..4).for_each(|gpu| world.add_share(0, gpu, &share(90, 90)));
    (0..5).for_each(|gpu| world.add_share(1, gpu, &share(10, 10)));
    assert!(world.nodes[0].gpus_left() < world.nodes[1].gpus_left());
    assert_eq!(world.best_node(&PodRequest::of_mains([Request::Whole(1)])), Some(1));
}

#[test]
fn quarters_leave_idle_nodes_to_pods_with_eight_gpus() {
    let mut world = World::new(&[8; 21]);
    for number in 0..320 {
        if number == 100 {
            world.restart();
        }
        world.arrive(&share(25, 25), true).unwrap();
    }
    let used: usize = world.nodes.iter().map(|node| 8 - node.idle().len()).sum();
    assert!(used <= 88, "320 quarters use {used} GPUs");
    let eight = PodRequest::of_mains([Request::Whole(8)]);
    assert!((0..8).all(|_| world.arrive(&eight, true).is_some()));
}

#[test]
fn shares_use_small_gpus_before_any_pod_has_shown_that_whole_gpus_of_any_size_are_wanted() {
    let sizes = [("80GiB", 80), ("16GiB", 16), ("24GiB", 24)];
    let nodes = sizes.into_iter().enumerate().map(|(number, (model, gibibytes))| {
        NodeState::empty(node_with(number, 8, model, MiB(gibibytes * 1024)))
    });
    let mut world = World::of(nodes.collect());
    // They fill all GPUs of 16 and of 24 GiB.
    for gibibytes in [8, 8].repeat(8).into_iter().chain([8, 8, 8].repeat(8)) {
        world.arrive(&PodRequest::of_mains([Request::memory(MiB(gibibytes * 1024))]), true);
    }
    let used = world.nodes.iter().map(|node| 8 - node.idle().len());
    assert_eq!(used.collect::<Vec<_>>(), [0, 8, 8]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn equal_shares_open_an_idle_gpu_only_where_no_used_gpu_has_room(
        gpu_counts in vec(1u8..=8, 1..5),
        compute_percent in 1u32..=99,
        memory_percent in 1u32..=99,
        forecasts in any::<bool>(),
        steps in vec(step(), 1..120),
    ) {
        let pod = share(compute_percent, memory_percent);
        let mut world = World::new(&gpu_counts);
        for step in steps {
            match step {
                Step::End(position) => world.end(position),
                Step::Restart => world.restart(),
                Step::Arrival => {
                    let has_room = world.has_room_on_used_gpu(&pod);
                    if let Some(was_idle) = world.arrive(&pod, forecasts) {
                        prop_assert_eq!(was_idle, !has_room);
                    }
                }
            }
        }
    }
}
