//! What can happen.

use tessera_core::placement::static_table::StaticTable;
use tessera_core::quota::Quota;
use tessera_wire::objects::{Node, Pod};

/// Something the state has to know.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one at a time")]
pub enum Event {
    /// Of a node.
    Node(Watched<Node>),
    /// Of a pod.
    Pod(Watched<Pod>),
    /// The limits have changed.
    Quota(Quota),
    /// The table of policy `static` has changed.
    Table(StaticTable),
}

/// What a watch tells of objects of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched<T> {
    /// A list begins: what it does not show is gone when it ends.
    Listing,
    /// An object as it is now.
    Set(T),
    /// An object that is no more.
    Gone(T),
    /// The list is complete.
    Listed,
}
