//! The demo: a whole cluster in one process, without GPU, Kubernetes or root.
//!
//! The API server, the kubelets and kube-scheduler's loop are the embedded ones of `tessera-sim`,
//! on real sockets. The agents and the scheduler are the real ones, configured like `tessera agent`
//! and `tessera scheduler`. This crate makes no placement decisions.

mod audit;
mod cluster;
mod jobs;
mod machine_model;
mod node;
mod report;
mod run;
mod scenario;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use self::machine_model::{MachineModel, built_in_models};
pub use self::report::DemoReport;
pub use self::run::run;

/// Options of the demo.
#[derive(Debug, Clone)]
pub struct DemoOptions {
    /// Number of nodes. The last of several nodes is reserved for the preemption.
    pub nodes: usize,
    /// Machine models of the nodes, used in turn.
    pub machine_models: Vec<MachineModel>,
    /// Rate of the pod stream, in pods per second. Absent for a rate that follows the number of GPUs.
    pub pods_per_second: Option<f64>,
    /// True if the scripted steps run.
    pub steps: bool,
    /// Seed of the pod stream. The same seed gives the same pods.
    pub seed: u64,
    /// Speed factor. At 2, twice as many pods arrive per second and each runs half as long.
    pub speed: f64,
    /// Address of the scheduler and its dashboard. Another port is used if this one is in use.
    pub listen: SocketAddr,
    /// File for a kubeconfig that outlives the demo.
    pub kubeconfig_out: Option<PathBuf>,
    /// Duration of the demo. It ends after this time and after one round of the steps. Absent for
    /// no limit.
    pub duration: Option<Duration>,
}

/// Reasons why the demo does not run.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// No node was requested.
    #[error("--nodes 0 is too few; write --nodes 1 or more")]
    NoNodes,
    /// The demo was interrupted before the cluster was up.
    #[error("interrupted before the cluster was up")]
    Interrupted,
    /// No machine model was given.
    #[error("no machine model is given to build nodes from")]
    NoMachineModel,
    /// The temporary directory is so deep that paths of sockets in it are too long.
    #[error("the paths of sockets in {} are too long; set TMPDIR to a shorter path, such as /tmp", .0.display())]
    DeepDirectory(PathBuf),
    /// A file or socket cannot be used.
    #[error("cannot {what}")]
    Io {
        /// The attempted operation.
        what: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The certificates of the scheduler cannot be made.
    #[error(transparent)]
    Authority(#[from] tessera_serve::authority::AuthorityError),
    /// The certificates of the scheduler cannot be used.
    #[error(transparent)]
    Tls(#[from] tessera_serve::TlsError),
    /// The client of the API server cannot be created.
    #[error(transparent)]
    Connect(#[from] tessera_cluster::ConnectError),
    /// The scheduler cannot be called.
    #[error(transparent)]
    Client(#[from] tessera_sim::http::HttpError),
    /// An agent ended during the start.
    #[error("the agent of {agent} ended")]
    Agent {
        /// Name of the agent's node.
        agent: String,
        /// The error of the agent.
        source: tessera_agent::shell::RunError,
    },
    /// A component did not start in time.
    #[error("{what} did not start within {within:?}")]
    Late {
        /// Name of the component.
        what: String,
        /// Timeout of the start.
        within: Duration,
    },
}

impl DemoError {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
