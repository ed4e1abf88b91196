//! Tests of the shipped library under programs that use all three entry points, on a simulated GPU.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

mod compute;
mod entry;
mod escapes;
mod memory;
mod robustness;
mod support;
mod windows;
