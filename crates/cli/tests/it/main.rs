//! Runs the real programs against an in-memory API server.

#![allow(clippy::unwrap_used, reason = "test helpers may panic")]

mod agents;
mod agreement;
mod broken;
mod colour;
mod cordon;
mod defragment;
mod documented;
mod errors;
mod explain;
mod forms;
mod kubectl;
mod samples;
#[path = "../../../tessera/tests/book/section.rs"]
mod section;
mod stage;
mod states;
mod tutorials;
