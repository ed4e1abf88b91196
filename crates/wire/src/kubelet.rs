//! The kubelet's interfaces: device plugins, their registration, and podresources, which lists the
//! devices of each container.
//!
//! The gRPC interfaces need the feature `grpc`. The test `kubelet_codegen` generates the code under
//! `gen` from `proto/`.

#[cfg(feature = "grpc")]
mod authority;
pub mod cdi;
#[cfg(feature = "grpc")]
pub mod container_response;
pub mod device_id;

#[cfg(feature = "grpc")]
pub use self::authority::{AuthorityError, AuthorityFilter};

#[cfg(feature = "grpc")]
macro_rules! generated {
    ($(#[$doc:meta])* $name:ident, $file:literal) => {
        $(#[$doc])*
        #[allow(
            clippy::all,
            clippy::allow_attributes_without_reason,
            clippy::or_fun_call,
            clippy::use_self,
            missing_debug_implementations,
            missing_docs,
            unreachable_pub,
            unused_qualifications,
            reason = "generated code"
        )]
        pub mod $name {
            include!($file);
        }
    };
}

#[cfg(feature = "grpc")]
generated!(
    /// `v1beta1`: the service of a device plugin, and the kubelet's service for registering it.
    device_plugin,
    "kubelet/gen/v1beta1.rs"
);
#[cfg(feature = "grpc")]
generated!(
    /// `pluginregistration`: the service of a plugin that the kubelet finds in `plugins_registry`.
    plugin_registration,
    "kubelet/gen/pluginregistration.rs"
);
#[cfg(feature = "grpc")]
generated!(
    /// `dra.v1`: the service of a driver of dynamic resource allocation.
    dra,
    "kubelet/gen/k8s.io.kubelet.pkg.apis.dra.v1.rs"
);
#[cfg(feature = "grpc")]
generated!(
    /// `v1alpha1`: the stream in which such a driver reports the health of its devices.
    dra_health,
    "kubelet/gen/v1alpha1.rs"
);
#[cfg(feature = "grpc")]
generated!(
    /// `v1`: the devices that the kubelet has assigned to each container.
    pod_resources,
    "kubelet/gen/v1.rs"
);

#[cfg(feature = "grpc")]
generated!(
    /// `display`: the service of gpu-manager on its socket, which is generated like those of the kubelet.
    gpu_manager_display,
    "kubelet/gen/display.rs"
);

/// Version of the device plugin interface. Kubernetes defines only one.
pub const DEVICE_PLUGIN_VERSION: &str = "v1beta1";

/// Plugin type that a driver of dynamic resource allocation reports in `plugins_registry`.
pub const DRA_PLUGIN_TYPE: &str = "DRAPlugin";

/// Service of a driver that prepares claims, as the registration names it.
pub const DRA_SERVICE: &str = "v1.DRAPlugin";

/// Service of a driver that reports health, as the registration names it.
pub const DRA_HEALTH_SERVICE: &str = "v1alpha1.DRAResourceHealth";

/// Plugin type that a device plugin reports in `plugins_registry`.
pub const DEVICE_PLUGIN_TYPE: &str = "DevicePlugin";

/// Health of a device that may be allocated.
pub const HEALTHY: &str = "Healthy";

/// Health of a device that must not be allocated to new containers.
pub const UNHEALTHY: &str = "Unhealthy";
