//! The limiter on a simulated GPU and virtual time.
//!
//! Nothing here sleeps or reads a clock. The simulation offers none of the time-outs that bound a sleep in
//! the library: a lost wake-up blocks its thread for the rest of the run, and the share is missed.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]
#![allow(clippy::print_stdout, reason = "tests report what they measured")]

mod gate;
mod gpu;
mod host_work;
mod limits;
mod programs;
mod shares;
mod steps;
mod wake_ups;
mod world;
