//! Tests of the simulators on small fixtures and, if it exists, on recorded data.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "test helpers may panic and print like tests")]

mod bench;
mod cluster;
mod conformance;
