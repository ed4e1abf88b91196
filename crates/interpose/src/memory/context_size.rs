//! The memory that a context takes, which differs between GPUs and drivers.
//!
//! The agent measures it when the first process on a GPU has made a context and nothing else. Until
//! then an upper bound is charged.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tessera_limits::{Bytes, GpuSlot, futex};

use super::contexts;
use crate::cuda::Status;
use crate::grant::Process;

/// Longest time for which a context waits at the limit until the contexts of other processes have
/// been measured. An idle process corrects its charge once a second.
const MAX_SIZE_WAIT: Duration = Duration::from_millis(2_000);

/// Longest time between a measurement and the limits that contain it.
const MAX_PUBLICATION_WAIT: Duration = Duration::from_millis(50);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Charges a context and returns its size.
///
/// # Errors
/// "Out of memory" at the limit.
pub fn charge(process: &Process, gpu: GpuSlot) -> Result<Bytes, Status> {
    let bytes = process.context_size(gpu);
    if process.try_charge(gpu, bytes) {
        return Ok(bytes);
    }
    // Another process may be charged an upper bound until its context has been measured.
    if process.place(gpu).grant.control.has_arbiter(futex::now()) {
        let charge_again = || {
            process.sweep();
            Some(process.context_size(gpu)).filter(|&size| process.try_charge(gpu, size))
        };
        if let Some(size) = poll(MAX_SIZE_WAIT, charge_again) {
            return Ok(size);
        }
    }
    let bytes = process.context_size(gpu);
    process.charge(gpu, bytes).map(|()| bytes)
}

/// Lets the agent measure the first context of this process, unless the size is known.
pub fn measure(process: &Process, gpu: GpuSlot) {
    let has_asked = process.memory.has_asked_context_size[gpu].swap(true, Ordering::Relaxed);
    if !has_asked && process.measured_context_size(gpu).is_none() && process.wait_for_measurement(gpu) {
        let _ = poll(MAX_PUBLICATION_WAIT, || process.measured_context_size(gpu));
    }
    contexts::settle(process);
}

/// Calls `attempt` until it returns a value or `max_time` has passed. Only the sleeps count as time, so on a machine
/// without free processors there are as many attempts as on an idle one.
fn poll<T>(max_time: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let mut waited = Duration::ZERO;
    loop {
        let result = attempt();
        if result.is_some() || waited >= max_time {
            return result;
        }
        std::thread::sleep(POLL_INTERVAL);
        waited += POLL_INTERVAL;
    }
}
