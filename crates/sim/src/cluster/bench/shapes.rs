//! The pods that generated workloads consist of.

use tessera_core::request::{PodRequest, Request};
use tessera_core::units::{MiB, MilliCpu, Percent};

use crate::cluster::pod::{PodSize, SimPod};

/// Memory of a GPU, unless a workload mixes kinds of GPUs. The size of a pod is relative to it.
pub(super) const GPU_MEMORY: MiB = MiB(80 * 1024);

/// Host resources requested per percent of a GPU: 8 CPUs and 64 GiB per GPU. Nodes have twice as
/// much, so that GPUs decide.
const CPU_PER_PERCENT: MilliCpu = MilliCpu(80);
const MEMORY_PER_PERCENT: MiB = MiB(655);

/// Returns a pod with this percentage of the compute and of the memory of one GPU.
pub(super) fn share(percent: u32) -> SimPod {
    uneven_share(percent, percent)
}

/// Returns a pod with these percentages of the compute and of the memory of one GPU.
pub(super) fn uneven_share(compute_percent: u32, memory_percent: u32) -> SimPod {
    let memory = part_of_memory(memory_percent);
    let request = Request::share(Percent(compute_percent), memory);
    pod(
        format!("share-{compute_percent}-{memory_percent}"),
        request,
        PodSize::Share,
        compute_percent.max(memory_percent),
    )
}

/// Returns a pod that requests only memory, in percent of one GPU's memory.
pub(super) fn memory_share(percent: u32) -> SimPod {
    pod(format!("memory-{percent}"), Request::memory(part_of_memory(percent)), PodSize::Share, percent)
}

/// Returns a pod that requests only memory, in GiB.
pub(super) fn gibibytes(gibibytes: u32) -> SimPod {
    let memory = MiB(u64::from(gibibytes) * 1024);
    let percent = (100 * gibibytes).div_ceil(80);
    pod(format!("memory-{gibibytes}gib"), Request::memory(memory), PodSize::Share, percent)
}

/// Returns a pod with whole GPUs.
pub(super) fn whole(gpus: u8) -> SimPod {
    let size = match gpus {
        1 => PodSize::One,
        2 => PodSize::Two,
        3 | 4 => PodSize::Four,
        _ => PodSize::Eight,
    };
    pod(format!("whole-{gpus}"), Request::Whole(gpus), size, 100 * u32::from(gpus))
}

/// Returns the pod without its requests of CPU and main memory.
pub(super) fn without_host(pod: SimPod) -> SimPod {
    let request = PodRequest { cpu: MilliCpu::ZERO, memory: MiB::ZERO, ..pod.request };
    SimPod { name: format!("{}-bare", pod.name), request, ..pod }
}

fn part_of_memory(percent: u32) -> MiB {
    MiB(GPU_MEMORY.0 * u64::from(percent) / 100)
}

fn pod(name: String, request: Request, size: PodSize, percent: u32) -> SimPod {
    let request = PodRequest {
        cpu: MilliCpu(CPU_PER_PERCENT.0 * u64::from(percent)),
        memory: MiB(MEMORY_PER_PERCENT.0 * u64::from(percent)),
        ..PodRequest::of_mains([request])
    };
    SimPod { name, request, size, percent }
}
