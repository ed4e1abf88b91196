//! The Kubernetes API, as far as Tessera speaks it: a client, lean objects to read, and the Binding that carries a grant.
//!
//! The only crate that knows the client library, whose major version follows Kubernetes releases.

mod binding;
mod connect;
mod lean;
pub mod node_agent;

pub use self::{
    binding::{BindError, Binding},
    connect::{ConnectError, connect},
    lean::{LeanNode, LeanPod},
};
