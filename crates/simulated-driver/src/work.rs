//! Kernels, streams, events, graphs. A stream is known by a number; it remembers when its last kernel ends.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex};

use crate::card::now;
use crate::contexts::{as_handle, current, next_handle};
use crate::{Handle, INVALID_VALUE, NOT_READY, SUCCESS, Status};

/// When the last kernel of each stream ends; and, for a capturing one, what was captured.
static STREAMS: LazyLock<Mutex<HashMap<usize, Stream>>> = LazyLock::new(Mutex::default);
/// When events happen, and nanoseconds of graphs.
static EVENTS: LazyLock<Mutex<HashMap<usize, u64>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Stream {
    end: u64,
    captured: Option<u64>,
}

/// Runs a kernel of `nanoseconds` after all before it in the stream.
fn run(stream: Handle, nanoseconds: u64) -> Status {
    let (Ok((_, mine)), Ok(mut streams)) = (current(), STREAMS.lock()) else { return INVALID_VALUE };
    let stream = streams.entry(stream.addr()).or_default();
    match &mut stream.captured {
        Some(captured) => *captured += nanoseconds,
        None => stream.end = mine.run(nanoseconds, stream.end),
    }
    SUCCESS
}

fn end(stream: Handle) -> u64 {
    STREAMS.lock().ok().and_then(|streams| streams.get(&stream.addr()).map(|stream| stream.end)).unwrap_or(0)
}

fn sleep_until(end: u64) {
    let left = end.saturating_sub(now());
    if left > 0 {
        std::thread::sleep(std::time::Duration::from_nanos(left));
    }
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
    _parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    run(stream, function.addr() as u64)
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
    _parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    run(stream, function.addr() as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(graph: Handle, stream: Handle) -> Status {
    run(stream, graph.addr() as u64)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, _flags: u32) -> Status {
    unsafe { *stream = as_handle(next_handle()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: Handle) -> Status {
    sleep_until(end(stream));
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Status {
    let last = STREAMS.lock().ok().and_then(|streams| streams.values().map(|stream| stream.end).max());
    sleep_until(last.unwrap_or(0));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: Handle, status: *mut i32) -> Status {
    let Ok(streams) = STREAMS.lock() else { return INVALID_VALUE };
    let captures = streams.get(&stream.addr()).is_some_and(|stream| stream.captured.is_some());
    unsafe { *status = i32::from(captures) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: Handle, _mode: i32) -> Status {
    let Ok(mut streams) = STREAMS.lock() else { return INVALID_VALUE };
    streams.entry(stream.addr()).or_default().captured = Some(0);
    SUCCESS
}

/// The graph's handle says how long it runs, like a function's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Status {
    let Ok(mut streams) = STREAMS.lock() else { return INVALID_VALUE };
    let captured = streams.get_mut(&stream.addr()).and_then(|stream| stream.captured.take());
    unsafe { *graph = as_handle(captured.unwrap_or(0)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut Handle, _flags: u32) -> Status {
    unsafe { *event = as_handle(next_handle()) };
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
    let at = end(stream).max(now());
    if let Ok(mut events) = EVENTS.lock() {
        events.insert(event.addr(), at);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: Handle) -> Status {
    let at = EVENTS.lock().ok().and_then(|events| events.get(&event.addr()).copied()).unwrap_or(0);
    if at <= now() { SUCCESS } else { NOT_READY }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, from: Handle, to: Handle) -> Status {
    let Ok(events) = EVENTS.lock() else { return INVALID_VALUE };
    let at = |event: Handle| events.get(&event.addr()).copied().unwrap_or(0);
    let elapsed = std::time::Duration::from_nanos(at(to).saturating_sub(at(from)));
    unsafe { *milliseconds = elapsed.as_secs_f32() * 1e3 };
    SUCCESS
}
