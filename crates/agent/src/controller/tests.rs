//! Tests of the controller alone: a simulated kubelet in a few lines makes the calls of a real one.

mod capacity;
mod diagnostics;
mod event_orders;
mod failures;
#[path = "../../tests/fixtures/mod.rs"]
mod fixtures;
mod hostile_input;
mod mig;
mod situations;
mod usage_check;
mod world;
