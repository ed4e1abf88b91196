//! The atomic integers of the shared files: those of the standard library, or those of loom, which
//! explores all interleavings
//! (`RUSTFLAGS="--cfg loom" cargo test -p tessera-limits interleavings`).

#[cfg(loom)]
pub(crate) use loom::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    thread::yield_now,
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    thread::yield_now,
};
