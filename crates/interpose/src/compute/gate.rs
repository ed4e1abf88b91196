//! The gate before one GPU: who passes, who waits, what is queued behind it.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tessera_limits::costs::Costs;
use tessera_limits::futex;
use tessera_limits::queue::{HOLD, QUEUE};
use tessera_limits::traffic::Traffic;

use super::lanes::Lanes;
use super::streams::Which;
use crate::monitor;

/// The way to one GPU. What every launch looks at comes first, in one line of the processor's cache: the driver has just used
/// that for its own.
#[repr(C, align(64))]
pub struct Gate {
    /// Threads that have passed and not yet told what they queued.
    pub traffic: Traffic,
    /// 1 while launches pass; they sleep on it.
    pub open: AtomicU32,
    /// 1 while work runs or is queued.
    busy: AtomicU32,
    /// Nanoseconds of queued work that has not ended, by estimate, and the ration.
    queued: AtomicU64,
    /// How much of that one stream may have: an equal part for each that has work, so that none waits for another's.
    part: AtomicU64,
    /// How much all may have. More than [`QUEUE`] where streams run beside each other, or where estimates are too high: then
    /// it is done in less time.
    pub most_queued: AtomicU64,
    /// Fences that have not been reached.
    fences: AtomicU32,
    /// Whether launches are held back at all.
    is_limited: AtomicBool,
    /// Percent of the GPU's time at most, for a process that must see to it itself.
    pub percent: AtomicU32,
    /// Since when work runs or is queued.
    pub busy_since: AtomicU64,
    /// Threads that wait at the gate.
    pub waiting: AtomicU32,
    lanes: Mutex<Lanes>,
    /// Held while our own thread asks the driver about events of the lanes, and to take lanes away. Before the lanes.
    looking: Mutex<()>,
}

/// The lanes of a gate, locked.
pub struct OpenLanes<'a> {
    gate: &'a Gate,
    lanes: MutexGuard<'a, Lanes>,
}

/// Why a launch is held back.
#[derive(Debug)]
enum Held {
    Closed,
    /// Its stream has queued enough: there may be room after so many nanoseconds.
    Full(u64),
}

/// Work is a queue if it is more than the one piece that runs: the GPU must not wait for us between two long kernels.
pub const PIECES: u32 = 2;

/// However little each of many streams has, all together do not have more than so many times that.
const FULL: u64 = 4;

impl Default for Gate {
    fn default() -> Self {
        Self {
            traffic: Traffic::default(),
            // Closed until somebody looks: also the first launch needs a window.
            open: AtomicU32::new(0),
            busy: AtomicU32::new(0),
            queued: AtomicU64::new(0),
            part: AtomicU64::new(QUEUE),
            most_queued: AtomicU64::new(QUEUE),
            fences: AtomicU32::new(0),
            is_limited: AtomicBool::new(false),
            percent: AtomicU32::new(100),
            busy_since: AtomicU64::new(0),
            waiting: AtomicU32::new(0),
            lanes: Mutex::default(),
            looking: Mutex::default(),
        }
    }
}

impl Gate {
    /// The right to ask the driver about events, or to take lanes away.
    pub fn looking(&self) -> MutexGuard<'_, ()> {
        self.looking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each stream has queued.
    pub fn lanes(&self) -> OpenLanes<'_> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.take_ration_back(&self.traffic);
        OpenLanes { gate: self, lanes }
    }

    /// Whether launches are held back at all.
    pub fn is_limited(&self) -> bool {
        self.is_limited.load(Ordering::Relaxed)
    }

    /// Whether work of ours runs, is queued, or is on its way to the driver.
    pub fn is_busy(&self) -> bool {
        self.traffic.is_anybody() || self.busy.load(Ordering::SeqCst) == 1
    }

    /// Whether work of ours is at the GPU or on the way, and whether any is wanted there.
    pub fn demand(&self) -> (bool, bool) {
        let is_busy = self.is_busy();
        (is_busy, is_busy || self.waiting.load(Ordering::SeqCst) > 0)
    }

    /// Nanoseconds of queued work that has not ended, by estimate.
    pub fn queued(&self) -> u64 {
        self.queued.load(Ordering::Relaxed).saturating_sub(self.traffic.left())
    }

    /// How long a stream that has queued enough is to wait; none where it may have more.
    fn until_room(&self, which: Which, costs: &Costs) -> Option<u64> {
        // All together have less than its part: it has, too, and that costs no lock to see.
        let may_be_full = self.queued() >= self.part.load(Ordering::Relaxed)
            && self.fences.load(Ordering::Relaxed) >= PIECES;
        may_be_full.then(|| {
            let (mut lanes, most) = (self.lanes(), self.most_queued.load(Ordering::Relaxed));
            let full = lanes.until_room(which, most, costs);
            full.or_else(|| (lanes.queued >= FULL * most).then_some(QUEUE / 4))
        })?
    }

    /// Sleeps until launches may pass and the queue is short; returns the nanoseconds slept. The caller counts as passing
    /// until it has told the traffic.
    pub fn pass(&self, which: Which, costs: &Costs) -> u64 {
        if self.enter(which, Some(costs)).is_ok() { 0 } else { self.wait(which, costs) }
    }

    #[cold]
    fn wait(&self, which: Which, costs: &Costs) -> u64 {
        let begin = futex::now();
        let mut full_since = begin;
        self.waiting.fetch_add(1, Ordering::SeqCst);
        if self.is_closed() {
            // Perhaps nobody knows that we want a window. A full queue is looked after already.
            monitor::notify();
        }
        while let Err(held) = self.enter(which, (futex::now() - full_since < HOLD).then_some(costs)) {
            match held {
                Held::Closed => {
                    futex::wait(&self.open, 0, 100_000_000);
                    full_since = futex::now();
                }
                // It then asks for itself: to be woken by a thread that looks would be two wake-ups.
                Held::Full(nanoseconds) => futex::sleep(nanoseconds),
            }
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        futex::now() - begin
    }

    /// Passes if the gate is open and, unless that has taken too long, the queue is short. Announced before it is tested:
    /// whoever closes the gate and then sees nobody passing knows that nobody will.
    fn enter(&self, which: Which, minds_queue: Option<&Costs>) -> Result<(), Held> {
        self.traffic.enter();
        let held = if self.is_closed() {
            Some(Held::Closed)
        } else {
            minds_queue.and_then(|costs| self.until_room(which, costs)).map(Held::Full)
        };
        if let Some(held) = held {
            self.traffic.leave();
            return Err(held);
        }
        if self.busy.load(Ordering::SeqCst) == 0 {
            self.set_busy();
        }
        Ok(())
    }

    /// Work has come. Told before the driver is asked: a copy may keep the caller until it has ended.
    #[cold]
    fn set_busy(&self) {
        self.busy_since.store(futex::now(), Ordering::Release);
        if self.busy.swap(1, Ordering::SeqCst) == 0 {
            monitor::notify();
        }
    }

    fn is_closed(&self) -> bool {
        self.open.load(Ordering::SeqCst) == 0 && self.is_limited()
    }

    /// Lets launches pass, or not.
    pub fn set_open(&self, open: bool) {
        if self.open.swap(u32::from(open), Ordering::SeqCst) == 0 && open {
            futex::wake(&self.open);
        }
    }

    /// Sets what all processes here may have at most, and whether that is held to.
    pub fn set_limit(&self, percent: u32, is_limited: bool) {
        self.percent.store(percent, Ordering::Relaxed);
        self.is_limited.store(is_limited, Ordering::Relaxed);
    }

    /// Work has all ended, unless some is on its way. The lanes must be locked: what is on its way comes by there.
    pub fn set_idle(&self) -> bool {
        self.busy.store(0, Ordering::SeqCst);
        let is_idle = !self.traffic.is_anybody();
        if !is_idle {
            self.busy.store(1, Ordering::SeqCst);
        }
        is_idle
    }
}

impl Deref for OpenLanes<'_> {
    type Target = Lanes;

    fn deref(&self) -> &Lanes {
        &self.lanes
    }
}

impl DerefMut for OpenLanes<'_> {
    fn deref_mut(&mut self) -> &mut Lanes {
        &mut self.lanes
    }
}

impl Drop for OpenLanes<'_> {
    /// Shows what is queued to those who look without the lock, and lets the stream used last go on without it.
    fn drop(&mut self) {
        let (gate, lanes) = (self.gate, &mut self.lanes);
        let most = gate.most_queued.load(Ordering::Relaxed);
        gate.part.store(most / u64::from(lanes.working.max(1)), Ordering::Relaxed);
        gate.fences.store(lanes.fences, Ordering::Relaxed);
        lanes.hand_ration_out(&gate.traffic);
        gate.queued.store(lanes.queued + lanes.handed.estimate, Ordering::Relaxed);
    }
}
