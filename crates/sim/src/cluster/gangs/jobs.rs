//! The jobs of a run: their kinds, arrivals and running times.

use tessera_core::gpu::Gpu;
use tessera_core::node::{BadNode, Node};
use tessera_core::request::{PodRequest, Request};
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu};

use super::{GangExperiment, JobShape};
use crate::cluster::arrivals::Draws;
use crate::cluster::pod::{PodSize, SimPod};

/// Pods and GPUs per pod of the generated jobs. About half of the jobs have several pods, which hold most of the GPUs.
const GENERATED: [(usize, u8); 12] =
    [(1, 1), (1, 1), (1, 2), (1, 4), (1, 8), (1, 8), (2, 4), (4, 2), (2, 8), (4, 8), (4, 8), (8, 8)];

const GPUS_PER_NODE: u8 = 8;

/// Mean running time of a job. Most jobs are shorter, because the times are distributed exponentially.
const MEAN_SECONDS: f64 = 3600.0;

/// Shortest running time of a job.
const MIN_SECONDS: u64 = 60;

/// A job that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) at_seconds: u64,
    pub(super) shape: usize,
    pub(super) running_seconds: u64,
}

pub(super) fn node(number: usize) -> Result<Node, BadNode> {
    let gpu = |index| {
        let uuid = format!("GPU-{number}-{index}");
        Gpu::new(GpuIndex(index), uuid.as_str().into(), "H100".into(), MiB(81_920))
    };
    Node::new(
        format!("node-{number:04}").as_str().into(),
        (0..GPUS_PER_NODE).map(gpu).collect(),
        Topology::unknown(usize::from(GPUS_PER_NODE)),
        MilliCpu(128_000),
        MiB(1 << 20),
    )
}

pub(super) fn generated_shapes() -> Vec<JobShape> {
    let shape = |(pod_count, gpus): (usize, u8)| JobShape {
        request: PodRequest::of_mains([Request::Whole(gpus)]),
        pod_count,
        pod_percent: u32::from(gpus) * 100,
    };
    GENERATED.into_iter().map(shape).collect()
}

/// Returns a job for each pod with GPUs. A pod with several whole GPUs becomes pods with one GPU each.
pub(super) fn trace_shapes(pods: &[SimPod]) -> Vec<JobShape> {
    let shape = |pod: &SimPod| {
        let whole = pod.request.containers.first().and_then(|container| container.request);
        match whole {
            Some(Request::Whole(count @ 2..)) => {
                let mut request = PodRequest::of_mains([Request::Whole(1)]);
                request.cpu = MilliCpu(pod.request.cpu.0 / u64::from(count));
                request.memory = MiB(pod.request.memory.0 / u64::from(count));
                request.models.clone_from(&pod.request.models);
                JobShape { request, pod_count: usize::from(count), pod_percent: 100 }
            }
            _ => JobShape { request: pod.request.clone(), pod_count: 1, pod_percent: pod.percent },
        }
    };
    pods.iter().filter(|pod| pod.size != PodSize::None).map(shape).collect()
}

/// Draws the jobs of a seed, earliest first. Their GPU time is the load of the experiment on average.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are positive and far below 2^52 seconds"
)]
pub(super) fn jobs(experiment: &GangExperiment, seed: u64) -> Vec<Job> {
    let mut draws = Draws::new(seed);
    let shapes = &experiment.shapes;
    let gpus: usize = experiment.nodes.iter().map(|node| node.gpus().len()).sum();
    let asked: f64 = shapes.iter().map(|shape| shape.pod_count as f64 * f64::from(shape.pod_percent)).sum();
    let mean_gpus = asked / 100.0 / shapes.len().max(1) as f64;
    let interval = mean_gpus * MEAN_SECONDS / (experiment.load * gpus as f64);
    let (end, mut now, mut jobs) = (f64::from(experiment.hours) * 3600.0, 0.0, Vec::new());
    while !shapes.is_empty() && interval > 0.0 {
        now += interval * draws.exponential();
        if now >= end {
            break;
        }
        let running = (MEAN_SECONDS * draws.exponential()) as u64;
        let shape = draws.below(shapes.len());
        jobs.push(Job { at_seconds: now as u64, shape, running_seconds: running.max(MIN_SECONDS) });
    }
    jobs
}
