//! Events of ours behind and around launches: when one has happened, all before it in its stream has ended.

use super::streams::Stream;
use crate::cuda::{Handle, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::memory::contexts;

driver_functions! { Cuda:
    create_event = c"cuEventCreate" (event: *mut Handle, flags: u32);
    record_event = c"cuEventRecord" (event: Handle, stream: Handle);
    record_event_per_thread = c"cuEventRecord_ptsz" (event: Handle, stream: Handle);
    query_event = c"cuEventQuery" (event: Handle);
    elapsed_v1 = c"cuEventElapsedTime" (milliseconds: *mut f32, from: Handle, to: Handle);
    set_current = c"cuCtxSetCurrent" (context: Handle);
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode" (mode: *mut i32);
}

/// In this mode a thread's calls do not disturb captures of others.
const RELAXED: i32 = 2;

const NOT_READY: Status = 600;

/// For events that only tell that something has ended: far cheaper to record.
const NO_TIMING: u32 = 2;

/// When so many streams that are gone are still at work, no more of those are asked: nobody waits for them.
pub const LEFT_ASKED: usize = 2;

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
    /// No other has it.
    pub number: u64,
    pub end: Event,
    /// Where one launch is measured: the event before it, and its kind.
    pub measures: Option<(Event, u64)>,
    /// What lies before it and behind the one before, by estimate.
    pub estimate: u64,
}

/// A fence that our own thread asks for.
pub struct Question {
    /// The place of its lane.
    pub place: usize,
    pub context: usize,
    /// Whether the stream is gone.
    pub is_left: bool,
    pub fence: Fence,
}

/// A fence that has been reached.
pub struct Answer {
    pub place: usize,
    pub number: u64,
    pub found: Found,
}

/// What was measured by a fence: the kind of work, and the milliseconds it took.
pub type Found = Option<(u64, f32)>;

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

    /// What was measured by it, once it has been reached. The calling thread must be in its context, and relaxed.
    pub fn ask(&self) -> Option<Found> {
        // SAFETY: an event of ours, recorded. An error of the program's work ends it too.
        let is_reached = unsafe { query_event(self.end.handle) } != NOT_READY;
        is_reached.then(|| {
            let ((begin, key), mut milliseconds) = (self.measures?, 0.0);
            // SAFETY: two recorded events of ours; `milliseconds` is the place for the answer.
            let status = unsafe { elapsed_v1(&raw mut milliseconds, begin.handle, self.end.handle) };
            (status == SUCCESS).then_some((key, milliseconds))
        })
    }
}

/// Asks the driver which fences have been reached. Launches wait for nothing meanwhile: this thread, which the driver may keep
/// waiting, holds no lock that they need. On our own thread.
pub fn ask(questions: &[Question]) -> Vec<Answer> {
    let (mut entered, mut left_at_work, mut answers) = (None, 0, Vec::new());
    for of_lane in questions.chunk_by(|one, next| one.place == next.place) {
        let Question { place, context, is_left, .. } = of_lane[0];
        if is_left && left_at_work == LEFT_ASKED {
            continue;
        }
        if entered.replace(context) != Some(context) {
            enter(context);
        }
        let before = answers.len();
        answers.extend(of_lane.iter().map_while(|question| {
            let number = question.fence.number;
            question.fence.ask().map(|found| Answer { place, number, found })
        }));
        left_at_work += usize::from(is_left && answers.len() - before < of_lane.len());
    }
    answers
}

/// Puts the calling thread into relaxed mode and returns the one it was in; none where the driver knows no modes yet.
pub fn relax() -> Option<i32> {
    exchange_mode(RELAXED)
}

/// Runs `action` in relaxed mode.
pub fn relaxed(action: impl FnOnce()) {
    let before = relax();
    action();
    before.map(exchange_mode);
}

fn exchange_mode(mut mode: i32) -> Option<i32> {
    // SAFETY: `mode` is read and written.
    (unsafe { exchange_capture_mode(&raw mut mode) } == SUCCESS).then_some(mode)
}

/// Runs `action` in a context, which need not be the calling thread's current one.
pub fn within(context: usize, action: impl FnOnce()) {
    let before = contexts::current();
    if context == before {
        return action();
    }
    enter(context);
    action();
    enter(before);
}

/// Makes a context the calling thread's current one.
pub fn enter(context: usize) {
    // SAFETY: none, or a context that lives: lanes are forgotten before theirs goes.
    unsafe { set_current(std::ptr::with_exposed_provenance_mut(context)) };
}
