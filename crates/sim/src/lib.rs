//! Simulators that drive the real code: recorded workloads on recorded clusters, job streams on single machines, a kubelet that
//! device plugins cannot tell from a real one, and an API server in memory.

pub mod apiserver;
pub mod cluster;
pub mod kubelet;
pub mod topology;
