//! Calls of the limiter to the CUDA driver: events, contexts and capture modes.

use tessera_throttle::Nanos;
use tessera_throttle::driver::{ContextId, Driver, StreamId, StreamName};

use crate::cuda::{Handle, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::memory::contexts;

driver_functions! { Cuda:
    create_event = c"cuEventCreate" (event: *mut Handle, flags: u32);
    record_event = c"cuEventRecord" (event: Handle, stream: Handle);
    query_event = c"cuEventQuery" (event: Handle);
    elapsed_time_v1 = c"cuEventElapsedTime" (milliseconds: *mut f32, from: Handle, to: Handle);
    set_current = c"cuCtxSetCurrent" (context: Handle);
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode" (mode: *mut i32);
    is_capturing = c"cuStreamIsCapturing" (stream: Handle, status: *mut i32);
    is_capturing_per_thread = c"cuStreamIsCapturing_ptsz" (stream: Handle, status: *mut i32);
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: the thread's calls do not disturb captures of other threads.
const RELAXED: i32 = 2;

/// `CUDA_ERROR_NOT_READY`: the GPU has not reached the event yet.
const NOT_READY: Status = 600;

/// `CU_EVENT_DISABLE_TIMING`: an event without a time stamp is far cheaper to record.
const DISABLE_TIMING: u32 = 2;

/// The CUDA driver.
pub struct CudaDriver;

/// An event that the library has created.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CudaEvent(Handle);

// SAFETY: the library never dereferences the handle, and any thread may pass it to the driver.
unsafe impl Send for CudaEvent {}

impl Driver for CudaDriver {
    /// The mode before the change, or `None` if the driver has no capture modes.
    type CaptureMode = Option<i32>;
    type DriverEvent = CudaEvent;

    fn host_time(&self) -> Nanos {
        super::now()
    }

    fn current_context(&self) -> ContextId {
        ContextId(contexts::current())
    }

    fn set_context(&self, context: ContextId) {
        // SAFETY: `context` is null or alive, because the gate forgets a context before it is
        // destroyed.
        unsafe { set_current(std::ptr::with_exposed_provenance_mut(context.0)) };
    }

    fn create_event(&self, is_timed: bool) -> Option<CudaEvent> {
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the calling thread has a context, and `handle` receives the event.
        let status = unsafe { create_event(&raw mut handle, if is_timed { 0 } else { DISABLE_TIMING }) };
        (status == SUCCESS).then_some(CudaEvent(handle))
    }

    fn record(&self, event: CudaEvent, stream: StreamId) -> bool {
        // SAFETY: the event of the library and the stream of the program belong to the same
        // context.
        (unsafe { record_event(event.0, handle(stream.handle())) }) == SUCCESS
    }

    fn is_reached(&self, event: CudaEvent) -> bool {
        // SAFETY: the event is one that the library has recorded. An error of the program's work
        // also ends the work, so every status except "not ready" counts as reached.
        (unsafe { query_event(event.0) }) != NOT_READY
    }

    fn elapsed_ms(&self, from: CudaEvent, to: CudaEvent) -> Option<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: the library has recorded both events, and `milliseconds` receives the answer.
        let status = unsafe { elapsed_time_v1(&raw mut milliseconds, from.0, to.0) };
        (status == SUCCESS).then_some(milliseconds)
    }

    fn is_capturing(&self, stream: StreamName) -> bool {
        let mut status = 0;
        // SAFETY: the stream belongs to the program, and `status` receives the answer.
        let result = unsafe {
            if stream.per_thread {
                is_capturing_per_thread(handle(stream.handle), &raw mut status)
            } else {
                is_capturing(handle(stream.handle), &raw mut status)
            }
        };
        // The driver rejects this query for the legacy stream during a capture in another stream.
        // Then the library must not touch the legacy stream either.
        result != SUCCESS || status != 0
    }

    fn relax(&self) -> Option<i32> {
        exchange_mode(RELAXED)
    }

    fn restore(&self, mode: Option<i32>) {
        mode.map(exchange_mode);
    }
}

fn handle(stream: usize) -> Handle {
    std::ptr::without_provenance_mut(stream)
}

/// Sets the capture mode of the calling thread and returns the previous mode.
fn exchange_mode(mut mode: i32) -> Option<i32> {
    // SAFETY: the driver reads and writes `mode`, which outlives the call.
    (unsafe { exchange_capture_mode(&raw mut mode) } == SUCCESS).then_some(mode)
}
