//! Ten thousand random pods of all dialects on 200 nodes with two replicas. A replica is killed now
//! and then, and every GPU is audited at every change.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::DeleteParams, runtime::watcher};
use tessera_cluster::LeanPod;

use super::{
    Replica, SOON, Site,
    audit::Audit,
    front::Front,
    pods::{asking, gpu_node, share, whole},
};
use crate::harness::Harness;

const NODES: usize = 200;
const PODS: usize = 10_000;

/// Number of pods at a time. It exceeds the capacity, so that some pods always wait.
const MAX_PODS_AT_ONCE: usize = 2_500;

/// Interval of killing a replica.
const KILL_INTERVAL: Duration = Duration::from_secs(30);

/// Random numbers that are the same in every run.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let nodes = (0..NODES).map(|number| gpu_node(&format!("node-{number:03}"), 4, "GiB"));
    let site = Site::start(&harness, nodes).await?;
    let mut replicas =
        vec![site.replica("tessera-scheduler-1", None)?, site.replica("tessera-scheduler-2", None)?];
    let front = Front::start(replicas.iter().map(|replica| replica.addresses).collect()).await?;
    let _kube_scheduler = site.kube_scheduler(&front).await?;
    let api: Api<LeanPod> = Api::default_namespaced(site.cluster.client());
    let mut events = std::pin::pin!(watcher(api, watcher::Config::default()));
    let mut world = World { audit: Audit::default(), bound: BTreeSet::new(), ever_bound: 0, checked: 0 };
    let mut dice = Dice(0x9E37_79B9_7F4A_7C15);
    let (mut made, mut alive, mut kills) = (0, BTreeSet::new(), 0);
    let mut last_kill = Instant::now();
    let mut idle_since = Instant::now();
    loop {
        // Pods are created up to the maximum, and bound pods are deleted to make room.
        if made < PODS && alive.len() < MAX_PODS_AT_ONCE {
            let batch: Vec<Pod> =
                (made..(made + 250).min(PODS)).map(|number| random_pod(number, &mut dice)).collect();
            alive.extend(batch.iter().filter_map(|pod| pod.metadata.name.clone()));
            made += batch.len();
            create(&site, batch).await?;
        } else if made < PODS {
            let ended: Vec<String> = world.bound.iter().filter(|_| dice.roll(4) == 0).cloned().collect();
            delete(&site, &ended).await?;
            ended.iter().for_each(|name| {
                alive.remove(name);
            });
        }
        let until = Instant::now() + Duration::from_millis(1500);
        while Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(Some(event)) = tokio::time::timeout(left, events.next()).await else { break };
            if world.see(event)? {
                idle_since = Instant::now();
            }
        }
        if last_kill.elapsed() > KILL_INTERVAL && made < PODS {
            last_kill = Instant::now();
            kills += 1;
            replace_one(&site, &front, &mut replicas, &mut dice, kills)?;
        }
        // After the last pod, when nothing has been bound for a while, every pod that fits is
        // bound.
        if made == PODS && idle_since.elapsed() > Duration::from_secs(20) {
            break;
        }
    }
    every_pod_has_an_answer(&site).await?;
    ensure!(world.ever_bound * 2 > PODS, "only {} pods were ever bound", world.ever_bound);
    harness.note(&format!(
        "{PODS} pods, {} bound, {kills} replicas killed, {} audits: no GPU ever over 100 % or its memory",
        world.ever_bound, world.checked
    ));
    Ok(())
}

struct World {
    audit: Audit,
    bound: BTreeSet<String>,
    ever_bound: usize,
    checked: usize,
}

impl World {
    /// Applies an event. Returns whether a pod was newly bound.
    fn see(&mut self, event: Result<watcher::Event<LeanPod>, watcher::Error>) -> Result<bool> {
        match event {
            Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => {
                self.audit.see(&pod)?;
                self.checked += 1;
                let name = pod.metadata.name.unwrap_or_default();
                let is_new = !pod.spec.node_name.is_empty() && self.bound.insert(name);
                self.ever_bound += usize::from(is_new);
                Ok(is_new)
            }
            Ok(watcher::Event::Delete(pod)) => {
                self.audit.forget(&pod.metadata.uid.unwrap_or_default());
                self.bound.remove(&pod.metadata.name.unwrap_or_default());
                Ok(false)
            }
            // The watch resumes by itself.
            Ok(watcher::Event::Init | watcher::Event::InitDone) | Err(_) => Ok(false),
        }
    }
}

fn random_pod(number: usize, dice: &mut Dice) -> Pod {
    let name = format!("pod-{number:05}");
    match dice.roll(10) {
        0 => whole(&name, 1 + dice.roll(4)),
        1 => asking(&name, &[("aliyun.com/gpu", &(1 + dice.roll(2)).to_string())]),
        2..5 => asking(&name, &[("aliyun.com/gpu-mem", &(1 + dice.roll(16)).to_string())]),
        5 => asking(&name, &[("tencent.com/vcuda-core", &((1 + dice.roll(2)) * 100).to_string())]),
        _ => share(&name, 5 + dice.roll(90)),
    }
}

async fn create(site: &Site, pods: Vec<Pod>) -> Result<()> {
    site.cluster.create_all(&site.cluster.pods(), pods.into_iter()).await
}

async fn delete(site: &Site, names: &[String]) -> Result<()> {
    let (pods, at_once) = (site.cluster.pods(), DeleteParams::default().grace_period(0));
    let deletions = names.iter().map(|name| async { pods.delete(name, &at_once).await.map(drop) });
    stream::iter(deletions).buffer_unordered(16).try_collect::<()>().await?;
    Ok(())
}

/// Kills one of the replicas with equal probability and starts another one in its place.
fn replace_one(
    site: &Site,
    front: &Front,
    replicas: &mut Vec<Replica>,
    dice: &mut Dice,
    number: usize,
) -> Result<()> {
    let place = if dice.roll(2) == 0 { 0 } else { 1 };
    let old = replicas.remove(place);
    old.component.kill()?;
    let fresh = site.replica(&format!("tessera-scheduler-{}", number + 2), None)?;
    front.add(fresh.addresses);
    replicas.push(fresh);
    Ok(())
}

/// Waits until every pod is bound or has a reason for waiting. A pod whose first sample of nodes had no suitable GPU has
/// none before kube-scheduler has tried other nodes.
async fn every_pod_has_an_answer(site: &Site) -> Result<()> {
    let answered = async || waiting_with_a_reason(site).await.map(Some);
    let waiting = site.harness.wait_for("an answer for every pod", SOON, answered).await?;
    site.harness.note(&format!("{waiting} pods wait, each with a reason"));
    Ok(())
}

/// Returns the number of pods that wait. Fails if one of them has no reason.
async fn waiting_with_a_reason(site: &Site) -> Result<usize> {
    let mut waiting = 0;
    for pod in site.cluster.pods().list(&kube::api::ListParams::default()).await?.items {
        if pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()).is_some() {
            continue;
        }
        waiting += 1;
        let conditions = pod.status.and_then(|status| status.conditions).unwrap_or_default();
        let reply = conditions.iter().find(|condition| condition.type_ == "PodScheduled");
        let reason = reply.and_then(|reply| reply.reason.clone()).unwrap_or_default();
        ensure!(reason == "Unschedulable", "{:?} waits with reason {reason:?}: {reply:?}", pod.metadata.name);
    }
    Ok(waiting)
}
