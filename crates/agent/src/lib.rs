//! The node agent: offers the GPUs of a node to its kubelet, hands them to containers, and keeps the books true.
//!
//! [`machine`] decides: events in, actions out, no IO. [`exporter`] tells who holds and who uses the GPUs, from what is given to
//! it. [`shell`] does what they say and reports what happened.

pub mod exporter;
pub mod machine;
pub mod shell;
