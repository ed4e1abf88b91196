//! The entry points from a program into the library, and from the library into the driver.
//!
//! A program reaches the driver by linked symbols, by `dlsym`, or by `cuGetProcAddress`. Linked
//! symbols resolve to the functions that this library exports. The other two look-ups are answered
//! by the driver, and the library replaces the answer only if it is exactly a function that the
//! library wraps. The driver therefore decides which version or per-thread-stream variant a program
//! gets, and unknown functions pass unchanged.

mod libc_functions;
pub mod library;
pub mod loader;
mod proc_address;
pub mod table;
