//! What this process knows of its container's grant. Loaded when a GPU is first used, never before, and anew in a
//! forked child: the parent's ledger, books and threads are not the child's.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tessera_limits::allocation_size::SmallAllocations;
use tessera_limits::control::Control;
use tessera_limits::files::{self, ArbiterWakeup, StaticMapping};
use tessera_limits::memory_account::{MemoryAccount, Slot, SlotIndex};
use tessera_limits::{GpuSlot, GrantLimits, PerGpu, futex};

use crate::compute::Compute;
use crate::cuda::{NOT_PERMITTED, Status};
use crate::gpus::GrantedGpus;
use crate::memory::Memory;
use crate::monitor;

/// This process under its grant.
pub struct Process {
    pub control: StaticMapping<Control>,
    pub account: StaticMapping<MemoryAccount>,
    wakeup: ArbiterWakeup,
    pub slot: SlotIndex,
    /// What our slot holds of each GPU, where no other process can write.
    pub own: PerGpu<AtomicU64>,
    pub gpus: GrantedGpus,
    pub memory: Memory,
    pub compute: Compute,
    /// One thread at a time announces what it wants; also the small pieces of each GPU.
    pub small: Mutex<PerGpu<SmallAllocations>>,
    limits: LastLimits,
}

/// The limits as last read, one number each, so that a hook needs no lock.
struct LastLimits {
    revision: AtomicU64,
    memory: PerGpu<AtomicU64>,
    context: PerGpu<AtomicU64>,
}

/// What has come of loading the grant in this process.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
static STAGE: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = 0;
const LOADING: u32 = 1;
const LOADED: u32 = 2;
const FAILED: u32 = 3;

/// Where to look for a grant on a machine that has none in its place. Only for trying out: in a container the grant
/// is mounted, and then this is not read.
const ELSEWHERE: &str = "TESSERA_GRANT";

impl Process {
    /// This process, registered in its container's account.
    ///
    /// # Errors
    /// The status to return to the program when there are no valid limits.
    #[inline]
    pub fn get() -> Result<&'static Self, Status> {
        let process = PROCESS.load(Ordering::Acquire);
        if process.is_null() {
            return Self::load();
        }
        // SAFETY: stored by `load`, never freed.
        Ok(unsafe { &*process })
    }

    /// This process if it has been registered.
    pub fn if_loaded() -> Option<&'static Self> {
        // SAFETY: stored by `load`, never freed.
        unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
    }

    /// Our slot in the account.
    pub fn slot(&self) -> &Slot {
        self.account.slot(self.slot)
    }

    /// Tells the arbiter that there is something new in our slot.
    pub fn wake_arbiter(&self) {
        self.wakeup.notify();
    }

    /// Bytes of the GPU this container may hold, as the ledgers count them.
    pub fn memory_limit(&self, gpu: GpuSlot) -> u64 {
        self.refresh();
        let limit = self.limits.memory[gpu].load(Ordering::Relaxed);
        limit.saturating_sub(if limit == u64::MAX { 0 } else { self.control.uncharged(gpu) })
    }

    /// Bytes of the GPU the container was granted.
    pub fn granted(&self, gpu: GpuSlot) -> u64 {
        self.refresh();
        self.limits.memory[gpu].load(Ordering::Relaxed)
    }

    /// What a context takes on the GPU.
    pub fn context_bytes(&self, gpu: GpuSlot) -> u64 {
        match self.limits.context[gpu].load(Ordering::Relaxed) {
            0 => tessera_limits::allocation_size::DEFAULT_CONTEXT_BYTES,
            measured => measured,
        }
    }

    /// The small pieces, and the right to announce.
    pub fn announcing(&self) -> MutexGuard<'_, PerGpu<SmallAllocations>> {
        self.small.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the limits again where they have changed.
    pub fn refresh(&self) {
        let revision = self.control.revision();
        if self.limits.revision.load(Ordering::Relaxed) != revision {
            // Damaged: stay with what was read before.
            if let Ok(limits) = self.control.read() {
                self.limits.set(revision, &limits);
                self.compute.set_limits(&limits);
            }
        }
    }

    #[cold]
    fn load() -> Result<&'static Self, Status> {
        loop {
            match STAGE.compare_exchange(UNKNOWN, LOADING, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => break,
                Err(LOADING) => futex::wait(&STAGE, LOADING, 100_000_000),
                Err(LOADED) => return Self::if_loaded().ok_or(NOT_PERMITTED),
                Err(_) => return Err(NOT_PERMITTED),
            }
        }
        // A child starts from the beginning.
        // SAFETY: the handler only stores to atomic words.
        unsafe { libc::pthread_atfork(None, None, Some(forget)) };
        let stage = match Self::register(&place()) {
            Ok(process) => {
                PROCESS.store(Box::into_raw(Box::new(process)), Ordering::Release);
                LOADED
            }
            Err(reason) => {
                say(&format!("no use of GPUs is allowed: {reason}"));
                FAILED
            }
        };
        STAGE.store(stage, Ordering::SeqCst);
        futex::wake(&STAGE);
        Self::if_loaded().ok_or(NOT_PERMITTED)
    }

    fn register(place: &Path) -> Result<Self, String> {
        let at = |file: &str| place.join(file).display().to_string();
        let control = files::open_control(place).map_err(|error| format!("{}: {error}", at("control")))?;
        let limits = control.read().map_err(|damage| format!("{}: {damage}", at("control")))?;
        let account = files::open_account(place).map_err(|error| format!("{}: {error}", at("account")))?;
        let slot = monitor::start(account).ok_or("this container has too many processes that use GPUs")?;
        let last =
            LastLimits { revision: AtomicU64::new(0), memory: PerGpu::default(), context: PerGpu::default() };
        last.set(control.revision(), &limits);
        let compute = Compute::default();
        compute.set_limits(&limits);
        Ok(Self {
            control,
            account,
            wakeup: ArbiterWakeup::of(place),
            slot,
            own: PerGpu::default(),
            gpus: GrantedGpus::of(&limits),
            memory: Memory::default(),
            compute,
            small: Mutex::default(),
            limits: last,
        })
    }
}

impl LastLimits {
    fn set(&self, revision: u64, limits: &GrantLimits) {
        for (slot, gpu) in GpuSlot::all().zip(&limits.gpus) {
            self.memory[slot].store(gpu.memory_bytes, Ordering::Relaxed);
            self.context[slot].store(gpu.context_bytes, Ordering::Relaxed);
        }
        self.revision.store(revision, Ordering::Relaxed);
    }
}

/// The grant's directory. The mounted one always wins; it cannot be unmounted from inside the container.
fn place() -> PathBuf {
    let mounted = Path::new(files::GRANT_DIRECTORY);
    let is_absent =
        matches!(mounted.symlink_metadata(), Err(error) if error.kind() == std::io::ErrorKind::NotFound);
    match std::env::var_os(ELSEWHERE) {
        Some(elsewhere) if is_absent => elsewhere.into(),
        _ => mounted.into(),
    }
}

/// One line on stderr.
pub fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("tessera: {line}\n").as_bytes());
}

extern "C" fn forget() {
    PROCESS.store(std::ptr::null_mut(), Ordering::SeqCst);
    STAGE.store(UNKNOWN, Ordering::SeqCst);
}
