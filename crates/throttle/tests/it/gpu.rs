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
    /// The kernels of each container.
    kernels: RefCell<Vec<ContainerKernels>>,
    next_event: Cell<u32>,
}

/// What a container has done on the GPU so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Work {
    /// Time in which its kernels ran, concurrent ones counted once.
    pub(crate) busy: Nanos,
    /// Kernels that have ended.
    pub(crate) completed: u64,
}

/// The kernels of a container. Only those that have not ended are kept one by one.
#[derive(Debug, Default)]
struct ContainerKernels {
    /// Begin and end of each kernel that had not ended when the kernels were last counted.
    pending: Vec<(Nanos, Nanos)>,
    work: Work,
    /// Moment up to which busy time is counted.
    counted_until: Nanos,
    /// Number of pending kernels from which on they are counted again.
    most: usize,
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

impl ContainerKernels {
    /// Counts the work up to now. Kernels that are launched later begin later.
    fn count(&mut self, now: Nanos) {
        self.pending.sort_unstable();
        for &(begin, end) in &self.pending {
            let (from, to) = (begin.max(self.counted_until), end.min(now));
            self.work.busy += to - from;
            self.counted_until = self.counted_until.max(to);
            self.work.completed += u64::from(end <= now);
        }
        self.pending.retain(|&(_, end)| end > now);
        self.most = self.pending.len() * 2 + 1_000;
    }
}

impl Gpu {
    /// Returns what a container has done until now.
    pub(crate) fn work(&self, container: usize) -> Work {
        let mut kernels = self.kernels.borrow_mut();
        let Some(own) = kernels.get_mut(container) else { return Work::default() };
        own.count(self.now.get());
        own.work
    }

    /// Adds a kernel of a container.
    fn add(&self, container: usize, begin: Nanos, end: Nanos) {
        let mut kernels = self.kernels.borrow_mut();
        if kernels.len() <= container {
            kernels.resize_with(container + 1, ContainerKernels::default);
        }
        let own = &mut kernels[container];
        own.pending.push((begin, end));
        if own.pending.len() > own.most {
            own.count(self.now.get());
        }
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
        gpu.add(self.container, begin, *end_of_stream);
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

    fn host_time(&self) -> Nanos {
        self.gpu.now.get()
    }

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
