//! Device plugins with simulated kubelets. The end-to-end scenario `device-plugin` uses real ones.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kubelet_socket;
mod plugin;
mod plugins_registry;
