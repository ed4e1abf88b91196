//! Invariants of the core under random input.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

mod arbitrary;
mod defragment;
mod eviction;
mod gang;
mod ledger;
mod links;
mod packing;
mod placement;
mod reservations;
