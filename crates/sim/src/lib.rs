//! Simulators that drive the real core: recorded workloads on recorded clusters, job streams on single machines.

pub mod cluster;
pub mod topology;
