//! The controller without anything around it: a make-believe kubelet in a few lines asks as a real one does.

mod diagnostics;
mod event_orders;
mod failures;
mod hostile_input;
mod situations;
mod usage_check;
mod world;
