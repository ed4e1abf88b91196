//! What each stream has queued, told by fences put between its launches.

use std::collections::VecDeque;

use tessera_limits::costs::Costs;
use tessera_limits::queue::{QUEUE, until_room};
use tessera_limits::traffic::{Ration, Traffic};

use super::fences::{Answer, Event, Fence, Found, LEFT_ASKED, Question, Spare, enter, relaxed, within};
use super::gate::PIECES;
use super::streams::{Stream, Which};
use crate::cuda::Handle;
use crate::memory::contexts;

/// A fence is put behind this much estimated work,
const FENCE_WORK: u64 = 500_000;
/// or behind twice as much if that was more than a few launches: a fence costs as much as some.
const FEW_LAUNCHES: u32 = 16;
/// It is put behind this many launches in any case.
const FENCE_LAUNCHES: u32 = 256;

/// More lanes than this are looked through for streams that do nothing any more.
const MANY: usize = 64;

/// The streams of one GPU.
#[derive(Default)]
pub struct Lanes {
    lanes: Vec<Lane>,
    /// The one used last,
    last: usize,
    /// and whether it was the one before, too: then the next launch will be for it.
    is_fed: bool,
    spare: Spare,
    /// Launches so far, to see whether there were any.
    pub launches: u64,
    /// Nanoseconds of work that has not ended, by estimate.
    pub queued: u64,
    /// Streams that have such work.
    pub working: u32,
    /// Fences that have not been reached.
    pub fences: u32,
    /// Numbers of fences so far.
    numbers: u64,
    /// Estimates of what has ended, since our own thread asked last.
    ended: u64,
    /// Where the last questions began.
    first_asked: usize,
    /// What was handed out to the one used last: it may be had without a word here.
    pub handed: Ration,
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

impl Lanes {
    /// An event in front of a launch that is to be measured.
    pub fn begin(&mut self, stream: Stream, which: Which) -> Option<Event> {
        if contexts::current() == 0 {
            // The launch will fail.
            return None;
        }
        let place = self.lane(which);
        self.spare.record(self.lanes[place].context, stream, true)
    }

    /// The launch did not happen: its event is free again.
    pub fn take_back(&mut self, which: Which, begin: Event) {
        let place = self.lane(which);
        self.spare.put(self.lanes[place].context, begin);
    }

    /// Notes a launch, by estimate; `measures` tells the event in front of it, and its kind.
    pub fn queue(&mut self, stream: Stream, which: Which, estimate: u64, measures: Option<(Event, u64)>) {
        let place = self.lane(which);
        self.note(place, Ration { launches: 1, estimate });
        let lane = &self.lanes[place];
        if measures.is_some() || lane.unfenced >= lane.work_before_fence() || lane.launches >= FENCE_LAUNCHES
        {
            self.fence(place, stream, measures);
        } else if which.is_of_a_thread() {
            self.put_behind(place, stream);
        }
    }

    /// Ends the ration: what is no longer left of it was had.
    pub fn take_ration_back(&mut self, traffic: &Traffic) {
        let handed = std::mem::take(&mut self.handed);
        if handed != Ration::default() {
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
            let estimate = (lane.work_before_fence() - 1).saturating_sub(lane.unfenced);
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

    /// How long a stream is to wait that has its part of `most`, the work that all may have, in more than one piece; none where it
    /// may have more. Asks the driver before it says so: our own thread looks only now and then, and nobody is to wait for that.
    pub fn until_room(&mut self, which: Which, most: u64, costs: &Costs) -> Option<u64> {
        let part = (most / u64::from(self.working.max(1))).max(1);
        let Some(place) = self.lanes.iter().position(|lane| lane.stream == Some(which)) else {
            // It comes in the place of those that were left behind at work.
            let is_full = |lanes: &[Lane]| {
                let left = lanes.iter().filter(|lane| lane.stream.is_none());
                left.map(|lane| lane.queued).sum::<u64>() >= most
            };
            if is_full(&self.lanes) {
                self.ask_for_left(costs);
            }
            return is_full(&self.lanes).then_some(QUEUE / 4);
        };
        let is_full = |lane: &Lane| lane.queued >= part && lane.fences.len() >= PIECES as usize;
        if is_full(&self.lanes[place]) {
            within(self.lanes[place].context, || relaxed(|| self.ask(place, costs)));
        }
        let lane = &self.lanes[place];
        is_full(lane).then(|| {
            // The first fence may be reached at any moment. The rest must not have ended by then.
            let first = lane.fences.front().map_or(0, |fence| fence.estimate);
            until_room(lane.queued.saturating_sub(first), part)
        })
    }

    /// The fences of all lanes, beginning with another lane each time. Lanes keep their places until what was found out is told
    /// to [`Lanes::pass`]: whoever takes one away must not do so while our own thread looks.
    pub fn questions(&mut self) -> Vec<Question> {
        self.first_asked = (self.first_asked + 1) % self.lanes.len().max(1);
        let (before, after) = self.lanes.split_at(self.first_asked);
        let lanes = (self.first_asked..).zip(after).chain(before.iter().enumerate());
        let questions = lanes.flat_map(|(place, lane)| {
            let (context, is_left) = (lane.context, lane.stream.is_none());
            lane.fences.iter().map(move |&fence| Question { place, context, is_left, fence })
        });
        questions.collect()
    }

    /// Fences have been reached; returns the estimates of what has ended since this was asked last.
    pub fn pass(&mut self, answers: &[Answer], costs: &Costs) -> u64 {
        for answer in answers {
            // A launch may have asked meanwhile. Then the events are in use again, and what was found by them is nonsense.
            let front = self.lanes.get(answer.place).and_then(|lane| lane.fences.front());
            if front.is_some_and(|fence| fence.number == answer.number) {
                self.reached(answer.place, answer.found, costs);
            }
        }
        let many = self.lanes.len() > MANY;
        self.lanes.retain(|lane| !lane.is_empty() || (lane.stream.is_some() && !many));
        std::mem::take(&mut self.ended)
    }

    /// Puts fences behind what has none, or where none `may` be put takes it for ended. On our own thread.
    pub fn fence_all(&mut self, may: bool) {
        for place in 0..self.lanes.len() {
            let lane = &self.lanes[place];
            let Some(which) = lane.stream.filter(|_| lane.launches > 0) else { continue };
            if let Some(behind) = lane.behind {
                self.push(place, behind, None);
            } else if may {
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
    pub fn forget_stream(&mut self, handle: Handle, costs: &Costs) {
        let is_it = |lane: &Lane| lane.stream.is_some_and(|which| which.is_made(handle));
        let Some(place) = self.lanes.iter().position(is_it) else { return };
        let stream = Stream { handle, per_thread: false };
        if self.lanes[place].launches > 0 && !stream.is_capturing() {
            within(self.lanes[place].context, || self.fence(place, stream, None));
        }
        self.lanes[place].stream = None;
        self.give_up_unfenced(place);
        self.ask_for_left(costs);
    }

    /// A program that leaves many streams behind asks for the oldest of them itself: our own thread would have much to ask.
    fn ask_for_left(&mut self, costs: &Costs) {
        let (context, mut at_work) = (contexts::current(), 0);
        relaxed(|| {
            for place in 0..self.lanes.len() {
                let is_left =
                    |lane: &Lane| lane.stream.is_none() && lane.context == context && !lane.fences.is_empty();
                if is_left(&self.lanes[place]) {
                    self.ask(place, costs);
                    at_work += usize::from(is_left(&self.lanes[place]));
                }
                if at_work == LEFT_ASKED {
                    break;
                }
            }
        });
    }

    /// Asks the driver what of a lane in the calling thread's context has ended. In relaxed mode.
    fn ask(&mut self, place: usize, costs: &Costs) {
        while let Some(found) = self.lanes[place].fences.front().and_then(Fence::ask) {
            self.reached(place, found, costs);
        }
    }

    /// Where no fence can be had, as in a context whose work has crashed, or beside a capture, the end is not seen and not waited for.
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
        self.spare.forget_context(context);
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
        if let Some(end) = self.spare.record(self.lanes[place].context, stream, measures.is_some()) {
            self.push(place, end, measures);
        }
    }

    /// Keeps the one event behind the last launch there, in case no other launch follows.
    fn put_behind(&mut self, place: usize, stream: Stream) {
        let lane = &self.lanes[place];
        let is_moved = lane.behind.is_some_and(|behind| behind.record(stream));
        if !is_moved {
            self.lanes[place].behind = self.spare.record(self.lanes[place].context, stream, false);
        }
    }

    /// An event behind what was launched becomes a fence.
    fn push(&mut self, place: usize, end: Event, measures: Option<(Event, u64)>) {
        let lane = &mut self.lanes[place];
        if let Some(behind) = lane.behind.take().filter(|behind| *behind != end) {
            self.spare.put(lane.context, behind);
        }
        self.numbers += 1;
        lane.fences.push_back(Fence { number: self.numbers, end, measures, estimate: lane.unfenced });
        (lane.unfenced, lane.launches) = (0, 0);
        self.fences += 1;
    }

    /// The first fence of a lane has happened.
    fn reached(&mut self, place: usize, found: Found, costs: &Costs) {
        let lane = &mut self.lanes[place];
        let (context, Some(fence)) = (lane.context, lane.fences.pop_front()) else { return };
        let had_work = lane.queued > 0;
        lane.queued = lane.queued.saturating_sub(fence.estimate);
        self.working = self.working.saturating_sub(u32::from(had_work && lane.queued == 0));
        fence.events().for_each(|event| self.spare.put(context, event));
        self.queued = self.queued.saturating_sub(fence.estimate);
        self.fences = self.fences.saturating_sub(1);
        self.ended += fence.estimate;
        if let Some((key, milliseconds)) = found {
            costs.learn(key, milliseconds);
        }
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

    /// Behind how much estimated work the next fence is put.
    fn work_before_fence(&self) -> u64 {
        if self.launches > FEW_LAUNCHES { 2 * FENCE_WORK } else { FENCE_WORK }
    }

    fn is_empty(&self) -> bool {
        self.launches == 0 && self.fences.is_empty()
    }
}
