//! Talks to the machine a node agent runs on. So far: the kubelet, on its sockets.
//!
//! [`device_plugin`] serves devices to the kubelet and keeps them registered with it; [`pod_resources`] asks the kubelet
//! which container holds which device. Nothing here knows the Kubernetes API.

pub mod device_plugin;
pub mod pod_resources;
