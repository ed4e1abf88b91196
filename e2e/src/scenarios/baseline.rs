//! The speed of kube-scheduler alone, as the reference of later measurements.

use std::{
    collections::BTreeSet,
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use futures::TryStreamExt;
use kube::{
    Api,
    runtime::{WatchStreamExt, watcher},
};
use tessera_cluster::LeanPod;

use crate::harness::{Cluster, Harness, Parts, pod};

const NODES: usize = 500;
const PODS: usize = 5000;

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: false }).await?;
    cluster.add_virtual_nodes(NODES).await?;
    harness.note(&format!("{NODES} virtual nodes"));
    let waiting =
        (0..PODS).map(|index| pod(&format!("pod-{index:05}"), "true", &[("cpu", "500m"), ("memory", "1Gi")]));
    cluster.create_all(&cluster.pods(), waiting).await?;
    harness.note(&format!("{PODS} pods are pending"));

    let _scheduler = cluster.start_scheduler("kube-scheduler", serde_json::json!({}))?;
    let placements = watch_placements(&cluster);
    let Placed { first, last } =
        harness.complete("all pods to be placed", Duration::from_secs(180), placements).await?;
    let seconds = last.duration_since(first).as_secs_f64();
    // There is one interval less than there are pods.
    let rate = f64::from(u32::try_from(PODS - 1)?) / seconds;
    harness.note(&format!(
        "kube-scheduler alone: {PODS} pods on {NODES} nodes in {seconds:.1} s, {rate:.0} pods/s"
    ));
    Ok(())
}

/// Times of the first and the last binding.
struct Placed {
    first: Instant,
    last: Instant,
}

async fn watch_placements(cluster: &Cluster) -> Result<Placed> {
    let pods: Api<LeanPod> = Api::default_namespaced(cluster.client());
    // The API server closes watches that fall behind, as on a busy host. This watch resumes.
    let mut pods = pin!(watcher(pods, watcher::Config::default()).default_backoff().applied_objects());
    let mut first = None;
    let mut placed = BTreeSet::new();
    while let Some(pod) = pods.try_next().await? {
        if pod.spec.node_name.is_empty() {
            continue;
        }
        let now = Instant::now();
        let first = *first.get_or_insert(now);
        placed.extend(pod.metadata.name);
        if placed.len() == PODS {
            return Ok(Placed { first, last: now });
        }
    }
    bail!("the watch ended after {} of {PODS} pods", placed.len())
}
