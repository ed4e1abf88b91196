//! Memory of graphs. Their nodes take it when a graph runs, and do not ask again. So it is charged when the node is made, until neither
//! the graph nor anything made of it to run is left; what the driver keeps after that is charged as the graphs' pool.

use std::ffi::{c_char, c_void};
use std::sync::{MutexGuard, PoisonError};

use tessera_limits::allocation_size::round_up_to_blocks;

use super::pools::PoolSource;
use crate::compute::Stream;
use crate::cuda::{AllocationNode, Device, Handle, Node, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
    cuGraphAddMemAllocNode(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, count: usize, parameters: *mut AllocationNode
    ) => add_allocation;
    cuGraphAddNode(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, count: usize, parameters: *mut Node
    ) => add;
    cuGraphAddNode_v2(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, data: *const c_void, count: usize, parameters: *mut Node
    ) => add_v2;
    cuGraphAddNode_v3(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, data: *const c_void, count: usize, parameters: *mut Node
    ) => add_v2;
    cuGraphInstantiate(
        made: *mut Handle, graph: Handle, node: *mut Handle, log: *mut c_char, length: usize
    ) => instantiate;
    cuGraphInstantiate_v2(
        made: *mut Handle, graph: Handle, node: *mut Handle, log: *mut c_char, length: usize
    ) => instantiate;
    cuGraphInstantiateWithFlags(made: *mut Handle, graph: Handle, flags: u64) => instantiate_with_flags;
    cuGraphInstantiateWithParams(made: *mut Handle, graph: Handle, parameters: *mut c_void) => instantiate_with;
    cuGraphInstantiateWithParams_ptsz(made: *mut Handle, graph: Handle, parameters: *mut c_void) => instantiate_with;
    cuGraphDestroy(graph: Handle) => destroy;
    cuGraphExecDestroy(made: Handle) => destroy;
}

driver_functions! { Cuda:
    current_device = c"cuCtxGetDevice" (device: *mut Device);
    capture_info = c"cuStreamGetCaptureInfo_v2" (
        stream: Handle, status: *mut i32, id: *mut u64, graph: *mut Handle, dependencies: *mut c_void, count: *mut c_void
    );
    capture_info_per_thread = c"cuStreamGetCaptureInfo_v2_ptsz" (
        stream: Handle, status: *mut i32, id: *mut u64, graph: *mut Handle, dependencies: *mut c_void, count: *mut c_void
    );
}

/// What graphs may take, and by whom it is still needed. Few programs have any.
#[derive(Default)]
pub struct Graphs {
    promises: Vec<Promise>,
    /// The streams in which captures run, and the graph of each.
    captures: Vec<(usize, usize)>,
}

struct Promise {
    device: Device,
    bytes: u64,
    /// The graph, and what was made of it.
    holders: Vec<usize>,
}

type AddAllocation =
    unsafe extern "C" fn(*mut Handle, Handle, *const Handle, usize, *mut AllocationNode) -> Status;
type Add = unsafe extern "C" fn(*mut Handle, Handle, *const Handle, usize, *mut Node) -> Status;
type AddV2 =
    unsafe extern "C" fn(*mut Handle, Handle, *const Handle, *const c_void, usize, *mut Node) -> Status;

fn graphs(process: &Process) -> MutexGuard<'_, Graphs> {
    process.memory.graphs.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The graph that work in a stream goes into, where it is captured.
pub fn captured_by(stream: Stream) -> Option<Handle> {
    if !Process::if_loaded()?.compute.has_captured() || !stream.is_capturing() {
        return None;
    }
    let (mut status, mut id, mut graph) = (0, 0, std::ptr::null_mut());
    let none = std::ptr::null_mut();
    let ask = if stream.per_thread { capture_info_per_thread } else { capture_info };
    // SAFETY: places for the answers; the last two are not asked for.
    let asked = unsafe { ask(stream.handle, &raw mut status, &raw mut id, &raw mut graph, none, none) };
    (asked == SUCCESS && !graph.is_null()).then_some(graph)
}

/// A capture has begun, into a graph of its own.
pub fn capture_began(process: &Process, stream: Stream) {
    if let Some(graph) = captured_by(stream) {
        graphs(process).captures.push((stream.handle.addr(), graph.addr()));
    }
}

/// A capture has ended. Unless the program has the graph now, nothing is left of it.
pub fn capture_ended(process: &Process, stream: Handle, is_kept: bool) {
    let mut all = graphs(process);
    let place = all.captures.iter().position(|(of, _)| *of == stream.addr());
    let graph = place.map(|place| all.captures.swap_remove(place).1);
    drop(all);
    if let Some(graph) = graph.filter(|_| !is_kept) {
        gone(process, graph);
    }
}

/// Adds a node that takes `bytes` of a device, or of the current one.
pub fn taking(graph: Handle, device: Option<Device>, bytes: usize, ask: impl FnOnce() -> Status) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let mut device = device.unwrap_or(-1);
    // SAFETY: `device` is the place for the answer.
    if device < 0 && unsafe { current_device(&raw mut device) } != SUCCESS {
        return ask();
    }
    let gpu = match process.gpus.of_device(device) {
        Ok(gpu) => gpu,
        Err(status) => return status,
    };
    let bytes = round_up_to_blocks(bytes as u64);
    let pool = process.memory.pools.get(PoolSource::Graphs(device), Some(gpu));
    if let Err(status) = pool.promise(process, bytes) {
        return status;
    }
    let status = ask();
    if status == SUCCESS {
        graphs(process).promises.push(Promise { device, bytes, holders: vec![graph.addr()] });
    } else {
        pool.take_back(process, bytes);
    }
    status
}

// In all of the following: `driver` is the driver's function of the same form, called with what the program passed.

unsafe fn add_allocation(
    driver: AddAllocation,
    node: *mut Handle,
    graph: Handle,
    dependencies: *const Handle,
    count: usize,
    parameters: *mut AllocationNode,
) -> Status {
    // SAFETY: see above.
    let ask = || unsafe { driver(node, graph, dependencies, count, parameters) };
    // SAFETY: the program passes parameters or null.
    described(graph, unsafe { parameters.as_ref() }, ask)
}

unsafe fn add(
    driver: Add,
    node: *mut Handle,
    graph: Handle,
    dependencies: *const Handle,
    count: usize,
    parameters: *mut Node,
) -> Status {
    // SAFETY: see above.
    let ask = || unsafe { driver(node, graph, dependencies, count, parameters) };
    // SAFETY: as `allocation` wants it.
    described(graph, unsafe { allocation(parameters) }, ask)
}

unsafe fn add_v2(
    driver: AddV2,
    node: *mut Handle,
    graph: Handle,
    dependencies: *const Handle,
    data: *const c_void,
    count: usize,
    parameters: *mut Node,
) -> Status {
    // SAFETY: see above.
    let ask = || unsafe { driver(node, graph, dependencies, data, count, parameters) };
    // SAFETY: as `allocation` wants it.
    described(graph, unsafe { allocation(parameters) }, ask)
}

/// What a node allocates, if it does: the program passes parameters or null.
unsafe fn allocation<'a>(parameters: *const Node) -> Option<&'a AllocationNode> {
    // SAFETY: all kinds of nodes have this length at least.
    unsafe { parameters.as_ref() }.filter(|node| node.kind == Node::ALLOCATES).map(|node| &node.allocation)
}

fn described(graph: Handle, allocation: Option<&AllocationNode>, ask: impl FnOnce() -> Status) -> Status {
    let Some(allocation) = allocation else { return ask() };
    match allocation.location.device() {
        Some(device) => taking(graph, Some(device), allocation.bytes, ask),
        None => ask(),
    }
}

unsafe fn instantiate(
    driver: unsafe extern "C" fn(*mut Handle, Handle, *mut Handle, *mut c_char, usize) -> Status,
    made: *mut Handle,
    graph: Handle,
    node: *mut Handle,
    log: *mut c_char,
    length: usize,
) -> Status {
    // SAFETY: see above.
    unsafe { held(made, graph, || driver(made, graph, node, log, length)) }
}

unsafe fn instantiate_with_flags(
    driver: unsafe extern "C" fn(*mut Handle, Handle, u64) -> Status,
    made: *mut Handle,
    graph: Handle,
    flags: u64,
) -> Status {
    // SAFETY: see above.
    unsafe { held(made, graph, || driver(made, graph, flags)) }
}

unsafe fn instantiate_with(
    driver: unsafe extern "C" fn(*mut Handle, Handle, *mut c_void) -> Status,
    made: *mut Handle,
    graph: Handle,
    parameters: *mut c_void,
) -> Status {
    // SAFETY: see above.
    unsafe { held(made, graph, || driver(made, graph, parameters)) }
}

/// What is made of a graph needs its memory too.
unsafe fn held(made: *const Handle, graph: Handle, ask: impl FnOnce() -> Status) -> Status {
    let status = ask();
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
    {
        for promise in &mut graphs(process).promises {
            if promise.holders.contains(&graph.addr()) {
                // SAFETY: written by the driver.
                promise.holders.push(unsafe { *made }.addr());
            }
        }
    }
    status
}

unsafe fn destroy(driver: unsafe extern "C" fn(Handle) -> Status, holder: Handle) -> Status {
    let process = Process::if_loaded();
    if let Some(process) = process {
        process.compute.forget_graph(holder);
    }
    // SAFETY: see above.
    let status = unsafe { driver(holder) };
    if status == SUCCESS
        && let Some(process) = process
    {
        gone(process, holder.addr());
    }
    status
}

/// A graph, or what was made of one, needs no memory any more.
fn gone(process: &Process, holder: usize) {
    let mut kept = Vec::new();
    let mut all = graphs(process);
    for mut promise in std::mem::take(&mut all.promises) {
        promise.holders.retain(|&known| known != holder);
        if promise.holders.is_empty() {
            if let Some(pool) = process.memory.pools.known(PoolSource::Graphs(promise.device)) {
                pool.take_back(process, promise.bytes);
            }
        } else {
            kept.push(promise);
        }
    }
    all.promises = kept;
}
