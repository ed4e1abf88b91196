//! The part of the Kubernetes API that Tessera uses: a client, lean objects, watches, the leader's
//! lease, the Binding that carries a grant, and who may read pages.
//!
//! No other crate uses the client library, whose major version follows Kubernetes releases.

#![warn(missing_docs)]

pub mod access;
pub mod annotate_node;
mod binding;
mod causes;
pub mod claims;
mod connect;
mod events;
mod eviction;
pub mod fetch;
mod lean;
pub mod lease;
pub mod list;
pub mod node_agent;
mod pods;
mod protobuf;
pub mod secrets;
mod served;
pub mod watch;

/// The client, which other crates only pass on.
pub use kube::Client;

pub use self::{
    binding::{BindError, Binding},
    causes::{FailureLog, with_causes},
    connect::{ConnectError, connect, connect_in, connect_to},
    events::{EventError, Notice, NoticeKind},
    eviction::{EvictionOutcome, evict},
    lean::{LeanBudget, LeanClaim, LeanClass, LeanNode, LeanPod, LeanResourceQuota, LeanSlice},
    list::{ApiError, Selection},
    pods::{AnnotateError, GetError, annotate_pod, get_pod},
    served::is_served,
};
