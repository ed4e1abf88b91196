//! The numbers that processes share in a ledger: the machine's own, or those with which all interleavings are tried
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
