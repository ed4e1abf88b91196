//! `libtessera.so`: enforces a container's limits on its GPUs, from inside its processes.
//!
//! ```text
//! program ── cu*, nvml* ──> entry points ──> memory, compute ──> the driver
//!                                                  │
//!                               grant: control (read-only), account (this container's)
//! ```
//!
//! - `entry`: the entry points: exported symbols, `dlsym`, `cuGetProcAddress`. Functions without a
//!   hook bypass the library.
//! - `grant`: the container's limits, loaded when the program first uses a GPU.
//! - `memory`: charges every allocation of device memory before it reaches the driver.
//! - `compute`: admits launches within the container's share of time.
//! - `monitor`: the library's only background thread.
//!
//! The build profile aborts on panic, so the code has no way to panic. The library installs no
//! signal handler and never ends the program. Without valid limits the library rejects every use of
//! a GPU.

#![allow(unsafe_code, reason = "intercepts calls from a C program to a C library")]
#![allow(non_snake_case, reason = "hooks have the names of the driver's functions")]
#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "reading a pointer from C and using it is one operation"
)]
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
