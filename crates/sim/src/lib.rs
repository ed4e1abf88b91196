//! Simulators that drive the real core: recorded workloads on recorded clusters, job streams on single machines; and an
//! API server in memory that drives everything else.

pub mod apiserver;
pub mod cluster;
pub mod topology;
