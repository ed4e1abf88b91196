//! Stream-ordered allocation. A pool takes memory from the card in its own pieces and keeps what is freed, so it is
//! charged by what it has reserved: more than that is never on the card, and what it keeps is not promised twice.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
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
    cuMemAllocAsync(pointer: *mut DevicePointer, bytes: usize, stream: Handle) => alloc;
    cuMemAllocAsync_ptsz(pointer: *mut DevicePointer, bytes: usize, stream: Handle) => alloc;
    cuMemAllocFromPoolAsync(
        pointer: *mut DevicePointer, bytes: usize, pool: Handle, stream: Handle
    ) => alloc_from;
    cuMemAllocFromPoolAsync_ptsz(
        pointer: *mut DevicePointer, bytes: usize, pool: Handle, stream: Handle
    ) => alloc_from;
    cuMemFreeAsync(pointer: DevicePointer, stream: Handle) => free;
    cuMemFreeAsync_ptsz(pointer: DevicePointer, stream: Handle) => free;
    cuDeviceSetMemPool(device: Device, pool: Handle) => set_pool;
    cuMemPoolCreate(pool: *mut Handle, placement: *const Placement) => create;
    cuMemPoolDestroy(pool: Handle) => destroy;
    cuGraphAddMemAllocNode(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, count: usize, parameters: *mut AllocationNode
    ) => add_node;
}

driver_functions! { CUDA:
    pool_attribute = c"cuMemPoolGetAttribute" (pool: Handle, attribute: i32, value: *mut c_void);
    trim = c"cuMemPoolTrimTo" (pool: Handle, keep: usize);
    pool_of_device = c"cuDeviceGetMemPool" (pool: *mut Handle, device: Device);
    graph_memory = c"cuDeviceGetGraphMemAttribute" (device: Device, attribute: i32, value: *mut c_void);
    current_device = c"cuCtxGetDevice" (device: *mut Device);
    device_count = c"cuDeviceGetCount" (count: *mut i32);
    free_async = c"cuMemFreeAsync" (pointer: DevicePointer, stream: Handle);
}

/// Pools in use, by handle or, for the memory of graphs, by device. They are few, and never freed here.
#[derive(Default)]
pub struct Pools {
    known: RwLock<HashMap<Source, &'static Pool>>,
    /// The pool used last: most programs have one.
    last: AtomicPtr<Pool>,
    /// Where there is one device only: the pool that allocations without a pool come from.
    usual: AtomicUsize,
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
    /// Our thread knows that there is something to settle.
    is_noted: AtomicBool,
}

/// As long as the container is further than this from its limit, a pool is charged ahead
const COMFORT: u64 = 2 << 30;
/// with so much.
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
                is_noted: AtomicBool::new(false),
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
        self.is_noted.store(false, Ordering::SeqCst);
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
        if self.pays(blocks) || (self.tops_up(process) && self.pays(blocks)) {
            let status = ask();
            if status != SUCCESS {
                self.settle(process);
            }
            return status;
        }
        let status = self.take_at_the_limit(process, bytes, ask, undo);
        keeper::notify();
        status
    }

    /// Takes from what was charged ahead.
    fn pays(&self, blocks: u64) -> bool {
        let paid = |ahead: u64| ahead.checked_sub(blocks);
        self.ahead.fetch_update(Ordering::SeqCst, Ordering::SeqCst, paid).is_ok()
    }

    /// Charges ahead, beyond what the pool really has, if the container is far from its limit.
    fn tops_up(&self, process: &Process) -> bool {
        if process.account.held(self.card).saturating_add(COMFORT) > process.memory_limit(self.card) {
            return false;
        }
        let target = self.ask(POOL_RESERVED) + self.on_the_way.load(Ordering::SeqCst) + AHEAD;
        let before = self.charged.swap(target, Ordering::SeqCst);
        if target < before {
            process.refund(self.card, before - target);
        } else if target > before && !process.charge_now(self.card, target - before) {
            self.charged.fetch_sub(target - before, Ordering::SeqCst);
            return false;
        }
        self.ahead.store(AHEAD, Ordering::SeqCst);
        if !self.is_noted.swap(true, Ordering::SeqCst) {
            keeper::notify();
        }
        true
    }

    /// Asks the driver, looking at the ledger and the pool.
    fn take_at_the_limit(
        &self,
        process: &Process,
        bytes: u64,
        ask: impl Fn() -> Status,
        undo: impl FnOnce(),
    ) -> Status {
        let mut charged = whole_blocks(bytes);
        if process.charge(self.card, charged).is_err() {
            // Not from the card, then; perhaps from what the pool already has.
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
        let (held, limit) = (process.account.held(self.card), process.memory_limit(self.card));
        // The pool could not use its spare memory after all and took more than there is.
        if charged == 0 && status == SUCCESS && held > limit {
            undo();
            self.trim();
            self.settle(process);
            return OUT_OF_MEMORY;
        }
        status
    }

    fn trim(&self) {
        if let Source::Pool(pool) = self.source {
            // SAFETY: a live pool; it keeps what is in use.
            unsafe { trim(std::ptr::with_exposed_provenance_mut(pool), 0) };
        }
    }
}

unsafe fn alloc(driver: Alloc, pointer: *mut DevicePointer, bytes: usize, stream: Handle) -> Status {
    // SAFETY: passed on as they came.
    let ask = || unsafe { driver(pointer, bytes, stream) };
    // Without a context the driver refuses by itself.
    let Some(pool) = usual_pool() else { return ask() };
    // SAFETY: as above; the stream is the program's.
    unsafe { take(pool, bytes, ask, pointer, stream) }
}

/// The pool of the current device.
fn usual_pool() -> Option<Handle> {
    let known = Process::if_loaded().map(|process| &process.memory.pools.usual);
    if let Some(usual) = known.map(|usual| usual.load(Ordering::Acquire)).filter(|usual| *usual != 0) {
        return Some(std::ptr::with_exposed_provenance_mut(usual));
    }
    let (mut device, mut pool, mut count) = (0, std::ptr::null_mut(), 0);
    // SAFETY: places for the answers.
    let found = unsafe {
        current_device(&raw mut device) == SUCCESS && pool_of_device(&raw mut pool, device) == SUCCESS
    };
    // SAFETY: as above.
    let is_only = unsafe { device_count(&raw mut count) } == SUCCESS && count == 1;
    if let Some(usual) = known.filter(|_| found && is_only) {
        usual.store(pool.expose_provenance(), Ordering::Release);
    }
    found.then_some(pool)
}

/// From now on allocations come from another pool.
unsafe fn set_pool(
    driver: unsafe extern "C" fn(Device, Handle) -> Status,
    device: Device,
    pool: Handle,
) -> Status {
    // SAFETY: passed on as they came.
    let status = unsafe { driver(device, pool) };
    if let Some(process) = Process::if_loaded() {
        process.memory.pools.usual.store(0, Ordering::Release);
    }
    status
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
        process.memory.pools.usual.store(0, Ordering::Release);
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
