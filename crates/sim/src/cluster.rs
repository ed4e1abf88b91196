//! A cluster filled with the pods of a trace until nothing fits any more: how much of it could be used?
//!
//! The experiment of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023), on the real core, with the rules they
//! compared beside it on the same arrivals.

mod arrivals;
mod peers;
mod run;
pub mod trace;

use std::str::FromStr;
use std::sync::Arc;

use tessera_core::node::Node;
use tessera_core::placement::{Policy, UnknownPolicy};

use trace::TracePod;

pub use run::{FRAGMENTATION_AT, Outcome, run};

/// What a run needs to know beside its rule and seed.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// The cluster.
    pub nodes: Vec<Arc<Node>>,
    /// The pods to draw from.
    pub pods: Vec<TracePod>,
    /// How much arrives, in parts of the cluster.
    pub fill: f64,
    /// What policy `tessera` knows of the workload.
    pub target: Target,
}

/// What a policy that looks ahead knows of the workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// What it has seen so far, as in a real cluster.
    #[default]
    Learned,
    /// The whole list from the start.
    Trace,
}

/// How nodes and GPUs are chosen.
#[derive(Clone, Debug)]
pub enum Rule {
    /// By lot.
    Random,
    /// The least product of what is free and what is asked for.
    DotProduct,
    /// Nodes that hold pods of the same size.
    Clustering,
    /// GPUs in use, then nodes in use.
    Packing,
    /// The least left over.
    BestFit,
    /// Fragmentation gradient descent.
    Fgd,
    /// A policy of the core.
    Core(Policy),
}

impl Rule {
    /// The published rules and ours, as results list them.
    pub const COMPARED: [&'static str; 7] =
        ["random", "dotprod", "clustering", "packing", "best-fit", "fgd", "tessera"];
}

impl FromStr for Rule {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Ok(match name {
            "random" => Self::Random,
            "dotprod" => Self::DotProduct,
            "clustering" => Self::Clustering,
            "packing" => Self::Packing,
            "best-fit" => Self::BestFit,
            "fgd" => Self::Fgd,
            _ => Self::Core(name.parse()?),
        })
    }
}
