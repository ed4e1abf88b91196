//! The limits of a container on its GPUs, and the accounting of its usage.
//!
//! Agent and library share two files for each container:
//!
//! ```text
//! control   limits and windows: written by the agent, read-only for the container (`control`)
//! account   charges and demand: written by the container's processes (`memory_account`)
//! ```
//!
//! Nothing in `account` can raise a limit. `control` depends on `account` only through the agent,
//! which validates everything it reads there. This crate has no threads and no logging; time is
//! always an argument.

#![warn(missing_docs)]
#![allow(unsafe_code, reason = "maps files shared between processes and sleeps on words in them")]

pub mod allocation_size;
mod atomic;
pub mod bytes;
pub mod control;
pub mod files;
pub mod futex;
pub mod gpu_slot;
pub mod limits;
pub mod memory_account;
pub mod pacer;
pub mod process_stat;

pub use bytes::{AtomicBytes, Bytes};
pub use control::Control;
pub use gpu_slot::{GpuSlot, MAX_GPUS, PerGpu};
pub use limits::{GpuLimit, GrantLimits, UuidBytes};
pub use memory_account::MemoryAccount;
