//! What can happen.

use tessera_core::gpu_set::GpuSet;
use tessera_core::placement::static_table::StaticTable;
use tessera_core::quota::Quota;
use tessera_core::units::NodeName;
use tessera_wire::foreign::disruption::Budget;
use tessera_wire::foreign::objects::{Node, Pod};

/// Something the state has to know.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one at a time")]
pub enum Event {
    /// Of a node.
    Node(Watched<Node>),
    /// Of a pod.
    Pod(Watched<Pod>),
    /// Of a disruption budget.
    Budget(Watched<Budget>),
    /// Of gpushare's list of a node's broken GPUs.
    Unhealthy(Watched<Unhealthy>),
    /// The limits have changed.
    Quota(Quota),
    /// The table of policy `static` has changed.
    Table(StaticTable),
}

/// The GPUs of a node that somebody calls broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unhealthy {
    /// Which node.
    pub node: NodeName,
    /// Which of its GPUs.
    pub cards: GpuSet,
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

impl<T> Watched<T> {
    /// Whether the API server has answered: a list that begins is only an attempt.
    pub(crate) const fn shows_life(&self) -> bool {
        !matches!(self, Self::Listing)
    }

    /// The same of what `read` makes of the object; `None` where it makes nothing of it.
    pub(crate) fn and_then<U>(self, read: impl FnOnce(T) -> Option<U>) -> Option<Watched<U>> {
        Some(match self {
            Self::Listing => Watched::Listing,
            Self::Set(object) => Watched::Set(read(object)?),
            Self::Gone(object) => Watched::Gone(read(object)?),
            Self::Listed => Watched::Listed,
        })
    }
}
