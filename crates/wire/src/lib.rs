//! Every foreign format, read into the core's types and written from them. No sockets, no files, no decisions.

pub mod cdi;
pub mod cgroup;
pub mod device_id;
pub mod dialect;
pub mod disruption;
pub mod extender;
pub mod gpu_topology;
pub mod grant;
#[cfg(feature = "grpc")]
pub mod hand_over;
pub mod inventory;
#[cfg(feature = "grpc")]
pub mod kubelet;
pub mod link;
pub mod metrics;
pub mod node_spec;
pub mod node_use;
pub mod objects;
pub mod pod_spec;
pub mod quantity;
pub mod quota;
pub mod smi_matrix;
pub mod static_table;
pub mod tree;
pub mod unhealthy;
pub mod wishes;
