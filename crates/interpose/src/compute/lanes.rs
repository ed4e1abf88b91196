//! What each stream has queued. Fences are events behind some launches: when one has happened, all before it has ended.

use std::collections::{HashMap, VecDeque};

use super::Stream;
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

/// A fence is put behind this much estimated work,
const FENCE_WORK: u64 = 1_000_000;
/// or this many launches.
const FENCE_LAUNCHES: u32 = 256;
/// Known work is measured again once in so many launches.
const MEASURE_EVERY: u32 = 64;
/// More kinds of work than this are forgotten and learned anew.
const MOST_COSTS: usize = 8_192;
/// What is assumed of work never measured.
const UNKNOWN: u64 = 500_000;

/// The streams of one card.
#[derive(Default)]
pub struct Lanes {
    lanes: Vec<Lane>,
    costs: HashMap<u64, Cost>,
    /// Events to use again, with the context they belong to.
    spare: Vec<(usize, Event)>,
    /// Launches so far, to see whether there were any.
    pub launches: u64,
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
    /// With the kind of work between, where it is measured.
    begin: Option<(Event, u64)>,
    estimate: u64,
}

#[derive(Clone, Copy)]
struct Event(Handle);

// SAFETY: only a name of the driver's object.
unsafe impl Send for Event {}

#[derive(Default)]
struct Cost {
    nanoseconds: u64,
    launches: u32,
}

/// What is known of work about to be launched.
pub struct Queued {
    pub estimate: u64,
    /// Whether an event stands before it, to measure it.
    pub measures: bool,
}

impl Lanes {
    /// Before a launch: what it will cost, and an event in front of it where that is to be measured.
    pub fn before(&mut self, stream: Stream, key: u64) -> Queued {
        if self.costs.len() > MOST_COSTS {
            self.costs.clear();
        }
        let cost = self.costs.entry(key).or_default();
        let measures = cost.launches.is_multiple_of(MEASURE_EVERY);
        cost.launches = cost.launches.wrapping_add(1);
        let estimate = if cost.nanoseconds == 0 { UNKNOWN } else { cost.nanoseconds };
        if !measures {
            return Queued { estimate, measures };
        }
        let lane = self.lane(stream);
        let context = self.lanes[lane].context;
        let begin = self.event(context).filter(|event| event.record(stream));
        let Some(begin) = begin else { return Queued { estimate, measures: false } };
        self.lanes[lane].fences.push_back(Fence { end: begin, begin: None, estimate: 0 });
        Queued { estimate, measures: true }
    }

    /// After a launch; returns the estimate to queue.
    pub fn after(&mut self, stream: Stream, key: u64, estimate: u64, measures: bool) -> u64 {
        self.launches += 1;
        let lane = self.lane(stream);
        let lane_state = &mut self.lanes[lane];
        lane_state.unfenced += estimate;
        lane_state.launches += 1;
        if measures || lane_state.unfenced >= FENCE_WORK || lane_state.launches >= FENCE_LAUNCHES {
            self.fence(lane, measures.then_some(key));
        }
        estimate
    }

    /// Follows the fences; returns the estimates of what has ended.
    pub fn follow(&mut self) -> u64 {
        let mut ended = 0;
        for lane in 0..self.lanes.len() {
            if !self.lanes[lane].fences.is_empty() {
                self.lanes[lane].enter();
            }
            while let Some(fence) = self.lanes[lane].fences.front() {
                // SAFETY: an event of ours, recorded.
                match unsafe { query_event(fence.end.0) } {
                    NOT_READY => break,
                    // An error of the program's work ends it too.
                    _ => ended += self.reached(lane),
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

    /// A stream is about to be destroyed: the last fence goes behind its work.
    pub fn forget_stream(&mut self, handle: Handle) -> u64 {
        let mut ended = 0;
        if let Some(lane) = self.lanes.iter().position(|lane| lane.stream.handle == handle) {
            let lane = self.lanes.swap_remove(lane);
            ended = lane.unfenced + lane.fences.iter().map(|fence| fence.estimate).sum::<u64>();
            self.spare.extend(lane.fences.iter().map(|fence| (lane.context, fence.end)));
        }
        ended
    }

    /// A context is gone, with its streams and events.
    pub fn forget_context(&mut self, context: usize) -> u64 {
        self.spare.retain(|(of, _)| *of != context);
        let (gone, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.lanes).into_iter().partition(|lane| lane.context == context);
        self.lanes = kept;
        gone.iter()
            .map(|lane| lane.unfenced + lane.fences.iter().map(|fence| fence.estimate).sum::<u64>())
            .sum()
    }

    fn fence(&mut self, lane: usize, key: Option<u64>) {
        let (stream, context) = (self.lanes[lane].stream, self.lanes[lane].context);
        let Some(end) = self.event(context).filter(|event| event.record(stream)) else { return };
        let state = &mut self.lanes[lane];
        let begin = key.and_then(|key| Some((state.fences.back()?.end, key)));
        state.fences.push_back(Fence { end, begin, estimate: state.unfenced });
        (state.unfenced, state.launches) = (0, 0);
    }

    /// The first fence of a lane has happened.
    fn reached(&mut self, lane: usize) -> u64 {
        let state = &mut self.lanes[lane];
        let Some(fence) = state.fences.pop_front() else { return 0 };
        let context = state.context;
        if let Some((begin, key)) = fence.begin {
            let mut milliseconds = 0.0;
            // SAFETY: two recorded events of ours; `milliseconds` is the place for the answer.
            if unsafe { elapsed_v1(&raw mut milliseconds, begin.0, fence.end.0) } == SUCCESS {
                self.learn(key, milliseconds);
            }
            self.spare.push((context, begin));
        }
        // An event that the next fence measures from is kept until then.
        let is_begin = self.lanes[lane].fences.front().is_some_and(|next| next.begin.is_some());
        if !is_begin {
            self.spare.push((context, fence.end));
        }
        fence.estimate
    }

    fn learn(&mut self, key: u64, milliseconds: f32) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "kept within a minute")]
        let measured = (milliseconds.clamp(0.001, 60_000.0) * 1e6) as u64;
        let cost = self.costs.entry(key).or_default();
        cost.nanoseconds = if cost.nanoseconds == 0 { measured } else { (cost.nanoseconds + measured) / 2 };
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

    fn event(&mut self, context: usize) -> Option<Event> {
        if let Some(place) = self.spare.iter().position(|(of, _)| *of == context) {
            return Some(self.spare.swap_remove(place).1);
        }
        let mut event: Handle = std::ptr::null_mut();
        // SAFETY: the calling thread has the context; `event` is the place for the answer.
        (unsafe { create_event(&raw mut event, 0) } == SUCCESS).then_some(Event(event))
    }
}

impl Lane {
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
                record_event_per_thread(self.0, stream.handle)
            } else {
                record_event(self.0, stream.handle)
            }
        };
        status == SUCCESS
    }
}
