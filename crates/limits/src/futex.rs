//! Sleeping on a word that another thread or process changes, and the clock for it.

use std::sync::atomic::AtomicU32;

/// Nanoseconds on the monotonic clock, which all processes of a machine share.
#[must_use]
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Sleeps until `word` is no longer `value`, somebody wakes it, or `nanoseconds` have passed.
pub fn wait(word: &AtomicU32, value: u32, nanoseconds: u64) {
    let timeout = duration(nanoseconds);
    // SAFETY: the word lives as long as the call; the kernel only reads it.
    unsafe {
        libc::syscall(libc::SYS_futex, std::ptr::from_ref(word), libc::FUTEX_WAIT, value, &raw const timeout);
    }
}

/// Wakes all that sleep on `word`.
pub fn wake(word: &AtomicU32) {
    // SAFETY: the word lives as long as the call; the kernel only uses its address.
    unsafe { libc::syscall(libc::SYS_futex, std::ptr::from_ref(word), libc::FUTEX_WAKE, i32::MAX) };
}

/// Sleeps until one of the files is as it is asked to be, or `nanoseconds` have passed; whether one is.
pub fn poll(files: &mut [libc::pollfd], nanoseconds: u64) -> bool {
    let timeout = duration(nanoseconds);
    // SAFETY: as many entries as told, a valid time, no change of signals.
    let ready = unsafe {
        libc::ppoll(files.as_mut_ptr(), files.len() as libc::nfds_t, &raw const timeout, std::ptr::null())
    };
    ready > 0
}

/// Sleeps for a while.
pub fn sleep(nanoseconds: u64) {
    let time = duration(nanoseconds);
    // SAFETY: `time` is valid; the rest after a signal is not asked for.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
}

#[allow(clippy::cast_possible_wrap, reason = "both parts are far below the largest number")]
fn duration(nanoseconds: u64) -> libc::timespec {
    libc::timespec {
        tv_sec: (nanoseconds / 1_000_000_000) as libc::time_t,
        tv_nsec: (nanoseconds % 1_000_000_000) as _,
    }
}
