//! Follows the lease of the kube-scheduler in the same pod.

use std::time::Duration;

use tessera_cluster::lease::NeighbourLease;
use tessera_cluster::{Client, FailureLog};
use tokio::sync::watch as signal;
use tokio::task::JoinSet;

/// The kube-scheduler in the same pod.
#[derive(Clone, Debug)]
pub struct Neighbour {
    /// Name of its lease, in the namespace of the replica's own lease.
    pub lease: String,
    /// Host name of the pod, with which kube-scheduler's identity begins.
    pub host: String,
}

/// Time between two reads of the lease.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Reads the neighbour's lease again and again.
pub(super) struct NeighbourWatch {
    leads: signal::Receiver<bool>,
    /// Ends the reads when it is dropped.
    _reads: JoinSet<()>,
}

impl NeighbourWatch {
    pub(super) fn start(client: Client, namespace: &str, neighbour: &Neighbour) -> Self {
        let lease = NeighbourLease::new(client, namespace, &neighbour.lease, &neighbour.host);
        let name = format!("{namespace}/{}", neighbour.lease);
        let (told, leads) = signal::channel(false);
        let mut reads = JoinSet::new();
        reads.spawn(async move {
            let mut trouble = FailureLog::default();
            loop {
                match lease.is_held().await {
                    Ok(is_held) => {
                        trouble.clear();
                        let is_new = told.send_if_modified(|known| std::mem::replace(known, is_held) != is_held);
                        if is_new {
                            tracing::info!(lease = name, is_held, "the lease of the kube-scheduler in this pod changed");
                        }
                    }
                    // The last answer counts, because only the replica's own lease says who may write.
                    Err(error) => {
                        if trouble.record(&error.to_string()) {
                            tracing::warn!(%error, lease = name, "cannot read the lease of the kube-scheduler in this pod; retrying");
                        }
                    }
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        });
        Self { leads, _reads: reads }
    }

    /// Returns whether the neighbour held its lease when it was last read.
    pub(super) fn leads(&mut self) -> bool {
        *self.leads.borrow_and_update()
    }

    /// Waits until the neighbour gains or loses its lease.
    pub(super) async fn changed(watch: Option<&mut Self>) {
        let has_changed = match watch {
            Some(watch) => watch.leads.changed().await.is_ok(),
            None => false,
        };
        if !has_changed {
            std::future::pending::<()>().await;
        }
    }
}
