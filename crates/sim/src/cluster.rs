//! Runs the policies of the core and the published policies on the same arrivals.
//!
//! [`run`] fills a cluster with the pods of a trace until nothing fits, and measures how much of it
//! is used. This is the experiment of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023).
//! [`mod@bench`] does the same with generated workloads, in which pods may also end.

mod arrivals;
pub mod bench;
mod chooser;
pub mod defragment;
pub mod gangs;
mod peers;
pub mod pod;
mod run;
mod sample;
mod sim_node;
pub mod trace;

use std::str::FromStr;
use std::sync::Arc;

use tessera_core::node::Node;
use tessera_core::placement::{Policy, UnknownPolicy};

use pod::SimPod;

pub use run::{FRAGMENTATION_AT, FillResult, run};

/// The input of a run, except for its policy and seed.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// Nodes of the cluster.
    pub nodes: Vec<Arc<Node>>,
    /// Pods that arrivals are drawn from.
    pub pods: Vec<SimPod>,
    /// GPUs requested by all arrivals, as a multiple of the GPUs of the cluster.
    pub fill: f64,
    /// How much policy `tessera` knows of the workload.
    pub target: WorkloadKnowledge,
    /// Largest number of nodes that kube-scheduler offers for a pod; `None` for all.
    pub sample: Option<usize>,
}

impl Experiment {
    /// Returns the pods in the order of their arrival for one seed.
    #[must_use]
    pub fn arrivals(&self, seed: u64) -> Vec<&SimPod> {
        arrivals::arrivals(&self.pods, self.gpu_count(), self.fill, &mut arrivals::Draws::new(seed))
    }

    /// Returns the number of GPUs of the cluster.
    #[must_use]
    pub fn gpu_count(&self) -> usize {
        self.nodes.iter().map(|node| node.gpus().len()).sum()
    }
}

/// How much a forecasting policy knows of the workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkloadKnowledge {
    /// The pods that have arrived so far, as in a real cluster.
    #[default]
    Learned,
    /// All pods of the trace from the start.
    Trace,
}

/// A policy that chooses nodes and GPUs.
#[derive(Clone, Debug)]
pub enum FillPolicy {
    /// A random node and GPU.
    Random,
    /// The smallest dot product of free and requested resources.
    DotProduct,
    /// Nodes that already hold pods of the same size.
    Clustering,
    /// GPUs in use first, then nodes in use.
    Packing,
    /// The node with the least capacity left over.
    BestFit,
    /// Fragmentation gradient descent.
    Fgd,
    /// A policy of the core.
    Core(Policy),
}

impl FillPolicy {
    /// Names of the published policies and of ours, in the order of the result tables.
    pub const COMPARED: [&'static str; 7] =
        ["random", "dotprod", "clustering", "packing", "best-fit", "fgd", "tessera"];
}

impl FromStr for FillPolicy {
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
