//! The card's time: launches pass while the container's window is open.
//!
//! - `hooks`: what starts work on a card.
//! - `costs`: what kinds of work cost.
//! - `lanes`: what each stream has queued, told by fences (events) put between the launches.
//! - `controller`: follows the fences, charges the time the card is busy for us, opens and closes.
//!
//! A launch costs one test of the gate, and a look into the lanes afterwards. Streams that capture are left alone.

mod controller;
mod costs;
pub mod hooks;
mod lanes;

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tessera_limits::{CARDS, Limits, futex};

use crate::cuda::{Handle, SUCCESS, Status};
use crate::door::library::driver_functions;
use crate::grant::Process;
use crate::keeper;
pub use controller::{Controller, Rest};
use costs::Costs;
use lanes::Lanes;

driver_functions! { CUDA:
    is_capturing = c"cuStreamIsCapturing" (stream: Handle, status: *mut i32);
    is_capturing_per_thread = c"cuStreamIsCapturing_ptsz" (stream: Handle, status: *mut i32);
}

/// The gates of this process.
pub struct Compute {
    pub gates: [Gate; CARDS],
    costs: Costs,
    /// A capture has been seen: from then on streams are asked.
    has_captured: AtomicBool,
    /// Captures that run now.
    capturing: AtomicI64,
}

/// The way to one card.
pub struct Gate {
    /// Whether launches are held back at all.
    is_limited: AtomicBool,
    /// Percent of the card's time at most, for a process that must see to it itself.
    percent: AtomicU32,
    /// 1 while launches pass; they sleep on it.
    open: AtomicU32,
    /// 1 while work runs or is queued.
    busy: AtomicU32,
    /// Threads that have passed and not yet told what they queued.
    passing: AtomicU32,
    /// Threads that wait at the gate.
    waiting: AtomicU32,
    /// Changes when queued work has ended; those who queued too much sleep on it.
    progress: AtomicU32,
    /// Nanoseconds of queued work that has not ended, by estimate.
    queued: AtomicU64,
    /// How much of that one stream may have: an equal part for each that has work, so that none waits for another's.
    part: AtomicU64,
    /// How much all may have. More than [`QUEUE`] where streams run beside each other, or where estimates are too high: then
    /// it is done in less time.
    most_queued: AtomicU64,
    /// Fences that have not been reached.
    fences: AtomicU32,
    lanes: Mutex<Lanes>,
}

/// A stream, as far as it matters: per-thread forms mean another stream by the same handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    pub handle: Handle,
    pub per_thread: bool,
}

// SAFETY: only a name of the driver's object.
unsafe impl Send for Stream {}

/// More queued work than this holds the caller back, by the time it will take,
const QUEUE: u64 = 3_000_000;

/// if it is more than the one piece that runs: the card must not wait for us between two long kernels.
const PIECES: u32 = 2;

/// Not for longer than this: a kernel may wait for another that is not launched yet.
const HOLD: u64 = 250_000_000;

impl Default for Compute {
    fn default() -> Self {
        Self {
            gates: std::array::from_fn(|_| Gate::default()),
            costs: Costs::default(),
            has_captured: AtomicBool::new(false),
            capturing: AtomicI64::new(0),
        }
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            is_limited: AtomicBool::new(false),
            percent: AtomicU32::new(100),
            open: AtomicU32::new(1),
            busy: AtomicU32::new(0),
            passing: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            progress: AtomicU32::new(0),
            queued: AtomicU64::new(0),
            part: AtomicU64::new(QUEUE),
            most_queued: AtomicU64::new(QUEUE),
            fences: AtomicU32::new(0),
            lanes: Mutex::default(),
        }
    }
}

impl Stream {
    /// Whether work given to it now is recorded and not run.
    fn is_capturing(self) -> bool {
        let mut status = 0;
        // SAFETY: the stream is the program's, `status` the place for the answer.
        let asked = unsafe {
            if self.per_thread {
                is_capturing_per_thread(self.handle, &raw mut status)
            } else {
                is_capturing(self.handle, &raw mut status)
            }
        };
        // Not allowed to ask, as for the legacy stream beside a capture: then it is not for us to touch either.
        asked != SUCCESS || status != 0
    }
}

impl Compute {
    /// Sets the shares. A container alone holds itself to what it may use at most; one without a share uses what is
    /// left, which alone is everything.
    pub fn set_limits(&self, limits: &Limits) {
        for (gate, card) in self.gates.iter().zip(&limits.cards) {
            let percent = if card.ceiling == 0 { 100 } else { card.ceiling };
            gate.percent.store(percent, Ordering::Relaxed);
            gate.is_limited.store(card.limits_compute(), Ordering::Relaxed);
        }
        keeper::notify();
    }

    /// A context is gone, with all its streams.
    pub fn forget_context(&self, context: usize) {
        for gate in &self.gates {
            let mut lanes = gate.lanes();
            lanes.forget_context(context);
            gate.show(&lanes);
        }
    }

    /// A stream is about to go.
    pub fn forget_stream(&self, stream: Handle) {
        for gate in &self.gates {
            let mut lanes = gate.lanes();
            lanes.forget_stream(stream);
            gate.show(&lanes);
        }
    }

    /// A capture begins (1) or ends (-1).
    pub fn captures(&self, change: i64) {
        self.has_captured.store(true, Ordering::SeqCst);
        self.capturing.fetch_add(change, Ordering::SeqCst);
    }
}

impl Gate {
    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_limited(&self) -> bool {
        self.is_limited.load(Ordering::Relaxed)
    }

    /// Whether work of ours runs, is queued, or is on its way to the driver.
    fn is_busy(&self) -> bool {
        self.passing.load(Ordering::SeqCst) > 0 || self.busy.load(Ordering::SeqCst) == 1
    }

    /// Whether a stream has queued enough.
    fn is_full(&self, stream: Stream) -> bool {
        let part = self.part.load(Ordering::Relaxed);
        // All together have less than its part: it has, too, and that costs no lock to see.
        self.queued.load(Ordering::Relaxed) >= part
            && self.fences.load(Ordering::Relaxed) >= PIECES
            && self.lanes().has_queued(stream, part, PIECES)
    }

    /// Sleeps until launches may pass and the queue is short; returns the nanoseconds slept. The caller counts as passing
    /// until [`Gate::note_queued`].
    fn pass(&self, stream: Stream) -> u64 {
        if self.enter(stream, true) {
            return 0;
        }
        let begin = futex::now();
        let mut full_since = begin;
        self.waiting.fetch_add(1, Ordering::SeqCst);
        keeper::notify();
        while !self.enter(stream, futex::now() - full_since < HOLD) {
            if self.is_closed() {
                futex::wait(&self.open, 0, 100_000_000);
                full_since = futex::now();
            } else {
                let seen = self.progress.load(Ordering::Acquire);
                if self.is_full(stream) {
                    futex::wait(&self.progress, seen, 5_000_000);
                }
            }
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        futex::now() - begin
    }

    /// Passes if the gate is open and, unless that has taken too long, the queue is short. Announced before it is tested:
    /// whoever closes the gate and then sees nobody passing knows that nobody will.
    fn enter(&self, stream: Stream, minds_queue: bool) -> bool {
        self.passing.fetch_add(1, Ordering::SeqCst);
        let may_pass = !self.is_closed() && (!minds_queue || !self.is_full(stream));
        if !may_pass {
            self.passing.fetch_sub(1, Ordering::SeqCst);
        }
        may_pass
    }

    fn is_closed(&self) -> bool {
        self.open.load(Ordering::SeqCst) == 0 && self.is_limited()
    }

    /// Lets launches pass, or not.
    fn set_open(&self, open: bool) {
        if self.open.swap(u32::from(open), Ordering::SeqCst) == 0 && open {
            futex::wake(&self.open);
        }
    }

    /// Shows what is queued to those who look without the lock.
    fn show(&self, lanes: &Lanes) {
        let most = self.most_queued.load(Ordering::Relaxed);
        self.part.store(most / u64::from(lanes.working.max(1)), Ordering::Relaxed);
        self.queued.store(lanes.queued, Ordering::Relaxed);
        self.fences.store(lanes.fences, Ordering::Relaxed);
    }

    /// A caller that passed has launched.
    fn note_queued(&self) {
        if self.busy.load(Ordering::Relaxed) == 0 && self.busy.swap(1, Ordering::SeqCst) == 0 {
            keeper::notify();
        }
        self.passing.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Launches through the gate. `key` tells equal work: what it cost once it will cost again.
pub unsafe fn launch(stream: Stream, key: u64, ask: impl FnOnce() -> Status) -> Status {
    let Some(process) = Process::if_loaded() else { return ask() };
    let Some(gate) = gate_of_current(process) else { return ask() };
    let compute = &process.compute;
    if compute.has_captured.load(Ordering::Relaxed) && stream.is_capturing() {
        return ask();
    }
    let waited = gate.pass(stream);
    if waited > 0 {
        process.slot().waited.fetch_add(waited, Ordering::Relaxed);
        process.slot().waits.fetch_add(1, Ordering::Relaxed);
    }
    let expected = compute.costs.of(key);
    let begin = if expected.measures { gate.lanes().begin(stream) } else { None };
    let status = ask();
    if expected.is_new {
        process.memory.code.note_loaded();
    }
    let mut lanes = gate.lanes();
    lanes.queue(stream, expected.nanoseconds, begin.map(|begin| (begin, key)));
    gate.show(&lanes);
    drop(lanes);
    gate.note_queued();
    status
}

/// The gate of the current card, if launches there are limited.
fn gate_of_current(process: &Process) -> Option<&Gate> {
    let card = match process.cards.only() {
        Some(card) => card,
        None => process.cards.current()?.ok()?,
    };
    Some(&process.compute.gates[card]).filter(|gate| gate.is_limited())
}
