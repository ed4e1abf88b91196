//! The Kubernetes API, as far as Tessera speaks it: a client, lean objects to read,
//! watches, the lease of the leader, and the Binding that carries a grant.
//!
//! The only crate that knows the client library, whose major version follows Kubernetes releases.

mod binding;
mod causes;
mod connect;
mod events;
pub mod fetch;
mod lean;
pub mod lease;
pub mod list;
pub mod node_agent;
mod pods;
pub mod watch;

/// The client, which other crates pass on and never look into.
pub use kube::Client;

pub use self::{
    binding::{BindError, Binding},
    causes::{Trouble, with_causes},
    connect::{ConnectError, connect, connect_in, connect_to},
    events::{EventError, PodNotice},
    lean::{LeanBudget, LeanNode, LeanPod},
    list::{ApiError, Selection},
    pods::{GetError, get_pod},
};
