//! The ways from a program into the driver, and from us into it.
//!
//! A program reaches the driver by symbols bound when it was linked, by `dlsym`, or by asking
//! `cuGetProcAddress`. The first finds our exported functions, the other two are answered by the driver itself,
//! and we put our function in place only where the answer is exactly the function we wrap. So which
//! version or per-thread-stream form a program gets is the driver's decision, and unknown ones pass.

pub mod dlsym;
pub mod library;
mod proc_address;
pub mod table;
