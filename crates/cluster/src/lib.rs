//! The part of the Kubernetes API that Tessera uses: a client, lean objects, watches, the leader's
//! lease, the Binding that carries a grant, and who may read pages.
//!
//! No other crate uses the client library, whose major version follows Kubernetes releases.

#![warn(missing_docs)]

pub mod access;
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
mod protobuf;
pub mod secrets;
pub mod watch;

/// The client, which other crates only pass on.
pub use kube::Client;

pub use self::{
    binding::{BindError, Binding},
    causes::{FailureLog, with_causes},
    connect::{ConnectError, connect, connect_in, connect_to},
    events::{EventError, PodNotice},
    lean::{LeanBudget, LeanNode, LeanPod},
    list::{ApiError, Selection},
    pods::{AnnotateError, GetError, annotate_pod, get_pod},
};
