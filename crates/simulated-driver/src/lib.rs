//! A simulated driver: the functions of `libcuda.so.1` and `libnvidia-ml.so.1` that the library's
//! tests use.
//!
//! A GPU is a file that all processes map: `$SIMULATED_GPU`, with a number as suffix for further
//! GPUs. Device memory is a number for each process, which is released when the process exits. A
//! kernel is an amount of time: the function's handle is its length in nanoseconds, or its
//! parameter is (`modules`).

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

mod contexts;
mod gpu;
mod graphs;
mod imports;
mod lookup;
mod memory;
mod modules;
mod nvml;
mod nvml_mig;
mod work;

/// The result of every driver function.
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
