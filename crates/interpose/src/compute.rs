//! Limits of GPU time: a launch passes the gate while the container has time left in its share.
//!
//! - `kernels`, `transfers`: hooks of the functions that start work on a GPU.
//! - `captures`: hooks of the functions that begin or end a stream capture.
//! - `streams`: streams as programs name them.
//! - `driver`: calls to the CUDA driver.
//! - `controllers`: rounds of the monitor thread for each GPU.
//!
//! `tessera_throttle` makes all decisions. This module has the hooks, the driver calls, the sleeps
//! and the clock. Launches into a capturing stream are not limited, because the work runs only when
//! the graph is launched.

mod captures;
mod controllers;
mod driver;
mod kernels;
mod streams;
mod transfers;

use std::hint::cold_path;
use std::sync::atomic::Ordering;

use tessera_limits::{GpuSlot, GrantLimits, PerGpu, futex};
use tessera_throttle::Nanos;
use tessera_throttle::captures::Captures;
use tessera_throttle::costs::CostTable;
use tessera_throttle::driver::{ContextId, StreamId};
use tessera_throttle::gate::{Entered, HeldBack, Launch, LaunchGate};

use crate::cuda::{Handle, SUCCESS, Status};
use crate::entry::table::Hook;
use crate::grant::Process;
use crate::monitor;
pub use controllers::Controllers;
use driver::{CudaDriver, CudaEvent};
pub use streams::Stream;

/// All hooks of this module.
pub static TABLES: &[&[Hook]] = &[&kernels::HOOKS, &captures::HOOKS, &transfers::HOOKS];

/// Longest sleep of a thread at a closed gate before the thread checks the gate without a wake-up.
const MAX_CLOSED_WAIT: Nanos = Nanos::from_millis(100);

/// The launch gate of one GPU.
type Gate = LaunchGate<CudaEvent>;

/// The limiter of this process.
pub struct Compute {
    gates: PerGpu<Gate>,
    costs: CostTable,
    captures: Captures,
    /// True if the grant has one GPU: then a launch does not ask the driver which one it is for.
    has_one_gpu: bool,
}

impl Compute {
    /// Creates the limiter of a process with these limits.
    pub fn new(limits: &GrantLimits) -> Self {
        let compute = Self {
            gates: PerGpu::default(),
            costs: CostTable::default(),
            captures: Captures::default(),
            has_one_gpu: limits.gpus.len() == 1,
        };
        compute.set_limits(limits);
        compute
    }

    /// Sets the shares. Without an arbiter, a container is limited to its ceiling. A container
    /// without a share may use the time that other containers leave, so its limit here is the whole
    /// GPU.
    pub fn set_limits(&self, limits: &GrantLimits) {
        for (gate, gpu) in self.gates.iter().zip(&limits.gpus) {
            let percent = if gpu.compute_ceiling_percent == 0 { 100 } else { gpu.compute_ceiling_percent };
            gate.set_limit(percent, gpu.limits_compute());
        }
        monitor::notify();
    }

    /// Forgets a destroyed context and all its streams.
    pub fn forget_context(&self, context: usize) {
        self.gates.iter().for_each(|gate| gate.forget_context(ContextId(context)));
    }

    /// Forgets a stream that is about to be destroyed.
    fn forget_stream(&self, stream: Handle) {
        self.gates.iter().for_each(|gate| gate.forget_stream(&CudaDriver, stream.addr(), &self.costs));
    }

    /// Forgets the cost of a graph that is about to be destroyed, because another graph may get its
    /// address.
    pub fn forget_graph(&self, graph: Handle) {
        let key = kernels::graph_key(graph);
        self.costs.forget(key);
        self.gates.iter().for_each(|gate| gate.forget_work(key));
    }

    /// Returns true if the process has ever begun a capture. Until then, no stream needs to be
    /// queried.
    pub fn has_captured(&self) -> bool {
        self.captures.were_seen()
    }

    /// Counts a capture that is about to begin. Waits while the monitor thread records an event,
    /// because the event may be in the same stream.
    fn begin_capture(&self) {
        self.captures.begin();
        self.gates.iter().for_each(Gate::settle_for_capture);
    }

    /// Removes an ended capture from the count.
    fn end_capture(&self) {
        self.captures.end();
    }
}

/// Launches work through the gate. Work with the same `key` is expected to cost the same each time.
pub fn launch(stream: Stream, key: u64, call: impl FnOnce() -> Status) -> Status {
    let launch = enter(stream, key);
    let status = call();
    if let Some(launch) = launch {
        leave(&launch, status);
    }
    status
}

/// Waits until the work may be launched. Returns `None` if this launch is not limited.
#[inline(never)]
fn enter(stream: Stream, key: u64) -> Option<Launch<'static, CudaEvent>> {
    let process = Process::if_loaded()?;
    let gate = current_gate(process)?;
    let compute = &process.compute;
    if compute.has_captured() {
        cold_path();
        if stream.is_capturing() {
            return None;
        }
    }
    let id = stream.id();
    match gate.try_enter(&CudaDriver, id, Some(&compute.costs)) {
        Ok(Entered::Busy) => {}
        Ok(Entered::FirstWork) => announce(gate),
        Err(_) => wait(process, gate, id),
    }
    Some(gate.begin(&CudaDriver, id, key, &compute.costs))
}

/// Ends a launch after the driver has returned.
#[inline(never)]
fn leave(launch: &Launch<'_, CudaEvent>, status: Status) {
    if launch.is_new_work() {
        note_loaded();
    }
    launch.end(&CudaDriver, status == SUCCESS);
}

/// Records that the driver may have loaded code for the launch.
#[cold]
fn note_loaded() {
    if let Some(process) = Process::if_loaded() {
        process.memory.code.note_loaded();
    }
}

/// Sleeps until the gate is open and the queue has room, and records the time spent waiting.
#[cold]
fn wait(process: &Process, gate: &Gate, id: StreamId) {
    let (mut blocked, must_notify) = gate.block(now());
    if must_notify {
        monitor::notify();
    }
    let entered = loop {
        match blocked.try_enter(&CudaDriver, id, &process.compute.costs, now()) {
            Ok(entered) => break entered,
            Err(HeldBack::Closed) => {
                futex::wait(gate.open_word(), 0, MAX_CLOSED_WAIT.0);
                blocked.was_closed(now());
            }
            Err(HeldBack::Full(sleep)) => futex::sleep(sleep.0),
        }
    };
    if entered == Entered::FirstWork {
        announce(gate);
    }
    let waited = blocked.finish(now()).0;
    let gpu = GpuSlot::all().zip(&process.compute.gates).find(|(_, known)| std::ptr::eq(*known, gate));
    if let Some((gpu, _)) = gpu {
        let slot = process.place(gpu).grant.slot();
        slot.waited.fetch_add(waited, Ordering::Relaxed);
        slot.waits.fetch_add(1, Ordering::Relaxed);
    }
}

/// Marks the GPU as busy: this launch is the first one after a pause.
#[cold]
fn announce(gate: &Gate) {
    if gate.mark_busy(now()) {
        monitor::notify();
    }
}

/// Returns the time on the monotonic clock.
fn now() -> Nanos {
    Nanos(futex::now())
}

/// Makes hooks for functions that start work on a GPU. Each line has the function's name, the name
/// of its per-thread form, its arguments, the stream of the work, and the key of equal work.
macro_rules! work {
    ($([$plain:ident $($per_thread:ident)?] $arguments:tt on $stream:expr, like $key:expr;)*) => {
        $crate::entry::table::hooks! { Cuda:
            $(
                $plain $arguments => $crate::compute::limited!(false, $arguments, $stream, $key);
                $($per_thread $arguments => $crate::compute::limited!(true, $arguments, $stream, $key);)?
            )*
        }
    };
}
use work;

/// Makes the body of a hook of `work!`. The driver's function is its first argument.
macro_rules! limited {
    ($per_thread:literal, ( $($argument:ident : $type:ty),* $(,)? ), $stream:expr, $key:expr) => {
        (|driver: unsafe extern "C" fn($($type),*) -> $crate::cuda::Status, $($argument: $type),*| {
            let stream = $crate::compute::Stream { handle: $stream, per_thread: $per_thread };
            // SAFETY: `driver` has the same signature and gets the program's arguments unchanged.
            $crate::compute::launch(stream, $key, || unsafe { driver($($argument),*) })
        })
    };
}
use limited;

/// Mixes a number into the key of a kind of work.
fn mix(key: u64, more: u64) -> u64 {
    (key.rotate_left(5) ^ more).wrapping_mul(0x517c_c1b7_2722_0a95)
}

/// Returns the gate of the calling thread's GPU if launches there are limited.
fn current_gate(process: &'static Process) -> Option<&'static Gate> {
    let compute = &process.compute;
    let gpu = if compute.has_one_gpu {
        GpuSlot::FIRST
    } else {
        cold_path();
        process.gpus.current()?.ok()?
    };
    Some(&compute.gates[gpu]).filter(|gate| gate.is_limited())
}
