//! What starts work on a card, each in its plain and its per-thread-stream form.

use std::ffi::c_void;

use super::{Stream, launch};
use crate::cuda::{DevicePointer, Handle, LaunchConfig, Status};
use crate::door::table::hooks;
use crate::grant::Process;

type Arguments = *mut *mut c_void;
type Launch =
    unsafe extern "C" fn(Handle, u32, u32, u32, u32, u32, u32, u32, Handle, Arguments, Arguments) -> Status;
type LaunchEx = unsafe extern "C" fn(*const LaunchConfig, Handle, Arguments, Arguments) -> Status;
type Cooperative =
    unsafe extern "C" fn(Handle, u32, u32, u32, u32, u32, u32, u32, Handle, Arguments) -> Status;
type Graph = unsafe extern "C" fn(Handle, Handle) -> Status;
type Copy = unsafe extern "C" fn(DevicePointer, DevicePointer, usize, Handle) -> Status;
type Set8 = unsafe extern "C" fn(DevicePointer, u8, usize, Handle) -> Status;
type Set32 = unsafe extern "C" fn(DevicePointer, u32, usize, Handle) -> Status;
type Begin = unsafe extern "C" fn(Handle, i32) -> Status;
type BeginToGraph = unsafe extern "C" fn(Handle, Handle, *const c_void, *const c_void, usize, i32) -> Status;
type End = unsafe extern "C" fn(Handle, *mut Handle) -> Status;

hooks! { CUDA:
    cuLaunchKernel c"cuLaunchKernel" (
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle,
        parameters: Arguments, extra: Arguments
    ) => kernel::<false>;
    cuLaunchKernel_ptsz c"cuLaunchKernel_ptsz" (
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle,
        parameters: Arguments, extra: Arguments
    ) => kernel::<true>;
    cuLaunchKernelEx c"cuLaunchKernelEx" (
        config: *const LaunchConfig, function: Handle, parameters: Arguments, extra: Arguments
    ) => kernel_ex::<false>;
    cuLaunchKernelEx_ptsz c"cuLaunchKernelEx_ptsz" (
        config: *const LaunchConfig, function: Handle, parameters: Arguments, extra: Arguments
    ) => kernel_ex::<true>;
    cuLaunchCooperativeKernel c"cuLaunchCooperativeKernel" (
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle,
        parameters: Arguments
    ) => cooperative::<false>;
    cuLaunchCooperativeKernel_ptsz c"cuLaunchCooperativeKernel_ptsz" (
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle,
        parameters: Arguments
    ) => cooperative::<true>;
    cuGraphLaunch c"cuGraphLaunch" (graph: Handle, stream: Handle) => launch_graph::<false>;
    cuGraphLaunch_ptsz c"cuGraphLaunch_ptsz" (graph: Handle, stream: Handle) => launch_graph::<true>;
    cuMemcpyDtoDAsync_v2 c"cuMemcpyDtoDAsync_v2" (
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle
    ) => copy::<false>;
    cuMemcpyDtoDAsync_v2_ptsz c"cuMemcpyDtoDAsync_v2_ptsz" (
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle
    ) => copy::<true>;
    cuMemcpyAsync c"cuMemcpyAsync" (
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle
    ) => copy::<false>;
    cuMemcpyAsync_ptsz c"cuMemcpyAsync_ptsz" (
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle
    ) => copy::<true>;
    cuMemsetD8Async c"cuMemsetD8Async" (to: DevicePointer, value: u8, count: usize, stream: Handle) => set_8::<false>;
    cuMemsetD8Async_ptsz c"cuMemsetD8Async_ptsz" (
        to: DevicePointer, value: u8, count: usize, stream: Handle
    ) => set_8::<true>;
    cuMemsetD32Async c"cuMemsetD32Async" (to: DevicePointer, value: u32, count: usize, stream: Handle) => set_32::<false>;
    cuMemsetD32Async_ptsz c"cuMemsetD32Async_ptsz" (
        to: DevicePointer, value: u32, count: usize, stream: Handle
    ) => set_32::<true>;
    cuStreamBeginCapture_v2 c"cuStreamBeginCapture_v2" (stream: Handle, mode: i32) => begin_capture;
    cuStreamBeginCapture_v2_ptsz c"cuStreamBeginCapture_v2_ptsz" (stream: Handle, mode: i32) => begin_capture;
    cuStreamBeginCaptureToGraph c"cuStreamBeginCaptureToGraph" (
        stream: Handle, graph: Handle, dependencies: *const c_void, data: *const c_void, count: usize, mode: i32
    ) => begin_capture_to_graph;
    cuStreamBeginCaptureToGraph_ptsz c"cuStreamBeginCaptureToGraph_ptsz" (
        stream: Handle, graph: Handle, dependencies: *const c_void, data: *const c_void, count: usize, mode: i32
    ) => begin_capture_to_graph;
    cuStreamEndCapture c"cuStreamEndCapture" (stream: Handle, graph: *mut Handle) => end_capture;
    cuStreamEndCapture_ptsz c"cuStreamEndCapture_ptsz" (stream: Handle, graph: *mut Handle) => end_capture;
    cuStreamDestroy_v2 c"cuStreamDestroy_v2" (stream: Handle) => destroy;
    cuStreamDestroy c"cuStreamDestroy" (stream: Handle) => destroy;
}

// In all of the following: `driver` is the driver's function of the same form, called with what the program passed.

#[allow(clippy::too_many_arguments, reason = "the driver's form")]
unsafe fn kernel<const PER_THREAD: bool>(
    driver: Launch,
    function: Handle,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared: u32,
    stream: Handle,
    parameters: Arguments,
    extra: Arguments,
) -> Status {
    let ask = || {
        // SAFETY: see above.
        unsafe { driver(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra) }
    };
    // SAFETY: see above.
    unsafe { launch(Stream { handle: stream, per_thread: PER_THREAD }, key(function, [gx, gy, gz]), ask) }
}

unsafe fn kernel_ex<const PER_THREAD: bool>(
    driver: LaunchEx,
    config: *const LaunchConfig,
    function: Handle,
    parameters: Arguments,
    extra: Arguments,
) -> Status {
    // SAFETY: see above.
    let ask = || unsafe { driver(config, function, parameters, extra) };
    // SAFETY: the program passes a configuration or null.
    let Some(told) = (unsafe { config.as_ref() }) else { return ask() };
    // SAFETY: see above.
    unsafe { launch(Stream { handle: told.stream, per_thread: PER_THREAD }, key(function, told.grid), ask) }
}

#[allow(clippy::too_many_arguments, reason = "the driver's form")]
unsafe fn cooperative<const PER_THREAD: bool>(
    driver: Cooperative,
    function: Handle,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared: u32,
    stream: Handle,
    parameters: Arguments,
) -> Status {
    let ask = || {
        // SAFETY: see above.
        unsafe { driver(function, gx, gy, gz, bx, by, bz, shared, stream, parameters) }
    };
    // SAFETY: see above.
    unsafe { launch(Stream { handle: stream, per_thread: PER_THREAD }, key(function, [gx, gy, gz]), ask) }
}

unsafe fn launch_graph<const PER_THREAD: bool>(driver: Graph, graph: Handle, stream: Handle) -> Status {
    // SAFETY: see above.
    let ask = || unsafe { driver(graph, stream) };
    // SAFETY: see above.
    unsafe { launch(Stream { handle: stream, per_thread: PER_THREAD }, key(graph, [0; 3]), ask) }
}

unsafe fn copy<const PER_THREAD: bool>(
    driver: Copy,
    to: DevicePointer,
    from: DevicePointer,
    bytes: usize,
    stream: Handle,
) -> Status {
    // SAFETY: see above.
    let ask = || unsafe { driver(to, from, bytes, stream) };
    // SAFETY: see above.
    unsafe { launch(Stream { handle: stream, per_thread: PER_THREAD }, sized(1, bytes), ask) }
}

unsafe fn set_8<const PER_THREAD: bool>(
    driver: Set8,
    to: DevicePointer,
    value: u8,
    count: usize,
    stream: Handle,
) -> Status {
    // SAFETY: see above.
    let ask = || unsafe { driver(to, value, count, stream) };
    // SAFETY: see above.
    unsafe { launch(Stream { handle: stream, per_thread: PER_THREAD }, sized(2, count), ask) }
}

unsafe fn set_32<const PER_THREAD: bool>(
    driver: Set32,
    to: DevicePointer,
    value: u32,
    count: usize,
    stream: Handle,
) -> Status {
    // SAFETY: see above.
    let ask = || unsafe { driver(to, value, count, stream) };
    // SAFETY: see above.
    unsafe { launch(Stream { handle: stream, per_thread: PER_THREAD }, sized(3, count), ask) }
}

unsafe fn begin_capture(driver: Begin, stream: Handle, mode: i32) -> Status {
    // SAFETY: see above.
    capturing(1, || unsafe { driver(stream, mode) })
}

unsafe fn begin_capture_to_graph(
    driver: BeginToGraph,
    stream: Handle,
    graph: Handle,
    dependencies: *const c_void,
    data: *const c_void,
    count: usize,
    mode: i32,
) -> Status {
    // SAFETY: see above.
    capturing(1, || unsafe { driver(stream, graph, dependencies, data, count, mode) })
}

unsafe fn end_capture(driver: End, stream: Handle, graph: *mut Handle) -> Status {
    // SAFETY: see above.
    capturing(-1, || unsafe { driver(stream, graph) })
}

/// Counts captures: before one begins, and after it has ended, well or not.
fn capturing(change: i64, ask: impl FnOnce() -> Status) -> Status {
    let Some(process) = Process::if_loaded() else { return ask() };
    if change < 0 {
        let status = ask();
        process.compute.captures(change);
        return status;
    }
    process.compute.captures(change);
    let status = ask();
    if status != crate::cuda::SUCCESS {
        process.compute.captures(-change);
    }
    status
}

unsafe fn destroy(driver: unsafe extern "C" fn(Handle) -> Status, stream: Handle) -> Status {
    if let Some(process) = Process::if_loaded() {
        process.compute.forget_stream(stream);
    }
    // SAFETY: see above.
    unsafe { driver(stream) }
}

/// Tells kinds of work apart.
fn key(what: Handle, grid: [u32; 3]) -> u64 {
    grid.iter().fold(what.addr() as u64, |key, &extent| mix(key, u64::from(extent)))
}

/// Copies and fills of about the same size cost about the same.
fn sized(kind: u64, bytes: usize) -> u64 {
    mix(kind, u64::from(bytes.checked_ilog2().unwrap_or(0)))
}

fn mix(key: u64, more: u64) -> u64 {
    (key.rotate_left(5) ^ more).wrapping_mul(0x517c_c1b7_2722_0a95)
}
