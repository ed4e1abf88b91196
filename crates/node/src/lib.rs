//! Talks to the machine a node agent runs on: its GPUs, and the kubelet on its sockets.
//!
//! [`gpus`] tells which GPUs there are and how they fare, by NVML or by a description; [`device_plugin`] serves devices to
//! the kubelet and keeps them registered with it; [`pod_resources`] asks the kubelet which container holds which device;
//! [`processes`] tells whose a process is; [`open_files`] raises how many files may be open.
//! Nothing here knows the Kubernetes API.

#![warn(missing_docs)]

pub mod device_plugin;
pub mod gpus;
pub mod open_files;
pub mod pod_resources;
pub mod processes;
