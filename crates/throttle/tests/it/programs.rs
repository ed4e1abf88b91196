//! The kinds of work that programs do.

use tessera_throttle::Nanos;
use tessera_throttle::driver::StreamName;

/// What each thread of a program does, over and over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) threads: usize,
    /// Length of a kernel. Each further one of a round is longer by this factor.
    pub(crate) kernel: Nanos,
    /// Kernels of different lengths, launched in turn.
    pub(crate) kinds: u64,
    /// Streams of each thread, used in turn.
    pub(crate) streams: usize,
    /// Launches after which the thread waits for all of its work, or 0 for never.
    pub(crate) sync_every: u64,
    /// Time without work after each such wait.
    pub(crate) pause: Nanos,
    /// Time that the thread needs for each launch.
    pub(crate) launch_time: Nanos,
    /// Launches after which the thread does other things, while its work runs, or 0 for never.
    pub(crate) thinks_every: u64,
    /// Time for those other things.
    pub(crate) thinking: Nanos,
    pub(crate) call: Call,
    /// True if kernels of different streams run concurrently.
    pub(crate) overlaps: bool,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// The call returns at once.
    Queued,
    /// The call returns when the work has ended, like a copy from the host.
    Blocking,
    /// The work goes to the default stream of the thread.
    PerThread,
    /// Each kernel gets a stream of its own, which is destroyed at once.
    NewStream,
}

/// Time that a thread needs for one launch, on a real driver.
const LAUNCH_TIME: Nanos = Nanos::from_micros(2);

/// Kernels of 0.2 ms in one stream, as fast as they can be launched.
pub(crate) const ONE: Program = Program {
    name: "",
    threads: 1,
    kernel: Nanos::from_micros(200),
    kinds: 1,
    streams: 1,
    sync_every: 0,
    pause: Nanos::ZERO,
    launch_time: LAUNCH_TIME,
    thinks_every: 0,
    thinking: Nanos::ZERO,
    call: Call::Queued,
    overlaps: false,
};

/// Every kind of work that the simulated driver knows.
pub(crate) const PROGRAMS: &[Program] = &[
    Program { name: "tiny kernels", kernel: Nanos::from_micros(10), sync_every: 1_000, ..ONE },
    Program { name: "big kernels", kernel: Nanos::from_millis(1), sync_every: 20, ..ONE },
    Program { name: "long kernels", kernel: Nanos::from_millis(15), sync_every: 4, ..ONE },
    Program { name: "a deep queue", ..ONE },
    Program { name: "several streams", streams: 4, sync_every: 64, overlaps: true, ..ONE },
    Program { name: "streams that take turns", streams: 4, ..ONE },
    Program { name: "several threads", threads: 3, sync_every: 10, overlaps: true, ..ONE },
    Program { name: "threads in their own streams", threads: 3, call: Call::PerThread, ..ONE },
    // A graph is one launch of much work.
    Program { name: "graphs", kernel: Nanos::from_millis(4), sync_every: 1, ..ONE },
    Program { name: "synchronous kernels", kernel: Nanos::from_millis(1), sync_every: 1, ..ONE },
    Program { name: "blocking copies", kernel: Nanos::from_millis(1), call: Call::Blocking, ..ONE },
    Program { name: "stream churn", kernel: Nanos::from_millis(1), call: Call::NewStream, ..ONE },
    Program { name: "mixed kernels", kinds: 5, sync_every: 50, ..ONE },
];

/// Programs that do work of their own between launches, as real ones do.
pub(crate) const HOST_PROGRAMS: &[Program] = &[
    Program {
        name: "matrix products and work of the host",
        kernel: Nanos::from_millis(1),
        thinks_every: 20,
        thinking: Nanos::from_millis(8),
        ..ONE
    },
    Program {
        name: "training with large batches",
        kernel: Nanos::from_micros(100),
        kinds: 4,
        launch_time: Nanos::from_micros(90),
        sync_every: 220,
        ..ONE
    },
    Program {
        name: "training with small batches",
        kernel: Nanos::from_micros(25),
        kinds: 4,
        launch_time: Nanos::from_micros(100),
        sync_every: 240,
        ..ONE
    },
    Program {
        name: "decoding of single requests",
        kernel: Nanos::from_micros(6),
        launch_time: Nanos::from_micros(44),
        sync_every: 60,
        pause: Nanos::from_micros(100),
        ..ONE
    },
];

impl Program {
    /// Returns the length of a thread's launch by its number.
    pub(crate) fn length(&self, launch: u64) -> Nanos {
        self.kernel * (launch % self.kinds + 1)
    }

    /// Returns the key of equal work.
    pub(crate) fn key(&self, launch: u64) -> u64 {
        (launch % self.kinds + 1).wrapping_mul(0x517c_c1b7_2722_0a95)
    }

    /// Returns the stream of a thread's launch.
    pub(crate) fn stream(&self, thread: usize, launch: u64) -> StreamName {
        let number = match self.call {
            Call::PerThread => return StreamName { handle: 0, per_thread: true },
            Call::NewStream => launch,
            _ => launch % self.streams as u64,
        };
        let handle = 0x10_0000 * (thread + 1) + 0x10 * usize::try_from(number).unwrap();
        StreamName { handle, per_thread: false }
    }
}
