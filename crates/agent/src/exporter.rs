//! The exporter: which container holds and which one uses each GPU. It has no IO.
//!
//! The driver knows GPUs and processes, the kernel knows the cgroup of a process, Kubernetes knows
//! the containers, and the agent knows their grants. [`Meter`] accumulates usage as samples arrive,
//! [`Snapshot`] joins all sources at the time of a scrape, and [`families`] writes the snapshot in
//! the metric names of each supported project. The parts always add up to the GPU.

mod container_index;
pub mod families;
mod meter;
mod snapshot;
mod split;
mod usage;

pub use self::{
    container_index::{Consumer, ContainerIndex, ContainerKey},
    meter::{GpuMeter, Meter, Observation, ShareReport, ShareReports, Tally},
    snapshot::{
        ContainerSnapshot, GpuReading, GpuSnapshot, ProcessOwner, ProcessSnapshot, Room, ShareSnapshot,
        Snapshot, Sources, UnknownUse,
    },
    split::{Fractions, MemorySplit, TimeSplit, split_memory, split_time},
    usage::{GpuManagerUsage, gpu_manager_usage, node_use},
};
