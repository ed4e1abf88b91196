//! Holds a process to its share of a GPU's time. All decisions of the launch limiter are here, as
//! functions of values: the time is an argument, and what the caller has to do is the result.
//!
//! ```text
//! program thread   LaunchGate::try_enter -> pass, or wait     then Launch::end -> fences in the stream
//! monitor thread   GpuController: poll fences, charge time, open or close the gate, how long to sleep
//! ```
//!
//! - [`driver`]: the calls to the GPU driver, as a trait.
//! - [`gate`]: the launch gate of one GPU. A closed gate, or a full queue, holds launches back.
//! - [`stream_queues`], [`fences`]: the work that each stream has queued, tracked by driver events.
//! - [`costs`]: how long each kind of work takes. [`back_pressure`]: how much may be queued. `busy_time`: how long
//!   the GPU was busy.
//! - [`controller`]: the decisions of the monitor thread. [`pacer`]: the share of a container alone.
//! - [`captures`]: stream captures, which the limiter must not disturb.
//!
//! There is no clock, no thread, no sleep and no input or output in this crate.

pub mod back_pressure;
mod busy_time;
pub mod captures;
pub mod controller;
pub mod costs;
pub mod driver;
pub mod fences;
pub mod gate;
mod nanos;
pub mod pacer;
pub mod stream_queues;

pub use nanos::Nanos;
