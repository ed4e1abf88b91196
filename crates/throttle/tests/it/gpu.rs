//! A simulated GPU on virtual time: a kernel is a length of time, an event is a moment.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use tessera_throttle::Nanos;
use tessera_throttle::driver::{ContextId, Driver, StreamId, StreamName};

/// The GPU, shared by all processes.
#[derive(Debug, Default)]
pub(crate) struct Gpu {
    pub(crate) now: Cell<Nanos>,
    /// True if kernels of different streams run concurrently, as small ones do on a real GPU.
    pub(crate) overlaps: Cell<bool>,
    /// End of all kernels queued so far.
    busy_until: Cell<Nanos>,
    /// Begin and end of every kernel, with the container that launched it.
    kernels: RefCell<Vec<(usize, Nanos, Nanos)>>,
    next_event: Cell<u32>,
}

/// The driver of one process.
#[derive(Debug)]
pub(crate) struct SimulatedDriver {
    gpu: Rc<Gpu>,
    container: usize,
    context: Cell<ContextId>,
    /// The thread that makes the calls.
    pub(crate) thread: Cell<u64>,
    /// When the last kernel of each stream ends.
    streams: RefCell<HashMap<StreamId, Nanos>>,
    events: RefCell<HashMap<u32, Nanos>>,
    /// Events recorded so far.
    pub(crate) recorded: Cell<u64>,
}

/// The number of the first thread of a process.
pub(crate) const MAIN_THREAD: u64 = 100;

/// The one context of each process.
const CONTEXT: ContextId = ContextId(0x1000);

impl Gpu {
    /// Returns the time until `end` in which kernels of a container ran, concurrent ones counted once.
    pub(crate) fn busy(&self, container: usize, begin: Nanos, end: Nanos) -> Nanos {
        let kernels = self.kernels.borrow();
        let mut own: Vec<_> = kernels.iter().filter(|kernel| kernel.0 == container).collect();
        own.sort_by_key(|kernel| kernel.1);
        let (mut busy, mut counted) = (Nanos::ZERO, begin);
        for &&(_, from, to) in &own {
            let (from, to) = (from.max(counted), to.min(end));
            busy += to - from;
            counted = counted.max(to);
        }
        busy
    }

    /// Returns the kernels of a container that ended between two moments.
    pub(crate) fn completed(&self, container: usize, begin: Nanos, end: Nanos) -> usize {
        let kernels = self.kernels.borrow();
        kernels.iter().filter(|&&(of, _, to)| of == container && to > begin && to <= end).count()
    }

    /// Returns the work that is queued at this moment.
    pub(crate) fn queued(&self) -> Nanos {
        self.busy_until.get() - self.now.get()
    }
}

impl SimulatedDriver {
    pub(crate) fn new(gpu: Rc<Gpu>, container: usize) -> Self {
        Self {
            gpu,
            container,
            context: Cell::new(CONTEXT),
            thread: Cell::new(MAIN_THREAD),
            streams: RefCell::default(),
            events: RefCell::default(),
            recorded: Cell::new(0),
        }
    }

    pub(crate) fn id(&self, stream: StreamName) -> StreamId {
        stream.id(|| self.context.get(), || self.thread.get())
    }

    /// Queues a kernel; returns when it will have ended.
    pub(crate) fn launch(&self, stream: StreamName, length: Nanos) -> Nanos {
        let gpu = &self.gpu;
        let mut streams = self.streams.borrow_mut();
        let end_of_stream = streams.entry(self.id(stream)).or_default();
        let begin = gpu.now.get().max(*end_of_stream);
        let begin = if gpu.overlaps.get() { begin } else { begin.max(gpu.busy_until.get()) };
        *end_of_stream = begin + length;
        gpu.busy_until.set(gpu.busy_until.get().max(*end_of_stream));
        gpu.kernels.borrow_mut().push((self.container, begin, *end_of_stream));
        *end_of_stream
    }

    /// Forgets a stream. Its work runs to the end.
    pub(crate) fn destroy(&self, stream: StreamName) {
        self.streams.borrow_mut().remove(&self.id(stream));
    }
}

impl Driver for SimulatedDriver {
    type CaptureMode = ();
    type DriverEvent = u32;

    fn current_context(&self) -> ContextId {
        self.context.get()
    }

    fn set_context(&self, context: ContextId) {
        assert_eq!(context, CONTEXT, "there is no other context");
        self.context.set(context);
    }

    fn create_event(&self, _is_timed: bool) -> Option<u32> {
        self.gpu.next_event.set(self.gpu.next_event.get() + 1);
        Some(self.gpu.next_event.get())
    }

    fn record(&self, event: u32, stream: StreamId) -> bool {
        let end = self.streams.borrow().get(&stream).copied().unwrap_or_default();
        self.events.borrow_mut().insert(event, end.max(self.gpu.now.get()));
        self.recorded.set(self.recorded.get() + 1);
        true
    }

    fn is_reached(&self, event: u32) -> bool {
        self.events.borrow()[&event] <= self.gpu.now.get()
    }

    fn elapsed_ms(&self, from: u32, to: u32) -> Option<f32> {
        let events = self.events.borrow();
        Some((events[&to] - events[&from]).0 as f32 / 1e6)
    }

    fn is_capturing(&self, _stream: StreamName) -> bool {
        false
    }

    fn relax(&self) {}

    fn restore(&self, (): ()) {}
}
