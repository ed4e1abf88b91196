//! The GPU's time: launches pass while the container's window is open.
//!
//! - `kernels`, `transfers`: what starts work on a GPU. `captures`: what only records it.
//! - `streams`: which stream a program means.
//! - `gate`: who passes and who waits.
//! - `lanes`: what each stream has queued, told by `fences` (events) put between the launches.
//! - `controller`: follows the fences, charges the time the GPU is busy for us, opens and closes.
//!
//! What is decided without the driver is in `tessera_limits`: `costs` of kinds of work, `queue`, `pacer`, `traffic`.
//!
//! A launch costs one test of the gate, and a look at the ration of its stream afterwards; between fences the lanes are not
//! touched. Streams that capture are left alone.

mod captures;
mod controller;
mod fences;
mod gate;
mod kernels;
mod lanes;
mod streams;
mod transfers;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tessera_limits::costs::{Costs, Expected};
use tessera_limits::{GrantLimits, PerGpu};

use crate::cuda::{Handle, SUCCESS, Status};
use crate::entry::table::Hook;
use crate::grant::Process;
use crate::monitor;
pub use controller::{Controller, Rest};
use fences::Event;
use gate::Gate;
pub use streams::Stream;
use streams::Which;

/// All hooks of this module.
pub static TABLES: &[&[Hook]] = &[kernels::HOOKS, captures::HOOKS, transfers::HOOKS];

/// The gates of this process.
pub struct Compute {
    pub gates: PerGpu<Gate>,
    costs: Costs,
    /// A capture has been seen: from then on streams are asked.
    has_captured: AtomicBool,
    /// Captures that run now.
    capturing: AtomicU32,
}

impl Default for Compute {
    fn default() -> Self {
        Self {
            gates: PerGpu::default(),
            costs: Costs::default(),
            has_captured: AtomicBool::new(false),
            capturing: AtomicU32::new(0),
        }
    }
}

impl Compute {
    /// Sets the shares. A container alone holds itself to what it may use at most; one without a share uses what is
    /// left, which alone is everything.
    pub fn set_limits(&self, limits: &GrantLimits) {
        for (gate, gpu) in self.gates.iter().zip(&limits.gpus) {
            let percent = if gpu.compute_ceiling_percent == 0 { 100 } else { gpu.compute_ceiling_percent };
            gate.set_limit(percent, gpu.limits_compute());
        }
        monitor::notify();
    }

    /// A context is gone, with all its streams.
    pub fn forget_context(&self, context: usize) {
        for gate in &self.gates {
            let looking = gate.looking();
            gate.lanes().forget_context(context);
            drop(looking);
        }
    }

    /// A stream is about to go.
    pub fn forget_stream(&self, stream: Handle) {
        for gate in &self.gates {
            gate.lanes().forget_stream(stream, &self.costs);
        }
    }

    /// A graph is about to go; another one may be where it was.
    pub fn forget_graph(&self, graph: Handle) {
        self.costs.forget(kernels::of_graph(graph));
    }

    /// Whether a capture was ever seen: before that no stream need be asked.
    pub fn has_captured(&self) -> bool {
        self.has_captured.load(Ordering::Relaxed)
    }

    /// A capture is about to begin, in a stream that our own thread may be about to put a fence into: waits until it has.
    pub fn begin_capture(&self) {
        self.has_captured.store(true, Ordering::SeqCst);
        self.capturing.fetch_add(1, Ordering::SeqCst);
        self.gates.iter().for_each(|gate| drop(gate.lanes()));
    }

    /// A capture has ended. Never below none: a program may end what it never began.
    pub fn end_capture(&self) {
        let fewer = |captures: u32| captures.checked_sub(1);
        let _ = self.capturing.fetch_update(Ordering::SeqCst, Ordering::Relaxed, fewer);
    }

    /// Whether no capture runs. Remains so as long as the lanes of a gate are locked.
    pub fn is_quiet(&self) -> bool {
        self.capturing.load(Ordering::SeqCst) == 0
    }
}

/// A launch on its way through the gate.
struct Passage {
    process: &'static Process,
    gate: &'static Gate,
    stream: Stream,
    which: Which,
    expected: Expected,
    /// The event in front of it and its kind, if it is measured.
    measures: Option<(Event, u64)>,
}

/// Launches through the gate. `key` tells equal work: what it cost once it will cost again.
pub fn launch(stream: Stream, key: u64, ask: impl FnOnce() -> Status) -> Status {
    let passage = Passage::enter(stream, key);
    let status = ask();
    if let Some(passage) = passage {
        passage.leave(status);
    }
    status
}

impl Passage {
    /// Waits until work for a stream may pass; none where nobody minds it.
    #[inline(never)]
    fn enter(stream: Stream, key: u64) -> Option<Self> {
        let process = Process::if_loaded()?;
        let gate = gate_of_current(process)?;
        let compute = &process.compute;
        if compute.has_captured() && stream.is_capturing() {
            return None;
        }
        let which = stream.which();
        let waited = gate.pass(which, &compute.costs);
        if waited > 0 {
            process.slot().waited.fetch_add(waited, Ordering::Relaxed);
            process.slot().waits.fetch_add(1, Ordering::Relaxed);
        }
        let expected = compute.costs.of(key);
        let begin = if expected.measures { gate.lanes().begin(stream, which) } else { None };
        Some(Self { process, gate, stream, which, expected, measures: begin.map(|begin| (begin, key)) })
    }

    /// The driver has answered.
    #[inline(never)]
    fn leave(&self, status: Status) {
        if self.expected.is_new {
            self.process.memory.code.note_loaded();
        }
        let (is_launched, estimate) = (status == SUCCESS, self.expected.nanoseconds);
        let is_noted = is_launched && self.measures.is_none();
        if is_noted && self.gate.traffic.leave_on_ration(self.which.mark(), estimate) {
            return;
        }
        if is_launched {
            self.gate.lanes().queue(self.stream, self.which, estimate, self.measures);
        } else if let Some((begin, _)) = self.measures {
            self.gate.lanes().take_back(self.which, begin);
        }
        self.gate.traffic.leave();
    }
}

/// A line for each function that starts work on a GPU: its name, the one of its per-thread form, what it is given, the stream the
/// work goes to, and the key of equal work.
macro_rules! work {
    ($([$plain:ident $($per_thread:ident)?] $arguments:tt on $stream:expr, like $key:expr;)*) => {
        $crate::entry::table::hooks! { Cuda:
            $(
                $plain $arguments => $crate::compute::through_the_gate!(false, $arguments, $stream, $key);
                $($per_thread $arguments => $crate::compute::through_the_gate!(true, $arguments, $stream, $key);)?
            )*
        }
    };
}
use work;

/// Such a function, given the driver's.
macro_rules! through_the_gate {
    ($per_thread:literal, ( $($argument:ident : $type:ty),* $(,)? ), $stream:expr, $key:expr) => {
        (|driver: unsafe extern "C" fn($($type),*) -> $crate::cuda::Status, $($argument: $type),*| {
            let stream = $crate::compute::Stream { handle: $stream, per_thread: $per_thread };
            // SAFETY: the driver's function of the same form, called with what the program passed.
            $crate::compute::launch(stream, $key, || unsafe { driver($($argument),*) })
        })
    };
}
use through_the_gate;

/// Tells kinds of work apart.
fn mix(key: u64, more: u64) -> u64 {
    (key.rotate_left(5) ^ more).wrapping_mul(0x517c_c1b7_2722_0a95)
}

/// The gate of the current GPU, if launches there are limited.
fn gate_of_current(process: &'static Process) -> Option<&'static Gate> {
    let gpu = match process.gpus.only() {
        Some(gpu) => gpu,
        None => process.gpus.current()?.ok()?,
    };
    Some(&process.compute.gates[gpu]).filter(|gate| gate.is_limited())
}
