//! Graphs: their running time and the memory that they take when they first run. The driver keeps
//! that memory after the graph is destroyed, until it is trimmed. Graphs use memory of the first
//! device only.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex};

use crate::contexts::{as_handle, next_handle, on};
use crate::{Handle, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, Status};

static GRAPHS: LazyLock<Mutex<HashMap<usize, Graph>>> = LazyLock::new(Mutex::default);
/// Bytes that graphs have reserved, and the part of them that belonged to destroyed graphs.
static RESERVED: Mutex<(u64, u64)> = Mutex::new((0, 0));

#[derive(Clone, Copy, Default)]
struct Graph {
    nanoseconds: u64,
    bytes: u64,
    has_memory: bool,
}

/// Addresses of destroyed graphs. Like the real driver, this one reuses them.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn address() -> usize {
    let free = FREE.lock().ok().and_then(|mut free| free.pop());
    free.unwrap_or_else(|| as_handle(next_handle()).addr())
}

pub fn new() -> Handle {
    let handle = address();
    if let Ok(mut graphs) = GRAPHS.lock() {
        graphs.insert(handle, Graph::default());
    }
    std::ptr::without_provenance_mut(handle)
}

pub fn add(graph: Handle, nanoseconds: u64, bytes: u64) {
    if let Ok(mut graphs) = GRAPHS.lock()
        && let Some(graph) = graphs.get_mut(&graph.addr())
    {
        graph.nanoseconds += nanoseconds;
        graph.bytes += bytes.next_multiple_of(2 << 20);
    }
}

/// Allocates the memory of a graph and returns its running time.
pub fn begin(graph: Handle) -> Result<u64, Status> {
    let (Ok(mut graphs), Ok(mut reserved)) = (GRAPHS.lock(), RESERVED.lock()) else {
        return Err(INVALID_VALUE);
    };
    let graph = graphs.get_mut(&graph.addr()).ok_or(INVALID_VALUE)?;
    if !graph.has_memory {
        if !on(0)?.take(graph.bytes) {
            return Err(OUT_OF_MEMORY);
        }
        reserved.0 += graph.bytes;
        graph.has_memory = true;
    }
    Ok(graph.nanoseconds)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphCreate(graph: *mut Handle, _flags: u32) -> Status {
    unsafe { *graph = new() };
    SUCCESS
}

/// Parameters of an allocation node. The size is the last number but one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphAddMemAllocNode(
    _node: *mut Handle,
    graph: Handle,
    _dependencies: *const Handle,
    _count: usize,
    parameters: *const [u64; 15],
) -> Status {
    add(graph, 0, unsafe { (*parameters)[13] });
    SUCCESS
}

/// Parameters of any node: its kind, followed by those of an allocation node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphAddNode_v2(
    _node: *mut Handle,
    graph: Handle,
    _dependencies: *const Handle,
    _data: *const c_void,
    _count: usize,
    parameters: *const [u64; 17],
) -> Status {
    add(graph, 0, unsafe { (*parameters)[15] });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    made: *mut Handle,
    graph: Handle,
    _flags: u64,
) -> Status {
    let Ok(mut graphs) = GRAPHS.lock() else { return INVALID_VALUE };
    let Some(graph) = graphs.get(&graph.addr()).copied() else { return INVALID_VALUE };
    let handle = address();
    graphs.insert(handle, Graph { has_memory: false, ..graph });
    unsafe { *made = std::ptr::without_provenance_mut(handle) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: Handle) -> Status {
    let (Ok(mut graphs), Ok(mut reserved)) = (GRAPHS.lock(), RESERVED.lock()) else { return INVALID_VALUE };
    let address = graph.addr();
    let Some(graph) = graphs.remove(&address) else { return INVALID_VALUE };
    if let Ok(mut free) = FREE.lock() {
        free.push(address);
    }
    if graph.has_memory {
        reserved.1 += graph.bytes;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(made: Handle) -> Status {
    cuGraphDestroy(made)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetGraphMemAttribute(
    _device: i32,
    _attribute: i32,
    value: *mut u64,
) -> Status {
    unsafe { *value = RESERVED.lock().map_or(0, |reserved| reserved.0) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGraphMemTrim(_device: i32) -> Status {
    let (Ok(mine), Ok(mut reserved)) = (on(0), RESERVED.lock()) else { return INVALID_VALUE };
    mine.give(reserved.1);
    *reserved = (reserved.0 - reserved.1, 0);
    SUCCESS
}
