//! The pods of the cluster simulations.

use tessera_core::grant::Hold;
use tessera_core::request::PodRequest;
use tessera_core::units::MiB;

/// A pod that arrives in a simulated cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimPod {
    /// Name of the pod.
    pub name: String,
    /// Requested resources.
    pub request: PodRequest,
    /// Size class for the report.
    pub size: PodSize,
    /// Requested part of all GPUs together, in percent of one GPU, by the scarcer of compute and memory.
    pub percent: u32,
}

/// Size class of a pod, by its requested GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodSize {
    /// The pod requests no GPU.
    None,
    /// A share of one GPU.
    Share,
    /// One whole GPU.
    One,
    /// Two whole GPUs.
    Two,
    /// Three or four whole GPUs.
    Four,
    /// More than four whole GPUs.
    Eight,
}

impl SimPod {
    /// Returns the share that the pod requests, or `None` for a pod without a share.
    #[must_use]
    pub fn share(&self) -> Option<Hold> {
        let request = self.request.containers.first()?.request.filter(|_| self.size == PodSize::Share);
        // Simulated pods name amounts, which do not depend on the GPU.
        request.map(|request| Hold::of(request, MiB::ZERO))
    }
}

impl PodSize {
    /// All sizes with GPUs, smallest first.
    pub const WITH_GPUS: [Self; 5] = [Self::Share, Self::One, Self::Two, Self::Four, Self::Eight];

    /// Returns the position in [`PodSize::WITH_GPUS`].
    #[must_use]
    pub fn position(self) -> Option<usize> {
        Self::WITH_GPUS.iter().position(|known| *known == self)
    }

    /// Returns the name in the results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Share => "share",
            Self::One => "1",
            Self::Two => "2",
            Self::Four => "4",
            Self::Eight => "8",
        }
    }
}
