//! The extender verbs and the explanation, each a pure function of the state.

mod admission;
mod evictions;
pub mod explain;
pub mod filter;
pub mod gang;
pub mod inspect;
pub mod preempt;
pub mod prioritize;
mod sample;
pub mod verdict_cache;
