//! Every foreign format, read into the core's types and written from them. No sockets, no files, no decisions.

pub mod dialect;
pub mod gpu_topology;
mod link;
pub mod pod_spec;
pub mod quantity;
pub mod smi_matrix;
pub mod static_table;
pub mod tree;
