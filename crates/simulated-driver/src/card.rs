//! The GPU, shared between processes.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// All memory of the GPU: 80 GiB.
pub const TOTAL: u64 = 80 << 30;
const UUID: [u8; 16] = *b"simulated-card-0";
/// What a context takes.
pub const CONTEXT: u64 = 500 << 20;
const PROCESSES: usize = 2048;

/// The file. `crates/interpose/tests` reads the first two numbers.
#[repr(C)]
pub struct Card {
    /// The most memory that was ever taken.
    most: AtomicU64,
    /// Until when the kernels queued so far will run.
    busy_until: AtomicU64,
    processes: [Process; PROCESSES],
}

#[repr(C)]
struct Process {
    id: AtomicU32,
    memory: AtomicU64,
    /// Nanoseconds of kernels run for it.
    time: AtomicU64,
}

/// The GPU and our place on it.
pub struct Mine {
    card: &'static Card,
    place: &'static Process,
    /// Streams run beside each other instead of taking turns: kernels so small that the GPU has room for several.
    overlaps: bool,
}

/// The most GPUs a program can have here.
const CARDS: usize = 4;

static MINE: [OnceLock<Option<Mine>>; CARDS] = [const { OnceLock::new() }; CARDS];

/// Which GPUs this program sees, in its order: `$SIMULATED_ORDER`, as "1,0"; else the first alone.
pub fn visible() -> &'static [usize] {
    static VISIBLE: OnceLock<Vec<usize>> = OnceLock::new();
    VISIBLE.get_or_init(|| {
        let order = std::env::var("SIMULATED_ORDER").unwrap_or_else(|_| "0".into());
        order.split(',').filter_map(|card| card.parse().ok()).filter(|&card| card < CARDS).collect()
    })
}

/// The GPU behind a device of this program.
pub fn gpu_of(device: i32) -> Option<usize> {
    visible().get(usize::try_from(device).ok()?).copied()
}

/// What a GPU is called.
pub fn uuid(card: usize) -> [u8; 16] {
    let mut uuid = UUID;
    uuid[15] += u8::try_from(card).unwrap_or(0);
    uuid
}

impl Mine {
    /// A GPU, by its number.
    pub fn get(card: usize) -> Option<&'static Self> {
        MINE.get(card)?.get_or_init(|| Self::open(card)).as_ref()
    }

    fn open(card: usize) -> Option<Self> {
        let mut path = std::env::var_os("SIMULATED_GPU")?;
        if card > 0 {
            path.push(format!(".{card}"));
        }
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).ok()?;
        let size = size_of::<Card>();
        if file.metadata().ok()?.len() < size as u64 {
            file.set_len(size as u64).ok()?;
        }
        let (access, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let address = unsafe { libc::mmap(std::ptr::null_mut(), size, access, shared, file.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED {
            return None;
        }
        let card: &'static Card = unsafe { &*address.cast() };
        let me = std::process::id();
        let place = card.processes.iter().find(|process| {
            let id = process.id.load(Ordering::SeqCst);
            (id == 0 || is_gone(id))
                && process.id.compare_exchange(id, me, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        })?;
        place.memory.store(0, Ordering::SeqCst);
        place.time.store(0, Ordering::SeqCst);
        Some(Self { card, place, overlaps: std::env::var_os("SIMULATED_OVERLAP").is_some() })
    }

    /// Takes memory, as much as the GPU has.
    pub fn take(&self, bytes: u64) -> bool {
        if bytes > TOTAL {
            return false;
        }
        self.place.memory.fetch_add(bytes, Ordering::SeqCst);
        let used = self.used();
        if used > TOTAL {
            self.place.memory.fetch_sub(bytes, Ordering::SeqCst);
            return false;
        }
        self.card.most.fetch_max(used, Ordering::SeqCst);
        true
    }

    pub fn give(&self, bytes: u64) {
        self.place.memory.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// Memory of all living processes.
    pub fn used(&self) -> u64 {
        let living = self.card.processes.iter().take_while(|process| process.id.load(Ordering::SeqCst) != 0);
        living
            .filter(|process| {
                process.memory.load(Ordering::SeqCst) > 0 && !is_gone(process.id.load(Ordering::SeqCst))
            })
            .map(|process| process.memory.load(Ordering::SeqCst))
            .sum()
    }

    /// Queues a kernel; returns when it will have ended.
    pub fn run(&self, nanoseconds: u64, after: u64) -> u64 {
        if self.overlaps {
            self.place.time.fetch_add(nanoseconds, Ordering::SeqCst);
            return now().max(after) + nanoseconds;
        }
        let mut until = self.card.busy_until.load(Ordering::SeqCst);
        loop {
            let end = until.max(now()).max(after) + nanoseconds;
            match self.card.busy_until.compare_exchange(until, end, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    self.place.time.fetch_add(nanoseconds, Ordering::SeqCst);
                    return end;
                }
                Err(changed) => until = changed,
            }
        }
    }
}

/// Nanoseconds on the monotonic clock.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Whether a process has closed its files, as the real driver is told.
fn is_gone(process: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat")).map_or(true, |stat| {
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
        matches!(state, Some('Z' | 'X' | 'x'))
    })
}
