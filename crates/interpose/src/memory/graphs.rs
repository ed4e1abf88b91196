//! Memory of graphs.
//!
//! Allocation nodes take memory when their graph runs, without another call. The memory is
//! therefore charged when the node is created, until the graph and all its executable graphs are
//! destroyed. Memory that the driver keeps afterwards is charged as the pool for graphs.

use std::ffi::{c_char, c_void};
use std::sync::{MutexGuard, PoisonError};

use tessera_limits::Bytes;
use tessera_limits::allocation_size::round_up_to_blocks;

use super::pools::PoolSource;
use crate::compute::Stream;
use crate::cuda::{AllocationNodeParameters, Device, GraphNodeParameters, Handle, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
    cuGraphAddMemAllocNode(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, count: usize, parameters: *mut AllocationNodeParameters
    ) => add_allocation;
    cuGraphAddNode(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, count: usize, parameters: *mut GraphNodeParameters
    ) => add;
    cuGraphAddNode_v2(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, data: *const c_void, count: usize, parameters: *mut GraphNodeParameters
    ) => add_v2;
    cuGraphAddNode_v3(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, data: *const c_void, count: usize, parameters: *mut GraphNodeParameters
    ) => add_v2;
    cuGraphInstantiate(
        executable: *mut Handle, graph: Handle, node: *mut Handle, log: *mut c_char, length: usize
    ) => instantiate;
    cuGraphInstantiate_v2(
        executable: *mut Handle, graph: Handle, node: *mut Handle, log: *mut c_char, length: usize
    ) => instantiate;
    cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64) => instantiate_with_flags;
    cuGraphInstantiateWithParams(executable: *mut Handle, graph: Handle, parameters: *mut c_void) => instantiate_with;
    cuGraphInstantiateWithParams_ptsz(executable: *mut Handle, graph: Handle, parameters: *mut c_void) => instantiate_with;
    cuGraphDestroy(graph: Handle) => destroy;
    cuGraphExecDestroy(executable: Handle) => destroy;
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

/// The memory that graphs may take. Few programs have such graphs.
#[derive(Default)]
pub struct Graphs {
    promises: Vec<Promise>,
    /// The streams that are being captured, each with its graph.
    captures: Vec<(usize, usize)>,
}

struct Promise {
    device: Device,
    bytes: Bytes,
    /// The graph and its executable graphs.
    holders: Vec<usize>,
}

type AddAllocation =
    unsafe extern "C" fn(*mut Handle, Handle, *const Handle, usize, *mut AllocationNodeParameters) -> Status;
type Add =
    unsafe extern "C" fn(*mut Handle, Handle, *const Handle, usize, *mut GraphNodeParameters) -> Status;
type AddV2 = unsafe extern "C" fn(
    *mut Handle,
    Handle,
    *const Handle,
    *const c_void,
    usize,
    *mut GraphNodeParameters,
) -> Status;

fn graphs(process: &Process) -> MutexGuard<'_, Graphs> {
    process.memory.graphs.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the graph into which a stream is being captured, if any.
pub fn captured_by(stream: Stream) -> Option<Handle> {
    if !Process::if_loaded()?.compute.has_captured() || !stream.is_capturing() {
        return None;
    }
    let (mut status, mut id, mut graph) = (0, 0, std::ptr::null_mut());
    let none = std::ptr::null_mut();
    let call_driver = if stream.per_thread { capture_info_per_thread } else { capture_info };
    // SAFETY: `status`, `id` and `graph` are writable, and the driver accepts null for the last two
    // results.
    let asked =
        unsafe { call_driver(stream.handle, &raw mut status, &raw mut id, &raw mut graph, none, none) };
    (asked == SUCCESS && !graph.is_null()).then_some(graph)
}

/// Records the graph of a capture that has begun.
pub fn capture_began(process: &Process, stream: Stream) {
    if let Some(graph) = captured_by(stream) {
        graphs(process).captures.push((stream.handle.addr(), graph.addr()));
    }
}

/// Forgets a capture that has ended. If the program did not get its graph, the memory of the graph
/// is released.
pub fn capture_ended(process: &Process, stream: Handle, is_kept: bool) {
    let mut all = graphs(process);
    let place = all.captures.iter().position(|(of, _)| *of == stream.addr());
    let graph = place.map(|place| all.captures.swap_remove(place).1);
    drop(all);
    if let Some(graph) = graph.filter(|_| !is_kept) {
        release_holder(process, graph);
    }
}

/// Adds a node that allocates `bytes` on `device`, or on the current device.
pub fn add_allocation_node(
    graph: Handle,
    device: Option<Device>,
    bytes: usize,
    call_driver: impl FnOnce() -> Status,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let mut device = device.unwrap_or(-1);
    // SAFETY: `device` is writable.
    if device < 0 && unsafe { current_device(&raw mut device) } != SUCCESS {
        return call_driver();
    }
    let gpu = match process.gpus.of_device(device) {
        Ok(gpu) => gpu,
        Err(status) => return status,
    };
    let bytes = round_up_to_blocks(Bytes(bytes as u64));
    let pool = process.memory.pools.get(PoolSource::Graphs(device), Some(gpu));
    if let Err(status) = pool.promise(process, bytes) {
        return status;
    }
    let status = call_driver();
    if status == SUCCESS {
        graphs(process).promises.push(Promise { device, bytes, holders: vec![graph.addr()] });
    } else {
        pool.revoke_promise(process, bytes);
    }
    status
}

// In each hook, `driver` is the driver's function of the same name.

unsafe fn add_allocation(
    driver: AddAllocation,
    node: *mut Handle,
    graph: Handle,
    dependencies: *const Handle,
    count: usize,
    parameters: *mut AllocationNodeParameters,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let call_driver = || unsafe { driver(node, graph, dependencies, count, parameters) };
    // SAFETY: the program passes valid parameters or null.
    add_described_node(graph, unsafe { parameters.as_ref() }, call_driver)
}

unsafe fn add(
    driver: Add,
    node: *mut Handle,
    graph: Handle,
    dependencies: *const Handle,
    count: usize,
    parameters: *mut GraphNodeParameters,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let call_driver = || unsafe { driver(node, graph, dependencies, count, parameters) };
    // SAFETY: the program passes valid parameters or null, as `allocation` requires.
    add_described_node(graph, unsafe { allocation(parameters) }, call_driver)
}

unsafe fn add_v2(
    driver: AddV2,
    node: *mut Handle,
    graph: Handle,
    dependencies: *const Handle,
    data: *const c_void,
    count: usize,
    parameters: *mut GraphNodeParameters,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let call_driver = || unsafe { driver(node, graph, dependencies, data, count, parameters) };
    // SAFETY: the program passes valid parameters or null, as `allocation` requires.
    add_described_node(graph, unsafe { allocation(parameters) }, call_driver)
}

/// Returns the allocation of a node, if it is an allocation node. The parameters must be valid or
/// null.
unsafe fn allocation<'a>(parameters: *const GraphNodeParameters) -> Option<&'a AllocationNodeParameters> {
    // SAFETY: the parameters are valid or null, and the parameters of all kinds of nodes have at
    // least this size.
    unsafe { parameters.as_ref() }
        .filter(|node| node.kind == GraphNodeParameters::ALLOCATES)
        .map(|node| &node.allocation)
}

fn add_described_node(
    graph: Handle,
    allocation: Option<&AllocationNodeParameters>,
    call_driver: impl FnOnce() -> Status,
) -> Status {
    let Some(allocation) = allocation else { return call_driver() };
    match allocation.location.device() {
        Some(device) => add_allocation_node(graph, Some(device), allocation.bytes, call_driver),
        None => call_driver(),
    }
}

unsafe fn instantiate(
    driver: unsafe extern "C" fn(*mut Handle, Handle, *mut Handle, *mut c_char, usize) -> Status,
    executable: *mut Handle,
    graph: Handle,
    node: *mut Handle,
    log: *mut c_char,
    length: usize,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    unsafe { instantiate_charged(executable, graph, || driver(executable, graph, node, log, length)) }
}

unsafe fn instantiate_with_flags(
    driver: unsafe extern "C" fn(*mut Handle, Handle, u64) -> Status,
    executable: *mut Handle,
    graph: Handle,
    flags: u64,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    unsafe { instantiate_charged(executable, graph, || driver(executable, graph, flags)) }
}

unsafe fn instantiate_with(
    driver: unsafe extern "C" fn(*mut Handle, Handle, *mut c_void) -> Status,
    executable: *mut Handle,
    graph: Handle,
    parameters: *mut c_void,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    unsafe { instantiate_charged(executable, graph, || driver(executable, graph, parameters)) }
}

/// Instantiates a graph. The executable graph keeps the memory of the graph charged.
unsafe fn instantiate_charged(
    executable: *const Handle,
    graph: Handle,
    call_driver: impl FnOnce() -> Status,
) -> Status {
    let status = call_driver();
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
    {
        for promise in &mut graphs(process).promises {
            if promise.holders.contains(&graph.addr()) {
                // SAFETY: the driver reported success, so it has written the handle.
                promise.holders.push(unsafe { *executable }.addr());
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
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(holder) };
    if status == SUCCESS
        && let Some(process) = process
    {
        release_holder(process, holder.addr());
    }
    status
}

/// Removes a graph or an executable graph as a holder, and releases memory without holders.
fn release_holder(process: &Process, holder: usize) {
    let mut kept = Vec::new();
    let mut all = graphs(process);
    for mut promise in std::mem::take(&mut all.promises) {
        promise.holders.retain(|&known| known != holder);
        if promise.holders.is_empty() {
            if let Some(pool) = process.memory.pools.known(PoolSource::Graphs(promise.device)) {
                pool.revoke_promise(process, promise.bytes);
            }
        } else {
            kept.push(promise);
        }
    }
    all.promises = kept;
}
