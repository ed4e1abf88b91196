//! Parses and writes every format Tessera exchanges with other programs.
//! This crate opens no sockets, reads no files and makes no decisions.
//!
//! - [`foreign`]: formats of other projects, such as the `nvidia-smi` matrix and Kubernetes objects.
//! - [`tessera`]: formats that Tessera defines, such as the grant and inventory annotations.
//! - [`kubelet`]: the kubelet's interfaces, such as device plugins and podresources.
//! - [`bounded`]: JSON of untrusted callers, within a budget of elements.
//!
//! `tessera` and `kubelet` may use `foreign`; `foreign` uses neither.

#![warn(missing_docs)]

pub mod bounded;
pub mod foreign;
pub mod kubelet;
pub mod metrics;
pub mod tessera;
