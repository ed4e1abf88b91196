//! The pod stream, which is a function of the seed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tessera_sim::apiserver::{ApiServer, ObjectChange, pod_path};
use tessera_sim::kubelet::node::RUN_SECONDS_ANNOTATION;
use tessera_sim::scatter::scatter;
use tokio_util::sync::CancellationToken;

use crate::DemoOptions;
use crate::cluster::NAMESPACES;
use crate::node::{POOL, SHARED};

/// Label of the demo's own pods.
const LABEL: &str = "tessera.dev/demo";

/// A pod to be created.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DemoJob {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Limits as pairs of resource and amount.
    pub(crate) limits: Vec<(&'static str, u64)>,
    /// Run time in seconds at speed 1. Absent for a pod that runs until it is deleted.
    pub(crate) runs_for: Option<f64>,
    pub(crate) pool: &'static str,
    pub(crate) priority_class: Option<&'static str>,
}

impl DemoJob {
    pub(crate) fn path(&self) -> String {
        format!("/api/v1/namespaces/{}/pods", self.namespace)
    }

    /// Returns the manifest of the pod.
    pub(crate) fn manifest(&self, speed: f64) -> Value {
        let limits: BTreeMap<&str, String> =
            self.limits.iter().map(|(resource, amount)| (*resource, amount.to_string())).collect();
        let kind = self.name.split('-').next().unwrap_or_default();
        let mut pod = json!({
            "metadata": { "name": self.name, "labels": { "app": kind, LABEL: "job" }, "annotations": {} },
            "spec": {
                "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "nodeSelector": { POOL: self.pool },
                "containers": [{ "name": "main", "image": "simulated", "resources": { "limits": limits } }],
            },
        });
        if let Some(seconds) = self.runs_for {
            pod["metadata"]["annotations"][RUN_SECONDS_ANNOTATION] = format!("{:.3}", seconds / speed).into();
        }
        if let Some(class) = self.priority_class {
            pod["spec"]["priorityClassName"] = class.into();
        }
        pod
    }
}

/// Random draws of the pod stream.
#[derive(Debug, Clone)]
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = scatter(self.0);
        self.0 % below
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.roll(high - low + 1)
    }
}

/// Returns the jobs of a seed: shares, notebooks, single GPUs and training sets of at most
/// `largest` GPUs.
pub(crate) fn stream(seed: u64, largest: u64) -> impl Iterator<Item = DemoJob> {
    let mut dice = Dice(seed);
    (1u64..).map(move |number| {
        let namespace = NAMESPACES[usize::try_from(dice.roll(3)).unwrap_or_default()];
        let (kind, limits, runs_for) = match dice.roll(100) {
            0..45 => {
                let (compute_percent, memory) = (dice.between(1, 6) * 10, dice.between(2, 16) * 4);
                let limits =
                    vec![("tencent.com/vcuda-core", compute_percent), ("tencent.com/vcuda-memory", memory)];
                ("share", limits, dice.between(8, 30))
            }
            45..65 => ("notebook", vec![("aliyun.com/gpu-mem", dice.between(4, 16))], dice.between(15, 40)),
            65..90 => {
                let resource = ["nvidia.com/gpu", "aliyun.com/gpu"][usize::from(dice.roll(2) == 1)];
                ("single", vec![(resource, 1)], dice.between(8, 25))
            }
            90..98 => (
                "train",
                vec![("aliyun.com/gpu", (2 * dice.between(1, 2)).min(largest))],
                dice.between(10, 30),
            ),
            _ => ("train", vec![("aliyun.com/gpu", largest)], dice.between(8, 15)),
        };
        DemoJob {
            namespace: namespace.to_owned(),
            name: format!("{kind}-{number}"),
            limits,
            runs_for: Some(f64::from(u32::try_from(runs_for).unwrap_or(u32::MAX))),
            pool: SHARED,
            priority_class: None,
        }
    })
}

/// Counters of the pod stream.
#[derive(Debug, Default)]
pub(crate) struct JobCounts {
    pub(crate) created: AtomicU64,
    pub(crate) succeeded: AtomicU64,
    pub(crate) failed: AtomicU64,
}

/// Pods per second for each GPU. A pod takes about 15 GPU-seconds, so the stream takes about 60 % of the cluster.
const PODS_PER_GPU_SECOND: f64 = 0.04;

/// Largest number of pending pods in a large cluster. No pods are created while more are pending.
const MAX_WAITING: usize = 150;

/// The size of the cluster that the pod stream feeds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamSize {
    /// GPUs that the stream shares with the steps.
    pub(crate) gpus: usize,
    /// GPUs of the smallest node.
    pub(crate) largest: u64,
}

impl StreamSize {
    /// Returns the default rate in pods per second.
    pub(crate) fn pods_per_second(self) -> f64 {
        PODS_PER_GPU_SECOND * f64::from(u32::try_from(self.gpus).unwrap_or(u32::MAX))
    }

    /// Returns the number of pods that may be pending. Pods of a step wait behind them, so a small
    /// cluster has a short queue, and none grows while a step plays.
    fn max_waiting(self, is_step_playing: bool) -> usize {
        if is_step_playing { 0 } else { (self.gpus / 2).clamp(2, MAX_WAITING) }
    }
}

/// Time for which ended pods stay visible.
const ENDED_POD_RETENTION: Duration = Duration::from_secs(5);

/// Creates pods at a fixed rate until it is stopped.
pub(crate) async fn feed(
    api: Arc<ApiServer>,
    counts: Arc<JobCounts>,
    options: &DemoOptions,
    size: StreamSize,
    is_step_playing: Arc<AtomicBool>,
    stop: CancellationToken,
) {
    let DemoOptions { seed, pods_per_second, speed, .. } = *options;
    let pods_per_second = pods_per_second.unwrap_or_else(|| size.pods_per_second());
    let Ok(pause) = Duration::try_from_secs_f64(1.0 / (pods_per_second * speed)) else { return };
    let mut ticks = tokio::time::interval(pause.max(Duration::from_micros(100)));
    for job in stream(seed, size.largest) {
        if stop.run_until_cancelled(ticks.tick()).await.is_none() {
            return;
        }
        let max_waiting = || size.max_waiting(is_step_playing.load(Ordering::Relaxed));
        while api.count("/api/v1/pods", "spec.nodeName=,status.phase=Pending") > max_waiting() {
            if stop.run_until_cancelled(ticks.tick()).await.is_none() {
                return;
            }
        }
        if api.create(&job.path(), job.manifest(speed)).is_ok() {
            counts.created.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Counts ended pods and deletes them after a while, like the garbage collector of a cluster.
pub(crate) async fn tidy(api: Arc<ApiServer>, counts: Arc<JobCounts>, stop: CancellationToken) {
    let Ok(mut pods) = api.watch("/api/v1/pods", "status.phase!=Pending,status.phase!=Running") else {
        return;
    };
    let mut ended = std::collections::VecDeque::new();
    loop {
        let due = ended.front().map(|(due, _): &(tokio::time::Instant, String)| *due);
        let wait = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = wait => {
                if let Some((_, path)) = ended.pop_front() {
                    // Another client may have deleted the pod already.
                    let _ = api.delete(&path);
                }
            }
            event = pods.next() => match event {
                // Pods of users are never deleted.
                Some(ObjectChange::Applied(pod)) if pod["metadata"]["labels"][LABEL] == "job" => {
                    let count = if pod["status"]["phase"] == "Failed" { &counts.failed } else { &counts.succeeded };
                    count.fetch_add(1, Ordering::Relaxed);
                    ended.push_back((tokio::time::Instant::now() + ENDED_POD_RETENTION, pod_path(&pod)));
                }
                Some(_) => {}
                None => return,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_jobs() {
        let jobs: Vec<DemoJob> = stream(7, 8).take(300).collect();
        assert_eq!(jobs, stream(7, 8).take(300).collect::<Vec<_>>());
        assert_ne!(jobs, stream(8, 8).take(300).collect::<Vec<_>>());
        assert!(
            stream(7, 4)
                .take(300)
                .all(|job| job.limits.iter().all(|(name, count)| *name != "aliyun.com/gpu" || *count <= 4))
        );
        for kind in ["share", "notebook", "single", "train"] {
            assert!(jobs.iter().any(|job| job.name.starts_with(kind)), "{kind}");
        }
    }

    #[test]
    fn a_manifest_uses_the_resources_of_its_dialect() {
        let job = stream(1, 8).find(|job| job.name.starts_with("share")).unwrap();
        let pod = job.manifest(2.0);
        let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
        assert!(limits["tencent.com/vcuda-core"].is_string(), "{pod}");
        let seconds: f64 =
            pod["metadata"]["annotations"][RUN_SECONDS_ANNOTATION].as_str().unwrap().parse().unwrap();
        assert!((seconds * 2.0 - job.runs_for.unwrap()).abs() < 0.01);
    }
}
