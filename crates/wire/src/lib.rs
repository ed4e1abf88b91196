//! Tessera.

pub mod extender;
#[cfg(feature = "grpc")]
pub mod kubelet;
pub mod objects;
