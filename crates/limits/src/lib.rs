//! What a container may use of its GPUs, and what it uses: the two files that node agent and library share, and the
//! accounting both do on them.
//!
//! ```text
//! control   written by the agent, read-only for the container: limits, time windows      -> limits, control
//! account   written by the container's processes, read by the agent as a hint             -> ledger
//! ```
//!
//! Nothing in `account` can raise a limit. Nothing in `control` depends on `account` but through the agent, which
//! checks what it reads there. No threads, no logging; time is always an argument.
//!
//! What the library decides and counts without the driver is here too ([`costs`], [`pacer`], [`queue`], [`traffic`]), as it can be tested here.

#![warn(missing_docs)]
#![allow(unsafe_code, reason = "maps files shared between processes and sleeps on words in them")]

mod atomic;
pub mod budget;
pub mod control;
pub mod costs;
pub mod files;
pub mod futex;
pub mod gpu_slot;
pub mod limits;
pub mod memory_account;
pub mod pacer;
pub mod queue;
pub mod traffic;

pub use control::Control;
pub use gpu_slot::{GpuSlot, MAX_GPUS, PerGpu};
pub use limits::{GpuLimit, GrantLimits, UuidBytes};
pub use memory_account::MemoryAccount;
