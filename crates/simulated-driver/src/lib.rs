//! The driver, simulated: as much of `libcuda.so.1` and `libnvidia-ml.so.1` as the tests of the library use.
//!
//! A GPU is a file, `$SIMULATED_GPU` (others with a number behind), mapped by all processes. Memory on it is a number per process; it goes back to
//! the GPU when the process is gone. A kernel is an amount of time: the function's handle says how many nanoseconds, or its parameter does (`modules`).

#![allow(unsafe_code, reason = "a C library")]
#![allow(non_snake_case, reason = "names of functions are the driver's")]
#![allow(unreachable_pub, reason = "functions are exported by name")]
#![allow(missing_docs, reason = "documented by the driver they imitate")]
#![allow(clippy::missing_safety_doc, reason = "the safety rules are those of the driver's functions")]
#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "answers are written through pointers of the caller"
)]
#![allow(clippy::undocumented_unsafe_blocks, reason = "everywhere the same: pointers are the test program's")]

mod card;
mod contexts;
mod graphs;
mod imports;
mod lookup;
mod memory;
mod modules;
mod nvml;
mod work;

/// What every function returns.
pub type Status = i32;
pub type Handle = *mut std::ffi::c_void;

pub const SUCCESS: Status = 0;
pub const INVALID_VALUE: Status = 1;
pub const OUT_OF_MEMORY: Status = 2;
pub const NOT_INITIALIZED: Status = 3;
pub const INVALID_CONTEXT: Status = 201;
pub const INVALID_HANDLE: Status = 400;
pub const NOT_FOUND: Status = 500;
pub const NOT_READY: Status = 600;
pub const CAPTURE_UNSUPPORTED: Status = 900;
pub const CAPTURE_INVALIDATED: Status = 901;
