//! Invariants of the core under random input.

mod arbitrary;
mod ledger;
mod placement;
