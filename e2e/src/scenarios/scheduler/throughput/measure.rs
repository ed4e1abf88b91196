//! One measurement: pods wait, kube-scheduler starts, and the time between the first and the last
//! binding counts.

use std::{
    collections::BTreeSet,
    fmt,
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use futures::StreamExt;
use tessera_cluster::watch::{self, WatchChange};

use super::{
    super::Site,
    contender::{Contender, PodKind},
    requests::{ApiRequests, extender_calls},
};

/// Time in which all pods must be bound.
const WITHIN: Duration = Duration::from_secs(300);

const KUBE_SCHEDULER: &str = "kube-scheduler";
const EXTENDER: &str = "extender";

/// Result of one measurement.
pub(super) struct Measured {
    /// Bound pods per second.
    pub(super) rate: f64,
    /// CPU time per pod in milliseconds, by program.
    cpu: Vec<(&'static str, f64)>,
    /// Requests to the API server per pod.
    requests: String,
    /// Calls of our extender per pod.
    calls: String,
}

impl Measured {
    /// Returns the CPU time per pod of kube-scheduler and the extender, in milliseconds.
    pub(super) fn scheduling_cpu(&self) -> f64 {
        let programs = self.cpu.iter().filter(|(program, _)| [KUBE_SCHEDULER, EXTENDER].contains(program));
        programs.map(|(_, spent)| spent).sum()
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} pods/s; ms of CPU per pod:", self.rate)?;
        self.cpu.iter().try_for_each(|(program, spent)| write!(f, " {program} {spent:.2}"))?;
        write!(f, "; requests per pod: {}", self.requests)?;
        if self.calls.is_empty() { Ok(()) } else { write!(f, "; calls per pod: {}", self.calls) }
    }
}

/// Schedules the pods of one kind and deletes them again.
pub(super) async fn measure(
    site: &Site,
    contender: &Contender,
    kind: PodKind,
    name: &str,
    pods: usize,
) -> Result<Measured> {
    let waiting = (0..pods).map(|index| contender.pod(&format!("{name}-{index:05}"), kind));
    site.cluster.create_all(&site.cluster.pods(), waiting).await?;
    let running = contender.start(site, name).await?;
    let programs = [
        (KUBE_SCHEDULER, running.scheduler.id()),
        (EXTENDER, running.extender.as_ref().and_then(|extender| extender.id())),
        ("kube-apiserver", site.cluster.api_server.id()),
        ("etcd", site.cluster.etcd.id()),
    ];
    let requests = ApiRequests::read(site).await?;
    let mut before = Vec::new();
    let began = || before = programs.map(|(_, id)| cpu_seconds(id)).to_vec();
    let what = format!("the pods of {name} to be bound");
    let seconds = site.harness.complete(&what, WITHIN, bound(site, pods, began)).await?;
    let intervals = f64::from(u32::try_from(pods - 1)?);
    let cpu = programs
        .iter()
        .zip(before)
        .map(|((program, id), before)| (*program, (cpu_seconds(*id) - before) * 1000.0 / intervals))
        .collect();
    let pod_count = f64::from(u32::try_from(pods)?);
    let requests = ApiRequests::read(site).await?.since(&requests, pod_count);
    let calls = match running.counts_calls_at {
        Some(address) => extender_calls(address, pod_count).await?,
        None => String::new(),
    };
    running.scheduler.kill()?;
    if let Some(extender) = &running.extender {
        extender.stop().await?;
    }
    site.delete_all_pods().await?;
    Ok(Measured { rate: intervals / seconds, cpu, requests, calls })
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
pub(in super::super) async fn bound(site: &Site, pods: usize, began: impl FnOnce()) -> Result<f64> {
    // In protobuf, as kube-scheduler watches: the API server encodes nothing for the measurement alone.
    let mut changes = pin!(watch::pods(site.cluster.client()));
    let mut began = Some(began);
    let mut first = None;
    let mut placed = BTreeSet::new();
    while let Some(change) = changes.next().await {
        let WatchChange::Set(pod) = change else { continue };
        if pod.spec.node_name.is_empty() {
            continue;
        }
        let now = Instant::now();
        let first = *first.get_or_insert(now);
        if let Some(began) = began.take() {
            began();
        }
        placed.insert(pod.metadata.name);
        if placed.len() == pods {
            return Ok(now.duration_since(first).as_secs_f64());
        }
    }
    bail!("the watch ended after {} of {pods} pods", placed.len())
}
