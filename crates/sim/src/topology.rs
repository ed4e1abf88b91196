//! Job streams on one machine: how much of the possible bandwidth do jobs get?
//!
//! The experiment of Ranganath et al., "MAPA" (SC21), with the ring model in place of its regression: jobs of two to
//! five GPUs in strict order, two thirds of which depend on their links. What counts is the bandwidth each of those
//! gets, as a share of the best that so many GPUs have on the empty machine.

mod peers;
mod stream;
mod twister;

use std::fmt;
use std::str::FromStr;

use tessera_core::ledger::Conflict;
use tessera_core::node::BadNode;
use tessera_core::placement::Refusal;
use tessera_core::topology::Topology;

/// How the GPUs of a job are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The lowest free indexes: the core's policy `simple`.
    Lowest,
    /// Gaia's tree of groups.
    Tree,
    /// go-gpuallocator's: the core's policy `best-effort`.
    Gpuallocator,
    /// MAPA's Greedy.
    Greedy,
    /// MAPA's Preserve.
    Preserve,
    /// Any free GPUs.
    Random,
    /// The core's policy `tessera`.
    Tessera,
}

/// A name that is no rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}; choose from {names}", names = Rule::ALL.map(Rule::name).join(", "))]
pub struct UnknownRule(String);

/// Why a stream could not be run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The rule looks at every set, and there are too many.
    #[error("policy {rule} compares every set of GPUs, which takes too long for more than {MOST_COMPARED}")]
    TooManySets {
        /// Which rule.
        rule: Rule,
    },
    /// No job of the stream can ever run.
    #[error("a machine of {0} GPUs is too small for the stream")]
    TooSmall(usize),
    /// A rule found no set though there are enough GPUs.
    #[error("no set of {size} among {free} free GPUs")]
    NoSet {
        /// How many are free.
        free: usize,
        /// How many were asked for.
        size: usize,
    },
    /// The core refused a job that fits.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The ledger refused a booking.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The links do not make a node.
    #[error(transparent)]
    BadNode(#[from] BadNode),
}

/// Rules that look at every set do so on machines of up to so many GPUs.
const MOST_COMPARED: usize = 16;

/// The mean share of the best bandwidth, over all jobs of `seeds` streams (seeds 0, 1, ...) of `jobs` each that
/// depend on their links. 1 where there is none: nothing was lost.
pub fn bandwidth_share(topology: &Topology, rule: Rule, jobs: usize, seeds: u32) -> Result<f64, StreamError> {
    if !rule.serves(topology) {
        return Err(StreamError::TooManySets { rule });
    }
    let (mut shares, mut measured) = (0.0, 0.0);
    for seed in 0..seeds {
        let served = stream::run(topology, rule, &stream::jobs(topology.count(), jobs, seed), seed)?;
        shares += served.shares;
        measured += f64::from(served.jobs);
    }
    Ok(if measured > 0.0 { shares / measured } else { 1.0 })
}

// === impl Rule ===

impl Rule {
    /// All rules, ours last.
    pub const ALL: [Self; 7] = [
        Self::Random,
        Self::Lowest,
        Self::Tree,
        Self::Gpuallocator,
        Self::Greedy,
        Self::Preserve,
        Self::Tessera,
    ];

    /// The names of those worth comparing.
    pub const COMPARED: [&'static str; 6] =
        ["lowest", "tree", "gpuallocator", "greedy", "preserve", "tessera"];

    /// The name users write.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lowest => "lowest",
            Self::Tree => "tree",
            Self::Gpuallocator => "gpuallocator",
            Self::Greedy => "greedy",
            Self::Preserve => "preserve",
            Self::Random => "random",
            Self::Tessera => "tessera",
        }
    }

    /// Whether the rule answers in time on a machine of this size.
    #[must_use]
    pub fn serves(self, topology: &Topology) -> bool {
        let compares_every_set = matches!(self, Self::Greedy | Self::Preserve);
        !compares_every_set || topology.count() <= MOST_COMPARED
    }
}

impl FromStr for Rule {
    type Err = UnknownRule;

    fn from_str(name: &str) -> Result<Self, UnknownRule> {
        Self::ALL.into_iter().find(|rule| rule.name() == name).ok_or_else(|| UnknownRule(name.to_owned()))
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
