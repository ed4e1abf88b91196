//! Samples stacks by a timer that counts processor time.
//!
//! The kernel sends SIGPROF to a thread that is running. The handler walks its stack with the unwinder that panics
//! use, and stores the addresses in a buffer that exists before the timer starts. The handler allocates nothing,
//! takes no lock and makes no system call.

#![allow(unsafe_code, reason = "signal handlers, timers and the unwinder have no safe interface")]

use std::{
    ffi::{c_int, c_void},
    fs, io, ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    thread,
    time::{Duration, SystemTime},
};

use crate::{mappings, report::Profile};

/// Longest time for which a profile is recorded.
pub const MAX_DURATION: Duration = Duration::from_secs(60);

/// Largest number of addresses of a stack.
const MAX_FRAMES: usize = 64;

/// Largest number of samples of a profile. The buffer of all samples takes about 6 MiB.
const MAX_SAMPLES: usize = 12_000;

/// Shortest processor time between two samples, as of other profilers.
const MIN_PERIOD: Duration = Duration::from_millis(10);

/// Time between two checks whether handlers have ended.
const HANDLER_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Reason why no profile was recorded.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Another profile is being recorded.
    #[error("another profile is being recorded; try again when it is done")]
    Busy,
    /// The C library is too old for a walk of the stack in a signal handler.
    #[error("the C library has no lock-free way to find code; profiles need glibc 2.35")]
    OldLibrary,
    /// A call to the kernel failed.
    #[error("cannot start the profiling timer")]
    Kernel(#[source] io::Error),
}

/// Samples of one recording. The first number of each sample is the number of its addresses.
struct Buffer {
    next: AtomicUsize,
    words: Box<[AtomicUsize]>,
}

/// Words of a sample in the buffer.
const STRIDE: usize = MAX_FRAMES + 1;

/// True while a profile is recorded.
static IS_BUSY: AtomicBool = AtomicBool::new(false);
/// Buffer of the current recording. Null if there is none.
static BUFFER: AtomicPtr<Buffer> = AtomicPtr::new(ptr::null_mut());
/// Number of threads in the handler.
static IN_HANDLER: AtomicUsize = AtomicUsize::new(0);

/// Records a profile for this time, at most [`MAX_DURATION`]. Blocks the calling thread.
pub fn record(duration: Duration) -> Result<Profile, ProfileError> {
    if IS_BUSY.swap(true, Ordering::SeqCst) {
        return Err(ProfileError::Busy);
    }
    let profile = record_alone(duration.min(MAX_DURATION));
    IS_BUSY.store(false, Ordering::SeqCst);
    profile
}

fn record_alone(duration: Duration) -> Result<Profile, ProfileError> {
    if !has_lock_free_lookup() {
        return Err(ProfileError::OldLibrary);
    }
    install_handler().map_err(ProfileError::Kernel)?;
    let began = SystemTime::now();
    let period = period(duration, thread::available_parallelism().map_or(1, usize::from));
    let words = (0..MAX_SAMPLES * STRIDE).map(|_| AtomicUsize::new(0)).collect();
    let buffer = Box::into_raw(Box::new(Buffer { next: AtomicUsize::new(0), words }));
    BUFFER.store(buffer, Ordering::SeqCst);
    let started = set_timer(period);
    if started.is_ok() {
        thread::sleep(duration);
    }
    // A timer that was not started needs no end, and an error at its end leaves signals that find no buffer.
    let _stopped = set_timer(Duration::ZERO);
    BUFFER.store(ptr::null_mut(), Ordering::SeqCst);
    while IN_HANDLER.load(Ordering::SeqCst) > 0 {
        thread::sleep(HANDLER_POLL_INTERVAL);
    }
    // SAFETY: the pointer comes from `Box::into_raw` above and is freed only here. No handler uses it: a handler
    // that found the pointer counted itself before, and none is left; later handlers find null.
    let buffer = unsafe { Box::from_raw(buffer) };
    started.map_err(ProfileError::Kernel)?;
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut mappings = mappings::parse(&maps);
    let program = std::env::current_exe().unwrap_or_default();
    mappings.sort_by_key(|mapping| program.as_os_str() != mapping.file.as_str());
    Ok(Profile { began, duration, period, stacks: buffer.stacks(), mappings })
}

/// Returns the processor time between two samples, such that those of all processors fit into the buffer.
fn period(duration: Duration, processors: usize) -> Duration {
    let processors = u32::try_from(processors).unwrap_or(u32::MAX);
    let samples = u32::try_from(MAX_SAMPLES).unwrap_or(u32::MAX);
    MIN_PERIOD.max(duration.saturating_mul(processors) / samples)
}

impl Buffer {
    /// Stores a stack, unless the buffer is full. The innermost address is exact, the others are those to
    /// which calls return.
    fn add(&self, addresses: &[usize]) {
        let place = self.next.fetch_add(1, Ordering::Relaxed) * STRIDE;
        let Some([count, words @ ..]) = self.words.get(place..place + STRIDE) else { return };
        for (word, address) in words.iter().zip(addresses) {
            word.store(*address, Ordering::Relaxed);
        }
        count.store(addresses.len().min(MAX_FRAMES), Ordering::Relaxed);
    }

    fn stacks(&self) -> Vec<Vec<u64>> {
        let stack = |sample: &[AtomicUsize]| {
            let [count, words @ ..] = sample else { return Vec::new() };
            let words = words.iter().take(count.load(Ordering::Relaxed));
            let addresses = words.map(|word| word.load(Ordering::Relaxed) as u64).enumerate();
            // The instruction of a call is before the address to which it returns.
            addresses.map(|(depth, address)| if depth == 0 { address } else { address - 1 }).collect()
        };
        let stacks = self.words.chunks_exact(STRIDE).map(stack);
        stacks.filter(|stack: &Vec<u64>| !stack.is_empty()).collect()
    }
}

/// Handles SIGPROF.
extern "C" fn on_signal(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    IN_HANDLER.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the buffer is freed only after the pointer was replaced by null and no handler was left. This
    // handler was counted before it read the pointer.
    if let Some(buffer) = unsafe { BUFFER.load(Ordering::SeqCst).as_ref() } {
        // SAFETY: the kernel passes the context of the interrupted thread to a handler with SA_SIGINFO.
        let interrupted = unsafe { interrupted_at(context) };
        let mut walk = Walk { addresses: [0; MAX_FRAMES], count: 0, from: interrupted };
        // SAFETY: the callback has the type that the unwinder expects, and `walk` outlives the call. The unwinder
        // reads only stacks and the tables of mapped files, whose lookup takes no lock (`has_lock_free_lookup`).
        unsafe { _Unwind_Backtrace(on_frame, (&raw mut walk).cast()) };
        match walk.addresses.get(..walk.count) {
            Some(addresses) if !addresses.is_empty() => buffer.add(addresses),
            _ => buffer.add(&[interrupted]),
        }
    }
    IN_HANDLER.fetch_sub(1, Ordering::SeqCst);
}

/// A walk of the stack in the handler.
struct Walk {
    addresses: [usize; MAX_FRAMES],
    count: usize,
    /// Address of the interrupted instruction. The frames before it belong to the handler.
    from: usize,
}

/// Stores the address of a frame. Returns 0 for the next frame, or 5 (`_URC_END_OF_STACK`) to end the walk.
extern "C" fn on_frame(frame: *mut UnwindFrame, walk: *mut c_void) -> c_int {
    // SAFETY: the pointer is the one that `on_signal` passes, to a value that no other thread knows.
    let walk = unsafe { &mut *walk.cast::<Walk>() };
    // SAFETY: the unwinder passes a frame that is valid for this call.
    let address = unsafe { _Unwind_GetIP(frame) };
    if walk.count == 0 && address != walk.from {
        return 0;
    }
    let Some(place) = walk.addresses.get_mut(walk.count).filter(|_| address != 0) else { return 5 };
    *place = address;
    walk.count += 1;
    0
}

/// A frame of the unwinder, which only the unwinder can read.
#[repr(C)]
struct UnwindFrame {
    _private: [u8; 0],
}

// The unwinder that the standard library links for panics.
unsafe extern "C" {
    fn _Unwind_Backtrace(
        callback: extern "C" fn(*mut UnwindFrame, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(frame: *mut UnwindFrame) -> usize;
}

/// Returns the address of the interrupted instruction.
///
/// # Safety
///
/// `context` must be the third argument of a signal handler with SA_SIGINFO.
unsafe fn interrupted_at(context: *mut c_void) -> usize {
    // SAFETY: see above.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    #[cfg(target_arch = "x86_64")]
    let address = context.uc_mcontext.gregs[libc::REG_RIP as usize];
    #[cfg(target_arch = "aarch64")]
    let address = context.uc_mcontext.pc;
    usize::try_from(address).unwrap_or_default()
}

/// Returns whether the unwinder finds code without a lock. Before glibc 2.35 it takes the loader's lock, which the
/// interrupted thread may hold. Static programs of other C libraries have no such lock.
fn has_lock_free_lookup() -> bool {
    if cfg!(not(target_env = "gnu")) {
        return true;
    }
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_dl_find_object".as_ptr()) };
    !found.is_null()
}

/// Installs the handler, which stays: without one, a late signal would end the process.
fn install_handler() -> io::Result<()> {
    // SAFETY: all bytes zero is a valid value of this type.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the action is initialized, and the handler has the type that SA_SIGINFO demands.
    checked(unsafe { libc::sigaction(libc::SIGPROF, &raw const action, ptr::null_mut()) })
}

/// Sends SIGPROF each time the process has used this much processor time. Zero ends that.
fn set_timer(period: Duration) -> io::Result<()> {
    let interval = libc::timeval {
        tv_sec: libc::time_t::try_from(period.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_usec: libc::suseconds_t::from(period.subsec_micros()),
    };
    let timer = libc::itimerval { it_interval: interval, it_value: interval };
    // SAFETY: the timer is a local value that outlives the call, and the old value is not asked for.
    checked(unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const timer, ptr::null_mut()) })
}

fn checked(code: c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_all_processors_fit_into_the_buffer() {
        assert_eq!(period(Duration::from_secs(1), 2), MIN_PERIOD);
        assert_eq!(period(MAX_DURATION, 2), MIN_PERIOD);
        assert_eq!(period(MAX_DURATION, 64), Duration::from_millis(320));
    }

    #[test]
    fn one_profile_is_recorded_at_a_time() {
        IS_BUSY.store(true, Ordering::SeqCst);
        assert!(matches!(record(Duration::ZERO), Err(ProfileError::Busy)));
        IS_BUSY.store(false, Ordering::SeqCst);
        assert!(record(Duration::ZERO).is_ok());
    }

    #[test]
    fn a_full_buffer_drops_samples() {
        let words = (0..2 * STRIDE).map(|_| AtomicUsize::new(0)).collect();
        let buffer = Buffer { next: AtomicUsize::new(0), words };
        buffer.add(&[9, 5]);
        buffer.add(&[7; MAX_FRAMES]);
        buffer.add(&[3]);
        assert_eq!(buffer.stacks().len(), 2);
        assert_eq!(buffer.stacks()[0], [9, 4], "the caller is where it called");
    }
}
