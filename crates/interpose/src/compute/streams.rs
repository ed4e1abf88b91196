//! Streams as programs name them.

use tessera_throttle::driver::{ContextId, Driver, StreamId, StreamName};

use super::driver::CudaDriver;
use crate::cuda::Handle;
use crate::memory::contexts;

/// A stream as a program names it. Functions of the per-thread form may mean another stream by the same
/// handle.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub handle: Handle,
    pub per_thread: bool,
}

impl Stream {
    /// Returns true if work for this stream is captured into a graph instead of run.
    pub fn is_capturing(self) -> bool {
        CudaDriver.is_capturing(self.name())
    }

    /// Returns the name of the stream without the pointer.
    pub fn name(self) -> StreamName {
        StreamName { handle: self.handle.addr(), per_thread: self.per_thread }
    }

    /// Returns the identity of the stream that the calling thread means.
    pub fn id(self) -> StreamId {
        // SAFETY: the function takes no arguments and cannot fail.
        self.name().id(|| ContextId(contexts::current()), || unsafe { libc::pthread_self() })
    }
}
