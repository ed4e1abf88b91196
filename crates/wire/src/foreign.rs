//! Formats that other projects define: Kubernetes, NVIDIA's tools, and the GPU schedulers that
//! Tessera replaces.

pub mod admission_review;
pub mod cgroup;
pub mod constraint;
pub mod dialect;
pub mod disruption;
pub mod dra;
pub mod extender;
pub mod gpu_topology;
pub mod gpu_tree;
pub mod inspect;
pub mod ld_cache;
pub mod link;
pub mod objects;
pub mod owned_pod;
pub mod pod_gpu_map;
pub mod pod_group;
pub mod pod_spec;
pub mod quantity;
pub mod quota;
pub mod resource_quota;
pub mod smi_matrix;
pub mod time;
pub mod unhealthy;
pub mod volume_config;
