//! Device plugins against make-believe kubelets. Against real ones: the end-to-end scenario `device-plugin`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kubelet_socket;
mod plugin;
mod plugins_registry;
