//! Sleeping on a word that another thread or process changes, and the clock that all processes
//! share.

use std::sync::atomic::AtomicU32;

/// Returns the time in nanoseconds on the monotonic clock, which all processes of a host share.
#[must_use]
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable for the duration of the call, and the monotonic clock exists on
    // every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Sleeps until `word` differs from `value`, another thread calls [`wake`], or `nanoseconds` have
/// passed.
pub fn wait(word: &AtomicU32, value: u32, nanoseconds: u64) {
    let timeout = timespec(nanoseconds);
    // SAFETY: `word` and `timeout` outlive the call, and the kernel only reads them.
    unsafe {
        libc::syscall(libc::SYS_futex, std::ptr::from_ref(word), libc::FUTEX_WAIT, value, &raw const timeout);
    }
}

/// Wakes all threads that sleep on `word`.
pub fn wake(word: &AtomicU32) {
    // SAFETY: `word` outlives the call, and the kernel only uses its address.
    unsafe { libc::syscall(libc::SYS_futex, std::ptr::from_ref(word), libc::FUTEX_WAKE, i32::MAX) };
}

/// Sleeps until one of the files has a requested event or `nanoseconds` have passed. Returns
/// whether one has.
pub fn poll(files: &mut [libc::pollfd], nanoseconds: u64) -> bool {
    let timeout = timespec(nanoseconds);
    // SAFETY: `files` has as many entries as its length says, `timeout` is valid, and a null signal
    // mask is allowed.
    let ready = unsafe {
        libc::ppoll(files.as_mut_ptr(), files.len() as libc::nfds_t, &raw const timeout, std::ptr::null())
    };
    ready > 0
}

/// Sleeps for `nanoseconds`, or less if a signal arrives.
pub fn sleep(nanoseconds: u64) {
    let time = timespec(nanoseconds);
    // SAFETY: `time` is valid, and the kernel accepts a null pointer for the remaining time.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
}

#[allow(clippy::cast_possible_wrap, reason = "seconds and nanoseconds are far below the largest value")]
fn timespec(nanoseconds: u64) -> libc::timespec {
    libc::timespec {
        tv_sec: (nanoseconds / 1_000_000_000) as libc::time_t,
        tv_nsec: (nanoseconds % 1_000_000_000) as _,
    }
}
