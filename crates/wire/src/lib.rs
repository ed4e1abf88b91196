//! Every foreign format, read into the core's types and written from them. No sockets, no files, no decisions.

pub mod cgroup;
pub mod device_id;
pub mod dialect;
pub mod extender;
pub mod gpu_topology;
pub mod grant;
#[cfg(feature = "grpc")]
pub mod hand_over;
pub mod inventory;
#[cfg(feature = "grpc")]
pub mod kubelet;
pub mod limits;
pub mod link;
