//! The launch gate of one GPU: it is open or closed, and bounds what is queued behind it.
//!
//! A launch tests the gate without a lock, and afterwards takes the lock of the stream queues once. That
//! path is short on purpose: three atomic read-modify-write operations, no reading of the clock, no
//! allocation, and few cache lines, because the driver has just used the caches for its own data. A lock-free
//! path past the queues was removed: it took 350 lines and saved about 20 ns. `docs/performance.md` has the
//! runs.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::back_pressure::{MAX_HOLD, QUEUE_LIMIT, QueueLimit};
use crate::costs::CostTable;
use crate::driver::{ContextId, Driver, StreamId};
use crate::nanos::{AtomicNanos, Nanos};
use crate::stream_queues::StreamQueues;

/// Upper bound for the queued work of all streams together, as a multiple of the queue limit. It matters
/// where each of many streams has little.
const TOTAL_QUEUE_FACTOR: u64 = 4;

/// How long a launch sleeps when all streams together have queued too much.
const TOTAL_QUEUE_SLEEP: Nanos = QUEUE_LIMIT.over(4);

/// The launch gate of one GPU. The fields that every launch uses come first, in two cache lines.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct LaunchGate<E> {
    /// Launches that have entered and were not taken back. Those that are not among `launched` are in flight.
    entered: AtomicU64,
    /// Launches that the driver has, as of the last change of the queues. Written under their lock.
    launched: AtomicU64,
    /// 1 while launches pass. Blocked threads sleep on this word.
    open: AtomicU32,
    /// 1 from [`LaunchGate::mark_busy`] on, until no work runs or is queued.
    busy: AtomicU32,
    /// False if every stream has room, as of the last change of the queues. Written under their lock.
    may_be_full: AtomicBool,
    is_limited: AtomicBool,
    /// Estimated queued work that has not ended. Written under the lock of the queues.
    queued: AtomicNanos,
    /// [`QueueLimit::work`].
    queue_limit: AtomicNanos,
    queues: Mutex<StreamQueues<E>>,
    /// Percentage of the GPU's time, for a process without an arbiter.
    percent: AtomicU32,
    /// Moment since when work runs or is queued.
    busy_since: AtomicNanos,
    /// Threads that are blocked here.
    blocked: AtomicU32,
    /// [`QueueLimit::time`].
    queue_time: AtomicNanos,
    /// Held while the monitor thread polls events of the queues, and to remove queues. Locked before the
    /// queues.
    polling: Mutex<()>,
}

/// The locked stream queues of a gate.
#[derive(Debug)]
pub struct LockedQueues<'a, E: Copy + PartialEq> {
    gate: &'a LaunchGate<E>,
    queues: MutexGuard<'a, StreamQueues<E>>,
}

/// Why a launch is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldBack {
    /// The gate is closed. The launch waits until [`LaunchGate::open_word`] is no longer 0.
    Closed,
    /// The queue of the stream is full. The launch sleeps for this time and then polls by itself: a
    /// wake-up by another thread would be two wake-ups.
    Full(Nanos),
}

/// A launch has entered the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entered {
    /// The GPU has other work of this process.
    Busy,
    /// This is the first work after a pause: the caller calls [`LaunchGate::mark_busy`] at once.
    FirstWork,
}

/// A thread whose launch is held back.
#[derive(Debug)]
pub struct BlockedLaunch<'a, E> {
    gate: &'a LaunchGate<E>,
    since: Nanos,
    /// Moment since when only the full queue holds the launch back.
    full_since: Nanos,
}

/// A launch that has entered the gate and is in flight until [`Launch::end`].
#[derive(Debug)]
pub struct Launch<'a, E> {
    gate: &'a LaunchGate<E>,
    id: StreamId,
    cost: Nanos,
    is_new_work: bool,
    is_measured: bool,
}

impl<E> Default for LaunchGate<E> {
    fn default() -> Self {
        Self {
            entered: AtomicU64::new(0),
            launched: AtomicU64::new(0),
            // Closed until the monitor thread decides: the first launch needs a window too.
            open: AtomicU32::new(0),
            busy: AtomicU32::new(0),
            may_be_full: AtomicBool::new(false),
            is_limited: AtomicBool::new(false),
            queued: AtomicNanos::new(Nanos::ZERO),
            queue_limit: AtomicNanos::new(QUEUE_LIMIT),
            queues: Mutex::default(),
            percent: AtomicU32::new(100),
            busy_since: AtomicNanos::new(Nanos::ZERO),
            blocked: AtomicU32::new(0),
            queue_time: AtomicNanos::new(QUEUE_LIMIT),
            polling: Mutex::default(),
        }
    }
}

impl<E> LaunchGate<E> {
    /// Returns true if launches are limited on this GPU.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.is_limited.load(Ordering::Relaxed)
    }

    /// Returns the percentage of the GPU's time that a process without an arbiter may use.
    pub fn percent(&self) -> u32 {
        self.percent.load(Ordering::Relaxed)
    }

    /// Sets the percentage, and whether launches are limited at all.
    pub fn set_limit(&self, percent: u32, is_limited: bool) {
        self.percent.store(percent, Ordering::Relaxed);
        self.is_limited.store(is_limited, Ordering::Relaxed);
    }

    /// Returns true if work of this process runs, is queued, or is on its way to the driver.
    pub fn is_busy(&self) -> bool {
        self.has_launches_in_flight() || self.busy.load(Ordering::SeqCst) == 1
    }

    /// Returns true if threads are blocked here.
    pub fn has_blocked_launches(&self) -> bool {
        self.blocked.load(Ordering::SeqCst) > 0
    }

    /// Returns true if a launch is in flight.
    pub(crate) fn has_launches_in_flight(&self) -> bool {
        // In this order: a launch that ends between both readings counts as in flight. In the other order a
        // launch that enters and ends in between could hide one that stays.
        let launched = self.launched.load(Ordering::SeqCst);
        self.entered.load(Ordering::SeqCst) != launched
    }

    /// Returns the word that is 1 while launches pass. Blocked threads sleep on it while it is 0.
    pub fn open_word(&self) -> &AtomicU32 {
        &self.open
    }

    /// Returns true if the gate is open.
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed) == 1
    }

    /// Opens or closes the gate. Returns true if threads that sleep on [`LaunchGate::open_word`] must be
    /// woken.
    #[must_use]
    pub fn set_open(&self, open: bool) -> bool {
        self.open.swap(u32::from(open), Ordering::SeqCst) == 0 && open
    }

    /// Returns true if a launch may not pass: the gate is closed, and launches are limited.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.open.load(Ordering::SeqCst) == 0 && self.is_limited()
    }

    /// Returns the estimated queued work that has not ended.
    pub fn queued(&self) -> Nanos {
        self.queued.load(Ordering::Relaxed)
    }

    /// Returns what all streams may have queued.
    #[inline]
    pub fn queue_limit(&self) -> QueueLimit {
        let (work, time) = (&self.queue_limit, &self.queue_time);
        QueueLimit { work: work.load(Ordering::Relaxed), time: time.load(Ordering::Relaxed) }
    }

    pub(crate) fn set_queue_limit(&self, limit: QueueLimit) {
        self.queue_limit.store(limit.work, Ordering::Relaxed);
        self.queue_time.store(limit.time, Ordering::Relaxed);
    }

    /// Returns the moment since when work runs or is queued, or `None` if no launch has said so yet.
    pub(crate) fn busy_since(&self) -> Option<Nanos> {
        (self.busy.load(Ordering::SeqCst) == 1).then(|| self.busy_since.load(Ordering::Acquire))
    }

    pub(crate) fn set_busy_since(&self, now: Nanos) {
        self.busy_since.store(now, Ordering::Release);
    }

    /// Marks the GPU as busy from `now` on. The caller does so before it calls the driver, because a copy
    /// may block it until the copy has ended. Returns true if the monitor thread must be notified.
    #[cold]
    #[must_use]
    pub fn mark_busy(&self, now: Nanos) -> bool {
        self.set_busy_since(now);
        self.busy.swap(1, Ordering::SeqCst) == 0
    }

    /// Marks the GPU as idle unless a launch is in flight; returns true if it is idle. The caller has
    /// locked the stream queues, which a launch in flight needs as well.
    pub(crate) fn mark_idle(&self) -> bool {
        let was_busy = self.busy.swap(0, Ordering::SeqCst);
        let is_idle = !self.has_launches_in_flight();
        if !is_idle {
            // A launch in flight that found the gate busy will not mark it again. One that found it idle will,
            // or has done so meanwhile.
            self.busy.fetch_or(was_busy, Ordering::SeqCst);
        }
        is_idle
    }

    /// Registers the calling thread as blocked. Returns true beside it if the monitor thread must be
    /// notified: it may not know that this process wants a window. Where only the queue is full, the
    /// monitor thread is at work already.
    pub fn block(&self, now: Nanos) -> (BlockedLaunch<'_, E>, bool) {
        self.blocked.fetch_add(1, Ordering::SeqCst);
        (BlockedLaunch { gate: self, since: now, full_since: now }, self.is_closed())
    }

    /// Takes back a launch in flight, which the driver does not have.
    fn take_back(&self) {
        self.entered.fetch_sub(1, Ordering::Release);
    }

    /// Takes the right to poll events of the queues without their lock, or to remove queues.
    pub(crate) fn lock_polling(&self) -> MutexGuard<'_, ()> {
        self.polling.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E: Copy + PartialEq> LaunchGate<E> {
    /// Locks the stream queues.
    #[inline]
    pub(crate) fn lock_queues(&self) -> LockedQueues<'_, E> {
        LockedQueues { gate: self, queues: self.queues.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Lets a launch into `id` pass if the gate is open and the queue has room. A caller that has waited
    /// too long for room passes no `costs`, and then the queue is not checked.
    ///
    /// The launch counts as in flight before the gate is tested. So a thread that closes the gate and
    /// then sees no launch in flight knows that none will follow. The caller ends the launch with
    /// [`Launch::end`].
    ///
    /// # Errors
    /// Returns why the launch is held back.
    #[inline]
    pub fn try_enter<D: Driver<DriverEvent = E>>(
        &self,
        driver: &D,
        id: StreamId,
        costs: Option<&CostTable>,
    ) -> Result<Entered, HeldBack> {
        self.entered.fetch_add(1, Ordering::SeqCst);
        if self.is_closed() {
            self.take_back();
            return Err(HeldBack::Closed);
        }
        if self.may_be_full.load(Ordering::Relaxed)
            && let Some(costs) = costs
            && let Some(sleep) = self.until_room(driver, id, costs)
        {
            self.take_back();
            return Err(HeldBack::Full(sleep));
        }
        Ok(if self.busy.load(Ordering::SeqCst) == 0 { Entered::FirstWork } else { Entered::Busy })
    }

    /// Returns how long a stream with a full queue must wait, or `None` if it has room.
    #[cold]
    fn until_room<D: Driver<DriverEvent = E>>(
        &self,
        driver: &D,
        id: StreamId,
        costs: &CostTable,
    ) -> Option<Nanos> {
        let (mut queues, limit) = (self.lock_queues(), self.queue_limit());
        let full = queues.until_room(driver, id, limit, costs);
        full.or_else(|| (queues.queued >= limit.work * TOTAL_QUEUE_FACTOR).then_some(TOTAL_QUEUE_SLEEP))
    }

    /// Starts a launch that has entered the gate. `key` names equal work: what it cost once it will cost
    /// again.
    #[inline]
    pub fn begin<D: Driver<DriverEvent = E>>(
        &self,
        driver: &D,
        id: StreamId,
        key: u64,
        costs: &CostTable,
    ) -> Launch<'_, E> {
        let expected = costs.expect(key);
        let is_measured = expected.must_measure && self.begin_measured(driver, id, key);
        Launch { gate: self, id, cost: expected.cost, is_new_work: expected.is_new, is_measured }
    }

    #[cold]
    fn begin_measured<D: Driver<DriverEvent = E>>(&self, driver: &D, id: StreamId, key: u64) -> bool {
        self.lock_queues().begin_measured(driver, id, key)
    }

    /// Waits until the monitor thread records no event. Called after a capture was counted, so that no
    /// event gets into it.
    pub fn settle_for_capture(&self) {
        drop(self.lock_queues());
    }

    /// Forgets a context that is gone, with all its streams.
    pub fn forget_context(&self, context: ContextId) {
        let polling = self.lock_polling();
        self.lock_queues().forget_context(context);
        drop(polling);
    }

    /// Forgets what is being measured of a kind of work, because its key will be used for other work.
    pub fn forget_work(&self, key: u64) {
        self.lock_queues().forget_work(key);
    }

    /// Forgets a stream that is about to be destroyed.
    pub fn forget_stream<D: Driver<DriverEvent = E>>(&self, driver: &D, handle: usize, costs: &CostTable) {
        self.lock_queues().forget_stream(driver, handle, costs);
    }
}

impl<E: Copy + PartialEq> BlockedLaunch<'_, E> {
    /// Tries again to enter. After [`MAX_HOLD`] a full queue is no longer a reason to wait.
    ///
    /// # Errors
    /// Returns why the launch is still held back.
    pub fn try_enter<D: Driver<DriverEvent = E>>(
        &self,
        driver: &D,
        id: StreamId,
        costs: &CostTable,
        now: Nanos,
    ) -> Result<Entered, HeldBack> {
        let minds_queue = now - self.full_since < MAX_HOLD;
        self.gate.try_enter(driver, id, minds_queue.then_some(costs))
    }

    /// Records that the launch was held back by the closed gate until now.
    pub fn was_closed(&mut self, now: Nanos) {
        self.full_since = now;
    }

    /// Ends the wait of a launch that has entered; returns how long it was held back.
    pub fn finish(self, now: Nanos) -> Nanos {
        self.gate.blocked.fetch_sub(1, Ordering::SeqCst);
        now - self.since
    }
}

impl<E: Copy + PartialEq> Launch<'_, E> {
    /// Returns true if such work was never launched: the driver may have loaded its code.
    #[must_use]
    pub fn is_new_work(&self) -> bool {
        self.is_new_work
    }

    /// Ends the launch after the driver has returned.
    #[inline]
    pub fn end<D: Driver<DriverEvent = E>>(&self, driver: &D, is_launched: bool) {
        if is_launched {
            let mut queues = self.gate.lock_queues();
            queues.push(driver, self.id, self.cost, self.is_measured);
        } else {
            self.cancel(driver);
        }
    }

    #[cold]
    fn cancel<D: Driver<DriverEvent = E>>(&self, driver: &D) {
        if self.is_measured {
            self.gate.lock_queues().cancel_measured(driver, self.id);
        }
        self.gate.take_back();
    }
}

impl<E: Copy + PartialEq> Deref for LockedQueues<'_, E> {
    type Target = StreamQueues<E>;

    fn deref(&self) -> &StreamQueues<E> {
        &self.queues
    }
}

impl<E: Copy + PartialEq> DerefMut for LockedQueues<'_, E> {
    fn deref_mut(&mut self) -> &mut StreamQueues<E> {
        &mut self.queues
    }
}

impl<E: Copy + PartialEq> Drop for LockedQueues<'_, E> {
    /// Publishes what is queued to threads that read it without the lock.
    #[inline(always)]
    fn drop(&mut self) {
        let (gate, queues) = (self.gate, &self.queues);
        gate.may_be_full.store(queues.may_be_full(gate.queue_limit()), Ordering::Relaxed);
        gate.queued.store(queues.queued, Ordering::Relaxed);
        gate.launched.store(queues.launches, Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
