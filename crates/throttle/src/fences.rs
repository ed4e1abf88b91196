//! Fences: driver events behind queued work. When a fence is reached, all work before it in its stream
//! has ended.

use crate::driver::{ContextId, Driver, StreamId};
use crate::nanos::Nanos;

/// Destroyed streams that may still be at work before no more of them are polled: no launch waits for
/// the end of their work.
pub(crate) const MAX_BUSY_ORPHANS_POLLED: usize = 2;

/// An event of the limiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceEvent<E> {
    handle: E,
    /// True if the event reports when it happened. Recording one without a time is far cheaper.
    is_timed: bool,
}

/// Events for reuse, with the context that each belongs to.
#[derive(Debug)]
pub(crate) struct EventPool<E>(Vec<(ContextId, FenceEvent<E>)>);

/// The end of some work in a stream.
#[derive(Clone, Copy, Debug)]
pub struct Fence<E> {
    /// Unique number.
    pub number: u64,
    /// The event behind the work.
    pub end: FenceEvent<E>,
    /// For a fence around one measured launch: what is known of the launch.
    pub measures: Option<MeasuredLaunch<E>>,
    /// Estimated work between the previous fence and this one.
    pub work: Nanos,
    /// Launches among that work whose cost is not known.
    pub unmeasured: u32,
    /// Moment at which the driver had the first launch of that work.
    pub since: Nanos,
}

/// A launch whose time on the GPU is measured, between two events. The fence follows the second event at once, so the
/// time between those two is what an event itself takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredLaunch<E> {
    /// The event before the launch.
    pub begin: FenceEvent<E>,
    /// The event behind the launch.
    pub end: FenceEvent<E>,
    /// The key of the launch, or `None` if it is used for other work by now.
    pub key: Option<u64>,
    /// Its estimated cost.
    pub cost: Nanos,
    /// Time for which the GPU had reached the first event and waited for the launch: the driver needed it for the
    /// launch. It is no time of the work.
    pub lead: Nanos,
}

/// A fence that the monitor thread polls without holding the lock of the stream queues.
#[derive(Debug)]
pub struct FenceQuery<E> {
    /// Index of the stream queue.
    pub queue: usize,
    /// The context of the stream.
    pub context: ContextId,
    /// True if the program has destroyed the stream.
    pub is_orphan: bool,
    /// The fence to poll.
    pub fence: Fence<E>,
}

/// A fence that was found reached.
#[derive(Debug)]
pub struct ReachedFence {
    /// Index of the stream queue.
    pub queue: usize,
    /// The fence's number.
    pub number: u64,
    /// Time on the GPU of the launch that the fence measured.
    pub milliseconds: Option<f32>,
}

impl<E: Copy> FenceEvent<E> {
    /// Returns true if the GPU has reached the event.
    pub(crate) fn is_reached<D: Driver<DriverEvent = E>>(self, driver: &D) -> bool {
        driver.is_reached(self.handle)
    }

    /// Records the event in a stream.
    pub(crate) fn record<D: Driver<DriverEvent = E>>(self, driver: &D, stream: StreamId) -> bool {
        driver.record(self.handle, stream)
    }
}

impl<E> Default for EventPool<E> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<E: Copy> EventPool<E> {
    /// Records an event of the pool, or a new one, in a stream of the calling thread's context.
    pub(crate) fn record<D: Driver<DriverEvent = E>>(
        &mut self,
        driver: &D,
        context: ContextId,
        stream: StreamId,
        is_timed: bool,
    ) -> Option<FenceEvent<E>> {
        let event = self.take(driver, context, is_timed)?;
        if event.record(driver, stream) {
            return Some(event);
        }
        self.put(context, event);
        None
    }

    /// Returns an event to the pool.
    pub(crate) fn put(&mut self, context: ContextId, event: FenceEvent<E>) {
        self.0.push((context, event));
    }

    /// Drops the events of a context that is gone.
    pub(crate) fn forget_context(&mut self, context: ContextId) {
        self.0.retain(|(of, _)| *of != context);
    }

    fn take<D: Driver<DriverEvent = E>>(
        &mut self,
        driver: &D,
        context: ContextId,
        is_timed: bool,
    ) -> Option<FenceEvent<E>> {
        let fits = |(of, event): &(ContextId, FenceEvent<E>)| *of == context && event.is_timed == is_timed;
        if let Some(place) = self.0.iter().rposition(fits) {
            return Some(self.0.swap_remove(place).1);
        }
        driver.create_event(is_timed).map(|handle| FenceEvent { handle, is_timed })
    }
}

impl<E: Copy> Fence<E> {
    /// Returns the events that the fence is made of.
    pub(crate) fn events(&self) -> impl Iterator<Item = FenceEvent<E>> + use<E> {
        let measures = self.measures.into_iter().flat_map(|launch| [launch.begin, launch.end]);
        measures.chain([self.end])
    }

    /// Polls the fence: returns `None` until it is reached, then the time of the launch that it measured. The calling
    /// thread is in the fence's context, and relaxed.
    pub(crate) fn poll<D: Driver<DriverEvent = E>>(&self, driver: &D) -> Option<Option<f32>> {
        driver.is_reached(self.end.handle).then(|| {
            let MeasuredLaunch { begin, end, lead, .. } = self.measures?;
            let all = driver.elapsed_ms(begin.handle, end.handle)?;
            let event = driver.elapsed_ms(end.handle, self.end.handle)?;
            Some(all - event - lead.0 as f32 / 1e6)
        })
    }
}

/// Polls the fences of all streams and returns those that are reached. Runs on the monitor thread
/// without any lock that launches need, because the driver may block this thread.
pub(crate) fn poll_all<D: Driver>(driver: &D, queries: &[FenceQuery<D::DriverEvent>]) -> Vec<ReachedFence> {
    let (mut entered, mut busy_orphans, mut reached) = (None, 0, Vec::new());
    for of_queue in queries.chunk_by(|one, next| one.queue == next.queue) {
        let &FenceQuery { queue, context, is_orphan, .. } = &of_queue[0];
        if is_orphan && busy_orphans == MAX_BUSY_ORPHANS_POLLED {
            continue;
        }
        if entered.replace(context) != Some(context) {
            driver.set_context(context);
        }
        let before = reached.len();
        reached.extend(of_queue.iter().map_while(|query| {
            let number = query.fence.number;
            query.fence.poll(driver).map(|milliseconds| ReachedFence { queue, number, milliseconds })
        }));
        busy_orphans += usize::from(is_orphan && reached.len() - before < of_queue.len());
    }
    reached
}
