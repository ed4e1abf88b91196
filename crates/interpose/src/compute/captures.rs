//! Hooks of the functions that begin or end a stream capture, or destroy a stream.

use std::ffi::c_void;

use super::Stream;
use crate::cuda::{Handle, SUCCESS, Status};
use crate::entry::table::hooks;
use crate::grant::Process;
use crate::memory::graphs;

type Begin = unsafe extern "C" fn(Handle, i32) -> Status;
type BeginToGraph = unsafe extern "C" fn(Handle, Handle, *const c_void, *const c_void, usize, i32) -> Status;
type BeginAgain = unsafe extern "C" fn(Handle, i32, Handle, *mut c_void, *mut c_void) -> Status;
type BeginForGraphics = unsafe extern "C" fn(Handle, *mut c_void) -> Status;
type End = unsafe extern "C" fn(Handle, *mut Handle) -> Status;
type Only = unsafe extern "C" fn(Handle) -> Status;

hooks! { Cuda:
    cuStreamBeginCapture(stream: Handle) => begin_v1;
    cuStreamBeginCapture_ptsz(stream: Handle) => begin_v1;
    cuStreamBeginCapture_v2(stream: Handle, mode: i32) => begin;
    cuStreamBeginCapture_v2_ptsz(stream: Handle, mode: i32) => begin;
    cuStreamBeginCaptureToGraph(
        stream: Handle, graph: Handle, dependencies: *const c_void, data: *const c_void, count: usize, mode: i32
    ) => begin_to_graph;
    cuStreamBeginCaptureToGraph_ptsz(
        stream: Handle, graph: Handle, dependencies: *const c_void, data: *const c_void, count: usize, mode: i32
    ) => begin_to_graph;
    cuStreamBeginRecaptureToGraph(
        stream: Handle, mode: i32, graph: Handle, callback: *mut c_void, data: *mut c_void
    ) => begin_again;
    cuStreamBeginRecaptureToGraph_ptsz(
        stream: Handle, mode: i32, graph: Handle, callback: *mut c_void, data: *mut c_void
    ) => begin_again;
    cuStreamBeginCaptureToCig(stream: Handle, parameters: *mut c_void) => begin_for_graphics;
    cuStreamBeginCaptureToCig_ptsz(stream: Handle, parameters: *mut c_void) => begin_for_graphics;
    cuStreamEndCapture(stream: Handle, graph: *mut Handle) => end;
    cuStreamEndCapture_ptsz(stream: Handle, graph: *mut Handle) => end;
    cuStreamEndCaptureToCig(stream: Handle) => end_for_graphics;
    cuStreamEndCaptureToCig_ptsz(stream: Handle) => end_for_graphics;
    cuStreamDestroy_v2(stream: Handle) => destroy;
    cuStreamDestroy(stream: Handle) => destroy;
}

// The argument `driver` of each function below is the driver's function with the same signature.

unsafe fn begin_v1(driver: Only, stream: Handle) -> Status {
    // SAFETY: the driver's function is called with the program's arguments.
    begin_own_graph(stream, || unsafe { driver(stream) })
}

unsafe fn begin(driver: Begin, stream: Handle, mode: i32) -> Status {
    // SAFETY: the driver's function is called with the program's arguments.
    begin_own_graph(stream, || unsafe { driver(stream, mode) })
}

unsafe fn begin_to_graph(
    driver: BeginToGraph,
    stream: Handle,
    graph: Handle,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: i32,
) -> Status {
    // SAFETY: the driver's function is called with the program's arguments.
    begin_counted(|| unsafe { driver(stream, graph, dependencies, data, count, mode) })
}

unsafe fn begin_again(
    driver: BeginAgain,
    stream: Handle,
    mode: i32,
    graph: Handle,
    callback: *mut c_void,
    data: *mut c_void,
) -> Status {
    // SAFETY: the driver's function is called with the program's arguments.
    begin_counted(|| unsafe { driver(stream, mode, graph, callback, data) })
}

unsafe fn begin_for_graphics(driver: BeginForGraphics, stream: Handle, parameters: *mut c_void) -> Status {
    // SAFETY: the driver's function is called with the program's arguments.
    begin_counted(|| unsafe { driver(stream, parameters) })
}

unsafe fn end(driver: End, stream: Handle, graph: *mut Handle) -> Status {
    // SAFETY: the driver's function is called with the program's arguments.
    let status = unsafe { driver(stream, graph) };
    uncount(stream, status == SUCCESS);
    status
}

unsafe fn end_for_graphics(driver: Only, stream: Handle) -> Status {
    // SAFETY: the driver's function is called with the program's arguments.
    let status = unsafe { driver(stream) };
    uncount(stream, true);
    status
}

/// Counts a capture and then begins it.
fn begin_counted(call: impl FnOnce() -> Status) -> Status {
    let Some(process) = Process::if_loaded() else { return call() };
    process.compute.begin_capture();
    let status = call();
    if status != SUCCESS {
        process.compute.end_capture();
    }
    status
}

/// Begins a capture that creates a new graph.
fn begin_own_graph(stream: Handle, call: impl FnOnce() -> Status) -> Status {
    let status = begin_counted(call);
    if let Some(process) = Process::if_loaded().filter(|_| status == SUCCESS) {
        graphs::capture_began(process, Stream { handle: stream, per_thread: false });
    }
    status
}

/// Removes an ended capture from the count. `is_kept` is true if its graph exists.
fn uncount(stream: Handle, is_kept: bool) {
    if let Some(process) = Process::if_loaded() {
        process.compute.end_capture();
        graphs::capture_ended(process, stream, is_kept);
    }
}

/// Destroys a stream. A capture in the stream ends when the stream is destroyed.
unsafe fn destroy(driver: Only, stream: Handle) -> Status {
    let process = Process::if_loaded();
    let is_capturing = process.is_some_and(|process| {
        process.compute.forget_stream(stream);
        process.compute.has_captured() && (Stream { handle: stream, per_thread: false }).is_capturing()
    });
    // SAFETY: the driver's function is called with the program's arguments.
    let status = unsafe { driver(stream) };
    if is_capturing {
        uncount(stream, false);
    }
    status
}
