//! Why a claim cannot be prepared or released. The text reaches the events of the pod.

use tessera_wire::tessera::dra::{BadAllocation, BadShareConfig};

use super::super::{NotEnforceable, ShellError};

/// Reason why a call of the kubelet about a claim is refused. The kubelet tries again.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClaimError {
    /// The GPUs of the node have not been discovered yet.
    #[error("the GPUs of this node are not known yet")]
    GpusUnknown,
    /// The API server did not return the claim.
    #[error("cannot read claim {claim}: {error}")]
    Unreadable {
        /// Namespace and name of the claim.
        claim: String,
        /// Error of the request.
        error: ShellError,
    },
    /// The claim was deleted, and another one has its name.
    #[error("claim {claim} has another UID by now; delete the pod, so that it uses the new claim")]
    Replaced {
        /// Namespace and name of the claim.
        claim: String,
    },
    /// Nothing is allocated for the claim.
    #[error("claim {claim} has no allocation of this driver")]
    NotAllocated {
        /// Namespace and name of the claim.
        claim: String,
    },
    /// The claim is reserved for no pod.
    #[error("claim {claim} is reserved for no pod")]
    NotReserved {
        /// Namespace and name of the claim.
        claim: String,
    },
    /// The allocation is not possible on this node.
    #[error("claim {claim}: {reason}")]
    Allocation {
        /// Namespace and name of the claim.
        claim: String,
        /// What is wrong with the allocation.
        reason: BadAllocation,
    },
    /// The settings of the claim or its class mean nothing.
    #[error("claim {claim}: {reason}; delete the claim and the pod, and correct the claim or its class")]
    Config {
        /// Namespace and name of the claim.
        claim: String,
        /// What is wrong with the settings.
        reason: BadShareConfig,
    },
    /// A GPU of the claim is not usable.
    #[error(
        "claim {claim}: {device} is {problem}; delete the claim and the pod, so that another GPU is chosen"
    )]
    Unhealthy {
        /// Namespace and name of the claim.
        claim: String,
        /// Name of the device.
        device: String,
        /// State of the GPU.
        problem: &'static str,
    },
    /// Other claims and pods hold so much of a GPU that the claim does not fit.
    #[error(
        "claim {claim} does not fit on {device}: other claims and pods on this node hold too much of it; delete one \
         of them, or delete this claim and its pod"
    )]
    Full {
        /// Namespace and name of the claim.
        claim: String,
        /// Name of the device.
        device: String,
    },
    /// The share must be enforced, and cannot be.
    #[error("claim {claim}: {reason}")]
    NotEnforceable {
        /// Namespace and name of the claim.
        claim: String,
        /// Why the share cannot be enforced.
        reason: NotEnforceable,
    },
    /// The UUID of a GPU cannot be written into limits.
    #[error("claim {claim}: the UUID of {device} is not known, so its share cannot be limited")]
    NoUuid {
        /// Namespace and name of the claim.
        claim: String,
        /// Name of the device.
        device: String,
    },
    /// Files of the claim cannot be written or removed.
    #[error("cannot write the files of claim {claim}: {error}")]
    Files {
        /// Namespace and name of the claim.
        claim: String,
        /// Error of the file system.
        error: ShellError,
    },
    /// The claim was released while it was being prepared.
    #[error("claim {claim} was released meanwhile")]
    Released {
        /// Namespace and name of the claim.
        claim: String,
    },
}
