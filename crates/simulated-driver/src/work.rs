//! Kernels, streams, events and graphs. A stream is identified by a number and stores the end of
//! its last kernel.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::contexts::{as_handle, assert_alive, current, is_relaxed, next_handle};
use crate::gpu::now;
use crate::graphs;
use crate::modules::length;
use crate::{
    CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, Handle, INVALID_HANDLE, INVALID_VALUE, NOT_READY, SUCCESS,
    Status,
};

/// End of the last kernel of each stream, and the captured work of a capturing stream.
static STREAMS: LazyLock<Mutex<HashMap<Key, Stream>>> = LazyLock::new(Mutex::default);
static EVENTS: LazyLock<Mutex<HashMap<usize, SimulatedEvent>>> = LazyLock::new(Mutex::default);
/// True if a call from a thread that is not in relaxed capture mode has invalidated a capture.
static DISTURBED: AtomicBool = AtomicBool::new(false);

/// An event: its time and its context.
#[derive(Clone, Copy)]
struct SimulatedEvent {
    at: u64,
    context: u64,
    /// True if the event was recorded in a capturing stream.
    is_captured: bool,
}

/// The key of a stream. Each context has default streams, one of them for each thread.
type Key = (usize, u64, u64);

/// Handles of the default streams.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

#[derive(Default)]
struct Stream {
    end: u64,
    /// The graph into which the stream is captured.
    captures: Option<Handle>,
}

// Only a name.
unsafe impl Send for Stream {}

fn key(stream: Handle, per_thread: bool) -> Key {
    let context = current().map_or(0, |(context, _)| context);
    match (stream.addr(), per_thread) {
        (0, true) | (PER_THREAD, _) => (PER_THREAD, context, unsafe { libc::pthread_self() }),
        (0, false) | (LEGACY, _) => (LEGACY, context, 0),
        (handle, _) => (handle, 0, 0),
    }
}

/// Queues work of `nanoseconds` behind all earlier work in the stream.
fn run(stream: Key, nanoseconds: u64) -> Status {
    let mine = match current() {
        Ok((_, mine)) => mine,
        Err(status) => return status,
    };
    LAUNCHES.fetch_add(1, Ordering::SeqCst);
    let Ok(mut streams) = STREAMS.lock() else { return INVALID_VALUE };
    let stream = streams.entry(stream).or_default();
    match stream.captures {
        Some(graph) => graphs::add(graph, nanoseconds, 0),
        None => stream.end = mine.run(nanoseconds, stream.end),
    }
    SUCCESS
}

/// Queues work and waits until it has ended.
fn run_and_wait(stream: Key, nanoseconds: u64) -> Status {
    let status = run(stream, nanoseconds);
    sleep_until(end(stream));
    status
}

fn end(stream: Key) -> u64 {
    STREAMS.lock().ok().and_then(|streams| streams.get(&stream).map(|stream| stream.end)).unwrap_or(0)
}

fn sleep_until(end: u64) {
    let left = end.saturating_sub(now());
    if left > 0 {
        std::thread::sleep(std::time::Duration::from_nanos(left));
    }
}

/// Copies and fills take one nanosecond per byte. Copies between host and GPU without a stream
/// block the caller.
macro_rules! transfers {
    ($($name:ident ( $($argument:ident : $type:ty),* ) $run:ident ($stream:expr, $per_thread:literal) $bytes:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(unused_variables, reason = "addresses mean nothing here")]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> Status {
                $run(key($stream, $per_thread), $bytes as u64)
            }
        )*
    };
}

const DEFAULT: Handle = std::ptr::null_mut();

/// Number of launched kernels.
static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// A transfer that waits until another thread launches a kernel, to test work that depends on later
/// work.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAtoA_v2(
    _to: Handle,
    _to_offset: usize,
    _from: Handle,
    _offset: usize,
    _bytes: usize,
) -> Status {
    let before = LAUNCHES.load(Ordering::SeqCst);
    while LAUNCHES.load(Ordering::SeqCst) == before {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    SUCCESS
}

transfers! {
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) run_and_wait(DEFAULT, false) bytes;
    cuMemcpyHtoD_v2_ptds(to: u64, from: *const c_void, bytes: usize) run_and_wait(DEFAULT, true) bytes;
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) run_and_wait(DEFAULT, false) bytes;
    cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) run(DEFAULT, false) bytes;
    cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: Handle) run(stream, false) bytes;
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle) run(stream, false) bytes;
    cuMemcpyHtoDAsync_v2_ptsz(to: u64, from: *const c_void, bytes: usize, stream: Handle) run(stream, true) bytes;
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) run(stream, false) bytes;
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) run(stream, false) bytes;
    cuMemcpyPeerAsync(to: u64, of: Handle, from: u64, other: Handle, bytes: usize, stream: Handle) run(stream, false) bytes;
    cuMemcpy2D_v2(copy: *const [usize; 16]) run_and_wait(DEFAULT, false) (unsafe { *copy })[14] * (unsafe { *copy })[15];
    cuMemcpyBatchAsync_v2(
        to: *mut u64, from: *mut u64, sizes: *const usize, count: usize, attributes: *mut c_void, indices: *mut usize,
        attribute_count: usize, stream: Handle
    ) run(stream, false) unsafe { std::slice::from_raw_parts(sizes, count) }.iter().sum::<usize>();
    cuMemsetD32_v2(to: u64, value: u32, count: usize) run(DEFAULT, false) count * 4;
    cuMemsetD32Async(to: u64, value: u32, count: usize, stream: Handle) run(stream, false) count * 4;
    cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) run(stream, false) count;
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    function: Handle,
    _gx: u32,
    _gy: u32,
    _gz: u32,
    _bx: u32,
    _by: u32,
    _bz: u32,
    _shared: u32,
    stream: Handle,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    run(key(stream, false), length(function, parameters))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel_ptsz(
    function: Handle,
    _gx: u32,
    _gy: u32,
    _gz: u32,
    _bx: u32,
    _by: u32,
    _bz: u32,
    _shared: u32,
    stream: Handle,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    run(key(stream, true), length(function, parameters))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(graph: Handle, stream: Handle) -> Status {
    match graphs::begin(graph) {
        Ok(nanoseconds) => run(key(stream, false), nanoseconds),
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, _flags: u32) -> Status {
    unsafe { *stream = as_handle(next_handle()) };
    SUCCESS
}

/// Destroys a stream. Queued work runs to its end.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Status {
    if let Ok(mut streams) = STREAMS.lock() {
        streams.remove(&key(stream, false));
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: Handle) -> Status {
    sleep_until(end(key(stream, false)));
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Status {
    if disturbs() {
        return CAPTURE_UNSUPPORTED;
    }
    let last = STREAMS.lock().ok().and_then(|streams| streams.values().map(|stream| stream.end).max());
    sleep_until(last.unwrap_or(0));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: Handle, status: *mut i32) -> Status {
    let Ok(streams) = STREAMS.lock() else { return INVALID_VALUE };
    let captures = streams.get(&key(stream, false)).is_some_and(|stream| stream.captures.is_some());
    unsafe { *status = i32::from(captures) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing_ptsz(stream: Handle, status: *mut i32) -> Status {
    unsafe { cuStreamIsCapturing(stream, status) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: Handle, _mode: i32) -> Status {
    let Ok(mut streams) = STREAMS.lock() else { return INVALID_VALUE };
    streams.entry(key(stream, false)).or_default().captures = Some(graphs::new());
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Status {
    let Ok(mut streams) = STREAMS.lock() else { return INVALID_VALUE };
    let captured = streams.get_mut(&key(stream, false)).and_then(|stream| stream.captures.take());
    unsafe { *graph = captured.unwrap_or(std::ptr::null_mut()) };
    if DISTURBED.swap(false, Ordering::SeqCst) {
        // The captured graph is discarded.
        graphs::cuGraphDestroy(unsafe { std::mem::replace(&mut *graph, std::ptr::null_mut()) });
        return CAPTURE_INVALIDATED;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v2(
    stream: Handle,
    status: *mut i32,
    _id: *mut u64,
    graph: *mut Handle,
    _dependencies: *mut c_void,
    _count: *mut c_void,
) -> Status {
    let captures = captures(stream);
    unsafe {
        *status = i32::from(captures.is_some());
        *graph = captures.unwrap_or(std::ptr::null_mut());
    }
    SUCCESS
}

/// Returns the graph into which a stream is captured.
pub fn captures(stream: Handle) -> Option<Handle> {
    STREAMS.lock().ok()?.get(&key(stream, false))?.captures
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut Handle, _flags: u32) -> Status {
    let (Ok((context, _)), Ok(mut events)) = (current(), EVENTS.lock()) else { return INVALID_VALUE };
    let handle = as_handle(next_handle());
    events.insert(handle.addr(), SimulatedEvent { at: 0, context, is_captured: false });
    unsafe { *event = handle };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: Handle) -> Status {
    if let Ok(mut events) = EVENTS.lock() {
        events.remove(&event.addr());
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Status {
    record(event, key(stream, false))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord_ptsz(event: Handle, stream: Handle) -> Status {
    record(event, key(stream, true))
}

fn record(event: Handle, stream: Key) -> Status {
    let at = end(stream).max(now());
    let is_captured = STREAMS
        .lock()
        .is_ok_and(|streams| streams.get(&stream).is_some_and(|stream| stream.captures.is_some()));
    let (Ok((context, _)), Ok(mut events)) = (current(), EVENTS.lock()) else { return INVALID_VALUE };
    match events.get_mut(&event.addr()) {
        Some(event) if event.context == context => {
            *event = SimulatedEvent { at, context, is_captured };
            SUCCESS
        }
        Some(event) => {
            assert_alive(event.context);
            INVALID_HANDLE
        }
        None => INVALID_HANDLE,
    }
}

/// Returns an event for a query. Its context must exist.
fn event(event: Handle) -> Option<SimulatedEvent> {
    let event = EVENTS.lock().ok()?.get(&event.addr()).copied()?;
    assert_alive(event.context);
    Some(event)
}

/// Returns whether a call invalidates captures, because this thread is not in relaxed capture mode.
fn disturbs() -> bool {
    let captures =
        STREAMS.lock().is_ok_and(|streams| streams.values().any(|stream| stream.captures.is_some()));
    let disturbs = captures && !is_relaxed();
    if disturbs {
        DISTURBED.store(true, Ordering::SeqCst);
    }
    disturbs
}

/// Queries an event. Like the real driver, a query of a captured event also invalidates captures.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(asked: Handle) -> Status {
    if disturbs() {
        return CAPTURE_UNSUPPORTED;
    }
    match event(asked) {
        Some(event) if event.is_captured => {
            DISTURBED.store(true, Ordering::SeqCst);
            CAPTURE_UNSUPPORTED
        }
        Some(event) if event.at > now() => NOT_READY,
        Some(_) => SUCCESS,
        None => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, from: Handle, to: Handle) -> Status {
    let (Some(from), Some(to)) = (event(from), event(to)) else { return INVALID_HANDLE };
    let elapsed = std::time::Duration::from_nanos(to.at.saturating_sub(from.at));
    unsafe { *milliseconds = elapsed.as_secs_f32() * 1e3 };
    SUCCESS
}
