//! Keeping what pods say of themselves true: annotations follow what the kubelet really holds, and grant directories go with
//! their pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::{grant::ContainerGrant, request::ContainerRole, units::PodUid};
use tessera_wire::{
    foreign::objects::Pod,
    tessera::grant::{self, Annotations},
};

use super::{
    Action, Agent, CallId, ContainerLimits, Dirty, EventTime, WriteError, has_ended, holdings::Source,
};

/// How soon a write that failed is tried again, at first and at most.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_AT_MOST: Duration = Duration::from_secs(30);

/// How soon limits that could not be written are.
const RETRY_LIMITS: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Truth {
    /// Whose grants are being made.
    pub(super) starting: BTreeMap<CallId, PodUid>,
    /// Pods of which a container has started under this agent.
    pub(super) started: BTreeSet<PodUid>,
    /// Pods that have a grant directory.
    directories: BTreeSet<PodUid>,
    /// The limits in force, of this agent or an earlier one.
    pub(super) on_disk: BTreeMap<(PodUid, String), ContainerLimits>,
    patches: BTreeMap<PodUid, Patch>,
    /// When limits that could not be written may be tried again.
    limits_retry: Option<Duration>,
}

/// A patch that was sent.
#[derive(Debug)]
struct Patch {
    annotations: Annotations,
    /// On its way.
    in_flight: bool,
    /// Not before, and how long the pause was.
    retry: Option<(Duration, Duration)>,
}

impl Truth {
    /// An earlier agent has left this.
    pub(super) fn found(&mut self, pods: BTreeSet<PodUid>, limits: Vec<ContainerLimits>) {
        self.directories.extend(pods);
        self.on_disk.extend(limits.into_iter().map(|limits| (limits.key(), limits)));
    }

    /// A container is about to start with these limits.
    pub(super) fn begin(&mut self, call: CallId, uid: PodUid, limits: &[ContainerLimits]) {
        if !limits.is_empty() {
            self.directories.insert(uid.clone());
        }
        self.on_disk.extend(limits.iter().map(|limits| (limits.key(), limits.clone())));
        self.starting.insert(call, uid);
    }

    /// What could not be changed is changed later.
    pub(super) fn changed(
        &mut self,
        now: EventTime,
        limits: &ContainerLimits,
        outcome: Result<(), String>,
        actions: &mut Vec<Action>,
    ) {
        if let Err(reason) = outcome {
            let ContainerLimits { namespace, name, container, .. } = limits;
            actions.push(Action::Warn(format!(
                "the limits of {namespace}/{name}, container {container}, stay as they were: {reason}"
            )));
            if let Some(known) = self.on_disk.get_mut(&limits.key()) {
                known.gpus.clear();
            }
            self.limits_retry = Some(now.elapsed + RETRY_LIMITS);
        }
    }

    /// How a patch went; comes back with the reason if this is the first time that it did not go well.
    fn patched(&mut self, now: EventTime, uid: &PodUid, outcome: Result<(), WriteError>) -> Option<String> {
        let patch = self.patches.get_mut(uid)?;
        let before = patch.retry;
        patch.in_flight = false;
        match outcome {
            Ok(()) => patch.retry = None,
            // Another pod of that name, or none: this one will not be patched any more.
            Err(WriteError::Gone) => patch.retry = Some((Duration::MAX, RETRY_AT_MOST)),
            Err(WriteError::Later(reason)) => {
                let pause = before.map_or(RETRY, |(_, pause)| (pause * 2).min(RETRY_AT_MOST));
                patch.retry = Some((now.elapsed + pause, pause));
                return before.is_none().then_some(reason);
            }
        }
        None
    }

    /// Whether a write that failed may be tried again.
    pub(super) fn has_waited(&self, now: EventTime) -> bool {
        let due = |patch: &Patch| patch.retry.is_some_and(|(not_before, _)| now.elapsed >= not_before);
        self.limits_retry.is_some_and(|at| now.elapsed >= at)
            || self.patches.values().any(|patch| !patch.in_flight && due(patch))
    }

    /// Whether these annotations should be sent now.
    fn may_send(&self, now: EventTime, uid: &PodUid, annotations: &Annotations) -> bool {
        let Some(patch) = self.patches.get(uid) else { return true };
        if patch.in_flight {
            return false;
        }
        match patch.retry {
            Some((not_before, _)) => now.elapsed >= not_before,
            // Sent and taken; the watch has yet to show it. Times differ with every reading of the clock.
            None => without_times(&patch.annotations) != without_times(annotations),
        }
    }
}

impl Agent {
    pub(super) fn on_pod_patched(
        &mut self,
        now: EventTime,
        uid: PodUid,
        outcome: Result<(), WriteError>,
        actions: &mut Vec<Action>,
    ) -> Dirty {
        if let (Some(reason), Some(pod)) = (self.truth.patched(now, &uid, outcome), self.pods.get(&uid)) {
            let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
            actions.push(Action::Warn(format!(
                "cannot annotate pod {namespace}/{name} with its GPUs, will try again: {reason}"
            )));
        }
        Dirty::Pod(uid)
    }

    /// Corrects limits and annotations of pods, of one or of all, and removes what ended pods left.
    pub(super) fn reconcile_pods(
        &mut self,
        now: EventTime,
        only: Option<&PodUid>,
        actions: &mut Vec<Action>,
    ) {
        if self.cards.is_none() || !self.listed_once {
            return;
        }
        self.change_limits(now, only, actions);
        let mut wanted = Vec::new();
        let mut true_by_now = Vec::new();
        let concerned = |uid: &PodUid| only.is_none_or(|only| only == uid);
        for (uid, pod) in self.pods.iter().filter(|(uid, pod)| concerned(uid) && !has_ended(pod)) {
            match self.correction(now, uid, pod) {
                None => true_by_now.push(uid.clone()),
                Some(annotations) if self.truth.may_send(now, uid, &annotations) => {
                    let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
                    wanted.push((uid.clone(), namespace, name, annotations));
                }
                Some(_) => {}
            }
        }
        // The watch has shown what was written. Should somebody change it back, it is written again.
        for uid in true_by_now {
            if self.truth.patches.get(&uid).is_some_and(|patch| !patch.in_flight) {
                self.truth.patches.remove(&uid);
            }
        }
        for (uid, namespace, name, annotations) in wanted {
            let patch = Patch { annotations: annotations.clone(), in_flight: true, retry: None };
            let before = self.truth.patches.insert(uid.clone(), patch);
            if let (Some(before), Some(patch)) = (before, self.truth.patches.get_mut(&uid)) {
                patch.retry = before.retry;
            }
            actions.push(Action::PatchPod { uid, namespace, name, annotations });
        }
        let ended = only.is_none_or(|uid| self.pods.get(uid).is_some_and(has_ended));
        if self.pods_known && ended {
            self.forget_ended(actions);
        }
    }

    /// Annotations a pod should have and has not.
    fn correction(&self, now: EventTime, uid: &PodUid, pod: &Pod) -> Option<Annotations> {
        let cards = self.cards.as_ref()?;
        let holdings = self.holdings_of(uid, pod);
        if !Self::is_settled(&holdings) {
            return None;
        }
        let unit = cards.ids.unit();
        let actual: Vec<ContainerGrant> = holdings
            .into_iter()
            // What an init container holds is known for sure only from our own record.
            .filter(|held| held.source != Source::Annotated || held.grant.role == ContainerRole::Init)
            .map(|held| held.grant)
            .collect();
        let mut missing = Annotations::new();
        let present = &pod.metadata.annotations;
        if self.annotated(pod) != actual || !present.contains_key(grant::KEY) {
            missing = grant::annotations(&pod.spec, &actual, &cards.node, unit, now.unix_nanos).ok()?;
        }
        if self.truth.started.contains(uid) || pod.status.phase == "Running" {
            missing.extend(grant::assigned(&pod.spec, unit).ok()?);
        } else {
            // Whoever said that it was handed over, it was.
            missing.retain(|key, value| value != "false" || !present.contains_key(key));
        }
        let (times, rest): (Annotations, Annotations) =
            missing.into_iter().partition(|(key, _)| is_time(key));
        let differs = |(key, value): (&String, &String)| present.get(key) != Some(value);
        if !rest.iter().any(differs) {
            return None;
        }
        let mut patch: Annotations = rest.into_iter().filter(|(key, value)| differs((key, value))).collect();
        patch.extend(times);
        Some(patch)
    }

    /// Containers that run get other limits where something has changed: the annotation with their ceiling, or our settings.
    /// The library takes more at once, and less as soon as what it holds permits.
    fn change_limits(&mut self, now: EventTime, only: Option<&PodUid>, actions: &mut Vec<Action>) {
        self.truth.limits_retry = self.truth.limits_retry.filter(|at| now.elapsed < *at);
        let mut changed = Vec::new();
        let concerned = |uid: &PodUid| only.is_none_or(|only| only == uid);
        for (uid, pod) in self.pods.iter().filter(|(uid, pod)| concerned(uid) && !has_ended(pod)) {
            if !self.truth.directories.contains(uid) {
                continue;
            }
            for held in self.holdings_of(uid, pod).iter().filter(|held| held.source != Source::Annotated) {
                let known = self.truth.on_disk.get(&(uid.clone(), held.grant.container.clone()));
                if let (Some(known), Ok(Some(limits))) = (known, self.limits(uid, pod, held))
                    && *known != limits
                {
                    changed.push(limits);
                }
            }
        }
        for limits in changed {
            self.truth.on_disk.insert(limits.key(), limits.clone());
            actions.push(Action::UpdateGrant(Box::new(limits)));
        }
    }

    fn forget_ended(&mut self, actions: &mut Vec<Action>) {
        let alive: BTreeSet<PodUid> =
            self.pods.iter().filter(|(_, pod)| !has_ended(pod)).map(|(uid, _)| uid.clone()).collect();
        let gone: Vec<PodUid> = self.truth.directories.extract_if(.., |uid| !alive.contains(uid)).collect();
        self.truth.on_disk.retain(|(uid, _), _| alive.contains(uid));
        self.truth.started.retain(|uid| alive.contains(uid));
        self.truth.patches.retain(|uid, _| alive.contains(uid));
        self.admission.forget(|uid| alive.contains(uid));
        actions.extend(gone.into_iter().map(Action::RemoveGrants));
    }
}

fn is_time(key: &str) -> bool {
    key.ends_with("ASSUME_TIME") || key.ends_with("predicate-time")
}

fn without_times(annotations: &Annotations) -> Vec<(&String, &String)> {
    annotations.iter().filter(|(key, _)| !is_time(key)).collect()
}
