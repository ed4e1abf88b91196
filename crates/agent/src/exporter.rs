//! Who holds and who really uses each GPU: samples, processes, pods and grants go in, pages come out. No IO.
//!
//! A driver knows GPUs and processes, the kernel whose a process is, Kubernetes which containers there are, and the agent what
//! they hold. [`Meter`] keeps the accounts as samples come, [`Snapshot`] puts everything together at the moment of a scrape, and
//! [`families`] write it down in the words of each project whose metrics are wanted. Parts always add up to the GPU.

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
        ContainerSnapshot, GpuReading, GpuSnapshot, ProcessOwner, ProcessSnapshot, ShareSnapshot, Snapshot,
        Sources,
    },
    split::{Split, TimeSplit, split_memory, split_time},
    usage::{GpuManagerUsage, node_use, usage},
};
