//! Simulators that drive the real code: recorded workloads on recorded clusters, job streams on single machines, a kubelet that
//! device plugins cannot tell from a real one, an API server in memory, and kube-scheduler's part in calling an extender.

pub mod apiserver;
pub mod cluster;
mod events;
pub mod http;
pub mod kube_scheduler;
pub mod kubelet;
pub mod scatter;
pub mod threads;
pub mod topology;
