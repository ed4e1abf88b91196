//! The speed of kube-scheduler with the extender relative to its speed alone, with the same pods on
//! the same nodes.

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
    Replica, Site,
    pods::{gpu_node, share},
};
use crate::harness::Harness;

const NODES: usize = 500;
const PODS: usize = 1500;

/// Part of its own speed that kube-scheduler must reach with the extender.
const MIN_RELATIVE_SPEED: f64 = 0.8;

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
        let measured = measure(&site, &replica, &format!("{name}-{round}"), extenders).await?;
        harness.note(&format!("{name}: {measured}"));
        rates.push((name, measured.rate));
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
    ensure!(
        part >= MIN_RELATIVE_SPEED,
        "the extender leaves {:.0} % of kube-scheduler's speed",
        part * 100.0
    );
    Ok(())
}

/// Result of one round.
struct Measured {
    /// Bound pods per second.
    rate: f64,
    /// CPU time per pod in milliseconds, by program.
    cpu: Vec<(&'static str, f64)>,
}

impl std::fmt::Display for Measured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.0} pods/s; ms of CPU per pod:", self.rate)?;
        self.cpu.iter().try_for_each(|(program, spent)| write!(f, " {program} {spent:.2}"))
    }
}

async fn measure(site: &Site, replica: &Replica, name: &str, extenders: Value) -> Result<Measured> {
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
    let programs = [
        ("kube-scheduler", scheduler.id()),
        ("tessera", replica.component.id()),
        ("kube-apiserver", site.cluster.api_server.id()),
        ("etcd", site.cluster.etcd.id()),
    ];
    let mut before = Vec::new();
    let began = || before = programs.map(|(_, id)| cpu_seconds(id)).to_vec();
    let watched = tokio::time::timeout(Duration::from_secs(100), watch(site, name, began)).await;
    let seconds = watched.context("too slow")??;
    let intervals = f64::from(u32::try_from(PODS - 1)?);
    let cpu = programs
        .iter()
        .zip(before)
        .map(|((program, id), before)| (*program, (cpu_seconds(*id) - before) * 1000.0 / intervals));
    let measured = Measured { rate: intervals / seconds, cpu: cpu.collect() };
    scheduler.kill()?;
    Ok(measured)
}

/// Returns the CPU time of a process in seconds. The kernel counts hundredths of a second.
fn cpu_seconds(id: Option<u32>) -> f64 {
    let stat = id.and_then(|id| std::fs::read_to_string(format!("/proc/{id}/stat")).ok()).unwrap_or_default();
    // The process name may contain any character, so the numbers are read after its closing
    // bracket. User and system time are the 12th and 13th of them.
    let (_, numbers) = stat.rsplit_once(')').unwrap_or_default();
    let spent = numbers.split_whitespace().skip(11).take(2).filter_map(|number| number.parse::<f64>().ok());
    spent.sum::<f64>() / 100.0
}

/// Returns the seconds from the first to the last binding. Calls `began` at the first one.
async fn watch(site: &Site, name: &str, began: impl FnOnce()) -> Result<f64> {
    let pods: Api<LeanPod> = Api::default_namespaced(site.cluster.client());
    let mut pods = pin!(watcher(pods, watcher::Config::default()).default_backoff().applied_objects());
    let mut began = Some(began);
    let mut first = None;
    let mut placed = BTreeSet::new();
    while let Some(pod) = pods.try_next().await? {
        if pod.spec.node_name.is_empty() || pod.spec.scheduler_name != name {
            continue;
        }
        let now = Instant::now();
        let first = *first.get_or_insert(now);
        if let Some(began) = began.take() {
            began();
        }
        placed.extend(pod.metadata.name);
        if placed.len() == PODS {
            return Ok(now.duration_since(first).as_secs_f64());
        }
    }
    bail!("the watch ended after {} of {PODS} pods", placed.len())
}
