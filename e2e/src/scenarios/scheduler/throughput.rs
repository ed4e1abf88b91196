//! How much of kube-scheduler's speed is left with the extender: the same pods on the same nodes, one after the other.

use std::{
    collections::BTreeSet,
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::TryStreamExt;
use kube::{
    Api,
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tessera_cluster::LeanPod;

use super::{
    Site,
    pods::{gpu_node, share},
};
use crate::harness::Harness;

const NODES: usize = 500;
const PODS: usize = 1500;

/// Part of its own speed kube-scheduler must keep.
const KEPT: f64 = 0.8;

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let nodes = (0..NODES).map(|number| gpu_node(&format!("node-{number:03}"), 8, "GiB"));
    let site = Site::start(&harness, nodes).await?;
    let replica = site.replica("tessera-scheduler", None)?;
    site.ready(&replica).await?;
    harness.note(&format!("{NODES} virtual nodes with 8 GPUs"));
    let extender = json!([{
        "urlPrefix": format!("http://{}/scheduler", replica.address),
        "filterVerb": "filter", "prioritizeVerb": "prioritize", "bindVerb": "bind", "preemptVerb": "preempt",
        "weight": 15, "nodeCacheCapable": true,
        "managedResources": [{ "name": "tencent.com/vcuda-core", "ignoredByScheduler": false }],
    }]);
    let mut rates: Vec<(&str, f64)> = Vec::new();
    for (round, name) in ["alone", "extended", "alone", "extended"].into_iter().enumerate() {
        let extenders = if name == "extended" { extender.clone() } else { json!([]) };
        let rate = measure(&site, &format!("{name}-{round}"), extenders).await?;
        harness.note(&format!("{name}: {rate:.0} pods/s"));
        rates.push((name, rate));
    }
    let mean = |wanted: &str| {
        let of: Vec<f64> = rates.iter().filter(|(name, _)| *name == wanted).map(|(_, rate)| *rate).collect();
        of.iter().sum::<f64>() / of.len() as f64
    };
    let part = mean("extended") / mean("alone");
    harness.note(&format!(
        "kube-scheduler alone {:.0} pods/s, with the extender {:.0} pods/s: {:.0} %",
        mean("alone"),
        mean("extended"),
        part * 100.0
    ));
    ensure!(part >= KEPT, "the extender leaves {:.0} % of kube-scheduler's speed", part * 100.0);
    Ok(())
}

async fn measure(site: &Site, name: &str, extenders: Value) -> Result<f64> {
    let waiting = (0..PODS).map(|index| {
        let mut pod = share(&format!("{name}-{index:05}"), 10);
        if let Some(spec) = &mut pod.spec {
            spec.scheduler_name = Some(name.to_owned());
        }
        pod
    });
    site.cluster.create_all(&site.cluster.pods(), waiting).await?;
    let configuration = json!({
        "profiles": [{ "schedulerName": name }], "extenders": extenders, "percentageOfNodesToScore": 100,
    });
    let scheduler = site.cluster.start_scheduler(name, configuration)?;
    let watched = tokio::time::timeout(Duration::from_secs(100), watch(site, name)).await;
    let seconds = watched.context("too slow")??;
    scheduler.kill()?;
    Ok(f64::from(u32::try_from(PODS - 1)?) / seconds)
}

/// Seconds from the first to the last placement.
async fn watch(site: &Site, name: &str) -> Result<f64> {
    let pods: Api<LeanPod> = Api::default_namespaced(site.cluster.client());
    let mut pods = pin!(watcher(pods, watcher::Config::default()).default_backoff().applied_objects());
    let mut first = None;
    let mut placed = BTreeSet::new();
    while let Some(pod) = pods.try_next().await? {
        if pod.spec.node_name.is_empty() || pod.spec.scheduler_name != name {
            continue;
        }
        let now = Instant::now();
        let first = *first.get_or_insert(now);
        placed.extend(pod.metadata.name);
        if placed.len() == PODS {
            return Ok(now.duration_since(first).as_secs_f64());
        }
    }
    bail!("the watch ended after {} of {PODS} pods", placed.len())
}
