//! The work that each stream of a GPU has queued, tracked by fences between its launches.

use std::collections::VecDeque;

use crate::back_pressure::{QUEUE_LIMIT, QueueLimit, until_room};
use crate::costs::{CostTable, UNMEASURED_COST};
use crate::driver::{ContextId, Driver, StreamId, StreamName, relaxed, within};
use crate::fences::{
    EventPool, Fence, FenceEvent, FenceQuery, MAX_BUSY_ORPHANS_POLLED, MeasuredLaunch, ReachedFence,
};
use crate::nanos::Nanos;

/// Estimated work between two fences of a stream.
const FENCE_INTERVAL: Nanos = Nanos::from_micros(500);

/// The fence interval doubles for a stream with more launches than this since its last fence, because a
/// fence costs as much as some launches.
const LAUNCHES_BEFORE_DOUBLE_INTERVAL: u32 = 16;

/// A fence follows this many launches in any case.
const MAX_LAUNCHES_BEFORE_FENCE: u32 = 256;

/// Empty queues of live streams are kept for their next launch, unless there are more queues than this.
const MAX_QUEUES_WITH_IDLE: usize = 64;

/// A queue with fewer unreached fences than this is never full: one for the kernel that runs, and one more, so that
/// the GPU need not wait for the program between two long kernels.
pub(crate) const MIN_FENCES_WHEN_FULL: u32 = 2;

/// Longest time that the driver needs for a launch. A call that takes longer waits until its work has ended, or
/// loads code.
const MAX_LEAD: Nanos = Nanos::from_micros(20);

/// A measured launch in flight.
#[derive(Debug)]
struct Measuring<E> {
    begin: FenceEvent<E>,
    key: u64,
    /// Moment at which the driver had the event before the launch.
    since: Nanos,
}

/// The queues of all streams of one GPU. The fields that every launch uses come first.
#[repr(C)]
#[derive(Debug)]
pub struct StreamQueues<E> {
    queues: Vec<StreamQueue<E>>,
    /// Index of the queue that the last launch used.
    last: usize,
    /// Launches so far.
    pub(crate) launches: u64,
    /// Estimated work that has not ended.
    pub(crate) queued: Nanos,
    /// Streams with such work. Each may have an equal part of the queue limit, so that no stream waits for
    /// another's work.
    pub(crate) working: u32,
    /// Fences that have not been reached.
    pub(crate) fences: u32,
    /// Queued launches whose cost is not known.
    unmeasured: u32,
    /// Number of the last fence.
    pub(crate) fence_number: u64,
    /// Estimated work that has ended since the monitor thread last asked.
    ended: Nanos,
    /// Index of the queue where the last round of polls began.
    first_polled: usize,
    pool: EventPool<E>,
}

/// The queue of one stream. The fields that every launch uses come first, in one cache line.
#[repr(C, align(64))]
#[derive(Debug)]
struct StreamQueue<E> {
    /// The stream, or `None` once it was destroyed, which does not end its work.
    stream: Option<StreamId>,
    /// Estimated work that has not ended.
    queued: Nanos,
    /// The part of it that was launched since the last fence.
    unfenced: Nanos,
    /// Launches since the last fence.
    launches: u32,
    /// Those among them whose cost is not known.
    unmeasured: u32,
    /// Moment at which the driver had the first of them.
    since: Nanos,
    context: ContextId,
    /// An event behind the last launch, in a per-thread stream, where the monitor thread cannot put a
    /// fence later.
    trailing: Option<FenceEvent<E>>,
    /// The measurement of a launch in flight.
    measuring: Option<Measuring<E>>,
    fences: VecDeque<Fence<E>>,
}

impl<E> Default for StreamQueues<E> {
    fn default() -> Self {
        Self {
            queues: Vec::new(),
            last: 0,
            pool: EventPool::default(),
            launches: 0,
            queued: Nanos::ZERO,
            working: 0,
            fences: 0,
            unmeasured: 0,
            fence_number: 0,
            ended: Nanos::ZERO,
            first_polled: 0,
        }
    }
}

impl<E: Copy + PartialEq> StreamQueues<E> {
    /// Records an event in front of a launch that is to be measured. Returns false if the launch cannot be
    /// measured.
    pub(crate) fn begin_measured<D: Driver<DriverEvent = E>>(
        &mut self,
        driver: &D,
        id: StreamId,
        key: u64,
    ) -> bool {
        if driver.current_context() == ContextId::NONE {
            // The launch will fail.
            return false;
        }
        let place = self.queue_of(driver, id);
        let queue = &mut self.queues[place];
        if queue.measuring.is_some() {
            // Another thread's launch is between its events.
            return false;
        }
        let begin = self.pool.record(driver, queue.context, id, true);
        queue.measuring = begin.map(|begin| Measuring { begin, key, since: driver.host_time() });
        queue.measuring.is_some()
    }

    /// Ends the measurement of a launch that did not happen.
    pub(crate) fn cancel_measured<D: Driver<DriverEvent = E>>(&mut self, driver: &D, id: StreamId) {
        let place = self.queue_of(driver, id);
        self.drop_measurement(place);
    }

    fn drop_measurement(&mut self, place: usize) {
        let queue = &mut self.queues[place];
        if let Some(measuring) = queue.measuring.take() {
            self.pool.put(queue.context, measuring.begin);
        }
    }

    /// Puts a fence behind a measured launch that the driver has just got.
    #[cold]
    fn end_measured<D: Driver<DriverEvent = E>>(
        &mut self,
        driver: &D,
        place: usize,
        id: StreamId,
        cost: Nanos,
    ) {
        let now = driver.host_time();
        let context = self.queues[place].context;
        let Some(Measuring { begin, key, since }) = self.queues[place].measuring.take() else { return };
        let [end, fence] = [(); 2].map(|()| self.pool.record(driver, context, id, true));
        // If the GPU has reached the first event, the stream was empty, and the GPU waited while the driver launched.
        let mut lead = now - since;
        relaxed(driver, || {
            if lead > MAX_LEAD || !begin.is_reached(driver) {
                lead = Nanos::ZERO;
            }
        });
        match (end, fence) {
            (Some(end), Some(fence)) => {
                self.push_fence(
                    place,
                    fence,
                    Some(MeasuredLaunch { begin, end, key: Some(key), cost, lead }),
                );
            }
            (end, fence) => {
                let events = [Some(begin), end, fence].into_iter().flatten();
                events.for_each(|event| self.pool.put(context, event));
            }
        }
    }

    /// Returns how much may be queued, of at most `most`. Work of unknown cost may take long, so beside it the queue
    /// is short.
    fn limit(&self, most: QueueLimit) -> QueueLimit {
        if self.unmeasured == 0 {
            return most;
        }
        QueueLimit { work: most.work.scaled(QUEUE_LIMIT, most.time), time: QUEUE_LIMIT }
    }

    /// Returns false if every stream has room below its share of `limit`.
    #[inline]
    pub(crate) fn may_be_full(&self, limit: QueueLimit) -> bool {
        let limit = self.limit(limit).work;
        // If all streams together have less than the share of one, each has room.
        self.fences >= MIN_FENCES_WHEN_FULL && self.queued * u64::from(self.working) >= limit
    }

    /// Queues a launch of an estimated cost, and puts a fence behind it where one is due.
    #[inline]
    pub(crate) fn push<D: Driver<DriverEvent = E>>(
        &mut self,
        driver: &D,
        id: StreamId,
        cost: Nanos,
        is_measured: bool,
    ) {
        let place = self.queue_of(driver, id);
        let queue = &mut self.queues[place];
        self.launches += 1;
        self.queued += cost;
        self.working += u32::from(queue.queued == Nanos::ZERO);
        queue.queued += cost;
        queue.unfenced += cost;
        if queue.launches == 0 {
            queue.since = driver.host_time();
        }
        queue.launches += 1;
        let is_unmeasured = u32::from(cost == UNMEASURED_COST);
        queue.unmeasured += is_unmeasured;
        self.unmeasured += is_unmeasured;
        if is_measured {
            self.end_measured(driver, place, id, cost);
        } else if queue.needs_fence() {
            self.put_fence(driver, place, id);
        } else if id.is_per_thread() {
            self.put_trailing(driver, place, id);
        }
    }

    /// Returns how long a stream must wait before it may queue more, or `None` if it is below its share
    /// of `limit`.
    ///
    /// A queue that seems full is polled first: the monitor thread polls only now and then, and no launch
    /// should wait for that.
    pub(crate) fn until_room<D: Driver<DriverEvent = E>>(
        &mut self,
        driver: &D,
        id: StreamId,
        limit: QueueLimit,
        costs: &CostTable,
    ) -> Option<Nanos> {
        let QueueLimit { work: limit, time } = self.limit(limit);
        let share = (limit / u64::from(self.working.max(1))).max(Nanos(1));
        let Some(place) = self.queues.iter().position(|queue| queue.stream == Some(id)) else {
            // A new stream takes the place of destroyed ones that are still at work.
            let is_full = |queues: &[StreamQueue<E>]| {
                let orphans = queues.iter().filter(|queue| queue.stream.is_none());
                orphans.map(|queue| queue.queued).sum::<Nanos>() >= limit
            };
            if is_full(&self.queues) {
                self.poll_orphans(driver, costs);
            }
            return is_full(&self.queues).then_some(time / 4);
        };
        let is_full = |queue: &StreamQueue<E>| {
            queue.queued >= share && queue.fences.len() >= MIN_FENCES_WHEN_FULL as usize
        };
        if is_full(&self.queues[place]) {
            within(driver, self.queues[place].context, || {
                relaxed(driver, || self.poll(driver, place, costs));
            });
        }
        let queue = &self.queues[place];
        is_full(queue).then(|| {
            // The first fence may be reached at any moment. The rest must not have ended by then.
            let first = queue.fences.front().map_or(Nanos::ZERO, |fence| fence.work);
            until_room((queue.queued - first).scaled(time, share), time)
        })
    }

    /// Returns the fences of all queues, beginning with another queue each time. Queues keep their
    /// places until [`StreamQueues::pass`] gets the result: a thread that removes queues must hold the
    /// gate's polling lock.
    pub(crate) fn queries(&mut self) -> Vec<FenceQuery<E>> {
        self.first_polled = (self.first_polled + 1) % self.queues.len().max(1);
        let (before, after) = self.queues.split_at(self.first_polled);
        let queues = (self.first_polled..).zip(after).chain(before.iter().enumerate());
        let queries = queues.flat_map(|(place, queue)| {
            let (context, is_orphan) = (queue.context, queue.stream.is_none());
            queue.fences.iter().map(move |&fence| FenceQuery { queue: place, context, is_orphan, fence })
        });
        queries.collect()
    }

    /// Takes reached fences out. Returns the estimated work that has ended since the last call.
    pub(crate) fn pass(&mut self, reached: &[ReachedFence], costs: &CostTable) -> Nanos {
        for fence in reached {
            // A launch may have polled this fence meanwhile. Then its events are in use again, and what
            // was measured by them means nothing.
            let front = self.queues.get(fence.queue).and_then(|queue| queue.fences.front());
            if front.is_some_and(|front| front.number == fence.number) {
                self.pop_fence(fence.queue, fence.milliseconds, costs);
            }
        }
        let too_many = self.queues.len() > MAX_QUEUES_WITH_IDLE;
        self.queues.retain(|queue| !queue.is_empty() || (queue.stream.is_some() && !too_many));
        std::mem::take(&mut self.ended)
    }

    /// Puts a fence behind all work that has none. Where that is not possible, or not allowed by
    /// `may_record`, the work counts as ended. Runs on the monitor thread.
    pub(crate) fn fence_all<D: Driver<DriverEvent = E>>(&mut self, driver: &D, may_record: bool) {
        for place in 0..self.queues.len() {
            let queue = &self.queues[place];
            let Some(id) = queue.stream.filter(|_| queue.launches > 0) else { continue };
            if let Some(trailing) = queue.trailing {
                self.push_fence(place, trailing, None);
            } else if may_record {
                driver.set_context(queue.context);
                self.put_fence(driver, place, id);
            }
            self.drop_unfenced(place);
        }
    }

    /// Returns the number of the oldest fence that has not been reached.
    pub(crate) fn oldest_fence(&self) -> Option<u64> {
        self.queues.iter().filter_map(|queue| queue.fences.front()).map(|fence| fence.number).min()
    }

    /// Returns the moment at which the driver had the first launch that is not known to have ended. `None` if all
    /// have.
    pub(crate) fn oldest_launch(&self) -> Option<Nanos> {
        let oldest = self.queues.iter().filter_map(|queue| {
            let fence = queue.fences.front().map(|fence| fence.since);
            fence.or_else(|| (queue.launches > 0).then_some(queue.since))
        });
        oldest.min()
    }

    /// Returns true if all work has ended, as far as fences show.
    pub(crate) fn are_empty(&self) -> bool {
        self.queues.iter().all(StreamQueue::is_empty)
    }

    /// Puts a last fence into a stream that is about to be destroyed, whose work goes on.
    pub(crate) fn forget_stream<D: Driver<DriverEvent = E>>(
        &mut self,
        driver: &D,
        handle: usize,
        costs: &CostTable,
    ) {
        let found =
            self.queues.iter().enumerate().find_map(|(place, queue)| {
                queue.stream.filter(|id| id.is_created(handle)).map(|id| (place, id))
            });
        let Some((place, id)) = found else { return };
        if self.queues[place].launches > 0 && !driver.is_capturing(StreamName { handle, per_thread: false }) {
            within(driver, self.queues[place].context, || self.put_fence(driver, place, id));
        }
        self.queues[place].stream = None;
        self.drop_unfenced(place);
        self.drop_measurement(place);
        self.poll_orphans(driver, costs);
    }

    /// Polls the oldest destroyed streams. A program that destroys many streams does this itself, because
    /// the monitor thread would have too many to poll.
    fn poll_orphans<D: Driver<DriverEvent = E>>(&mut self, driver: &D, costs: &CostTable) {
        let (context, mut busy) = (driver.current_context(), 0);
        relaxed(driver, || {
            for place in 0..self.queues.len() {
                let is_busy_orphan = |queue: &StreamQueue<E>| {
                    queue.stream.is_none() && queue.context == context && !queue.fences.is_empty()
                };
                if is_busy_orphan(&self.queues[place]) {
                    self.poll(driver, place, costs);
                    busy += usize::from(is_busy_orphan(&self.queues[place]));
                }
                if busy == MAX_BUSY_ORPHANS_POLLED {
                    break;
                }
            }
        });
    }

    /// Takes out the reached fences of a queue in the calling thread's context. The thread is relaxed.
    fn poll<D: Driver<DriverEvent = E>>(&mut self, driver: &D, place: usize, costs: &CostTable) {
        while let Some(milliseconds) = self.queues[place].fences.front().and_then(|fence| fence.poll(driver))
        {
            self.pop_fence(place, milliseconds, costs);
        }
    }

    /// Counts unfenced work as ended. No fence is possible in a context whose work has crashed, or beside
    /// a capture; then the end is not seen and not waited for.
    fn drop_unfenced(&mut self, place: usize) {
        let queue = &mut self.queues[place];
        if queue.launches > 0 {
            self.ended += queue.unfenced;
            (queue.unfenced, queue.launches, queue.unmeasured) = (Nanos::ZERO, 0, 0);
            queue.queued = queue.fences.iter().map(|fence| fence.work).sum();
            self.recount();
        }
    }

    /// Drops the queues and events of a context that is gone.
    pub(crate) fn forget_context(&mut self, context: ContextId) {
        self.pool.forget_context(context);
        self.queues.retain(|queue| queue.context != context);
        self.recount();
    }

    fn recount(&mut self) {
        self.queued = self.queues.iter().map(|queue| queue.queued).sum();
        let working = self.queues.iter().filter(|queue| queue.queued > Nanos::ZERO).count();
        self.working = u32::try_from(working).unwrap_or(u32::MAX);
        let fences: usize = self.queues.iter().map(|queue| queue.fences.len()).sum();
        self.fences = u32::try_from(fences).unwrap_or(u32::MAX);
        let fenced = |queue: &StreamQueue<E>| queue.fences.iter().map(|fence| fence.unmeasured).sum::<u32>();
        self.unmeasured = self.queues.iter().map(|queue| queue.unmeasured + fenced(queue)).sum();
    }

    /// Records a fence in a stream.
    #[cold]
    fn put_fence<D: Driver<DriverEvent = E>>(&mut self, driver: &D, place: usize, id: StreamId) {
        if let Some(end) = self.pool.record(driver, self.queues[place].context, id, false) {
            self.push_fence(place, end, None);
        }
    }

    /// Moves the queue's trailing event behind its last launch, in case no other launch follows.
    #[cold]
    fn put_trailing<D: Driver<DriverEvent = E>>(&mut self, driver: &D, place: usize, id: StreamId) {
        let queue = &self.queues[place];
        let is_moved = queue.trailing.is_some_and(|trailing| trailing.record(driver, id));
        if !is_moved {
            self.queues[place].trailing = self.pool.record(driver, self.queues[place].context, id, false);
        }
    }

    /// Makes an event behind all launches of a queue its last fence.
    fn push_fence(&mut self, place: usize, end: FenceEvent<E>, measures: Option<MeasuredLaunch<E>>) {
        let queue = &mut self.queues[place];
        if let Some(trailing) = queue.trailing.take().filter(|trailing| *trailing != end) {
            self.pool.put(queue.context, trailing);
        }
        self.fence_number += 1;
        let (work, unmeasured, since) = (queue.unfenced, queue.unmeasured, queue.since);
        queue.fences.push_back(Fence { number: self.fence_number, end, measures, work, unmeasured, since });
        (queue.unfenced, queue.launches, queue.unmeasured) = (Nanos::ZERO, 0, 0);
        self.fences += 1;
    }

    /// Takes the first fence of a queue out, because it was reached.
    fn pop_fence(&mut self, place: usize, milliseconds: Option<f32>, costs: &CostTable) {
        let queue = &mut self.queues[place];
        let (context, Some(fence)) = (queue.context, queue.fences.pop_front()) else { return };
        let had_work = queue.queued > Nanos::ZERO;
        queue.queued = queue.queued - fence.work;
        let has_ended = had_work && queue.queued == Nanos::ZERO;
        self.working = self.working.saturating_sub(u32::from(has_ended));
        fence.events().for_each(|event| self.pool.put(context, event));
        self.queued = self.queued - fence.work;
        self.fences = self.fences.saturating_sub(1);
        self.unmeasured = self.unmeasured.saturating_sub(fence.unmeasured);
        self.ended += fence.work;
        if let Some(MeasuredLaunch { key: Some(key), cost, .. }) = fence.measures
            && let Some(milliseconds) = milliseconds
        {
            // What the launch took is known now.
            self.ended = self.ended - cost + costs.learn(key, milliseconds);
        }
    }

    /// Forgets measurements of a kind of work, because its key will be used for other work.
    pub(crate) fn forget_work(&mut self, key: u64) {
        let fences = self.queues.iter_mut().flat_map(|queue| &mut queue.fences);
        for launch in fences.filter_map(|fence| fence.measures.as_mut()) {
            launch.key = launch.key.filter(|&own| own != key);
        }
    }

    /// Returns the index of a stream's queue. A new one belongs to the calling thread's context.
    #[inline]
    fn queue_of<D: Driver<DriverEvent = E>>(&mut self, driver: &D, id: StreamId) -> usize {
        if self.queues.get(self.last).is_none_or(|queue| queue.stream != Some(id)) {
            self.find_queue(driver, id);
        }
        self.last
    }

    #[cold]
    fn find_queue<D: Driver<DriverEvent = E>>(&mut self, driver: &D, id: StreamId) {
        let found = self.queues.iter().position(|queue| queue.stream == Some(id));
        self.last = found.unwrap_or_else(|| {
            self.queues.push(StreamQueue::new(id, driver.current_context()));
            self.queues.len() - 1
        });
    }
}

impl<E> StreamQueue<E> {
    fn new(id: StreamId, context: ContextId) -> Self {
        Self {
            stream: Some(id),
            context,
            queued: Nanos::ZERO,
            unfenced: Nanos::ZERO,
            launches: 0,
            unmeasured: 0,
            since: Nanos::ZERO,
            trailing: None,
            measuring: None,
            fences: VecDeque::new(),
        }
    }

    /// Returns true if the next fence is due.
    #[inline]
    fn needs_fence(&self) -> bool {
        let interval =
            if self.launches > LAUNCHES_BEFORE_DOUBLE_INTERVAL { FENCE_INTERVAL * 2 } else { FENCE_INTERVAL };
        self.unfenced >= interval || self.launches >= MAX_LAUNCHES_BEFORE_FENCE
    }

    fn is_empty(&self) -> bool {
        self.launches == 0 && self.fences.is_empty() && self.measuring.is_none()
    }
}
