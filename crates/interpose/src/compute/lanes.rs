//! What each stream has queued. Fences are events behind some launches: when one has happened, all before it has ended.

use std::collections::VecDeque;

use tessera_limits::traffic::{Ration, Traffic};

use super::costs::Costs;
use super::streams::{Stream, Which};
use crate::cuda::{Handle, SUCCESS, Status};
use crate::door::library::driver_functions;
use crate::memory::contexts;

driver_functions! { Cuda:
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

/// When so many streams that are gone are still at work, no more of those are asked: nobody waits for them.
const LEFT_ASKED: u32 = 4;

/// More lanes than this are looked through for streams that do nothing any more.
const MANY: usize = 64;

/// The streams of one card.
#[derive(Default)]
pub struct Lanes {
    lanes: Vec<Lane>,
    /// The one used last,
    last: usize,
    /// and whether it was the one before, too: then the next launch will be for it.
    is_fed: bool,
    /// Events to use again, with the context they belong to.
    spare: Vec<(usize, Event)>,
    /// Launches so far, to see whether there were any.
    pub launches: u64,
    /// Nanoseconds of work that has not ended, by estimate.
    pub queued: u64,
    /// Streams that have such work.
    pub working: u32,
    /// Fences that have not been reached.
    pub fences: u32,
    /// Where the last questions began.
    first_asked: usize,
    /// What was handed out to the one used last: it may be had without a word here.
    handed: Ration,
}

struct Lane {
    /// The stream; none once it was destroyed, which does not end its work.
    stream: Option<Which>,
    context: usize,
    /// What has not ended, by estimate.
    queued: u64,
    /// The part of it since the last fence.
    unfenced: u64,
    launches: u32,
    /// Behind the last launch, in a stream where our own thread cannot put a fence later.
    behind: Option<Event>,
    fences: VecDeque<Fence>,
}

struct Fence {
    end: Event,
    /// Where one launch is measured: the event before it, and its kind.
    measures: Option<(Event, u64)>,
    estimate: u64,
}

/// A fence to be asked for.
pub struct Question {
    /// The place of its lane.
    place: usize,
    context: usize,
    /// Whether the stream is gone.
    is_left: bool,
    end: Event,
    measures: Option<(Event, u64)>,
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
    pub fn begin(&mut self, stream: Stream, which: Which) -> Option<Event> {
        if contexts::current() == 0 {
            // The launch will fail.
            return None;
        }
        let place = self.lane(which);
        self.record(self.lanes[place].context, stream, true)
    }

    /// The launch did not happen: its event is free again.
    pub fn take_back(&mut self, which: Which, begin: Event) {
        let place = self.lane(which);
        self.spare.push((self.lanes[place].context, begin));
    }

    /// Notes a launch, by estimate; `measures` tells the event in front of it, and its kind.
    pub fn queue(&mut self, stream: Stream, which: Which, estimate: u64, measures: Option<(Event, u64)>) {
        let place = self.lane(which);
        self.note(place, Ration { launches: 1, estimate });
        let lane = &self.lanes[place];
        if measures.is_some() || lane.unfenced >= FENCE_WORK || lane.launches >= FENCE_LAUNCHES {
            self.fence(place, stream, measures);
        } else if which.is_of_a_thread() {
            self.put_behind(place, stream);
        }
    }

    /// Ends the ration: what is no longer left of it was had.
    pub fn take_ration_back(&mut self, traffic: &Traffic) {
        let handed = std::mem::take(&mut self.handed);
        if handed.launches > 0 {
            let left = traffic.take_back();
            let launches = handed.launches.saturating_sub(left.launches);
            let estimate = handed.estimate.saturating_sub(left.estimate);
            self.note(self.last, Ration { launches, estimate });
        }
    }

    /// Lets a stream that is fed have what goes before its next fence. Not a thread's own one, where an event follows each launch.
    pub fn hand_ration_out(&mut self, traffic: &Traffic) {
        let lane = self.lanes.get(self.last).filter(|_| self.is_fed);
        let fed = lane.and_then(|lane| Some((lane, lane.stream.filter(|which| !which.is_of_a_thread())?)));
        if let Some((lane, stream)) = fed {
            let launches = (FENCE_LAUNCHES - 1).saturating_sub(lane.launches);
            let estimate = (FENCE_WORK - 1).saturating_sub(lane.unfenced);
            self.handed = Ration { launches, estimate };
            traffic.hand_out(stream.mark(), self.handed);
        }
    }

    fn note(&mut self, place: usize, had: Ration) {
        let Some(lane) = self.lanes.get_mut(place).filter(|_| had.launches > 0) else { return };
        self.launches += u64::from(had.launches);
        self.queued += had.estimate;
        self.working += u32::from(lane.queued == 0);
        lane.queued += had.estimate;
        lane.unfenced += had.estimate;
        lane.launches += had.launches;
    }

    /// Whether a stream has so much work in so many pieces.
    pub fn has_queued(&self, which: Which, nanoseconds: u64, pieces: u32) -> bool {
        let lane = self.lanes.iter().find(|lane| lane.stream == Some(which));
        lane.is_some_and(|lane| lane.queued >= nanoseconds && lane.fences.len() >= pieces as usize)
    }

    /// The fences of all lanes, beginning with another lane each time. Lanes keep their places until what was found out is told
    /// to [`Lanes::pass`]: whoever takes one away must not do so while our own thread looks.
    pub fn questions(&mut self) -> Vec<Question> {
        self.first_asked = (self.first_asked + 1) % self.lanes.len().max(1);
        let (before, after) = self.lanes.split_at(self.first_asked);
        let lanes = (self.first_asked..).zip(after).chain(before.iter().enumerate());
        let questions = lanes.flat_map(|(place, lane)| {
            let (context, is_left) = (lane.context, lane.stream.is_none());
            let question = move |fence: &Fence| {
                let (end, measures) = (fence.end, fence.measures);
                Question { place, context, is_left, end, measures }
            };
            lane.fences.iter().map(question)
        });
        questions.collect()
    }

    /// So many fences of the lanes at these places have been reached; returns the estimates of what has ended.
    pub fn pass(&mut self, reached: &[(usize, usize)]) -> u64 {
        let mut ended = 0;
        for &(place, count) in reached {
            for _ in 0..count {
                ended += self.reached(place);
            }
        }
        let many = self.lanes.len() > MANY;
        self.lanes.retain(|lane| !lane.is_empty() || (lane.stream.is_some() && !many));
        ended
    }

    /// Puts fences behind what has none. Only while nothing captures, on our own thread.
    pub fn fence_all(&mut self) {
        for place in 0..self.lanes.len() {
            let lane = &self.lanes[place];
            let Some(which) = lane.stream.filter(|_| lane.launches > 0) else { continue };
            if let Some(behind) = lane.behind {
                self.push(place, behind, None);
            } else {
                enter(lane.context);
                self.fence(place, Stream { handle: which.by_handle(), per_thread: false }, None);
            }
            self.give_up_unfenced(place);
        }
    }

    /// Whether all that was launched has ended, as far as fences tell.
    pub fn are_empty(&self) -> bool {
        self.lanes.iter().all(Lane::is_empty)
    }

    /// A stream is about to be destroyed. Its work goes on, so it gets a last fence.
    pub fn forget_stream(&mut self, handle: Handle) {
        let is_it = |lane: &Lane| lane.stream.is_some_and(|which| which.is_made(handle));
        let Some(place) = self.lanes.iter().position(is_it) else { return };
        let stream = Stream { handle, per_thread: false };
        if self.lanes[place].launches > 0 && !stream.is_capturing() {
            let (before, context) = (contexts::current(), self.lanes[place].context);
            enter(context);
            self.fence(place, stream, None);
            enter(before);
        }
        self.lanes[place].stream = None;
        self.give_up_unfenced(place);
    }

    /// Where no fence can be had, as in a context whose work has crashed, the end is not seen and not waited for.
    fn give_up_unfenced(&mut self, place: usize) {
        let lane = &mut self.lanes[place];
        if lane.launches > 0 {
            (lane.unfenced, lane.launches) = (0, 0);
            lane.queued = lane.fences.iter().map(|fence| fence.estimate).sum();
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
        self.queued = self.lanes.iter().map(|lane| lane.queued).sum();
        let working = self.lanes.iter().filter(|lane| lane.queued > 0).count();
        self.working = u32::try_from(working).unwrap_or(u32::MAX);
        let fences: usize = self.lanes.iter().map(|lane| lane.fences.len()).sum();
        self.fences = u32::try_from(fences).unwrap_or(u32::MAX);
    }

    /// Puts a fence into a stream.
    fn fence(&mut self, place: usize, stream: Stream, measures: Option<(Event, u64)>) {
        if let Some(end) = self.record(self.lanes[place].context, stream, measures.is_some()) {
            self.push(place, end, measures);
        }
    }

    /// Keeps the one event behind the last launch there, in case no other launch follows.
    fn put_behind(&mut self, place: usize, stream: Stream) {
        let lane = &self.lanes[place];
        let is_moved = lane.behind.is_some_and(|behind| behind.record(stream));
        if !is_moved {
            self.lanes[place].behind = self.record(self.lanes[place].context, stream, false);
        }
    }

    /// An event behind what was launched becomes a fence.
    fn push(&mut self, place: usize, end: Event, measures: Option<(Event, u64)>) {
        let lane = &mut self.lanes[place];
        if let Some(behind) = lane.behind.take().filter(|behind| *behind != end) {
            self.spare.push((lane.context, behind));
        }
        lane.fences.push_back(Fence { end, measures, estimate: lane.unfenced });
        (lane.unfenced, lane.launches) = (0, 0);
        self.fences += 1;
    }

    /// The first fence of a lane has happened.
    fn reached(&mut self, place: usize) -> u64 {
        let Some(lane) = self.lanes.get_mut(place) else { return 0 };
        let (context, Some(fence)) = (lane.context, lane.fences.pop_front()) else { return 0 };
        let had_work = lane.queued > 0;
        lane.queued = lane.queued.saturating_sub(fence.estimate);
        self.working = self.working.saturating_sub(u32::from(had_work && lane.queued == 0));
        self.spare.extend(fence.events().map(|event| (context, event)));
        self.queued = self.queued.saturating_sub(fence.estimate);
        self.fences = self.fences.saturating_sub(1);
        fence.estimate
    }

    /// The lane of a stream, in the calling thread's context where it is new.
    fn lane(&mut self, which: Which) -> usize {
        let is_it = |lane: &Lane| lane.stream == Some(which);
        self.is_fed = self.lanes.get(self.last).is_some_and(is_it);
        if !self.is_fed {
            self.last = self.lanes.iter().position(is_it).unwrap_or_else(|| {
                self.lanes.push(Lane::new(which));
                self.lanes.len() - 1
            });
        }
        self.last
    }

    /// Puts an event into a stream of a context, which is the calling thread's.
    fn record(&mut self, context: usize, stream: Stream, is_timed: bool) -> Option<Event> {
        let event = self.event(context, is_timed)?;
        if event.record(stream) {
            return Some(event);
        }
        self.spare.push((context, event));
        None
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

/// Asks the driver which fences have been reached: of each lane, by its place, how many. Launches wait for nothing meanwhile: this
/// thread, which the driver may keep waiting, holds no lock that they need. On our own thread.
pub fn ask(questions: &[Question], costs: &Costs) -> Vec<(usize, usize)> {
    let (mut entered, mut left_at_work, mut reached) = (None, 0, Vec::new());
    for of_lane in questions.chunk_by(|one, next| one.place == next.place) {
        let Question { place, context, is_left, .. } = of_lane[0];
        if is_left && left_at_work == LEFT_ASKED {
            continue;
        }
        if entered.replace(context) != Some(context) {
            enter(context);
        }
        let count = of_lane.iter().take_while(|question| question.ask(costs)).count();
        left_at_work += u32::from(is_left && count < of_lane.len());
        reached.push((place, count));
    }
    reached
}

impl Question {
    /// Whether it has been reached; learns what was measured by it.
    fn ask(&self, costs: &Costs) -> bool {
        // SAFETY: an event of ours, recorded. An error of the program's work ends it too.
        let is_reached = unsafe { query_event(self.end.handle) } != NOT_READY;
        if let (true, Some((begin, key))) = (is_reached, self.measures) {
            let mut milliseconds = 0.0;
            // SAFETY: two recorded events of ours; `milliseconds` is the place for the answer.
            if unsafe { elapsed_v1(&raw mut milliseconds, begin.handle, self.end.handle) } == SUCCESS {
                costs.learn(key, milliseconds);
            }
        }
        is_reached
    }
}

impl Fence {
    fn events(&self) -> impl Iterator<Item = Event> + use<> {
        self.measures.map(|(begin, _)| begin).into_iter().chain([self.end])
    }
}

impl Lane {
    fn new(which: Which) -> Self {
        Self {
            stream: Some(which),
            context: contexts::current(),
            queued: 0,
            unfenced: 0,
            launches: 0,
            behind: None,
            fences: VecDeque::new(),
        }
    }

    fn is_empty(&self) -> bool {
        self.launches == 0 && self.fences.is_empty()
    }
}

/// Makes a context the calling thread's current one.
fn enter(context: usize) {
    // SAFETY: none, or a context that lives: lanes are forgotten before theirs goes.
    unsafe { set_current(std::ptr::with_exposed_provenance_mut(context)) };
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
