//! Device plugins against make-believe kubelets. Against real ones: the end-to-end scenario `device-plugin`.

mod kubelet_socket;
mod plugin;
mod plugins_registry;
