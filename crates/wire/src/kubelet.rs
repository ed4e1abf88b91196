//! The kubelet's gRPC interfaces: device plugins, their registration, and who holds which device.
//!
//! The code under `gen` is made from `proto/` by the test `kubelet_codegen`.

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
    /// `v1beta1`: what a device plugin serves, and the service where it may register.
    device_plugin,
    "kubelet/gen/v1beta1.rs"
);
#[cfg(feature = "grpc")]
generated!(
    /// `pluginregistration`: how a plugin that waits in `plugins_registry` introduces itself.
    plugin_registration,
    "kubelet/gen/pluginregistration.rs"
);
#[cfg(feature = "grpc")]
generated!(
    /// `v1`: which devices each container holds, by the kubelet's own books.
    pod_resources,
    "kubelet/gen/v1.rs"
);

/// The only version of the device plugin interface there is.
pub const DEVICE_PLUGIN_VERSION: &str = "v1beta1";

/// The kind of plugin a device plugin says it is in `plugins_registry`.
pub const DEVICE_PLUGIN_TYPE: &str = "DevicePlugin";

/// The health of a device that may be allocated.
pub const HEALTHY: &str = "Healthy";

/// The health of a device that must not be given to new containers.
pub const UNHEALTHY: &str = "Unhealthy";
