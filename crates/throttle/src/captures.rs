//! Counts the stream captures that run. The monitor thread records no event while a capture runs,
//! because the event might end up in the capture.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The captures of a process.
#[derive(Debug, Default)]
pub struct Captures {
    /// True once a capture was seen. Before that no launch asks the driver whether its stream captures.
    were_seen: AtomicBool,
    running: AtomicU32,
}

impl Captures {
    /// Returns true if the process ever captured.
    pub fn were_seen(&self) -> bool {
        self.were_seen.load(Ordering::Relaxed)
    }

    /// Counts a capture that is about to begin. The caller then locks and unlocks the stream queues of
    /// every gate: the monitor thread may be recording an event under such a lock.
    pub fn begin(&self) {
        self.were_seen.store(true, Ordering::SeqCst);
        self.running.fetch_add(1, Ordering::SeqCst);
    }

    /// Uncounts a capture that has ended. A program may end a capture that it never began, so the count
    /// stops at zero.
    pub fn end(&self) {
        let fewer = |captures: u32| captures.checked_sub(1);
        let _ = self.running.fetch_update(Ordering::SeqCst, Ordering::Relaxed, fewer);
    }

    /// Returns true if a capture runs. The answer "no" stays valid while the caller holds the lock of a
    /// gate's stream queues.
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captures_are_counted_and_never_below_zero() {
        let captures = Captures::default();
        captures.end();
        assert!(!captures.were_seen() && !captures.is_running());
        captures.begin();
        captures.begin();
        captures.end();
        assert!(captures.is_running());
        captures.end();
        assert!(captures.were_seen() && !captures.is_running());
    }
}
