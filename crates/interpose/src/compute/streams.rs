//! Streams: which one a program means.

use crate::cuda::{Handle, SUCCESS};
use crate::entry::library::driver_functions;
use crate::memory::contexts;

driver_functions! { Cuda:
    is_capturing = c"cuStreamIsCapturing" (stream: Handle, status: *mut i32);
    is_capturing_per_thread = c"cuStreamIsCapturing_ptsz" (stream: Handle, status: *mut i32);
}

/// A stream as a program names it. By the same name, functions of the per-thread form may mean another one.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub handle: Handle,
    pub per_thread: bool,
}

/// Which of all streams that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Which {
    handle: usize,
    /// Each context has default streams of its own,
    context: usize,
    /// and one of them for each thread.
    thread: libc::pthread_t,
}

/// Handles that mean a default stream; null means one or the other, by the form of the function.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

impl Stream {
    /// Whether work given to it now is recorded and not run.
    pub fn is_capturing(self) -> bool {
        let mut status = 0;
        // SAFETY: the stream is the program's, `status` the place for the answer.
        let asked = unsafe {
            if self.per_thread {
                is_capturing_per_thread(self.handle, &raw mut status)
            } else {
                is_capturing(self.handle, &raw mut status)
            }
        };
        // Not allowed to ask, as for the legacy stream beside a capture: then it is not for us to touch either.
        asked != SUCCESS || status != 0
    }

    /// Which one the calling thread means.
    pub fn which(self) -> Which {
        match (self.handle.addr(), self.per_thread) {
            (0, true) | (PER_THREAD, _) => {
                // SAFETY: no arguments, no failure.
                let thread = unsafe { libc::pthread_self() };
                Which { handle: PER_THREAD, context: contexts::current(), thread }
            }
            (0, false) | (LEGACY, _) => Which { handle: LEGACY, context: contexts::current(), thread: 0 },
            (handle, _) => Which { handle, context: 0, thread: 0 },
        }
    }
}

impl Which {
    /// Whether only the thread it belongs to can put something into it.
    pub fn is_of_a_thread(self) -> bool {
        self.thread != 0
    }

    /// A number that no other stream has.
    pub fn mark(self) -> u64 {
        // One that was made has an address and no context here, a default stream has a context and no address: turned into the high
        // bits, which addresses do not have, the one is never the other.
        self.handle as u64 ^ (self.context as u64).rotate_left(17) ^ self.thread.rotate_left(34)
    }

    /// Whether it is the stream a program made and knows by `handle`.
    pub fn is_made(self, handle: Handle) -> bool {
        self.context == 0 && self.handle == handle.addr()
    }

    /// The stream, for functions of the plain form. Not for a thread's own.
    pub fn by_handle(self) -> Handle {
        std::ptr::without_provenance_mut(self.handle)
    }
}
