//! Helpers under the names that `server.rs` of the agent's test uses.

pub(crate) mod load;
