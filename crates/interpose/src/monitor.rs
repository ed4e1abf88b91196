//! The one thread of ours in a process. Its life is the process's life, and the kernel marks our slot when it ends.

use std::ffi::c_long;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use tessera_limits::files::StaticMapping;
use tessera_limits::futex;
use tessera_limits::memory_account::{MemoryAccount, SlotIndex};

use crate::compute::{Controller, Rest};
use crate::grant::Process;

/// How long freed pool memory may stay in the ledger of a process that does nothing more.
const SETTLE_EVERY: u64 = 100_000_000;

/// How long nothing at all is looked at in a process that does nothing.
const AT_EASE: u64 = 1_000_000_000;

/// Woken when there is something to look after.
static WORK: AtomicU32 = AtomicU32::new(0);

/// An entry of the kernel's robust list, see `set_robust_list(2)`.
#[repr(C)]
struct Link {
    next: *const Self,
}

/// The head of a thread's robust list. The kernel finds the word of an entry at a fixed distance from it, so the word may
/// lie in the shared file while the list itself lies here, where no other process can change it.
#[repr(C)]
struct RobustList {
    list: Link,
    distance: c_long,
    pending: *const Link,
    /// Our only entry.
    entry: Link,
}

/// Starts the thread; the slot it holds, or none when there is no free one or no thread can be had.
pub fn start(account: StaticMapping<MemoryAccount>) -> Option<SlotIndex> {
    let told = Arc::new(OnceLock::new());
    let tell = Arc::clone(&told);
    without_signals(|| {
        std::thread::Builder::new().name("tessera".into()).stack_size(256 << 10).spawn(move || {
            let slot = hold_slot(&account);
            let _ = tell.set(slot);
            if slot.is_some() {
                keep();
            }
        })
    })
    .ok()?;
    *told.wait()
}

/// There is something to look after.
pub fn notify() {
    if WORK.swap(1, Ordering::AcqRel) == 0 {
        futex::wake(&WORK);
    }
}

fn keep() -> ! {
    // Sleeps end when they should, not up to 50 microseconds later.
    // SAFETY: for this thread only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000) };
    let mut controller = Controller::default();
    let mut settled = futex::now();
    loop {
        let has_work = WORK.swap(0, Ordering::AcqRel) == 1;
        let Some(process) = Process::if_loaded() else {
            futex::wait(&WORK, 0, 1_000_000);
            continue;
        };
        let now = futex::now();
        if now - settled > SETTLE_EVERY {
            settled = now;
            process.refresh();
            process.memory.pools.settle_all(process);
        }
        match controller.look(process) {
            Rest::For(nanoseconds) => futex::wait(&WORK, 0, nanoseconds),
            Rest::Idle => futex::wait(&WORK, 0, if has_work { SETTLE_EVERY } else { AT_EASE }),
            Rest::Window(gpu, change, nanoseconds) => {
                futex::wait(&process.control.window(gpu).change, change, nanoseconds)
            }
        }
    }
}

/// Takes a slot and has the kernel mark it when this thread ends, however it ends.
fn hold_slot(account: &MemoryAccount) -> Option<SlotIndex> {
    // SAFETY: no arguments, no failure.
    let (process, thread) = unsafe { (libc::getpid(), libc::syscall(libc::SYS_gettid)) };
    let (process, thread) = (u32::try_from(process).ok()?, u32::try_from(thread).ok()?);
    // Never freed: the kernel reads it when the thread ends.
    let robust = Box::leak(Box::new(RobustList {
        list: Link { next: std::ptr::null() },
        distance: 0,
        pending: std::ptr::null(),
        entry: Link { next: std::ptr::null() },
    }));
    let robust: *mut RobustList = robust;
    // SAFETY: `robust` is leaked; only this thread and, at its end, the kernel use it.
    unsafe {
        (*robust).list.next = &raw const (*robust).list;
        (*robust).entry.next = &raw const (*robust).list;
        // In place of libc's list for this thread, which takes no robust mutex.
        libc::syscall(libc::SYS_set_robust_list, robust, std::mem::offset_of!(RobustList, entry));
    }
    let slot = account.claim(process, thread, |word| {
        // SAFETY: as above. "Pending" covers a death between taking the word and entering it in the list.
        unsafe {
            let entry = &raw const (*robust).entry;
            std::ptr::write_volatile(&raw mut (*robust).distance, word.as_ptr() as c_long - entry as c_long);
            std::ptr::write_volatile(&raw mut (*robust).pending, entry);
        }
    });
    // SAFETY: as above.
    unsafe {
        if slot.is_some() {
            std::ptr::write_volatile(&raw mut (*robust).list.next, &raw const (*robust).entry);
        }
        std::ptr::write_volatile(&raw mut (*robust).pending, std::ptr::null());
    }
    slot
}

/// Runs `action` with all signals blocked, for threads inherit that: the program's handlers never run on ours.
fn without_signals<T>(action: impl FnOnce() -> T) -> T {
    // SAFETY: plain sets of signals, for the calling thread only.
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
