//! The questions the scheduler answers, each a pure function of the state.

pub mod ask;
pub mod explain;
pub mod filter;
pub mod inspect;
pub mod judge;
mod node_hint;
pub mod preempt;
pub mod prioritize;
pub mod reason;
pub mod verdict_cache;
