//! The GPU, shared between processes.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Memory of the GPU: 80 GiB.
pub const TOTAL_BYTES: u64 = 80 << 30;
const UUID: [u8; 16] = *b"simulated-gpu-00";
/// Memory that one context takes.
pub const CONTEXT_BYTES: u64 = 500 << 20;
const MAX_PROCESSES: usize = 2048;

/// The file that stands for a GPU. `crates/interpose/tests` reads the first three numbers, and
/// `crates/agent/tests/real_gpu` reads the processes.
#[repr(C)]
pub struct GpuFile {
    /// Highest memory usage so far, in bytes.
    most: AtomicU64,
    /// Most work that was queued after a launch, in nanoseconds.
    longest_queue: AtomicU64,
    /// Total length of all kernels and transfers so far, in nanoseconds.
    work: AtomicU64,
    /// End of the last queued kernel, in nanoseconds on the monotonic clock.
    busy_until: AtomicU64,
    processes: [Process; MAX_PROCESSES],
}

#[repr(C)]
struct Process {
    id: AtomicU32,
    memory: AtomicU64,
    /// Total length of the kernels and transfers of the process, in nanoseconds.
    work: AtomicU64,
}

/// A GPU and this process's record on it.
pub struct GpuProcess {
    gpu: &'static GpuFile,
    place: &'static Process,
    /// True if the kernels of several streams run at the same time, as small kernels do on a real
    /// GPU.
    overlaps: bool,
}

/// Largest number of simulated GPUs.
const MAX_GPUS: usize = 4;

static PROCESS_ON_GPU: [OnceLock<Option<GpuProcess>>; MAX_GPUS] = [const { OnceLock::new() }; MAX_GPUS];

/// Returns the visible GPUs in the order of `$SIMULATED_ORDER`, for example "1,0". The default is
/// the first GPU alone.
pub fn visible() -> &'static [usize] {
    static VISIBLE: OnceLock<Vec<usize>> = OnceLock::new();
    VISIBLE.get_or_init(|| {
        let order = std::env::var("SIMULATED_ORDER").unwrap_or_else(|_| "0".into());
        order.split(',').filter_map(|gpu| gpu.parse().ok()).filter(|&gpu| gpu < MAX_GPUS).collect()
    })
}

/// Returns the GPU of a device of this program.
pub fn gpu_of(device: i32) -> Option<usize> {
    visible().get(usize::try_from(device).ok()?).copied()
}

/// Returns the UUID of a GPU.
pub fn uuid(gpu: usize) -> [u8; 16] {
    let mut uuid = UUID;
    uuid[15] += u8::try_from(gpu).unwrap_or(0);
    uuid
}

impl GpuProcess {
    /// Returns the GPU with this number.
    pub fn get(gpu: usize) -> Option<&'static Self> {
        PROCESS_ON_GPU.get(gpu)?.get_or_init(|| Self::open(gpu)).as_ref()
    }

    fn open(gpu: usize) -> Option<Self> {
        let mut path = std::env::var_os("SIMULATED_GPU")?;
        if gpu > 0 {
            path.push(format!(".{gpu}"));
        }
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).ok()?;
        let size = size_of::<GpuFile>();
        if file.metadata().ok()?.len() < size as u64 {
            file.set_len(size as u64).ok()?;
        }
        let (access, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let address = unsafe { libc::mmap(std::ptr::null_mut(), size, access, shared, file.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED {
            return None;
        }
        let gpu: &'static GpuFile = unsafe { &*address.cast() };
        let me = std::process::id();
        let place = gpu.processes.iter().find(|process| {
            let id = process.id.load(Ordering::SeqCst);
            // The place of this process is that of the program which it ran before `execve`.
            (id == 0 || id == me || is_gone(id))
                && process.id.compare_exchange(id, me, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        })?;
        place.memory.store(0, Ordering::SeqCst);
        place.work.store(0, Ordering::SeqCst);
        Some(Self { gpu, place, overlaps: std::env::var_os("SIMULATED_OVERLAP").is_some() })
    }

    /// Allocates memory. Returns false if the GPU does not have enough.
    pub fn take(&self, bytes: u64) -> bool {
        if bytes > TOTAL_BYTES {
            return false;
        }
        self.place.memory.fetch_add(bytes, Ordering::SeqCst);
        let used = self.used();
        if used > TOTAL_BYTES {
            self.place.memory.fetch_sub(bytes, Ordering::SeqCst);
            return false;
        }
        self.gpu.most.fetch_max(used, Ordering::SeqCst);
        true
    }

    pub fn give(&self, bytes: u64) {
        self.place.memory.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// Returns the memory of all live processes.
    pub fn used(&self) -> u64 {
        let living = self.gpu.processes.iter().take_while(|process| process.id.load(Ordering::SeqCst) != 0);
        living
            .filter(|process| {
                process.memory.load(Ordering::SeqCst) > 0 && !is_gone(process.id.load(Ordering::SeqCst))
            })
            .map(|process| process.memory.load(Ordering::SeqCst))
            .sum()
    }

    /// Queues a kernel and returns the time of its end.
    pub fn run(&self, nanoseconds: u64, after: u64) -> u64 {
        self.gpu.work.fetch_add(nanoseconds, Ordering::SeqCst);
        self.place.work.fetch_add(nanoseconds, Ordering::SeqCst);
        if self.overlaps {
            return now().max(after) + nanoseconds;
        }
        let mut until = self.gpu.busy_until.load(Ordering::SeqCst);
        loop {
            let now = now();
            let end = until.max(now).max(after) + nanoseconds;
            match self.gpu.busy_until.compare_exchange(until, end, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    self.gpu.longest_queue.fetch_max(end - now, Ordering::SeqCst);
                    return end;
                }
                Err(changed) => until = changed,
            }
        }
    }
}

/// Returns the time in nanoseconds on the monotonic clock.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Returns whether a process has closed its files, which is when the real driver reclaims its
/// memory.
fn is_gone(process: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat")).map_or(true, |stat| {
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
        matches!(state, Some('Z' | 'X' | 'x'))
    })
}
