//! Why a node will not do, in one line.

pub use tessera_core::admission::{QUOTA, RejectReason};
