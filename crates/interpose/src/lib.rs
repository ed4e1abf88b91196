//! `libtessera.so`: holds a container to its share of the GPUs, from inside its processes.
//!
//! ```text
//! program ── cu*, nvml* ──> door (three ways in) ──> memory, compute ──> the driver
//!                                                        │
//!                                     grant: control (read-only), account (this container's)
//! ```
//!
//! - `door`: exported symbols, `dlsym`, `cuGetProcAddress`. What we do not wrap never comes here.
//! - `grant`: what this container may use; loaded when a program first uses a GPU, and only then.
//! - `memory`: charges every way to take device memory before the driver is asked.
//! - `compute`: lets launches pass while the container's share of time lasts.
//! - `keeper`: the one thread of ours.
//!
//! No panic leaves a hook (the profile aborts on panic, so code here has no way to panic), no signal handler is
//! set, the program is never ended. Without valid limits nothing is allowed.

#![allow(unsafe_code, reason = "stands between a C program and a C library")]
#![allow(non_snake_case, reason = "names of functions are the driver's")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "calling through a pointer read from C is one act")]
#![allow(unreachable_pub, reason = "hooks are exported by name")]
#![allow(
    clippy::missing_safety_doc,
    reason = "the safety rules of a hook are those of the driver's function"
)]

mod compute;
mod cuda;
mod entry;
mod gpus;
mod grant;
mod memory;
mod monitor;
mod nvml;
