//! Parses and writes every format Tessera exchanges with other programs. No sockets, no files, no decisions.
//!
//! - [`foreign`]: formats that other projects define, such as the `nvidia-smi` matrix and Kubernetes objects.
//! - [`tessera`]: formats that Tessera defines, such as the grant and inventory annotations.
//! - [`kubelet`]: the kubelet's interfaces, such as device plugins and podresources.
//!
//! `tessera` and `kubelet` may use `foreign`; `foreign` uses neither.

#![warn(missing_docs)]

pub mod foreign;
pub mod kubelet;
pub mod metrics;
pub mod tessera;
