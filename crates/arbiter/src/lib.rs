//! Assigns time windows on shared GPUs, so that one container at a time uses a GPU and each gets
//! its share.
//!
//! - [`gpu_arbiter`] decides which container gets the next window on one GPU. It is pure: time and
//!   reports are arguments.
//! - [`power`] computes the factor by which busy time counts if a share means throughput. It is
//!   pure, too.
//! - [`service`] reads the demand of containers from their accounts and writes windows into their
//!   control files.
//!
//! While no arbiter runs, each container limits itself to its share. It returns to windows when an
//! arbiter runs again. The arbiter keeps no state that a restart would lose.

#![warn(missing_docs)]

pub mod gpu_arbiter;
pub mod power;
mod rate_limit;
mod read_schedule;
pub mod service;

pub use gpu_arbiter::{GpuArbiter, Share, TenantReport, WindowAction};
pub use service::Service;
