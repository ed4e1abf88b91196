//! The simulators, on small fixtures and, where it is there, on real data.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "helpers of tests may fail and speak like tests"
)]

mod cluster;
mod conformance;
