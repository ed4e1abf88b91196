//! Decisions of Tessera: which GPUs a pod gets, and what is left.
//!
//! Every function depends only on its arguments: no IO, no clock, no globals, no async. The
//! scheduler, the agent, the command line and the simulators call the same code and carry out its
//! decisions.

#![warn(missing_docs)]

pub mod admission;
pub mod bandwidth;
pub mod claim;
pub mod cluster_view;
pub mod constraint;
pub mod defragment;
pub mod disruption;
pub mod eviction;
#[cfg(test)]
mod fixtures;
pub mod forecast;
pub mod fragmentation;
pub mod gang;
pub mod gpu;
pub mod gpu_set;
pub mod grant;
pub mod ledger;
pub mod natural;
pub mod node;
pub mod placement;
pub mod preemption;
pub mod quota;
pub mod remedy;
pub mod request;
pub mod selection;
pub mod taint;
pub mod topology;
pub mod tree;
pub mod units;
pub mod workload;
