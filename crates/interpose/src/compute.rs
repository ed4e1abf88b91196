//! The card's time: launches pass while the container's window is open.
//!
//! - `kernels`, `transfers`: what starts work on a card. `captures`: what only records it.
//! - `streams`: which stream a program means.
//! - `costs`: what kinds of work cost.
//! - `lanes`: what each stream has queued, told by fences (events) put between the launches.
//! - `controller`: follows the fences, charges the time the card is busy for us, opens and closes.
//!
//! A launch costs one test of the gate, and a look into the lanes afterwards. Streams that capture are left alone.

mod captures;
mod controller;
mod costs;
mod kernels;
mod lanes;
mod streams;
mod transfers;

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tessera_limits::{CARDS, Limits, futex};

use crate::cuda::{Handle, SUCCESS, Status};
use crate::door::table::Hook;
use crate::grant::Process;
use crate::keeper;
pub use controller::{Controller, Rest};
use costs::{Costs, Expected};
use lanes::{Event, Lanes};
pub use streams::Stream;
use streams::Which;

/// All hooks of this module.
pub static TABLES: &[&[Hook]] = &[kernels::HOOKS, captures::HOOKS, transfers::HOOKS];

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
    /// Since when.
    busy_since: AtomicU64,
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

/// More queued work than this holds the caller back, by the time it will take,
const QUEUE: u64 = 3_000_000;

/// if it is more than the one piece that runs: the card must not wait for us between two long kernels.
const PIECES: u32 = 2;

/// However little each of many streams has, all together do not have more than so many times that.
const FULL: u64 = 4;

/// Nobody is held back for longer than this while nothing happens: work may wait for other work that is not launched yet.
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
            busy_since: AtomicU64::new(0),
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

    /// Whether a capture was ever seen: before that no stream need be asked.
    pub fn has_captured(&self) -> bool {
        self.has_captured.load(Ordering::Relaxed)
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
    fn is_full(&self, which: Which) -> bool {
        let part = self.part.load(Ordering::Relaxed);
        // All together have less than its part: it has, too, and that costs no lock to see.
        let queued = self.queued.load(Ordering::Relaxed);
        queued >= part
            && self.fences.load(Ordering::Relaxed) >= PIECES
            && (queued >= FULL * self.most_queued.load(Ordering::Relaxed)
                || self.lanes().has_queued(which, part, PIECES))
    }

    /// Sleeps until launches may pass and the queue is short; returns the nanoseconds slept. The caller counts as passing
    /// until [`Passage::leave`].
    fn pass(&self, which: Which) -> u64 {
        if self.enter(which, true) { 0 } else { self.wait(which) }
    }

    #[cold]
    fn wait(&self, which: Which) -> u64 {
        let begin = futex::now();
        let mut full_since = begin;
        self.waiting.fetch_add(1, Ordering::SeqCst);
        if self.is_closed() {
            // Perhaps nobody knows that we want a window. A full queue is looked after already.
            keeper::notify();
        }
        while !self.enter(which, futex::now() - full_since < HOLD) {
            if self.is_closed() {
                futex::wait(&self.open, 0, 100_000_000);
                full_since = futex::now();
            } else {
                let seen = self.progress.load(Ordering::Acquire);
                if self.is_full(which) {
                    futex::wait(&self.progress, seen, 5_000_000);
                }
            }
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        futex::now() - begin
    }

    /// Passes if the gate is open and, unless that has taken too long, the queue is short. Announced before it is tested:
    /// whoever closes the gate and then sees nobody passing knows that nobody will.
    fn enter(&self, which: Which, minds_queue: bool) -> bool {
        self.passing.fetch_add(1, Ordering::SeqCst);
        let may_pass = !self.is_closed() && (!minds_queue || !self.is_full(which));
        if !may_pass {
            self.passing.fetch_sub(1, Ordering::SeqCst);
        } else if self.busy.load(Ordering::SeqCst) == 0 {
            self.set_busy();
        }
        may_pass
    }

    /// Work has come. Told before the driver is asked: a copy may keep the caller until it has ended.
    #[cold]
    fn set_busy(&self) {
        self.busy_since.store(futex::now(), Ordering::Release);
        if self.busy.swap(1, Ordering::SeqCst) == 0 {
            keeper::notify();
        }
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

    /// Work has all ended, unless some is on its way. The lanes must be locked: what is on its way comes by there.
    fn set_idle(&self) -> bool {
        self.busy.store(0, Ordering::SeqCst);
        let is_idle = self.passing.load(Ordering::SeqCst) == 0;
        if !is_idle {
            self.busy.store(1, Ordering::SeqCst);
        }
        is_idle
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
        let waited = gate.pass(which);
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
        let mut lanes = self.gate.lanes();
        if status == SUCCESS {
            lanes.queue(self.stream, self.which, self.expected.nanoseconds, self.measures);
            self.gate.show(&lanes);
        } else if let Some((begin, _)) = self.measures {
            lanes.take_back(self.which, begin);
        }
        drop(lanes);
        self.gate.passing.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A line for each function that starts work on a card: its name, the one of its per-thread form, what it is given, the stream the
/// work goes to, and the key of equal work.
macro_rules! work {
    ($([$plain:ident $($per_thread:ident)?] $arguments:tt on $stream:expr, like $key:expr;)*) => {
        $crate::door::table::hooks! { Cuda:
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

/// The gate of the current card, if launches there are limited.
fn gate_of_current(process: &'static Process) -> Option<&'static Gate> {
    let card = match process.cards.only() {
        Some(card) => card,
        None => process.cards.current()?.ok()?,
    };
    Some(&process.compute.gates[card]).filter(|gate| gate.is_limited())
}
