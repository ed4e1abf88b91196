//! The real programs against an API server in memory.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

mod agents;
mod broken;
mod colour;
mod errors;
mod explain;
mod forms;
mod kubectl;
mod samples;
mod stage;
mod states;
