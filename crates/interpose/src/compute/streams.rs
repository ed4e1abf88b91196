//! Streams as programs name them.

use tessera_throttle::driver::{ContextId, Driver, StreamId, StreamName};

use super::driver::CudaDriver;
use crate::cuda::Handle;
use crate::memory::contexts;

/// A stream as a program names it. The per-thread form of a function may use another stream for the
/// same handle.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub handle: Handle,
    pub per_thread: bool,
}

impl Stream {
    /// Returns true if the driver captures work for this stream into a graph instead of running it. Out of
    /// line, because launches of a program that never captured do not call it.
    #[inline(never)]
    pub fn is_capturing(self) -> bool {
        CudaDriver.is_capturing(self.name())
    }

    /// Returns the name of the stream with the handle as an address.
    pub fn name(self) -> StreamName {
        StreamName { handle: self.handle.addr(), per_thread: self.per_thread }
    }

    /// Returns the identity of the stream for the calling thread and its current context.
    pub fn id(self) -> StreamId {
        // SAFETY: the function takes no arguments and cannot fail.
        self.name().id(|| ContextId(contexts::current()), || unsafe { libc::pthread_self() })
    }
}
