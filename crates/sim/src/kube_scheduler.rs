//! A stand-in for kube-scheduler.
//!
//! It takes pending pods from the API server one after the other and calls an extender over HTTP as
//! kube-scheduler does: filter, prioritize, bind and preempt. It implements only the fitting of
//! amounts, node selectors, the queue with its backoff, and evictions.

mod extender;
mod queue;
mod reports;
mod snapshot;
mod worker;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::extender::Extender;
pub use self::reports::REPORTS;
use self::worker::Worker;
use crate::apiserver::ApiServer;
use crate::http::HttpError;

/// A running kube-scheduler.
#[derive(Debug)]
pub struct KubeScheduler {
    stop: CancellationToken,
    task: JoinHandle<()>,
    counters: Arc<SchedulerCounters>,
}

/// Counters of a kube-scheduler.
#[derive(Debug, Default)]
pub struct SchedulerCounters {
    /// Number of bound pods.
    pub bound: AtomicU64,
    /// Number of attempts that found no node.
    pub unschedulable: AtomicU64,
    /// Number of attempts that failed because the extender failed or rejected the bind.
    pub failed: AtomicU64,
    /// Number of pods evicted for other pods.
    pub evicted: AtomicU64,
    /// Time of the attempts that bound a pod, in nanoseconds.
    pub bind_nanos: AtomicU64,
}

impl KubeScheduler {
    /// Starts a kube-scheduler that calls the extender at `http://host:port`.
    pub fn start(api: Arc<ApiServer>, extender: &str) -> Result<Self, HttpError> {
        let (stop, counters) = (CancellationToken::new(), Arc::<SchedulerCounters>::default());
        let worker = Worker::new(api, Extender::at(extender)?, Arc::clone(&counters));
        let task = tokio::spawn(worker.run(stop.clone()));
        Ok(Self { stop, task, counters })
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> &SchedulerCounters {
        &self.counters
    }

    /// Stops after the current pod.
    pub async fn stop(self) {
        self.stop.cancel();
        // A panic of the task was logged when it happened.
        let _ = self.task.await;
    }
}
