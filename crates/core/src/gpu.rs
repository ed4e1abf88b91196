//! A physical GPU.

use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use crate::units::{GpuIndex, MiB};

/// One physical GPU of a node, as its driver reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The position on the node.
    pub index: GpuIndex,
    /// The driver's identifier of the GPU. It survives reboots and renumbering.
    pub uuid: GpuUuid,
    /// The number N of `/dev/nvidiaN`, which may differ from the index.
    pub minor: u32,
    /// The product.
    pub model: Model,
    /// The memory that the driver reports.
    pub memory: MiB,
    /// The NUMA node of the GPU, where known.
    pub numa: Option<u16>,
    /// Whether new grants may use the GPU.
    pub health: Health,
}

/// A GPU's UUID, such as `GPU-8f2a...`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid(pub Arc<str>);

/// A product name, such as `T4`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Model(pub Arc<str>);

/// A kind of GPUs that are interchangeable for a request.
#[derive(Clone, Debug)]
pub struct GpuKind {
    /// The product.
    pub model: Model,
    /// The memory of one GPU of this kind.
    pub memory: MiB,
    /// A hash that tells most kinds apart without a comparison of names.
    hash: u64,
}

/// Whether new grants may use a GPU. Existing grants stay booked either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// The GPU works.
    Healthy,
    /// The GPU was reported broken and gets no new grant.
    Unhealthy,
    /// The GPU is divided into MIG instances, so it cannot be granted as a GPU.
    InMigMode,
    /// The driver has retired memory of the GPU, which takes effect with its next reset.
    AwaitingReset,
    /// An administrator wants no new grants on the GPU.
    Cordoned,
}

impl Health {
    /// Returns whether new grants may use the GPU.
    #[must_use]
    pub fn is_healthy(self) -> bool {
        self == Self::Healthy
    }

    /// Returns whether the GPU has a fault. A cordoned GPU works, and so does one in MIG mode.
    #[must_use]
    pub fn is_faulty(self) -> bool {
        matches!(self, Self::Unhealthy | Self::AwaitingReset)
    }

    /// Returns the reason why new grants may not use the GPU, or `None` if they may.
    #[must_use]
    pub fn problem(self) -> Option<&'static str> {
        match self {
            Self::Healthy => None,
            Self::Unhealthy => Some("unhealthy"),
            Self::InMigMode => Some("in MIG mode"),
            Self::AwaitingReset => Some("awaiting a reset for retired memory"),
            Self::Cordoned => Some("cordoned"),
        }
    }
}

// === impl Gpu ===

impl Gpu {
    /// Creates a healthy GPU whose minor number is its index and whose NUMA node is unknown.
    #[must_use]
    pub fn new(index: GpuIndex, uuid: GpuUuid, model: Model, memory: MiB) -> Self {
        Self { index, uuid, minor: u32::from(index.0), model, memory, numa: None, health: Health::Healthy }
    }

    /// Returns the kind of the GPU.
    #[must_use]
    pub fn kind(&self) -> GpuKind {
        GpuKind::new(self.model.clone(), self.memory)
    }
}

// === impl GpuKind ===

impl GpuKind {
    /// Returns the kind of this product and memory size.
    #[must_use]
    pub fn new(model: Model, memory: MiB) -> Self {
        let mut hasher = DefaultHasher::new();
        (&model, memory).hash(&mut hasher);
        Self { hash: hasher.finish(), model, memory }
    }
}

impl PartialEq for GpuKind {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.memory == other.memory && self.model == other.model
    }
}

impl Eq for GpuKind {}

// === impl GpuUuid, Model ===

impl From<&str> for GpuUuid {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<&str> for Model {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
