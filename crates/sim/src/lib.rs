//! Simulators that drive the real code.
//!
//! - `cluster` runs policies on recorded and generated workloads.
//! - `topology` runs job streams on single hosts.
//! - `kubelet`, `apiserver` and `kube_scheduler` stand in for Kubernetes: a kubelet that device
//!   plugins cannot distinguish from a real one, an API server in memory, and the calls that
//!   kube-scheduler makes to an extender. `reviews` stands in for an API server that checks tokens.

pub mod apiserver;
pub mod cluster;
mod events;
pub mod http;
pub mod kube_scheduler;
pub mod kubelet;
pub mod reviews;
pub mod scatter;
pub mod threads;
pub mod topology;
