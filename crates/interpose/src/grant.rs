//! The state of this process under its container's grant.
//!
//! The state is loaded when the program first uses a GPU. A forked child loads it again, because
//! the parent's slot, allocation table and threads do not belong to the child.

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tessera_limits::allocation_size::{DEFAULT_CONTEXT, SmallAllocations};
use tessera_limits::control::Control;
use tessera_limits::files::{self, ArbiterWakeup, StaticMapping};
use tessera_limits::limits::InvalidLimits;
use tessera_limits::memory_account::{MemoryAccount, ProcessIdentity, Slot, SlotIndex};
use tessera_limits::{AtomicBytes, Bytes, GpuLimit, GpuSlot, GrantLimits, PerGpu, futex};

use crate::compute::Compute;
use crate::cuda::{NOT_PERMITTED, Status};
use crate::gpus::GrantedGpus;
use crate::memory::{Memory, exits};
use crate::monitor;

/// All state of this process.
pub struct Process {
    pub control: StaticMapping<Control>,
    pub account: StaticMapping<MemoryAccount>,
    wakeup: ArbiterWakeup,
    pub identity: ProcessIdentity,
    pub slot: SlotIndex,
    /// Copy of the charges in the process's slot, where no other process can write.
    pub own_charge: PerGpu<AtomicBytes>,
    pub gpus: GrantedGpus,
    pub memory: Memory,
    pub compute: Compute,
    /// Small allocations on each GPU. The lock also makes sure that one thread at a time charges
    /// memory.
    small_allocations: Mutex<PerGpu<SmallAllocations>>,
    limits: CachedLimits,
}

/// The limits as last read, in atomic numbers, so that a hook needs no lock.
struct CachedLimits {
    revision: AtomicU64,
    memory: PerGpu<AtomicBytes>,
    context: PerGpu<AtomicBytes>,
}

/// The loaded state of this process, or null. It is never freed.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
static LOAD_STATE: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = 0;
const LOADING: u32 = 1;
const LOADED: u32 = 2;
const FAILED: u32 = 3;

/// Environment variable with the grant's directory, for tests on a host without a mounted grant. A
/// mounted grant always takes precedence.
const GRANT_VARIABLE: &str = "TESSERA_GRANT";

impl Process {
    /// Returns the state of this process, and registers the process in its container's account on
    /// the first call.
    ///
    /// # Errors
    /// The status to return to the program if there are no valid limits.
    #[inline]
    pub fn get() -> Result<&'static Self, Status> {
        let process = PROCESS.load(Ordering::Acquire);
        if process.is_null() {
            return Self::load();
        }
        // SAFETY: the pointer is null or was stored by `load`, and its target is never freed.
        Ok(unsafe { &*process })
    }

    /// Returns the state of this process if it has been loaded.
    pub fn if_loaded() -> Option<&'static Self> {
        // SAFETY: the pointer is null or was stored by `load`, and its target is never freed.
        unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
    }

    /// Returns this process's slot in the account.
    pub fn slot(&self) -> &Slot {
        self.account.slot(self.slot)
    }

    /// Wakes the arbiter after a change in this process's slot.
    pub fn wake_arbiter(&self) {
        self.wakeup.notify();
    }

    /// Returns the memory of the GPU that the container's processes may charge: the grant less the
    /// uncharged memory.
    pub fn memory_limit(&self, gpu: GpuSlot) -> Bytes {
        match self.granted(gpu) {
            GpuLimit::WHOLE => GpuLimit::WHOLE,
            granted => granted - self.control.uncharged(gpu),
        }
    }

    /// Returns the memory of the GPU that the container was granted.
    pub fn granted(&self, gpu: GpuSlot) -> Bytes {
        self.refresh();
        self.limits.memory[gpu].load(Ordering::Relaxed)
    }

    /// Returns the memory that a context takes on the GPU: what the agent has measured, or an upper
    /// bound.
    pub fn context_size(&self, gpu: GpuSlot) -> Bytes {
        self.measured_context_size(gpu).unwrap_or(DEFAULT_CONTEXT)
    }

    /// Returns the memory that a context takes on the GPU, if the agent has measured it.
    pub fn measured_context_size(&self, gpu: GpuSlot) -> Option<Bytes> {
        self.refresh();
        Some(self.limits.context[gpu].load(Ordering::Relaxed)).filter(|&size| size > Bytes::ZERO)
    }

    /// Locks the small allocations, and with them the right to charge memory.
    pub fn lock_small_allocations(&self) -> MutexGuard<'_, PerGpu<SmallAllocations>> {
        self.small_allocations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the limits again if they have changed.
    pub fn refresh(&self) {
        let revision = self.control.revision();
        if self.limits.revision.load(Ordering::Relaxed) != revision {
            // Damaged limits are ignored; the limits that were read before stay in force.
            if let Ok(limits) = self.control.read() {
                self.limits.set(revision, &limits);
                self.compute.set_limits(&limits);
            }
        }
    }

    #[cold]
    fn load() -> Result<&'static Self, Status> {
        loop {
            match LOAD_STATE.compare_exchange(UNKNOWN, LOADING, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => break,
                Err(LOADING) => futex::wait(&LOAD_STATE, LOADING, 100_000_000),
                Err(LOADED) => return Self::if_loaded().ok_or(NOT_PERMITTED),
                Err(_) => return Err(NOT_PERMITTED),
            }
        }
        // SAFETY: the handler runs in a forked child and only stores to atomic words.
        unsafe { libc::pthread_atfork(None, None, Some(forget)) };
        let stage = match Self::register(&grant_directory()) {
            Ok(process) => {
                PROCESS.store(Box::into_raw(Box::new(process)), Ordering::Release);
                LOADED
            }
            Err(error) => {
                log(&format!(
                    "cannot load this container's GPU limits, so every use of a GPU is rejected: {error}"
                ));
                FAILED
            }
        };
        LOAD_STATE.store(stage, Ordering::SeqCst);
        futex::wake(&LOAD_STATE);
        Self::if_loaded().ok_or(NOT_PERMITTED)
    }

    fn register(directory: &Path) -> Result<Self, LoadError> {
        let cannot_open = |path: PathBuf| |error| LoadError::Open(path, error);
        let control_path = files::control_path(directory);
        let control = files::open_control(directory).map_err(cannot_open(control_path.clone()))?;
        let limits = control.read().map_err(|invalid| LoadError::Limits(control_path, invalid))?;
        let account = files::open_account(directory).map_err(cannot_open(files::account_path(directory)))?;
        let identity = exits::own_identity();
        // The time for which the driver reclaims memory begins when an end is noted.
        exits::sweep(&account, identity);
        let slot = monitor::start(account, identity)?;
        let last = CachedLimits {
            revision: AtomicU64::new(0),
            memory: PerGpu::default(),
            context: PerGpu::default(),
        };
        last.set(control.revision(), &limits);
        Ok(Self {
            control,
            account,
            wakeup: ArbiterWakeup::of(directory),
            identity,
            slot,
            own_charge: PerGpu::default(),
            gpus: GrantedGpus::of(&limits),
            memory: Memory::default(),
            compute: Compute::new(&limits),
            small_allocations: Mutex::default(),
            limits: last,
        })
    }
}

/// The reason why a process cannot use its container's grant.
#[derive(Debug)]
pub enum LoadError {
    /// A file of the grant cannot be opened.
    Open(PathBuf, io::Error),
    /// The control file has no valid limits.
    Limits(PathBuf, InvalidLimits),
    /// The monitor thread cannot be started.
    Thread(io::Error),
    /// All slots of the account are taken.
    NoSlot,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(path, error) => write!(f, "cannot open {}: {error}", path.display()),
            Self::Limits(path, invalid) => write!(f, "{}: {invalid}", path.display()),
            Self::Thread(error) => write!(f, "cannot start a thread: {error}"),
            Self::NoSlot => {
                f.write_str("the account has no free slot; too many processes of this container use GPUs")
            }
        }
    }
}

impl CachedLimits {
    fn set(&self, revision: u64, limits: &GrantLimits) {
        for (slot, gpu) in GpuSlot::all().zip(&limits.gpus) {
            self.memory[slot].store(gpu.memory, Ordering::Relaxed);
            self.context[slot].store(gpu.context, Ordering::Relaxed);
        }
        self.revision.store(revision, Ordering::Relaxed);
    }
}

/// Returns the grant's directory. The mounted directory takes precedence; a container cannot
/// unmount it.
fn grant_directory() -> PathBuf {
    let mounted = Path::new(files::GRANT_DIRECTORY);
    let is_absent =
        matches!(mounted.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound);
    match std::env::var_os(GRANT_VARIABLE) {
        Some(elsewhere) if is_absent => elsewhere.into(),
        _ => mounted.into(),
    }
}

/// Writes one line to standard error.
pub fn log(line: &str) {
    let _ = io::stderr().write_all(format!("tessera: {line}\n").as_bytes());
}

extern "C" fn forget() {
    PROCESS.store(std::ptr::null_mut(), Ordering::SeqCst);
    LOAD_STATE.store(UNKNOWN, Ordering::SeqCst);
}
