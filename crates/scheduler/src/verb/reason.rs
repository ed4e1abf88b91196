//! Why a node will not do, in one line.

use tessera_core::placement::Refusal;
use tessera_core::quota::OverQuota;

/// The word for [`Reason::Quota`].
pub(crate) const QUOTA: &str = "quota";

/// What stands in the way on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// No watch has shown it yet.
    #[error("node is not known yet")]
    UnknownNode,
    /// What it says of itself cannot be read.
    #[error("node cannot be read: {0}")]
    BadNode(String),
    /// It does not offer the resource the pod asks for.
    #[error("node does not offer this kind of GPU resource")]
    NotServed,
    /// Its cards, or its host.
    #[error(transparent)]
    Cards(#[from] Refusal),
    /// The namespace has had its share.
    #[error(transparent)]
    Quota(#[from] OverQuota),
}

impl Reason {
    /// Whether the pod could fit once others have gone.
    #[must_use]
    pub fn may_resolve(&self) -> bool {
        match self {
            Self::UnknownNode => true,
            Self::BadNode(_) | Self::NotServed => false,
            Self::Cards(refusal) => refusal.may_resolve(),
            Self::Quota(over) => over.may_resolve(),
        }
    }

    /// A word for counting.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::UnknownNode => "unknown-node",
            Self::BadNode(_) => "bad-node",
            Self::NotServed => "not-served",
            Self::Quota(_) => QUOTA,
            Self::Cards(refusal) => match refusal {
                Refusal::Cpu => "cpu",
                Refusal::Memory => "memory",
                Refusal::NoGpu => "no-gpu",
                Refusal::Model => "model",
                Refusal::FewerGpus(_) => "fewer-gpus",
                Refusal::FewerIdle(_) => "fewer-idle",
                Refusal::TooLarge(_) => "too-large",
                Refusal::NoShare { .. } => "no-share",
                Refusal::NoMemory(_) => "no-gpu-memory",
                Refusal::Required => "required",
            },
        }
    }
}
