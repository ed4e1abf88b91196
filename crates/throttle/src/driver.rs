//! The edge to the GPU driver: the few calls that the limiter needs.

use crate::nanos::Nanos;

/// The calls to the GPU driver. The library implements them by CUDA, the tests by a simulated GPU on
/// virtual time.
pub trait Driver {
    /// A driver event that the limiter created.
    type DriverEvent: Copy + PartialEq + Send;

    /// The mode in which a thread's calls relate to stream captures.
    type CaptureMode;

    /// Returns the time on the host's clock.
    fn host_time(&self) -> Nanos;

    /// Returns the current context of the calling thread.
    fn current_context(&self) -> ContextId;

    /// Makes a context the current one of the calling thread.
    fn set_context(&self, context: ContextId);

    /// Creates an event in the current context. A timed one reports when it happened.
    fn create_event(&self, is_timed: bool) -> Option<Self::DriverEvent>;

    /// Puts an event behind all work of a stream, which is not the per-thread stream of another thread.
    /// Returns false if the driver refuses.
    fn record(&self, event: Self::DriverEvent, stream: StreamId) -> bool;

    /// Returns true if all work before the event has ended, well or not.
    fn is_reached(&self, event: Self::DriverEvent) -> bool;

    /// Returns the milliseconds between two timed events that were reached.
    fn elapsed_ms(&self, from: Self::DriverEvent, to: Self::DriverEvent) -> Option<f32>;

    /// Returns true if work for this stream is captured into a graph instead of run.
    fn is_capturing(&self, stream: StreamName) -> bool;

    /// Puts the calling thread into the mode in which its calls do not disturb captures of other
    /// threads. Returns the mode before.
    fn relax(&self) -> Self::CaptureMode;

    /// Returns the calling thread to the mode that [`Driver::relax`] reported.
    fn restore(&self, mode: Self::CaptureMode);
}

/// A driver context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ContextId(pub usize);

impl ContextId {
    /// The calling thread has no context.
    pub const NONE: Self = Self(0);
}

/// A stream as a program names it. The per-thread form of a function may mean another stream by the
/// same handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamName {
    /// The driver's handle as a number.
    pub handle: usize,
    /// True if the function has the per-thread form.
    pub per_thread: bool,
}

/// The identity of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId {
    /// The handle of a created stream. The context of a default stream: each context has streams of its own.
    address: usize,
    /// [`CREATED`], [`SHARED_DEFAULT`], or the thread of a per-thread default stream.
    owner: u64,
}

/// A stream that the program created.
const CREATED: u64 = 0;

/// The default stream that all threads of a context share. No thread has this number.
const SHARED_DEFAULT: u64 = 1;

/// The handle of the default stream that all threads of a context share.
const LEGACY: usize = 1;

/// The handle of the calling thread's default stream.
const PER_THREAD: usize = 2;

impl StreamName {
    /// Returns the identity of the stream that the calling thread means. A null handle is one default
    /// stream or the other, depending on the form of the function. `context` and `thread` return the
    /// caller's context and thread; they are called only where the answer depends on them.
    #[inline]
    pub fn id(self, context: impl FnOnce() -> ContextId, thread: impl FnOnce() -> u64) -> StreamId {
        if self.handle > PER_THREAD {
            StreamId { address: self.handle, owner: CREATED }
        } else {
            self.id_of_default(context, thread)
        }
    }

    #[inline(never)]
    fn id_of_default(self, context: impl FnOnce() -> ContextId, thread: impl FnOnce() -> u64) -> StreamId {
        let is_per_thread = self.handle == PER_THREAD || (self.handle == 0 && self.per_thread);
        StreamId { address: context().0, owner: if is_per_thread { thread() } else { SHARED_DEFAULT } }
    }
}

impl StreamId {
    /// Returns true if only one thread can put something into this stream.
    #[inline]
    #[must_use]
    pub fn is_per_thread(self) -> bool {
        self.owner > SHARED_DEFAULT
    }

    /// Returns true if this is the stream that the program created and knows by `handle`.
    #[must_use]
    pub fn is_created(self, handle: usize) -> bool {
        self == Self { address: handle, owner: CREATED }
    }

    /// Returns a handle that names the stream in functions of either form. The handle of a per-thread stream
    /// names the stream of the calling thread.
    #[must_use]
    pub fn handle(self) -> usize {
        match self.owner {
            CREATED => self.address,
            SHARED_DEFAULT => LEGACY,
            _ => PER_THREAD,
        }
    }
}

/// Runs `action` in relaxed mode.
pub(crate) fn relaxed<D: Driver>(driver: &D, action: impl FnOnce()) {
    let before = driver.relax();
    action();
    driver.restore(before);
}

/// Runs `action` in a context, which need not be the calling thread's current one.
pub(crate) fn within<D: Driver>(driver: &D, context: ContextId, action: impl FnOnce()) {
    let before = driver.current_context();
    if context == before {
        return action();
    }
    driver.set_context(context);
    action();
    driver.set_context(before);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(handle: usize, per_thread: bool, context: usize, thread: u64) -> StreamId {
        StreamName { handle, per_thread }.id(|| ContextId(context), || thread)
    }

    #[test]
    fn a_null_handle_is_the_default_stream_of_the_functions_form() {
        assert_eq!(id(0, false, 0x10, 7), id(LEGACY, true, 0x10, 8));
        assert_eq!(id(0, true, 0x10, 7), id(PER_THREAD, false, 0x10, 7));
        assert_ne!(id(0, true, 0x10, 7), id(0, true, 0x10, 8), "each thread has its own");
        assert_ne!(id(0, false, 0x10, 7), id(0, false, 0x20, 7), "each context has its own");
        assert_eq!(id(0x5000, false, 0x10, 7), id(0x5000, true, 0x20, 8), "a created stream is one stream");
    }

    #[test]
    fn only_per_thread_streams_belong_to_a_thread() {
        assert!(id(0, true, 0x10, 7).is_per_thread());
        assert!(!id(0, false, 0x10, 7).is_per_thread() && !id(0x5000, true, 0x10, 7).is_per_thread());
        assert!(id(0x5000, false, 0x10, 7).is_created(0x5000));
        assert!(!id(0, false, 0x10, 7).is_created(LEGACY));
        let handles =
            [(0x5000, false), (0, false), (0, true)].map(|(handle, own)| id(handle, own, 0x10, 7).handle());
        assert_eq!(handles, [0x5000, LEGACY, PER_THREAD]);
    }
}
