//! The scheduling loop: takes one pod after the other from the queue. Pods are bound beside it, as kube-scheduler does.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_wire::foreign::extender::MetaVictims;
use tessera_wire::kubelet::device_id::Resource;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::SchedulerCounters;
use super::extender::{Extender, ExtenderError};
use super::queue::Queue;
use super::snapshot::{PodInfo, Snapshot};
use crate::apiserver::{ApiServer, ObjectChange, now, pod_path};
use crate::events::ObjectEvent;

/// Name of the scheduler whose pods this loop takes.
const SCHEDULER_NAME: &str = "default-scheduler";

/// State of the scheduling loop.
pub(super) struct Worker {
    api: Arc<ApiServer>,
    extender: Extender,
    counters: Arc<SchedulerCounters>,
    snapshot: Snapshot,
    /// Pods without a node, by UID.
    pending: HashMap<String, PodInfo>,
    /// Nodes on which pods are evicted for a pod, by its UID.
    nominated: HashMap<String, String>,
    queue: Queue,
    /// Binds under way.
    binds: JoinSet<BindEnd>,
    started: Instant,
}

/// The end of a bind.
struct BindEnd {
    pod: PodInfo,
    node: String,
    begun: Instant,
    outcome: Result<(), Unbound>,
}

/// Reasons why a pod was not bound.
enum Unbound {
    /// No node fits the pod.
    Stuck(String),
    /// A call failed.
    Later(String),
}

/// Returns whether the pod requests a resource of the extender.
fn asks_extender(pod: &PodInfo) -> bool {
    Resource::ALL.iter().any(|resource| pod.asks_for(resource.name()))
}

impl From<ExtenderError> for Unbound {
    fn from(error: ExtenderError) -> Self {
        Self::Later(error.to_string())
    }
}

impl Worker {
    pub(super) fn new(api: Arc<ApiServer>, extender: Extender, counters: Arc<SchedulerCounters>) -> Self {
        Self {
            api,
            extender,
            counters,
            snapshot: Snapshot::default(),
            pending: HashMap::new(),
            nominated: HashMap::new(),
            queue: Queue::default(),
            binds: JoinSet::new(),
            started: Instant::now(),
        }
    }

    pub(super) async fn run(mut self, stop: CancellationToken) {
        loop {
            let watches = (self.api.watch("/api/v1/nodes", ""), self.api.watch("/api/v1/pods", ""));
            let (Ok(mut nodes), Ok(mut pods)) = watches else { return };
            self.snapshot = Snapshot::default();
            self.pending.clear();
            self.queue.clear();
            loop {
                while let Some(event) = nodes.try_next() {
                    self.apply_node(&event);
                }
                while let Some(event) = pods.try_next() {
                    self.apply_pod(event);
                }
                while let Some(end) = self.binds.try_join_next() {
                    self.end_bind(end);
                }
                if stop.is_cancelled() {
                    break;
                }
                let now = self.started.elapsed();
                if let Some(uid) = self.queue.next(now) {
                    self.schedule(&uid).await;
                    continue;
                }
                let due = self.queue.due().map_or(Duration::from_secs(3600), |due| due.saturating_sub(now));
                tokio::select! {
                    () = stop.cancelled() => break,
                    () = tokio::time::sleep(due) => {}
                    Some(end) = self.binds.join_next() => self.end_bind(end),
                    event = nodes.next() => match event {
                        Some(event) => self.apply_node(&event),
                        None => break,
                    },
                    event = pods.next() => match event {
                        Some(event) => self.apply_pod(event),
                        None => break,
                    },
                }
            }
            while let Some(end) = self.binds.join_next().await {
                self.end_bind(end);
            }
            if stop.is_cancelled() {
                return;
            }
        }
    }

    fn apply_node(&mut self, event: &ObjectChange) {
        match event {
            ObjectChange::Applied(node) => self.snapshot.set_node(node),
            ObjectChange::Deleted(node) => self.snapshot.remove_node(node),
        }
        self.queue.cluster_changed();
    }

    fn apply_pod(&mut self, event: ObjectChange) {
        let (object, is_gone) = match event {
            ObjectChange::Applied(object) => (object, false),
            ObjectChange::Deleted(object) => (object, true),
        };
        let Some(info) = PodInfo::read(object) else { return };
        let uid = info.pod.metadata.uid.clone();
        if is_gone || info.has_ended() {
            self.pending.remove(&uid);
            self.nominated.remove(&uid);
            self.queue.remove(&uid);
            if self.snapshot.remove_pod(&uid) {
                self.queue.cluster_changed();
            }
        } else if !info.pod.spec.node_name.is_empty() {
            self.pending.remove(&uid);
            self.nominated.remove(&uid);
            self.queue.remove(&uid);
            self.snapshot.set_pod(info);
        } else if info.pod.spec.scheduler_name == SCHEDULER_NAME
            && !info.is_ending
            && self.snapshot.pod(&uid).is_none()
        {
            self.queue.add(&uid, info.priority());
            self.pending.insert(uid, info);
        }
    }

    async fn schedule(&mut self, uid: &str) {
        let Some(pod) = self.pending.get(uid).cloned() else { return };
        let begun = Instant::now();
        match self.choose(&pod).await {
            Ok(node) => self.begin_bind(pod, node, begun),
            Err(Unbound::Stuck(message)) => {
                self.counters.unschedulable.fetch_add(1, Ordering::Relaxed);
                self.queue.stuck(uid, self.started.elapsed());
                self.record_failure(&pod, "Unschedulable", &message);
            }
            Err(Unbound::Later(message)) => self.retry(&pod, &message),
        }
    }

    /// Binds the pod while the loop goes on. The pod counts as bound until the watch confirms it or the bind fails.
    fn begin_bind(&mut self, pod: PodInfo, node: String, begun: Instant) {
        let uid = pod.pod.metadata.uid.clone();
        self.queue.remove(&uid);
        self.pending.remove(&uid);
        let mut assumed = pod.clone();
        assumed.pod.spec.node_name.clone_from(&node);
        self.snapshot.set_pod(assumed);
        if !asks_extender(&pod) {
            let outcome = self.bind_without_extender(&pod, &node);
            self.apply_end(BindEnd { pod, node, begun, outcome });
            return;
        }
        let extender = self.extender.another();
        self.binds.spawn(async move {
            let outcome = match extender {
                Ok(mut extender) => extender.bind(&pod, &node).await,
                Err(error) => Err(error),
            };
            let outcome = match outcome {
                Ok(bound) if bound.error.is_empty() => Ok(()),
                Ok(bound) => Err(Unbound::Later(bound.error)),
                Err(error) => Err(error.into()),
            };
            BindEnd { pod, node, begun, outcome }
        });
    }

    fn end_bind(&mut self, end: Result<BindEnd, JoinError>) {
        // A panic of the task was logged when it happened.
        if let Ok(end) = end {
            self.apply_end(end);
        }
    }

    fn apply_end(&mut self, BindEnd { pod, node, begun, outcome }: BindEnd) {
        match outcome {
            Ok(()) => {
                let spent = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
                self.counters.bind_nanos.fetch_add(spent, Ordering::Relaxed);
                self.counters.bound.fetch_add(1, Ordering::Relaxed);
                let metadata = &pod.pod.metadata;
                let message =
                    format!("Successfully assigned {}/{} to {node}", metadata.namespace, metadata.name);
                self.record_event(&pod.object, false, "Scheduled", &message);
            }
            Err(Unbound::Stuck(message) | Unbound::Later(message)) => {
                let uid = pod.pod.metadata.uid.clone();
                // The pod may have been deleted meanwhile.
                if !self.snapshot.remove_pod(&uid) {
                    return;
                }
                self.queue.add(&uid, pod.priority());
                self.pending.insert(uid, pod.clone());
                self.retry(&pod, &message);
            }
        }
    }

    fn retry(&mut self, pod: &PodInfo, message: &str) {
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
        self.queue.later(&pod.pod.metadata.uid, self.started.elapsed());
        self.record_failure(pod, "SchedulerError", message);
    }

    /// Chooses the node of a pod.
    async fn choose(&mut self, pod: &PodInfo) -> Result<String, Unbound> {
        let (mut fitting, mut refused) = self.snapshot.filter(pod);
        if !asks_extender(pod) {
            // The first node that fits is taken.
            return fitting.first().cloned().ok_or_else(|| self.nowhere(&refused));
        }
        if !fitting.is_empty() {
            let verdict = self.extender.filter(pod, &fitting).await?;
            if !verdict.error.is_empty() {
                return Err(Unbound::Later(verdict.error));
            }
            fitting = verdict.node_names.unwrap_or_default();
            refused.extend(verdict.failed_nodes.into_iter().map(|(node, why)| (node, (why, true))));
            let hopeless = verdict.failed_and_unresolvable_nodes.into_iter();
            refused.extend(hopeless.map(|(node, why)| (node, (why, false))));
        }
        if fitting.is_empty() {
            self.preempt(pod, &refused).await?;
            return Err(self.nowhere(&refused));
        }
        let scores = self.extender.prioritize(pod, &fitting).await?;
        let scores: BTreeMap<String, i64> =
            scores.into_iter().map(|graded| (graded.host, graded.score)).collect();
        let score = |node: &String| scores.get(node).copied().unwrap_or_default();
        // Takes the first of the best nodes. kube-scheduler chooses randomly among them.
        Ok(fitting.iter().rev().max_by_key(|node| score(node)).cloned().unwrap_or_default())
    }

    fn bind_without_extender(&self, pod: &PodInfo, node: &str) -> Result<(), Unbound> {
        let uid = &pod.pod.metadata.uid;
        let binding = json!({ "metadata": { "uid": uid }, "target": { "kind": "Node", "name": node } });
        let bound = self.api.bind(&format!("{}/binding", pod_path(&pod.object)), &binding);
        bound.map_err(|problem| Unbound::Later(problem["message"].to_string()))
    }

    /// Evicts pods of lower priority on a node where that makes the pod fit.
    async fn preempt(
        &mut self,
        pod: &PodInfo,
        refused: &BTreeMap<String, (String, bool)>,
    ) -> Result<(), Unbound> {
        let uid = &pod.pod.metadata.uid;
        let waits = |node: &String| self.snapshot.has_ending_pods(node);
        if self.nominated.get(uid).is_some_and(waits) {
            return Ok(());
        }
        let hopeful = refused.iter().filter(|(_, (_, may_help))| *may_help);
        let victims: Vec<(String, Vec<String>)> = hopeful
            .map(|(node, _)| (node.clone(), self.snapshot.victims(node, pod)))
            .filter(|(_, victims)| !victims.is_empty())
            .collect();
        if victims.is_empty() {
            return Ok(());
        }
        let answer = self.extender.preempt(pod, &victims).await?.node_name_to_meta_victims;
        let Some((node, chosen)) = answer.into_iter().min_by_key(|(_, chosen)| self.harm(chosen)) else {
            return Ok(());
        };
        for victim in chosen.pods.iter().filter_map(|victim| self.snapshot.pod(&victim.uid)) {
            let by = format!("Preempted by pod {uid} on node {node}");
            self.record_event(&victim.object, false, "Preempted", &by);
            // The pod may have ended by itself.
            let _ = self.api.delete_gently(&pod_path(&victim.object));
            self.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
        let status = json!({ "status": { "nominatedNodeName": node } });
        let _ = self.api.patch(&format!("{}/status", pod_path(&pod.object)), &status);
        self.nominated.insert(uid.clone(), node);
        Ok(())
    }

    /// Returns the cost of evicting the pods: their highest priority, then their number.
    fn harm(&self, victims: &MetaVictims) -> (i32, usize) {
        let priority = |uid: &str| self.snapshot.pod(uid).map_or(i32::MAX, PodInfo::priority);
        let highest = victims.pods.iter().map(|victim| priority(&victim.uid)).max();
        (highest.unwrap_or(i32::MIN), victims.pods.len())
    }

    /// Builds a message such as `0/3 nodes are available: 2 fewer than 8 idle GPUs, 1 node(s) were
    /// unschedulable.`
    fn nowhere(&self, refused: &BTreeMap<String, (String, bool)>) -> Unbound {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for (why, _) in refused.values() {
            *counts.entry(why).or_default() += 1;
        }
        let reasons: Vec<String> = counts.iter().map(|(why, count)| format!("{count} {why}")).collect();
        let all = self.snapshot.node_count();
        Unbound::Stuck(format!("0/{all} nodes are available: {}.", reasons.join(", ")))
    }

    fn record_failure(&self, pod: &PodInfo, reason: &str, message: &str) {
        self.record_event(&pod.object, true, "FailedScheduling", message);
        let conditions = pod.object["status"]["conditions"].as_array().into_iter().flatten();
        let mut known = conditions.filter(|condition| condition["type"] == "PodScheduled");
        if known.any(|condition| condition["message"] == message) {
            return;
        }
        let condition = json!({
            "type": "PodScheduled", "status": "False", "reason": reason, "message": message, "lastTransitionTime": now(),
        });
        let patch =
            json!({ "metadata": { "uid": pod.pod.metadata.uid }, "status": { "conditions": [condition] } });
        // The pod may be gone by now.
        let _ = self.api.patch(&format!("{}/status", pod_path(&pod.object)), &patch);
    }

    fn record_event(&self, about: &Value, is_warning: bool, reason: &str, message: &str) {
        ObjectEvent { about, is_warning, reason, message, component: SCHEDULER_NAME }.write(&self.api);
    }
}
