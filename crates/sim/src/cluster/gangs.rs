//! Jobs of many pods that come and go on a cluster with racks: joint placement against placement pod by pod.
//!
//! A job starts when all its pods have their GPUs. Pod by pod, each pod takes GPUs as soon as it fits, as kube-scheduler
//! does. Jointly, a job takes all its GPUs or none, and the first waiting job holds back GPUs for a while, as Tessera's
//! scheduler does. Both use the same policy for the GPUs of a pod.

mod jobs;
mod run;

use std::sync::Arc;

use tessera_core::node::Node;
use tessera_core::request::PodRequest;

pub use run::simulate;

/// Nodes of a rack, and racks of a block.
pub const NODES_PER_RACK: usize = 16;
const RACKS_PER_BLOCK: usize = 4;

/// A kind of job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobShape {
    /// The request of each pod.
    pub request: PodRequest,
    /// Number of pods.
    pub pod_count: usize,
    /// GPUs of each pod, in percent of one GPU.
    pub pod_percent: u32,
}

/// The cluster and the jobs of a run.
#[derive(Clone, Debug)]
pub struct GangExperiment {
    /// The nodes. Neighbours in the list are in the same rack.
    pub nodes: Vec<Arc<Node>>,
    /// The jobs are drawn from these kinds, each equally likely.
    pub shapes: Vec<JobShape>,
    /// Offered GPU time, as a part of the GPU time of the cluster.
    pub load: f64,
    /// Hours in which jobs arrive. Afterwards the simulation runs until nothing changes any more.
    pub hours: u32,
}

/// How pods are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GangMode {
    /// Each pod takes GPUs as soon as it fits.
    PodByPod,
    /// All pods of a job are placed together.
    Jointly,
}

/// What one run measured. Jobs of one pod count only for the allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GangMeasures {
    /// Jobs with several pods.
    pub jobs: usize,
    /// Jobs with several pods that never started.
    pub never_started: usize,
    /// Mean time from arrival to start, in minutes, of the jobs that started.
    pub wait_minutes: f64,
    /// Time to start that 95 % of these jobs did not exceed, in minutes.
    pub wait_p95_minutes: f64,
    /// Started jobs whose nodes are all in one rack, in percent.
    pub one_rack_percent: f64,
    /// GPU time held by jobs that have not started, in percent of all GPU time while jobs arrive.
    pub incomplete_percent: f64,
    /// GPU time held back for the first waiting job, in percent of all GPU time while jobs arrive.
    pub held_back_percent: f64,
    /// GPU time of running jobs, in percent of all GPU time while jobs arrive.
    pub running_percent: f64,
}

impl GangExperiment {
    /// Returns a generated cluster of nodes with eight GPUs and jobs of 1 to 64 GPUs.
    ///
    /// # Errors
    /// Fails if the nodes are invalid, which a generated node never is.
    pub fn fat_tree(node_count: usize, load: f64) -> Result<Self, tessera_core::node::BadNode> {
        let nodes =
            (0..node_count).map(|number| jobs::node(number).map(Arc::new)).collect::<Result<_, _>>()?;
        Ok(Self { nodes, shapes: jobs::generated_shapes(), load, hours: 48 })
    }

    /// Returns the cluster of a trace, with racks of neighbouring nodes. Each pod of the trace with several whole GPUs
    /// becomes a job of so many pods with one GPU each.
    #[must_use]
    pub fn of_trace(trace: &super::Experiment, load: f64) -> Self {
        Self { nodes: trace.nodes.clone(), shapes: jobs::trace_shapes(&trace.pods), load, hours: 12 }
    }

    fn rack(node: usize) -> String {
        format!("rack-{}", node / NODES_PER_RACK)
    }

    fn block(node: usize) -> String {
        format!("block-{}", node / NODES_PER_RACK / RACKS_PER_BLOCK)
    }
}
