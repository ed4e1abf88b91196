//! The demonstration: a whole cluster in one process, without GPU, Kubernetes or root.
//!
//! The API server, the kubelets and kube-scheduler's loop are the embedded ones of `sim`, on real sockets. The agents and the
//! scheduler are the real ones, set up as `tessera agent` and `tessera scheduler` set them up. Nothing here decides anything.

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

/// How the demonstration is set.
#[derive(Debug, Clone)]
pub struct DemoOptions {
    /// How many nodes; two at least: one of them is reserved.
    pub nodes: usize,
    /// What the nodes are made of, in turns.
    pub machine_models: Vec<MachineModel>,
    /// Pods a second that come by themselves.
    pub pods_per_second: f64,
    /// Whether the scripted steps are played.
    pub steps: bool,
    /// The same seed brings the same pods.
    pub seed: u64,
    /// Twice as fast: twice the pods a second, each for half the time.
    pub speed: f64,
    /// Where the scheduler and its dashboard listen, if that is free.
    pub listen: SocketAddr,
    /// Where to write a kubeconfig that stays.
    pub kubeconfig_out: Option<PathBuf>,
    /// End after this time, and after the steps were played once; never where absent.
    pub duration: Option<Duration>,
}

/// It cannot run.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// Fewer nodes than it takes.
    #[error("{0} nodes are too few: one is reserved for the preemption, so write --nodes 2 or more")]
    TooFewNodes(usize),
    /// Somebody wanted it to end before it had begun.
    #[error("interrupted before the cluster was up")]
    Interrupted,
    /// No machine model to make nodes of.
    #[error("no machine model is given to build nodes from")]
    NoMachineModel,
    /// The temporary directory lies so deep that sockets in it would have names that are too long.
    #[error("sockets in {} would have names that are too long; set TMPDIR to a shorter path, such as /tmp", .0.display())]
    DeepDirectory(PathBuf),
    /// A file or socket that cannot be had.
    #[error("cannot {what}")]
    Io {
        /// What was tried.
        what: String,
        /// What is in the way.
        source: std::io::Error,
    },
    /// The client of the API server.
    #[error(transparent)]
    Connect(#[from] tessera_cluster::ConnectError),
    /// The scheduler's address cannot be called.
    #[error(transparent)]
    Client(#[from] tessera_sim::http::HttpError),
    /// An agent ended instead of coming up.
    #[error("the agent of {agent} ended")]
    Agent {
        /// Whose.
        agent: String,
        /// Why.
        source: tessera_agent::shell::RunError,
    },
    /// Something did not come up.
    #[error("{what} did not come up within {within:?}")]
    Late {
        /// What.
        what: String,
        /// How long was waited.
        within: Duration,
    },
}

impl DemoError {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
