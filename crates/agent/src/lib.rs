//! The node agent: offers the node's GPUs to the kubelet, gives containers the GPUs they were
//! granted, and keeps annotations and limits in line with what the kubelet holds.
//!
//! - [`controller`] decides. Events go in and actions come out; it does no IO.
//! - [`exporter`] turns samples of GPUs and processes into metrics. It does no IO either.
//! - [`shell`] carries out the actions and reports the results as events.

// Fixtures that unit tests share with integration tests name this crate.
#[cfg(test)]
extern crate self as tessera_agent;

pub mod controller;
pub mod exporter;
pub mod shell;
