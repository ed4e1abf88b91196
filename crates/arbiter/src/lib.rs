//! Hands out time windows on shared GPUs, so that one container at a time uses a GPU and each gets its share.
//!
//! - [`gpu_arbiter`]: who goes next on one GPU. Pure: time and what is seen are arguments.
//! - [`power`]: by what factor time counts where a share means throughput. Pure.
//! - [`service`]: reads what containers want from their accounts, writes windows into their control files.
//!
//! Containers on a GPU whose arbiter is gone hold themselves to their share, and go on with windows when it is back:
//! nothing is kept here that a restart would miss.

#![warn(missing_docs)]

pub mod gpu_arbiter;
pub mod power;
pub mod service;

pub use gpu_arbiter::{GpuArbiter, Share, TenantReport, WindowAction};
pub use service::Service;
