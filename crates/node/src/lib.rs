//! Interfaces of the host on which a node agent runs: its GPUs, its processes, and the kubelet's
//! sockets.
//!
//! [`gpus`] discovers and samples GPUs, through NVML or from a description. [`device_plugin`]
//! serves devices to the kubelet and keeps the plugin registered, and [`dra`] does so for claims. [`pod_resources`] asks the
//! kubelet which container holds which device. [`processes`] finds the owner of a process.
//! [`driver_volume`] fills the directory with the driver that containers mount. [`display_socket`] serves
//! gpu-manager's gRPC interface.
//! [`open_files`] raises the limit of open files, [`tmpfs`] mounts memory. This crate does not use the Kubernetes API.

#![warn(missing_docs)]

pub mod device_plugin;
pub mod display_socket;
pub mod dra;
pub mod driver_volume;
mod file_identity;
pub mod gpus;
pub mod open_files;
pub mod pod_resources;
pub mod processes;
pub mod tmpfs;
