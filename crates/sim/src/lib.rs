//! Simulators that drive the real code: recorded workloads on recorded clusters, job streams on single machines, and a kubelet
//! that device plugins cannot tell from a real one.

pub mod cluster;
pub mod kubelet;
pub mod topology;
