//! Job streams on one host: which share of the possible bandwidth do jobs get?
//!
//! This is the experiment of Ranganath et al., "MAPA" (SC21), with the ring model in place of its
//! regression. Jobs of two to five GPUs run in strict order, and two thirds of them depend on their
//! links. The result is the bandwidth of each such job relative to the best bandwidth of as many
//! GPUs on the empty host.

mod peers;
mod stream;
mod twister;

use std::fmt;
use std::str::FromStr;

use tessera_core::ledger::Conflict;
use tessera_core::node::BadNode;
use tessera_core::placement::PlacementError;
use tessera_core::topology::Topology;
use tessera_core::units::Count;

pub use self::stream::{StreamJob, jobs};

/// A policy that chooses the GPUs of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamPolicy {
    /// The lowest free indexes: policy `simple` of the core.
    Lowest,
    /// The tree of groups of Gaia.
    Tree,
    /// The choice of go-gpuallocator: policy `best-effort` of the core.
    Gpuallocator,
    /// Policy Greedy of MAPA.
    Greedy,
    /// Policy Preserve of MAPA.
    Preserve,
    /// Random free GPUs.
    Random,
    /// The lowest free indexes, as kube-scheduler allocates claims, corrected as when the pod is bound.
    Claims,
    /// Policy `tessera` of the core.
    Tessera,
}

/// The error for a name that is not a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}; choose from {names}", names = StreamPolicy::ALL.map(StreamPolicy::name).join(", "))]
pub struct UnknownStreamPolicy(String);

/// Reasons why a stream does not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The policy compares every set of GPUs, and there are too many.
    #[error(
        "policy {policy} compares every set of GPUs, which takes too long for more than {MAX_GPUS_OF_FULL_COMPARISON}"
    )]
    TooManySets {
        /// Name of the policy.
        policy: StreamPolicy,
    },
    /// No job of the stream fits on the host.
    #[error("a host with {} is too small for the stream", Count(*.0, "GPU"))]
    TooSmall(usize),
    /// The policy found no set although enough GPUs are free.
    #[error("the policy found no set of {} among {free} that are free", Count(*.size, "GPU"))]
    NoSet {
        /// Number of free GPUs.
        free: usize,
        /// Number of GPUs of the job.
        size: usize,
    },
    /// The core rejected a job that fits.
    #[error(transparent)]
    Refused(#[from] PlacementError),
    /// The ledger rejected a booking.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The topology does not describe a valid node.
    #[error(transparent)]
    BadNode(#[from] BadNode),
}

/// Largest host on which a policy that compares every set of GPUs finishes in acceptable time.
const MAX_GPUS_OF_FULL_COMPARISON: usize = 16;

/// Returns the mean share of the best bandwidth over all link-sensitive jobs of `seeds` streams
/// with `jobs` jobs each. The seeds are 0, 1, and so on. Without such a job the result is 1,
/// because no bandwidth was lost.
pub fn bandwidth_share(
    topology: &Topology,
    policy: StreamPolicy,
    jobs: usize,
    seeds: u32,
) -> Result<f64, StreamError> {
    if !policy.serves(topology) {
        return Err(StreamError::TooManySets { policy });
    }
    let (mut shares, mut measured) = (0.0, 0.0);
    for seed in 0..seeds {
        let served = stream::run(topology, policy, &stream::jobs(topology.count(), jobs, seed), seed)?;
        shares += served.shares;
        measured += f64::from(served.jobs);
    }
    Ok(if measured > 0.0 { shares / measured } else { 1.0 })
}

impl StreamPolicy {
    /// All policies, ours last.
    pub const ALL: [Self; 8] = [
        Self::Random,
        Self::Lowest,
        Self::Tree,
        Self::Gpuallocator,
        Self::Greedy,
        Self::Preserve,
        Self::Claims,
        Self::Tessera,
    ];

    /// Names of the policies that `tessera simulate topology` compares by default.
    pub const COMPARED: [&'static str; 6] =
        ["lowest", "tree", "gpuallocator", "greedy", "preserve", "tessera"];

    /// Returns the name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lowest => "lowest",
            Self::Tree => "tree",
            Self::Gpuallocator => "gpuallocator",
            Self::Greedy => "greedy",
            Self::Preserve => "preserve",
            Self::Random => "random",
            Self::Claims => "claims",
            Self::Tessera => "tessera",
        }
    }

    /// Returns whether the policy finishes in acceptable time on a host of this size.
    #[must_use]
    pub fn serves(self, topology: &Topology) -> bool {
        let compares_every_set = matches!(self, Self::Greedy | Self::Preserve);
        !compares_every_set || topology.count() <= MAX_GPUS_OF_FULL_COMPARISON
    }
}

impl FromStr for StreamPolicy {
    type Err = UnknownStreamPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownStreamPolicy> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownStreamPolicy(name.to_owned()))
    }
}

impl fmt::Display for StreamPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
