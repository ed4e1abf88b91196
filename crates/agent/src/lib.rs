//! The node agent: offers the cards of a node to its kubelet, hands them to containers, and keeps the books true.
//!
//! [`machine`] decides: events in, actions out, no IO. [`shell`] does what it says and reports what happened.

pub mod machine;
pub mod shell;
