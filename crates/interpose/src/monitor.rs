//! The monitor thread, the library's only thread in a process. It lives as long as the process, and
//! the kernel marks the process's slot when the thread ends.

use std::ffi::c_long;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use tessera_limits::files::StaticMapping;
use tessera_limits::futex;
use tessera_limits::memory_account::{MemoryAccount, ProcessIdentity, SlotIndex};
use tessera_throttle::controller::Sleep;

use crate::compute::Controllers;
use crate::grant::{GpuPlace, LoadError, Process};
use crate::memory::contexts;

/// Interval in nanoseconds at which the charges of pools are settled. Freed pool memory stays
/// charged for at most this time.
const SETTLE_INTERVAL_NS: u64 = 100_000_000;

/// Longest sleep in nanoseconds of the monitor thread in an idle process.
const IDLE_INTERVAL_NS: u64 = 1_000_000_000;

/// Wake-up futex of the monitor thread.
static WAKEUP: AtomicU32 = AtomicU32::new(0);

/// An entry of the kernel's robust list, see `set_robust_list(2)`.
#[repr(C)]
struct Link {
    next: *const Self,
}

/// The head of a thread's robust list.
///
/// The kernel finds the word of an entry at a fixed distance from the entry. The word may therefore
/// be in the shared file, while the list is in private memory, where no other process can change
/// it.
#[repr(C)]
struct RobustList {
    list: Link,
    distance: c_long,
    pending: *const Link,
    /// The only entry of the list.
    entry: Link,
}

/// Starts the monitor thread and returns its slot.
///
/// # Errors
/// An error if no thread can be created, or if there is no free slot.
pub fn start(account: StaticMapping<MemoryAccount>, me: ProcessIdentity) -> Result<SlotIndex, LoadError> {
    spawn(account, me, || run())
}

/// Holds a slot of one more account, on a thread of its own that only sleeps: the kernel's list of a thread has room
/// for the slots of one file.
///
/// # Errors
/// An error if no thread can be created, or if there is no free slot.
pub fn hold(account: StaticMapping<MemoryAccount>, me: ProcessIdentity) -> Result<SlotIndex, LoadError> {
    spawn(account, me, || {
        loop {
            futex::wait(&HELD, 0, IDLE_INTERVAL_NS * 3600);
        }
    })
}

/// Word at which threads sleep that hold slots. It never changes.
static HELD: AtomicU32 = AtomicU32::new(0);

/// Starts a thread that takes a slot and then runs `work`.
fn spawn(
    account: StaticMapping<MemoryAccount>,
    me: ProcessIdentity,
    work: impl FnOnce() + Send + 'static,
) -> Result<SlotIndex, LoadError> {
    let slot_of_thread = Arc::new(OnceLock::new());
    let result = Arc::clone(&slot_of_thread);
    without_signals(|| {
        std::thread::Builder::new().name("tessera".into()).stack_size(256 << 10).spawn(move || {
            let slot = hold_slot(&account, me);
            let _ = result.set(slot);
            if slot.is_some() {
                work();
            }
        })
    })
    .map_err(LoadError::Thread)?;
    slot_of_thread.wait().ok_or(LoadError::NoSlot)
}

/// Wakes the monitor thread.
pub fn notify() {
    if WAKEUP.swap(1, Ordering::AcqRel) == 0 {
        futex::wake(&WAKEUP);
    }
}

fn run() -> ! {
    // By default the kernel may end a sleep up to 50 microseconds late.
    // SAFETY: the call changes the timer slack of the calling thread only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000) };
    let mut controllers = Controllers::default();
    let mut settled = futex::now();
    loop {
        let has_work = WAKEUP.swap(0, Ordering::AcqRel) == 1;
        let Some(process) = Process::if_loaded() else {
            futex::wait(&WAKEUP, 0, 1_000_000);
            continue;
        };
        let now = futex::now();
        if now - settled > SETTLE_INTERVAL_NS {
            settled = now;
            contexts::settle(process);
            process.memory.pools.settle_all(process);
        }
        match controllers.run_round(process) {
            (_, Sleep::For(time)) => futex::wait(&WAKEUP, 0, time.0),
            (_, Sleep::UntilWork) => {
                futex::wait(&WAKEUP, 0, if has_work { SETTLE_INTERVAL_NS } else { IDLE_INTERVAL_NS });
            }
            (gpu, Sleep::UntilWindowChanges { change, timeout }) => {
                let GpuPlace { grant, gpu } = process.place(gpu);
                futex::wait(&grant.control.window(*gpu).change, change, timeout.0);
            }
        }
    }
}

/// Claims a slot that the kernel marks when this thread ends for any reason.
fn hold_slot(account: &MemoryAccount, me: ProcessIdentity) -> Option<SlotIndex> {
    // SAFETY: the call has no arguments and cannot fail.
    let thread = u32::try_from(unsafe { libc::syscall(libc::SYS_gettid) }).ok()?;
    // The list is never freed, because the kernel reads it when the thread ends.
    let robust = Box::leak(Box::new(RobustList {
        list: Link { next: std::ptr::null() },
        distance: 0,
        pending: std::ptr::null(),
        entry: Link { next: std::ptr::null() },
    }));
    let robust: *mut RobustList = robust;
    // SAFETY: `robust` is leaked, and only this thread and, at its end, the kernel access it.
    unsafe {
        (*robust).list.next = &raw const (*robust).list;
        (*robust).entry.next = &raw const (*robust).list;
        // This replaces libc's list. The thread takes no robust mutex, so it does not need libc's
        // list.
        libc::syscall(libc::SYS_set_robust_list, robust, std::mem::offset_of!(RobustList, entry));
    }
    let slot = account.claim(me, thread, |word| {
        // SAFETY: `robust` is leaked and accessed by this thread only. The pending entry covers a
        // death between taking the word and adding it to the list.
        unsafe {
            let entry = &raw const (*robust).entry;
            std::ptr::write_volatile(&raw mut (*robust).distance, word.as_ptr() as c_long - entry as c_long);
            std::ptr::write_volatile(&raw mut (*robust).pending, entry);
        }
    });
    // SAFETY: `robust` is leaked, and only this thread and, at its end, the kernel access it.
    unsafe {
        if slot.is_some() {
            std::ptr::write_volatile(&raw mut (*robust).list.next, &raw const (*robust).entry);
        }
        std::ptr::write_volatile(&raw mut (*robust).pending, std::ptr::null());
    }
    slot
}

/// Runs `action` with all signals blocked. A thread started by `action` inherits the blocked
/// signals, so the program's signal handlers never run on it.
fn without_signals<T>(action: impl FnOnce() -> T) -> T {
    // SAFETY: both signal sets are initialised before they are read, and the mask is the calling
    // thread's own.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) =
            (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = action();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    }
}
