//! Stream-ordered allocation. A pool takes memory from the card in its own pieces and keeps what is freed, so it is
//! charged by what it has reserved: more than that is never on the card, and what it keeps is not promised twice.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use tessera_limits::budget::whole_blocks;

use super::books::Kind;
use super::give;
use crate::cuda::{
    AllocationNode, Device, DevicePointer, GRAPH_MEMORY_RESERVED, Handle, LOCATION_DEVICE, OUT_OF_MEMORY,
    POOL_RESERVED, POOL_USED, Placement, SUCCESS, Status,
};
use crate::door::library::driver_functions;
use crate::door::table::hooks;
use crate::grant::Process;
use crate::keeper;

hooks! { CUDA:
    cuMemAllocAsync c"cuMemAllocAsync" (pointer: *mut DevicePointer, bytes: usize, stream: Handle) => alloc;
    cuMemAllocAsync_ptsz c"cuMemAllocAsync_ptsz" (pointer: *mut DevicePointer, bytes: usize, stream: Handle) => alloc;
    cuMemAllocFromPoolAsync c"cuMemAllocFromPoolAsync" (
        pointer: *mut DevicePointer, bytes: usize, pool: Handle, stream: Handle
    ) => alloc_from;
    cuMemAllocFromPoolAsync_ptsz c"cuMemAllocFromPoolAsync_ptsz" (
        pointer: *mut DevicePointer, bytes: usize, pool: Handle, stream: Handle
    ) => alloc_from;
    cuMemFreeAsync c"cuMemFreeAsync" (pointer: DevicePointer, stream: Handle) => free;
    cuMemFreeAsync_ptsz c"cuMemFreeAsync_ptsz" (pointer: DevicePointer, stream: Handle) => free;
    cuMemPoolCreate c"cuMemPoolCreate" (pool: *mut Handle, placement: *const Placement) => create;
    cuMemPoolDestroy c"cuMemPoolDestroy" (pool: Handle) => destroy;
    cuGraphAddMemAllocNode c"cuGraphAddMemAllocNode" (
        node: *mut Handle, graph: Handle, dependencies: *const Handle, count: usize, parameters: *mut AllocationNode
    ) => add_node;
}

driver_functions! { CUDA:
    pool_attribute = c"cuMemPoolGetAttribute" (pool: Handle, attribute: i32, value: *mut c_void);
    trim = c"cuMemPoolTrimTo" (pool: Handle, keep: usize);
    pool_of_device = c"cuDeviceGetMemPool" (pool: *mut Handle, device: Device);
    graph_memory = c"cuDeviceGetGraphMemAttribute" (device: Device, attribute: i32, value: *mut c_void);
    current_device = c"cuCtxGetDevice" (device: *mut Device);
    free_async = c"cuMemFreeAsync" (pointer: DevicePointer, stream: Handle);
}

/// Pools in use, by handle or, for the memory of graphs, by device. They are few, and never freed here.
#[derive(Default)]
pub struct Pools {
    known: RwLock<HashMap<Source, &'static Pool>>,
    /// The pool used last: most programs have one.
    last: AtomicPtr<Pool>,
}

/// Where memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    Pool(usize),
    Graphs(Device),
}

struct Pool {
    source: Source,
    card: usize,
    /// What this pool is charged with.
    charged: AtomicU64,
    /// Part of it: for calls on their way to the driver.
    on_the_way: AtomicU64,
    /// Part of it: for calls to come, so that not each of them goes to the ledger.
    ahead: AtomicU64,
    /// Calls since the last look at the pool.
    unlooked: AtomicU64,
}

/// As long as the container is further than this from its limit, a pool is looked at once in a while only.
const COMFORT: u64 = 2 << 30;
const LOOK_EVERY: u64 = 64;
/// What is charged ahead then.
const AHEAD: u64 = 256 << 20;

type Alloc = unsafe extern "C" fn(*mut DevicePointer, usize, Handle) -> Status;
type AllocFrom = unsafe extern "C" fn(*mut DevicePointer, usize, Handle, Handle) -> Status;

impl Pools {
    /// Charges each pool with what it really has.
    pub fn settle_all(&self, process: &Process) {
        for pool in self.all() {
            pool.settle(process);
        }
    }

    /// Has each pool give up what it keeps for later, as the driver does when the card is full.
    pub fn shrink_all(&self, process: &Process) {
        for pool in self.all() {
            pool.trim();
            pool.settle(process);
        }
    }

    fn all(&self) -> Vec<&'static Pool> {
        let pools = self.known.read().unwrap_or_else(PoisonError::into_inner);
        pools.values().filter(|pool| pool.card != ON_HOST).copied().collect()
    }

    fn get(&self, source: Source, card: usize) -> &'static Pool {
        if let Some(pool) = self.known(source) {
            return pool;
        }
        let new = || {
            &*Box::leak(Box::new(Pool {
                source,
                card,
                charged: AtomicU64::new(0),
                on_the_way: AtomicU64::new(0),
                ahead: AtomicU64::new(0),
                unlooked: AtomicU64::new(0),
            }))
        };
        self.known.write().unwrap_or_else(PoisonError::into_inner).entry(source).or_insert_with(new)
    }

    fn known(&self, source: Source) -> Option<&'static Pool> {
        // SAFETY: null or a leaked pool.
        let last = unsafe { self.last.load(Ordering::Acquire).as_ref() };
        if let Some(last) = last.filter(|last| last.source == source) {
            return Some(last);
        }
        let pool = self.known.read().unwrap_or_else(PoisonError::into_inner).get(&source).copied()?;
        self.last.store(std::ptr::from_ref(pool).cast_mut(), Ordering::Release);
        Some(pool)
    }

    fn forget(&self, source: Source) -> Option<&'static Pool> {
        self.last.store(std::ptr::null_mut(), Ordering::Release);
        self.known.write().unwrap_or_else(PoisonError::into_inner).remove(&source)
    }
}

impl Pool {
    /// An attribute of the pool; 0 where it cannot be asked.
    fn ask(&self, pool_attribute_number: i32) -> u64 {
        let mut value = 0_u64;
        let place = (&raw mut value).cast();
        // SAFETY: all attributes asked for are 64 bits wide.
        let status = unsafe {
            match self.source {
                Source::Pool(pool) => {
                    pool_attribute(std::ptr::with_exposed_provenance_mut(pool), pool_attribute_number, place)
                }
                Source::Graphs(device) => graph_memory(device, GRAPH_MEMORY_RESERVED, place),
            }
        };
        if status == SUCCESS { value } else { 0 }
    }

    /// Charges the pool with what it has reserved and what is on its way.
    fn settle(&self, process: &Process) {
        self.unlooked.store(0, Ordering::Relaxed);
        if self.ahead.swap(0, Ordering::SeqCst) > 0 {
            // What was charged ahead may have covered what the agent would have seen beyond the ledger.
            process.memory.code.note_loaded();
        }
        let target = self.ask(POOL_RESERVED) + self.on_the_way.load(Ordering::SeqCst);
        let before = self.charged.swap(target, Ordering::SeqCst);
        if target > before {
            process.charge_anyway(self.card, target - before);
        } else {
            process.refund(self.card, before - target);
        }
    }

    fn spare(&self) -> u64 {
        self.ask(POOL_RESERVED).saturating_sub(self.ask(POOL_USED))
    }

    /// Asks the driver for `bytes` of this pool.
    unsafe fn take(
        &self,
        process: &Process,
        bytes: u64,
        ask: impl Fn() -> Status,
        undo: impl FnOnce(),
    ) -> Status {
        let blocks = whole_blocks(bytes);
        let paid = |ahead: u64| ahead.checked_sub(blocks);
        if self.unlooked.load(Ordering::Relaxed) < LOOK_EVERY
            && self.ahead.fetch_update(Ordering::SeqCst, Ordering::SeqCst, paid).is_ok()
        {
            self.unlooked.fetch_add(1, Ordering::Relaxed);
            let status = ask();
            if status != SUCCESS {
                self.settle(process);
            }
            return status;
        }
        let (status, is_comfortable) = self.take_at_the_limit(process, bytes, ask, undo);
        if is_comfortable && process.charge_now(self.card, AHEAD) {
            self.charged.fetch_add(AHEAD, Ordering::SeqCst);
            self.ahead.fetch_add(AHEAD, Ordering::SeqCst);
        }
        keeper::notify();
        status
    }

    /// The same, looking at the ledger and the pool. Also tells whether the container is far from its limit.
    fn take_at_the_limit(
        &self,
        process: &Process,
        bytes: u64,
        ask: impl Fn() -> Status,
        undo: impl FnOnce(),
    ) -> (Status, bool) {
        let mut charged = whole_blocks(bytes);
        if process.charge(self.card, charged).is_err() {
            // Not from the card, then; perhaps from what the pool already has.
            if self.spare() < bytes {
                return (OUT_OF_MEMORY, false);
            }
            charged = 0;
        }
        self.on_the_way.fetch_add(charged, Ordering::SeqCst);
        self.charged.fetch_add(charged, Ordering::SeqCst);
        let status = ask();
        self.on_the_way.fetch_sub(charged, Ordering::SeqCst);
        self.settle(process);
        let (held, limit) = (process.account.held(self.card), process.memory_limit(self.card));
        // The pool could not use its spare memory after all and took more than there is.
        if charged == 0 && status == SUCCESS && held > limit {
            undo();
            self.trim();
            self.settle(process);
            return (OUT_OF_MEMORY, false);
        }
        (status, held.saturating_add(COMFORT) < limit)
    }

    fn trim(&self) {
        if let Source::Pool(pool) = self.source {
            // SAFETY: a live pool; it keeps what is in use.
            unsafe { trim(std::ptr::with_exposed_provenance_mut(pool), 0) };
        }
    }
}

unsafe fn alloc(driver: Alloc, pointer: *mut DevicePointer, bytes: usize, stream: Handle) -> Status {
    let mut device = 0;
    let mut pool = std::ptr::null_mut();
    // SAFETY: places for the answers.
    let known = unsafe {
        current_device(&raw mut device) == SUCCESS && pool_of_device(&raw mut pool, device) == SUCCESS
    };
    // SAFETY: passed on as they came.
    let ask = || unsafe { driver(pointer, bytes, stream) };
    if !known {
        // Without a context the driver refuses by itself.
        return ask();
    }
    // SAFETY: as above; the stream is the program's.
    unsafe { take(pool, bytes, ask, pointer, stream) }
}

unsafe fn alloc_from(
    driver: AllocFrom,
    pointer: *mut DevicePointer,
    bytes: usize,
    pool: Handle,
    stream: Handle,
) -> Status {
    // SAFETY: passed on as they came.
    let ask = || unsafe { driver(pointer, bytes, pool, stream) };
    // SAFETY: as above.
    unsafe { take(pool, bytes, ask, pointer, stream) }
}

unsafe fn take(
    pool: Handle,
    bytes: usize,
    ask: impl Fn() -> Status,
    pointer: *mut DevicePointer,
    stream: Handle,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let source = Source::Pool(pool.expose_provenance());
    let pool = match process.memory.pools.known(source) {
        Some(pool) => pool,
        None => match process.cards.current() {
            Some(Ok(card)) => process.memory.pools.get(source, card),
            Some(Err(status)) => return status,
            None => return ask(),
        },
    };
    if pool.card == ON_HOST {
        return ask();
    }
    let undo = || {
        // SAFETY: allocated just before, on this stream, and not yet known to the program.
        unsafe { free_async(*pointer, stream) };
    };
    // SAFETY: as the caller says.
    unsafe { pool.take(process, bytes as u64, ask, undo) }
}

unsafe fn free(
    driver: unsafe extern "C" fn(DevicePointer, Handle) -> Status,
    pointer: DevicePointer,
    stream: Handle,
) -> Status {
    // Plain memory may be freed in stream order too.
    // SAFETY: passed on as they came.
    unsafe { give(Kind::Pointer, pointer, || driver(pointer, stream)) }
}

/// Stands for no card: pools of host memory are not charged.
const ON_HOST: usize = usize::MAX;

unsafe fn create(
    driver: unsafe extern "C" fn(*mut Handle, *const Placement) -> Status,
    pool: *mut Handle,
    placement: *const Placement,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    // SAFETY: passed on as they came.
    let status = unsafe { driver(pool, placement) };
    if status == SUCCESS && !placement.is_null() {
        // SAFETY: the driver has read the one and written the other.
        let (location, pool) = unsafe { ((*placement).location, *pool) };
        let card = match location.kind {
            LOCATION_DEVICE => process.cards.of_device(location.id),
            _ => Ok(ON_HOST),
        };
        if let Ok(card) = card {
            process.memory.pools.get(Source::Pool(pool.expose_provenance()), card);
        }
    }
    status
}

unsafe fn destroy(driver: unsafe extern "C" fn(Handle) -> Status, pool: Handle) -> Status {
    // SAFETY: passed on as it came.
    let status = unsafe { driver(pool) };
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
    {
        let source = Source::Pool(pool.expose_provenance());
        let gone = process.memory.pools.forget(source);
        if let Some(pool) = gone.filter(|pool| pool.card != ON_HOST) {
            process.refund(pool.card, pool.charged.swap(0, Ordering::SeqCst));
        }
    }
    status
}

/// Memory that a graph allocates when it runs: refused here when it cannot fit, charged as the graphs' pool grows.
unsafe fn add_node(
    driver: unsafe extern "C" fn(*mut Handle, Handle, *const Handle, usize, *mut AllocationNode) -> Status,
    node: *mut Handle,
    graph: Handle,
    dependencies: *const Handle,
    count: usize,
    parameters: *mut AllocationNode,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    // SAFETY: the program passes parameters or null.
    if let Some(asked) = unsafe { parameters.as_ref() }
        && asked.location.kind == LOCATION_DEVICE
    {
        let card = match process.cards.of_device(asked.location.id) {
            Ok(card) => card,
            Err(status) => return status,
        };
        let bytes = whole_blocks(asked.bytes as u64);
        if let Err(status) = process.charge(card, bytes) {
            return status;
        }
        process.refund(card, bytes);
        process.memory.pools.get(Source::Graphs(asked.location.id), card);
        keeper::notify();
    }
    // SAFETY: passed on as they came.
    unsafe { driver(node, graph, dependencies, count, parameters) }
}
