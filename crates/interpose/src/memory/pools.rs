//! Pools of the driver, which take memory from the GPU in their own pieces and keep what is freed. So a pool is charged by what it
//! has reserved: more than that is never on the GPU, and what it keeps is not promised twice.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use tessera_limits::GpuSlot;
use tessera_limits::allocation_size::round_up_to_blocks;

use crate::cuda::{
    Device, GRAPH_MEMORY_RESERVED, Handle, INVALID_VALUE, OUT_OF_MEMORY, POOL_RESERVED, POOL_USED, SUCCESS,
    Status,
};
use crate::entry::library::driver_functions;
use crate::grant::Process;
use crate::monitor;

driver_functions! { Cuda:
    pool_attribute = c"cuMemPoolGetAttribute" (pool: Handle, attribute: i32, value: *mut c_void);
    destroy_pool = c"cuMemPoolDestroy" (pool: Handle);
    trim = c"cuMemPoolTrimTo" (pool: Handle, keep: usize);
    graph_memory = c"cuDeviceGetGraphMemAttribute" (device: Device, attribute: i32, value: *mut c_void);
    trim_graph_memory = c"cuDeviceGraphMemTrim" (device: Device);
}

/// Pools in use, by handle or, for the memory of graphs, by device. They are few, and never freed here.
#[derive(Default)]
pub struct Pools {
    known: RwLock<Vec<&'static Pool>>,
    /// The pool used last: most programs have one.
    last: AtomicPtr<Pool>,
    /// Where there is one device only: the pool that allocations without a pool come from.
    pub usual: AtomicUsize,
}

/// Where memory comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PoolSource {
    Pool(usize),
    Graphs(Device),
}

pub struct Pool {
    source: PoolSource,
    /// The GPU whose memory the pool hands out, or `None` for host memory, which is not charged.
    gpu: Option<GpuSlot>,
    /// What this pool is charged with.
    charged: AtomicU64,
    /// Part of it: for calls on their way to the driver.
    on_the_way: AtomicU64,
    /// Part of it: for calls to come, so that not each of them goes to the ledger.
    ahead: AtomicU64,
    /// What it may reserve without asking again: it is charged with that at least.
    promised: AtomicU64,
    /// Our thread knows that there is something to settle.
    is_noted: AtomicBool,
    /// The program made it, and may destroy it.
    pub is_made: AtomicBool,
    /// The program has destroyed it while memory of it was in use. That is so until the last of it is freed.
    is_left: AtomicBool,
}

/// As long as the container is further than this from its limit, a pool is charged ahead
const COMFORT: u64 = 2 << 30;
/// with so much.
const AHEAD: u64 = 512 << 20;

impl Pools {
    /// Charges each pool with what it really has.
    pub fn settle_all(&self, process: &Process) {
        self.each(process, &|pool| pool.settle(process));
    }

    /// Has each pool give up what it keeps for later, as the driver does when the GPU is full.
    pub fn shrink_all(&self, process: &Process) {
        self.each(process, &|pool| {
            pool.trim();
            pool.settle(process);
        });
    }

    /// Asks each pool of a GPU. None goes meanwhile; those that the program has left go then.
    fn each(&self, process: &Process, ask: &dyn Fn(&Pool)) {
        let pools = self.known.read().unwrap_or_else(PoisonError::into_inner);
        pools.iter().filter(|pool| pool.gpu.is_some()).for_each(|pool| ask(pool));
        let is_left = |pool: &&&Pool| pool.is_left.load(Ordering::SeqCst);
        let left: Vec<PoolSource> = pools.iter().filter(is_left).map(|pool| pool.source).collect();
        drop(pools);
        for source in left {
            self.destroy(process, source);
        }
    }

    /// The pool of a source, which lies on a GPU.
    pub fn get(&self, source: PoolSource, gpu: Option<GpuSlot>) -> &'static Pool {
        if let Some(pool) = self.known(source) {
            return pool;
        }
        let mut pools = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.iter().find(|pool| pool.source == source) {
            return pool;
        }
        let new = Box::leak(Box::new(Pool {
            source,
            gpu,
            charged: AtomicU64::new(0),
            on_the_way: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            promised: AtomicU64::new(0),
            is_noted: AtomicBool::new(false),
            is_made: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
        }));
        pools.push(new);
        new
    }

    /// The pool of a source, if there was one before.
    pub fn known(&self, source: PoolSource) -> Option<&'static Pool> {
        // SAFETY: null or a leaked pool.
        let last = unsafe { self.last.load(Ordering::Acquire).as_ref() };
        if let Some(last) = last.filter(|last| last.source == source) {
            return Some(last);
        }
        let pools = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let pool = pools.iter().find(|pool| pool.source == source).copied()?;
        self.last.store(std::ptr::from_ref(pool).cast_mut(), Ordering::Release);
        Some(pool)
    }

    /// A pool goes, with its memory. Where some of that is in use the driver would let it live, but nobody could ask it any more: then it
    /// goes later.
    pub fn destroy(&self, process: &Process, source: PoolSource) -> Status {
        let PoolSource::Pool(handle) = source else { return INVALID_VALUE };
        // Locked until it is gone: others may be asking it, and the next one may have its handle.
        let mut pools = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let place = pools.iter().position(|pool| pool.source == source);
        let is_in_use = |pool: &Pool| pool.is_made.load(Ordering::Relaxed) && pool.ask(POOL_USED) > Some(0);
        if let Some(pool) = place.map(|place| pools[place]).filter(|pool| is_in_use(pool)) {
            pool.is_left.store(true, Ordering::SeqCst);
            return SUCCESS;
        }
        // SAFETY: destroyed by the program.
        let status = unsafe { destroy_pool(std::ptr::with_exposed_provenance_mut(handle)) };
        if let Some(place) = place.filter(|_| status == SUCCESS) {
            let pool = pools.swap_remove(place);
            self.usual.store(0, Ordering::Release);
            self.last.store(std::ptr::null_mut(), Ordering::Release);
            if let Some(gpu) = pool.gpu {
                process.refund(gpu, pool.charged.swap(0, Ordering::SeqCst));
            }
        }
        status
    }
}

impl Pool {
    /// An attribute of the pool, where it can be asked.
    fn ask(&self, pool_attribute_number: i32) -> Option<u64> {
        let mut value = 0_u64;
        let place = (&raw mut value).cast();
        // SAFETY: all attributes asked for are 64 bits wide.
        let status = unsafe {
            match self.source {
                PoolSource::Pool(pool) => {
                    pool_attribute(std::ptr::with_exposed_provenance_mut(pool), pool_attribute_number, place)
                }
                PoolSource::Graphs(device) => graph_memory(device, GRAPH_MEMORY_RESERVED, place),
            }
        };
        (status == SUCCESS).then_some(value)
    }

    /// Charges the pool with what it has reserved and what is on its way.
    fn settle(&self, process: &Process) {
        self.is_noted.store(false, Ordering::SeqCst);
        if self.ahead.swap(0, Ordering::SeqCst) > 0 {
            // What was charged ahead may have covered what the agent would have seen beyond the ledger.
            process.memory.code.note_loaded();
        }
        // A pool that cannot report its size keeps its last charge.
        let (Some(gpu), Some(reserved)) = (self.gpu, self.ask(POOL_RESERVED)) else { return };
        let reserved = reserved + self.on_the_way.load(Ordering::SeqCst);
        let target = reserved.max(self.promised.load(Ordering::SeqCst));
        let before = self.charged.swap(target, Ordering::SeqCst);
        if target > before {
            process.charge_anyway(gpu, target - before);
        } else {
            process.refund(gpu, before - target);
        }
    }

    /// Lets the pool reserve `bytes` more whenever it likes.
    ///
    /// # Errors
    /// "Out of memory" at the limit.
    pub fn promise(&self, process: &Process, bytes: u64) -> Result<(), Status> {
        let Some(gpu) = self.gpu else { return Ok(()) };
        self.settle(process);
        let promised = self.promised.fetch_add(bytes, Ordering::SeqCst) + bytes;
        let missing = promised.saturating_sub(self.charged.load(Ordering::SeqCst));
        if let Err(status) = process.charge(gpu, missing) {
            self.promised.fetch_sub(bytes, Ordering::SeqCst);
            return Err(status);
        }
        self.charged.fetch_add(missing, Ordering::SeqCst);
        monitor::notify();
        Ok(())
    }

    /// It will not reserve that any more. What it has of it must go back to the GPU, or the next could come on top of it.
    pub fn take_back(&self, process: &Process, bytes: u64) {
        self.promised.fetch_sub(bytes, Ordering::SeqCst);
        self.trim();
        self.settle(process);
    }

    fn spare(&self) -> u64 {
        let asked = self.ask(POOL_RESERVED).zip(self.ask(POOL_USED));
        asked.map_or(0, |(reserved, used)| reserved.saturating_sub(used))
    }

    /// Asks the driver for `bytes` of this pool.
    pub fn take(
        &self,
        process: &Process,
        bytes: u64,
        ask: &dyn Fn() -> Status,
        undo: impl FnOnce(),
    ) -> Status {
        let Some(gpu) = self.gpu else { return ask() };
        let blocks = round_up_to_blocks(bytes);
        if self.pays(blocks) || (self.tops_up(process, gpu) && self.pays(blocks)) {
            let status = ask();
            if status != SUCCESS {
                self.settle(process);
            }
            return status;
        }
        let status = self.take_at_the_limit(process, gpu, bytes, ask, undo);
        monitor::notify();
        status
    }

    /// Takes from what was charged ahead.
    fn pays(&self, blocks: u64) -> bool {
        let paid = |ahead: u64| ahead.checked_sub(blocks);
        self.ahead.fetch_update(Ordering::SeqCst, Ordering::SeqCst, paid).is_ok()
    }

    /// Charges ahead, beyond what the pool really has, if the container is far from its limit.
    fn tops_up(&self, process: &Process, gpu: GpuSlot) -> bool {
        if process.account.held(gpu).saturating_add(COMFORT) > process.memory_limit(gpu) {
            return false;
        }
        let Some(reserved) = self.ask(POOL_RESERVED) else { return false };
        let target = reserved + self.on_the_way.load(Ordering::SeqCst) + AHEAD;
        let before = self.charged.swap(target, Ordering::SeqCst);
        if target < before {
            process.refund(gpu, before - target);
        } else if target > before && !process.charge_now(gpu, target - before) {
            self.charged.fetch_sub(target - before, Ordering::SeqCst);
            return false;
        }
        self.ahead.store(AHEAD, Ordering::SeqCst);
        if !self.is_noted.swap(true, Ordering::SeqCst) {
            monitor::notify();
        }
        true
    }

    /// Asks the driver, looking at the ledger and the pool.
    fn take_at_the_limit(
        &self,
        process: &Process,
        gpu: GpuSlot,
        bytes: u64,
        ask: &dyn Fn() -> Status,
        undo: impl FnOnce(),
    ) -> Status {
        let mut charged = round_up_to_blocks(bytes);
        if process.charge(gpu, charged).is_err() {
            // Not from the GPU, then; perhaps from what the pool already has.
            if self.spare() < bytes {
                return OUT_OF_MEMORY;
            }
            charged = 0;
        }
        self.on_the_way.fetch_add(charged, Ordering::SeqCst);
        self.charged.fetch_add(charged, Ordering::SeqCst);
        let status = ask();
        self.on_the_way.fetch_sub(charged, Ordering::SeqCst);
        self.settle(process);
        let (held, limit) = (process.account.held(gpu), process.memory_limit(gpu));
        // The pool could not use its spare memory after all and took more than there is.
        if charged == 0 && status == SUCCESS && held > limit {
            undo();
            self.trim();
            self.settle(process);
            return OUT_OF_MEMORY;
        }
        status
    }

    /// Has it give up what it keeps for later.
    fn trim(&self) {
        // SAFETY: a live pool, or a device; what is in use is kept.
        unsafe {
            match self.source {
                PoolSource::Pool(pool) => trim(std::ptr::with_exposed_provenance_mut(pool), 0),
                PoolSource::Graphs(device) => trim_graph_memory(device),
            }
        };
    }
}
