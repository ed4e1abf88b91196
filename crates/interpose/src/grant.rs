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
use tessera_limits::{AtomicBytes, Bytes, GpuLimit, GpuSlot, GrantLimits, MAX_GPUS, PerGpu, futex};

use crate::compute::Compute;
use crate::cuda::{NOT_PERMITTED, Status};
use crate::gpus::GrantedGpus;
use crate::memory::{Memory, exits};
use crate::monitor;

/// All state of this process.
pub struct Process {
    /// Grants of the container; at least one.
    grants: Vec<OpenGrant>,
    /// Where the files have each GPU. GPUs that the container does not have are in the first grant.
    places: PerGpu<GpuPlace>,
    /// Number of GPUs of all grants.
    gpu_count: usize,
    pub identity: ProcessIdentity,
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

/// A grant of the container, as this process uses it.
#[derive(Clone, Copy)]
pub struct OpenGrant {
    pub control: StaticMapping<Control>,
    pub account: StaticMapping<MemoryAccount>,
    /// Slot of this process in the account.
    pub slot_index: SlotIndex,
    wakeup: &'static ArbiterWakeup,
}

/// The place of a GPU in the files of its grant. A container with one grant has each GPU at its own slot.
#[derive(Clone, Copy)]
pub struct GpuPlace {
    pub grant: OpenGrant,
    /// Slot of the GPU in the files.
    pub gpu: GpuSlot,
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

    /// Returns where the files have a GPU.
    pub fn place(&self, gpu: GpuSlot) -> &GpuPlace {
        &self.places[gpu]
    }

    /// Returns the grants of the container.
    pub fn grants(&self) -> &[OpenGrant] {
        &self.grants
    }

    /// Returns the memory of a GPU that the container's processes have charged.
    pub fn charged(&self, gpu: GpuSlot) -> Bytes {
        let GpuPlace { grant, gpu } = self.place(gpu);
        grant.account.held(*gpu)
    }

    /// Returns the memory of a GPU that no process of the container has charged.
    pub fn uncharged(&self, gpu: GpuSlot) -> Bytes {
        let GpuPlace { grant, gpu } = self.place(gpu);
        grant.control.uncharged(*gpu)
    }

    /// Returns the memory of the GPU that the container's processes may charge: the grant less the
    /// uncharged memory.
    pub fn memory_limit(&self, gpu: GpuSlot) -> Bytes {
        match self.granted(gpu) {
            GpuLimit::WHOLE => GpuLimit::WHOLE,
            granted => granted - self.uncharged(gpu),
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
        let revision = revision(&self.grants);
        if self.limits.revision.load(Ordering::Relaxed) != revision {
            // Damaged limits are ignored; the limits that were read before stay in force.
            if let Some(limits) = self.current_limits() {
                self.limits.set(revision, &limits);
                self.compute.set_limits(&limits);
            }
        }
    }

    /// Reads the limits of all GPUs, each from the grant that was chosen for it when the process registered.
    #[cold]
    fn current_limits(&self) -> Option<GrantLimits> {
        let mut limits: Option<GrantLimits> = None;
        for place in self.places.iter().take(self.gpu_count) {
            let read = place.grant.control.read().ok()?;
            let gpu = *read.gpus.get(place.gpu.index())?;
            limits.get_or_insert(GrantLimits { gpus: Vec::new(), ..read }).gpus.push(gpu);
        }
        limits
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
        let loaded = grant_directories().and_then(|directories| Self::register(&directories));
        let stage = match loaded {
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

    fn register(directories: &[PathBuf]) -> Result<Self, LoadError> {
        let identity = exits::own_identity();
        let (mut grants, mut read) = (Vec::new(), Vec::new());
        for directory in directories {
            let cannot_open = |path: PathBuf| |error| LoadError::Open(path, error);
            let control_path = files::control_path(directory);
            let control = files::open_control(directory).map_err(cannot_open(control_path.clone()))?;
            let limits = control.read().map_err(|invalid| LoadError::Limits(control_path, invalid))?;
            let account =
                files::open_account(directory).map_err(cannot_open(files::account_path(directory)))?;
            // The time for which the driver reclaims memory begins when an end is noted.
            exits::sweep(&account, identity);
            let slot_index = match grants.is_empty() {
                true => monitor::start(account, identity)?,
                false => monitor::hold(account, identity)?,
            };
            // The state of a process is never freed.
            let wakeup = Box::leak(Box::new(ArbiterWakeup::of(directory)));
            grants.push(OpenGrant { control, account, slot_index, wakeup });
            read.push(limits);
        }
        let Some(first) = grants.first().copied() else {
            let missing = io::Error::from(io::ErrorKind::NotFound);
            return Err(LoadError::Open(files::GRANT_DIRECTORY.into(), missing));
        };
        let (limits, chosen) = merge(&read);
        let place = |slot: GpuSlot| match chosen.get(slot.index()) {
            Some(&(grant, gpu)) => GpuPlace { grant: grants.get(grant).copied().unwrap_or(first), gpu },
            None => GpuPlace { grant: first, gpu: slot },
        };
        let places = PerGpu::from_fn(place);
        let last = CachedLimits {
            revision: AtomicU64::new(0),
            memory: PerGpu::default(),
            context: PerGpu::default(),
        };
        last.set(revision(&grants), &limits);
        Ok(Self {
            grants,
            places,
            gpu_count: limits.gpus.len(),
            identity,
            own_charge: PerGpu::default(),
            gpus: GrantedGpus::of(&limits),
            memory: Memory::default(),
            compute: Compute::new(&limits),
            small_allocations: Mutex::default(),
            limits: last,
        })
    }
}

impl OpenGrant {
    /// Returns this process's slot in the account.
    pub fn slot(&self) -> &Slot {
        self.account.slot(self.slot_index)
    }

    /// Wakes the arbiter after a change in this process's slot.
    pub fn wake_arbiter(&self) {
        self.wakeup.notify();
    }
}

/// Returns a number that changes with the limits of any grant.
fn revision(grants: &[OpenGrant]) -> u64 {
    grants.iter().fold(0, |sum: u64, grant| sum.wrapping_add(grant.control.revision()))
}

/// Merges the limits of several grants. Returns them with the grant and the slot of each GPU.
///
/// A GPU that several grants contain has the limits of the grant with the least memory, then of the one with the least
/// compute. So a container that adds a grant of its own cannot raise a limit.
fn merge(grants: &[GrantLimits]) -> (GrantLimits, Vec<(usize, GpuSlot)>) {
    let (mut gpus, mut places): (Vec<GpuLimit>, Vec<(usize, GpuSlot)>) = (Vec::new(), Vec::new());
    for (number, grant) in grants.iter().enumerate() {
        for (slot, limit) in GpuSlot::all().zip(&grant.gpus) {
            let strictness = |limit: &GpuLimit| (limit.memory, limit.compute_ceiling_percent);
            let known = gpus.iter().position(|known| known.uuid == limit.uuid);
            match known.and_then(|at| Some((gpus.get_mut(at)?, places.get_mut(at)?))) {
                Some((known, place)) => {
                    if strictness(limit) < strictness(known) {
                        (*known, *place) = (*limit, (number, slot));
                    }
                }
                None => {
                    if gpus.len() < MAX_GPUS {
                        gpus.push(*limit);
                        places.push((number, slot));
                    }
                }
            }
        }
    }
    let first = grants.first().cloned().unwrap_or_default();
    (GrantLimits { gpus, ..first }, places)
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

/// Returns the directories of the grants. Mounted directories take precedence; a container cannot unmount
/// them.
fn grant_directories() -> Result<Vec<PathBuf>, LoadError> {
    let mounted = Path::new(files::GRANT_DIRECTORY);
    let is_absent =
        matches!(mounted.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound);
    match std::env::var_os(GRANT_VARIABLE) {
        Some(elsewhere) if is_absent => {
            let elsewhere = PathBuf::from(elsewhere);
            Ok(files::grants_in(&elsewhere).unwrap_or_else(|_| vec![elsewhere]))
        }
        _ if is_absent => Ok(vec![mounted.into()]),
        _ => files::grants_in(mounted).map_err(|error| LoadError::Open(mounted.into(), error)),
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

#[cfg(test)]
mod tests {
    use tessera_limits::UuidBytes;

    use super::*;

    fn grant(gpus: &[(u8, u64, u32)]) -> GrantLimits {
        let gpu = |&(uuid, memory, percent): &(u8, u64, u32)| GpuLimit {
            uuid: UuidBytes([uuid; 16]),
            memory: Bytes(memory),
            context: Bytes::ZERO,
            compute_percent: percent,
            compute_ceiling_percent: percent,
        };
        GrantLimits { generation: 1, gpus: gpus.iter().map(gpu).collect(), ..GrantLimits::default() }
    }

    fn check(grants: &[GrantLimits], expected: &[(u8, u64, usize, usize)]) {
        let (limits, places) = merge(grants);
        let found: Vec<_> = limits
            .gpus
            .iter()
            .zip(&places)
            .map(|(gpu, (grant, slot))| (gpu.uuid.0[0], gpu.memory.0, *grant, slot.index()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn the_gpus_of_several_grants_are_those_of_the_process() {
        check(&[grant(&[(1, 5, 30), (2, 5, 30)])], &[(1, 5, 0, 0), (2, 5, 0, 1)]);
        check(
            &[grant(&[(1, 5, 30)]), grant(&[(3, 9, 50), (2, 7, 50)])],
            &[(1, 5, 0, 0), (3, 9, 1, 0), (2, 7, 1, 1)],
        );
        check(&[], &[]);
    }

    #[test]
    fn another_grant_for_the_same_gpu_never_raises_a_limit() {
        check(&[grant(&[(1, 5, 30)]), grant(&[(1, u64::MAX, 100)])], &[(1, 5, 0, 0)]);
        check(
            &[grant(&[(1, u64::MAX, 100)]), grant(&[(2, 1, 1), (1, 5, 30)])],
            &[(1, 5, 1, 1), (2, 1, 1, 0)],
        );
        let many: Vec<(u8, u64, u32)> = (0..20).map(|gpu| (gpu, 1, 1)).collect();
        assert_eq!(merge(&[grant(&many), grant(&many)]).0.gpus.len(), MAX_GPUS);
    }
}
