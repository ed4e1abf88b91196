//! The driver's memory pools. A pool reserves memory from the GPU in its own units and keeps freed
//! memory. It is therefore charged by what it has reserved: it never has more memory on the GPU,
//! and memory that it keeps is not promised twice.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use tessera_limits::allocation_size::round_up_to_blocks;
use tessera_limits::{AtomicBytes, Bytes, GpuSlot};

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

/// All known pools. A process has few of them, and their records are never freed.
#[derive(Default)]
pub struct Pools {
    known: RwLock<Vec<&'static Pool>>,
    /// The pool of the last allocation. Most programs use one pool only.
    last: AtomicPtr<Pool>,
    /// Handle of the pool for allocations that name no pool, or 0. Cached only if there is one
    /// device.
    pub default_pool: AtomicUsize,
}

/// The origin of stream-ordered memory: a pool by its handle, or the memory for graphs of a device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PoolSource {
    Pool(usize),
    Graphs(Device),
}

pub struct Pool {
    source: PoolSource,
    /// The GPU whose memory the pool hands out, or `None` for host memory, which is not charged.
    gpu: Option<GpuSlot>,
    /// Memory that is charged for this pool.
    charged: AtomicBytes,
    /// Part of the charge that belongs to driver calls in flight.
    in_flight: AtomicBytes,
    /// Part of the charge that is prepaid for later allocations, so that not each of them updates
    /// the account.
    prepaid: AtomicBytes,
    /// Memory that the pool may reserve at any time. The charge is never below this value.
    promised: AtomicBytes,
    /// True if the monitor thread has been notified that this pool must be settled.
    is_monitor_notified: AtomicBool,
    /// True if the program created the pool and may destroy it.
    pub is_created_by_program: AtomicBool,
    /// True if the program has destroyed the pool while some of its memory was in use. The pool is
    /// destroyed once all of it is freed.
    is_destroy_pending: AtomicBool,
}

/// Distance of the container from its limit above which a pool prepays.
const PREPAY_DISTANCE: Bytes = Bytes::from_mib(2_048);
/// Memory that a pool prepays.
const PREPAID: Bytes = Bytes::from_mib(512);

impl Pools {
    /// Adjusts the charge of each pool to its reserved memory.
    pub fn settle_all(&self, process: &Process) {
        self.each(process, &|pool| pool.settle(process));
    }

    /// Makes each pool release unused memory, as the driver does when the GPU is full.
    pub fn shrink_all(&self, process: &Process) {
        self.each(process, &|pool| {
            pool.trim();
            pool.settle(process);
        });
    }

    /// Visits each pool of device memory. No pool is destroyed meanwhile; pools with a pending
    /// destruction are destroyed afterwards.
    fn each(&self, process: &Process, visit: &dyn Fn(&Pool)) {
        let pools = self.known.read().unwrap_or_else(PoisonError::into_inner);
        pools.iter().filter(|pool| pool.gpu.is_some()).for_each(|pool| visit(pool));
        let is_destroy_pending = |pool: &&&Pool| pool.is_destroy_pending.load(Ordering::SeqCst);
        let pending: Vec<PoolSource> =
            pools.iter().filter(is_destroy_pending).map(|pool| pool.source).collect();
        drop(pools);
        for source in pending {
            self.destroy(process, source);
        }
    }

    /// Returns the pool of a source, and adds it if it is not known.
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
            charged: AtomicBytes::default(),
            in_flight: AtomicBytes::default(),
            prepaid: AtomicBytes::default(),
            promised: AtomicBytes::default(),
            is_monitor_notified: AtomicBool::new(false),
            is_created_by_program: AtomicBool::new(false),
            is_destroy_pending: AtomicBool::new(false),
        }));
        pools.push(new);
        new
    }

    /// Returns the pool of a source if it is known.
    pub fn known(&self, source: PoolSource) -> Option<&'static Pool> {
        // SAFETY: the pointer is null or refers to a pool that was leaked.
        let last = unsafe { self.last.load(Ordering::Acquire).as_ref() };
        if let Some(last) = last.filter(|last| last.source == source) {
            return Some(last);
        }
        let pools = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let pool = pools.iter().find(|pool| pool.source == source).copied()?;
        self.last.store(std::ptr::from_ref(pool).cast_mut(), Ordering::Release);
        Some(pool)
    }

    /// Destroys a pool. If some of its memory is in use, the driver would keep that memory, but the
    /// pool could no longer be queried. The destruction is then deferred until the memory is freed.
    pub fn destroy(&self, process: &Process, source: PoolSource) -> Status {
        let PoolSource::Pool(handle) = source else { return INVALID_VALUE };
        // The list stays locked until the pool is destroyed: other threads may query the pool, and
        // a new pool may get the same handle.
        let mut pools = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let place = pools.iter().position(|pool| pool.source == source);
        let is_in_use = |pool: &Pool| {
            pool.is_created_by_program.load(Ordering::Relaxed)
                && pool.attribute(POOL_USED) > Some(Bytes::ZERO)
        };
        if let Some(pool) = place.map(|place| pools[place]).filter(|pool| is_in_use(pool)) {
            pool.is_destroy_pending.store(true, Ordering::SeqCst);
            return SUCCESS;
        }
        // SAFETY: the program has requested the destruction of this pool.
        let status = unsafe { destroy_pool(std::ptr::with_exposed_provenance_mut(handle)) };
        if let Some(place) = place.filter(|_| status == SUCCESS) {
            let pool = pools.swap_remove(place);
            self.default_pool.store(0, Ordering::Release);
            self.last.store(std::ptr::null_mut(), Ordering::Release);
            if let Some(gpu) = pool.gpu {
                process.refund(gpu, pool.charged.swap(Bytes::ZERO, Ordering::SeqCst));
            }
        }
        status
    }
}

impl Pool {
    /// Returns an attribute of the pool, or `None` if the driver does not report it.
    fn attribute(&self, pool_attribute_number: i32) -> Option<Bytes> {
        let mut value = 0_u64;
        let target = (&raw mut value).cast();
        // SAFETY: the pool or device is valid, and all attributes used here are 64 bits wide, like
        // `value`.
        let status = unsafe {
            match self.source {
                PoolSource::Pool(pool) => {
                    pool_attribute(std::ptr::with_exposed_provenance_mut(pool), pool_attribute_number, target)
                }
                PoolSource::Graphs(device) => graph_memory(device, GRAPH_MEMORY_RESERVED, target),
            }
        };
        (status == SUCCESS).then_some(Bytes(value))
    }

    /// Adjusts the charge to the reserved memory and the calls in flight.
    fn settle(&self, process: &Process) {
        self.is_monitor_notified.store(false, Ordering::SeqCst);
        if self.prepaid.swap(Bytes::ZERO, Ordering::SeqCst) > Bytes::ZERO {
            // The prepaid charge may have hidden memory that the agent would have measured as
            // uncharged.
            process.memory.code.note_loaded();
        }
        // A pool that cannot report its size keeps its last charge.
        let (Some(gpu), Some(reserved)) = (self.gpu, self.attribute(POOL_RESERVED)) else { return };
        let reserved = reserved + self.in_flight.load(Ordering::SeqCst);
        let target = reserved.max(self.promised.load(Ordering::SeqCst));
        let before = self.charged.swap(target, Ordering::SeqCst);
        if target > before {
            process.charge_anyway(gpu, target - before);
        } else {
            process.refund(gpu, before - target);
        }
    }

    /// Allows the pool to reserve `bytes` more at any time.
    ///
    /// # Errors
    /// "Out of memory" at the limit.
    pub fn promise(&self, process: &Process, bytes: Bytes) -> Result<(), Status> {
        let Some(gpu) = self.gpu else { return Ok(()) };
        self.settle(process);
        let promised = self.promised.fetch_add(bytes, Ordering::SeqCst) + bytes;
        let missing = promised - self.charged.load(Ordering::SeqCst);
        if let Err(status) = process.charge(gpu, missing) {
            self.promised.fetch_sub(bytes, Ordering::SeqCst);
            return Err(status);
        }
        self.charged.fetch_add(missing, Ordering::SeqCst);
        monitor::notify();
        Ok(())
    }

    /// Revokes a promise. The pool is trimmed, so that a later promise does not come on top of
    /// memory that the pool keeps.
    pub fn revoke_promise(&self, process: &Process, bytes: Bytes) {
        self.promised.fetch_sub(bytes, Ordering::SeqCst);
        self.trim();
        self.settle(process);
    }

    fn spare(&self) -> Bytes {
        let sizes = self.attribute(POOL_RESERVED).zip(self.attribute(POOL_USED));
        sizes.map_or(Bytes::ZERO, |(reserved, used)| reserved - used)
    }

    /// Allocates `bytes` from this pool.
    pub fn allocate(
        &self,
        process: &Process,
        bytes: Bytes,
        call_driver: &dyn Fn() -> Status,
        undo: impl FnOnce(),
    ) -> Status {
        let Some(gpu) = self.gpu else { return call_driver() };
        let blocks = round_up_to_blocks(bytes);
        if self.use_prepaid(blocks) || (self.prepay(process, gpu) && self.use_prepaid(blocks)) {
            let status = call_driver();
            if status != SUCCESS {
                self.settle(process);
            }
            return status;
        }
        let status = self.allocate_near_limit(process, gpu, bytes, call_driver, undo);
        monitor::notify();
        status
    }

    /// Uses `blocks` of the prepaid charge. Returns false if it does not suffice.
    fn use_prepaid(&self, blocks: Bytes) -> bool {
        self.prepaid.try_sub(blocks, Ordering::SeqCst)
    }

    /// Charges more than the pool has reserved, if the container is far from its limit. Returns
    /// whether it did.
    fn prepay(&self, process: &Process, gpu: GpuSlot) -> bool {
        if process.charged(gpu) + PREPAY_DISTANCE > process.memory_limit(gpu) {
            return false;
        }
        let Some(reserved) = self.attribute(POOL_RESERVED) else { return false };
        let target = reserved + self.in_flight.load(Ordering::SeqCst) + PREPAID;
        let before = self.charged.swap(target, Ordering::SeqCst);
        if target < before {
            process.refund(gpu, before - target);
        } else if target > before && !process.try_charge(gpu, target - before) {
            self.charged.fetch_sub(target - before, Ordering::SeqCst);
            return false;
        }
        self.prepaid.store(PREPAID, Ordering::SeqCst);
        if !self.is_monitor_notified.swap(true, Ordering::SeqCst) {
            monitor::notify();
        }
        true
    }

    /// Allocates with an exact charge, because the container is near its limit.
    fn allocate_near_limit(
        &self,
        process: &Process,
        gpu: GpuSlot,
        bytes: Bytes,
        call_driver: &dyn Fn() -> Status,
        undo: impl FnOnce(),
    ) -> Status {
        let mut charged = round_up_to_blocks(bytes);
        if process.charge(gpu, charged).is_err() {
            // No more memory of the GPU is available. The pool may still have enough unused memory.
            if self.spare() < bytes {
                return OUT_OF_MEMORY;
            }
            charged = Bytes::ZERO;
        }
        self.in_flight.fetch_add(charged, Ordering::SeqCst);
        self.charged.fetch_add(charged, Ordering::SeqCst);
        let status = call_driver();
        self.in_flight.fetch_sub(charged, Ordering::SeqCst);
        self.settle(process);
        let (held, limit) = (process.charged(gpu), process.memory_limit(gpu));
        // The pool could not use its spare memory and has reserved more than the limit allows.
        if charged == Bytes::ZERO && status == SUCCESS && held > limit {
            undo();
            self.trim();
            self.settle(process);
            return OUT_OF_MEMORY;
        }
        status
    }

    /// Makes the pool release its unused memory.
    fn trim(&self) {
        // SAFETY: the pool or device is valid, and the driver keeps memory that is in use.
        unsafe {
            match self.source {
                PoolSource::Pool(pool) => trim(std::ptr::with_exposed_provenance_mut(pool), 0),
                PoolSource::Graphs(device) => trim_graph_memory(device),
            }
        };
    }
}
