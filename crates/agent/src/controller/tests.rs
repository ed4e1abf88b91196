//! Tests of the controller alone: a simulated kubelet in a few lines makes the calls of a real one.

mod availability;
mod capacity;
mod diagnostics;
mod dra;
mod event_orders;
mod failures;
#[path = "../../tests/fixtures/mod.rs"]
mod fixtures;
mod hami;
mod hostile_input;
mod loans;
mod mig;
mod other_plugins;
mod situations;
mod usage_check;
mod world;
