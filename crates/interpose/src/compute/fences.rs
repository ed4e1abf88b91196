//! Events of ours behind and around launches: when one has happened, all before it in its stream has ended.

use super::costs::Costs;
use super::streams::Stream;
use crate::cuda::{Handle, SUCCESS, Status};
use crate::door::library::driver_functions;

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

/// When so many streams that are gone are still at work, no more of those are asked: nobody waits for them.
const LEFT_ASKED: u32 = 2;

/// An event of ours.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Event {
    handle: Handle,
    /// Whether it tells when it happened.
    is_timed: bool,
}

// SAFETY: only a name of the driver's object.
unsafe impl Send for Event {}

/// Events to use again, with the context they belong to.
#[derive(Default)]
pub struct Spare(Vec<(usize, Event)>);

/// The end of some work of a stream.
#[derive(Clone, Copy)]
pub struct Fence {
    pub end: Event,
    /// Where one launch is measured: the event before it, and its kind.
    pub measures: Option<(Event, u64)>,
    /// What lies before it and behind the one before, by estimate.
    pub estimate: u64,
}

/// A fence to be asked for.
pub struct Question {
    /// The place of its lane.
    pub place: usize,
    pub context: usize,
    /// Whether the stream is gone.
    pub is_left: bool,
    pub fence: Fence,
}

impl Event {
    /// Puts it into a stream.
    pub fn record(self, stream: Stream) -> bool {
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

impl Spare {
    /// Puts an event into a stream of a context, which is the calling thread's.
    pub fn record(&mut self, context: usize, stream: Stream, is_timed: bool) -> Option<Event> {
        let event = self.take(context, is_timed)?;
        if event.record(stream) {
            return Some(event);
        }
        self.put(context, event);
        None
    }

    /// An event is free again.
    pub fn put(&mut self, context: usize, event: Event) {
        self.0.push((context, event));
    }

    /// A context is gone, with its events.
    pub fn forget_context(&mut self, context: usize) {
        self.0.retain(|(of, _)| *of != context);
    }

    fn take(&mut self, context: usize, is_timed: bool) -> Option<Event> {
        let fits = |(of, event): &(usize, Event)| *of == context && event.is_timed == is_timed;
        if let Some(place) = self.0.iter().rposition(fits) {
            return Some(self.0.swap_remove(place).1);
        }
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the calling thread has the context; `handle` is the place for the answer.
        let status = unsafe { create_event(&raw mut handle, if is_timed { 0 } else { NO_TIMING }) };
        (status == SUCCESS).then_some(Event { handle, is_timed })
    }
}

impl Fence {
    /// The events it is made of.
    pub fn events(&self) -> impl Iterator<Item = Event> + use<> {
        self.measures.map(|(begin, _)| begin).into_iter().chain([self.end])
    }

    /// Whether it has been reached; learns what was measured by it.
    fn is_reached(&self, costs: &Costs) -> bool {
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
        let count = of_lane.iter().take_while(|question| question.fence.is_reached(costs)).count();
        left_at_work += u32::from(is_left && count < of_lane.len());
        reached.push((place, count));
    }
    reached
}

/// Makes a context the calling thread's current one.
pub fn enter(context: usize) {
    // SAFETY: none, or a context that lives: lanes are forgotten before theirs goes.
    unsafe { set_current(std::ptr::with_exposed_provenance_mut(context)) };
}
