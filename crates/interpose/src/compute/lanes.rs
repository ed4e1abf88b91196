//! What each stream has queued. Fences are events behind some launches: when one has happened, all before it has ended.

use std::collections::VecDeque;

use super::Stream;
use super::costs::Costs;
use crate::cuda::{Handle, SUCCESS, Status};
use crate::door::library::driver_functions;
use crate::memory::contexts;

driver_functions! { CUDA:
    create_event = c"cuEventCreate" (event: *mut Handle, flags: u32);
    record_event = c"cuEventRecord" (event: Handle, stream: Handle);
    record_event_per_thread = c"cuEventRecord_ptsz" (event: Handle, stream: Handle);
    query_event = c"cuEventQuery" (event: Handle);
    elapsed_v1 = c"cuEventElapsedTime" (milliseconds: *mut f32, from: Handle, to: Handle);
    set_current = c"cuCtxSetCurrent" (context: Handle);
}

const NOT_READY: Status = 600;

/// For events that only tell that something has ended: far cheaper to record.
const NO_TIMING: u32 = 2;

/// A fence is put behind this much estimated work,
const FENCE_WORK: u64 = 1_000_000;
/// or this many launches.
const FENCE_LAUNCHES: u32 = 256;

/// The streams of one card.
#[derive(Default)]
pub struct Lanes {
    lanes: Vec<Lane>,
    /// Events to use again, with the context they belong to.
    spare: Vec<(usize, Event)>,
    /// Launches so far, to see whether there were any.
    pub launches: u64,
    /// Nanoseconds of work that has not ended, by estimate.
    pub queued: u64,
    /// Fences that have not been reached.
    pub fences: u32,
}

struct Lane {
    stream: Stream,
    context: usize,
    /// Since the last fence.
    unfenced: u64,
    launches: u32,
    fences: VecDeque<Fence>,
}

struct Fence {
    end: Event,
    /// Where one launch is measured: the event before it, and its kind.
    measures: Option<(Event, u64)>,
    estimate: u64,
}

/// An event of ours.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Event {
    handle: Handle,
    /// Whether it tells when it happened.
    is_timed: bool,
}

// SAFETY: only a name of the driver's object.
unsafe impl Send for Event {}

impl Lanes {
    /// An event in front of a launch that is to be measured.
    pub fn begin(&mut self, stream: Stream) -> Option<Event> {
        let lane = self.lane(stream);
        self.event(self.lanes[lane].context, true).filter(|event| event.record(stream))
    }

    /// Notes a launch, by estimate; `measures` tells the event in front of it, and its kind.
    pub fn queue(&mut self, stream: Stream, estimate: u64, measures: Option<(Event, u64)>) {
        self.launches += 1;
        self.queued += estimate;
        let place = self.lane(stream);
        let lane = &mut self.lanes[place];
        lane.unfenced += estimate;
        lane.launches += 1;
        if measures.is_some() || lane.unfenced >= FENCE_WORK || lane.launches >= FENCE_LAUNCHES {
            self.fence(place, measures);
        }
    }

    /// Follows the fences; returns the estimates of what has ended.
    pub fn follow(&mut self, costs: &Costs) -> u64 {
        let mut ended = 0;
        for lane in 0..self.lanes.len() {
            if !self.lanes[lane].fences.is_empty() {
                self.lanes[lane].enter();
            }
            while let Some(fence) = self.lanes[lane].fences.front() {
                // SAFETY: an event of ours, recorded.
                match unsafe { query_event(fence.end.handle) } {
                    NOT_READY => break,
                    // An error of the program's work ends it too.
                    _ => ended += self.reached(lane, costs),
                }
            }
        }
        ended
    }

    /// Puts fences behind what has none. Only while nothing captures.
    pub fn fence_all(&mut self) {
        for lane in 0..self.lanes.len() {
            if self.lanes[lane].launches > 0 {
                self.lanes[lane].enter();
                self.fence(lane, None);
            }
        }
    }

    /// Whether all that was launched has ended, as far as fences tell.
    pub fn are_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.launches == 0 && lane.fences.is_empty())
    }

    /// A stream is about to be destroyed: its end is not seen any more.
    pub fn forget_stream(&mut self, handle: Handle) {
        if let Some(place) = self.lanes.iter().position(|lane| lane.stream.handle == handle) {
            let lane = self.lanes.swap_remove(place);
            self.spare.extend(lane.fences.iter().flat_map(Fence::events).map(|event| (lane.context, event)));
            self.count_again();
        }
    }

    /// A context is gone, with its streams and events.
    pub fn forget_context(&mut self, context: usize) {
        self.spare.retain(|(of, _)| *of != context);
        self.lanes.retain(|lane| lane.context != context);
        self.count_again();
    }

    fn count_again(&mut self) {
        self.queued = self.lanes.iter().map(Lane::queued).sum();
        let fences: usize = self.lanes.iter().map(|lane| lane.fences.len()).sum();
        self.fences = u32::try_from(fences).unwrap_or(u32::MAX);
    }

    fn fence(&mut self, place: usize, measures: Option<(Event, u64)>) {
        let (stream, context) = (self.lanes[place].stream, self.lanes[place].context);
        let end = self.event(context, measures.is_some()).filter(|event| event.record(stream));
        let Some(end) = end else { return };
        let lane = &mut self.lanes[place];
        lane.fences.push_back(Fence { end, measures, estimate: lane.unfenced });
        (lane.unfenced, lane.launches) = (0, 0);
        self.fences += 1;
    }

    /// The first fence of a lane has happened.
    fn reached(&mut self, place: usize, costs: &Costs) -> u64 {
        let lane = &mut self.lanes[place];
        let (context, Some(fence)) = (lane.context, lane.fences.pop_front()) else { return 0 };
        if let Some((begin, key)) = fence.measures {
            let mut milliseconds = 0.0;
            // SAFETY: two recorded events of ours; `milliseconds` is the place for the answer.
            if unsafe { elapsed_v1(&raw mut milliseconds, begin.handle, fence.end.handle) } == SUCCESS {
                costs.learn(key, milliseconds);
            }
        }
        self.spare.extend(fence.events().map(|event| (context, event)));
        self.queued = self.queued.saturating_sub(fence.estimate);
        self.fences = self.fences.saturating_sub(1);
        fence.estimate
    }

    /// The lane of a stream, the last used first.
    fn lane(&mut self, stream: Stream) -> usize {
        if let Some(lane) = self.lanes.iter().position(|lane| lane.stream == stream) {
            return lane;
        }
        self.lanes.push(Lane {
            stream,
            context: contexts::current(),
            unfenced: 0,
            launches: 0,
            fences: VecDeque::new(),
        });
        self.lanes.len() - 1
    }

    fn event(&mut self, context: usize, is_timed: bool) -> Option<Event> {
        let fits = |(of, event): &(usize, Event)| *of == context && event.is_timed == is_timed;
        if let Some(place) = self.spare.iter().rposition(fits) {
            return Some(self.spare.swap_remove(place).1);
        }
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the calling thread has the context; `handle` is the place for the answer.
        let status = unsafe { create_event(&raw mut handle, if is_timed { 0 } else { NO_TIMING }) };
        (status == SUCCESS).then_some(Event { handle, is_timed })
    }
}

impl Fence {
    fn events(&self) -> impl Iterator<Item = Event> + use<> {
        self.measures.map(|(begin, _)| begin).into_iter().chain([self.end])
    }
}

impl Lane {
    fn queued(&self) -> u64 {
        self.unfenced + self.fences.iter().map(|fence| fence.estimate).sum::<u64>()
    }

    /// Makes the lane's context the current one of our own thread.
    fn enter(&self) {
        // SAFETY: a context that lives: lanes are forgotten before theirs goes.
        unsafe { set_current(std::ptr::with_exposed_provenance_mut(self.context)) };
    }
}

impl Event {
    fn record(self, stream: Stream) -> bool {
        // SAFETY: an event of ours in a stream of the program's, of the same context.
        let status = unsafe {
            if stream.per_thread {
                record_event_per_thread(self.handle, stream.handle)
            } else {
                record_event(self.handle, stream.handle)
            }
        };
        status == SUCCESS
    }
}
