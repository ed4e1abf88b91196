//! Who holds and who really uses each GPU: samples, processes, pods and grants go in, pages come out. No IO.
//!
//! A driver knows GPUs and processes, the kernel whose a process is, Kubernetes which containers there are, and the agent what
//! they hold. [`Meter`] keeps the accounts as samples come, [`Picture`] puts everything together at the moment of a scrape, and
//! [`families`] write it down in the words of each project whose metrics are wanted. Parts always add up to the GPU.

mod book;
pub mod families;
mod meter;
mod picture;
mod split;
mod usage;

pub use self::{
    book::{Book, ContainerKey, Holder},
    meter::{GpuMeter, Meter, Observation, Tally, Throttle, Throttles},
    picture::{ContainerPicture, GpuPicture, Look, Owned, Picture, ProcessPicture, SharePicture, Sources},
    split::{Split, TimeSplit, split_memory, split_time},
    usage::{Usage, node_use, usage},
};
