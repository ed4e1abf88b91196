//! A stand-in for kube-scheduler: takes pending pods from the API server one after the other and calls an extender about them
//! as kube-scheduler does, over HTTP: filter, prioritize, bind, preempt.
//!
//! What it does by itself is little: amounts, node selectors, the queue with its pauses, evictions.

mod extender;
mod queue;
mod snapshot;
mod worker;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::extender::Extender;
use self::worker::Worker;
use crate::apiserver::ApiServer;
use crate::http::HttpError;

/// A running one.
#[derive(Debug)]
pub struct KubeScheduler {
    stop: CancellationToken,
    task: JoinHandle<()>,
    counters: Arc<SchedulerCounters>,
}

/// What it did.
#[derive(Debug, Default)]
pub struct SchedulerCounters {
    /// Pods bound.
    pub bound: AtomicU64,
    /// Attempts that found no node.
    pub unschedulable: AtomicU64,
    /// Attempts that broke off: the extender failed, or refused the bind.
    pub failed: AtomicU64,
    /// Pods evicted for others.
    pub evicted: AtomicU64,
    /// Nanoseconds spent on attempts that bound a pod.
    pub bind_nanos: AtomicU64,
}

impl KubeScheduler {
    /// Starts one that calls the extender at `http://host:port`.
    pub fn start(api: Arc<ApiServer>, extender: &str) -> Result<Self, HttpError> {
        let (stop, counters) = (CancellationToken::new(), Arc::<SchedulerCounters>::default());
        let worker = Worker::new(api, Extender::at(extender)?, Arc::clone(&counters));
        let task = tokio::spawn(worker.run(stop.clone()));
        Ok(Self { stop, task, counters })
    }

    /// What it did so far.
    #[must_use]
    pub fn counters(&self) -> &SchedulerCounters {
        &self.counters
    }

    /// Ends it, between two pods.
    pub async fn stop(self) {
        self.stop.cancel();
        // A panic in there was reported when it happened.
        let _ = self.task.await;
    }
}
