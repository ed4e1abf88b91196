//! Brings the annotations of pods in line with what the kubelet holds.

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
    Action, EventTime, WriteError,
    grants::GrantDirectories,
    holdings::{Holdings, Source, is_settled},
};

/// Delay before a failed write is tried again. It doubles with every failure.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

/// Patches of pods that were sent to the API server.
#[derive(Debug, Default)]
pub(super) struct PodPatches {
    patches: BTreeMap<PodUid, Patch>,
}

#[derive(Debug)]
struct Patch {
    annotations: Annotations,
    is_in_flight: bool,
    retry: Option<Retry>,
}

/// Time before which a failed patch is not tried again.
#[derive(Clone, Copy, Debug)]
struct Retry {
    not_before: Duration,
    delay: Duration,
}

impl PodPatches {
    /// Notes the result of a patch. Returns the error the first time that a patch fails.
    pub(super) fn finished(
        &mut self,
        now: EventTime,
        uid: &PodUid,
        outcome: Result<(), WriteError>,
    ) -> Option<WriteError> {
        let patch = self.patches.get_mut(uid)?;
        let before = patch.retry;
        patch.is_in_flight = false;
        match outcome {
            Ok(()) => patch.retry = None,
            // The pod is gone or was replaced by another one of that name. It is never patched again.
            Err(WriteError::Gone) => {
                patch.retry = Some(Retry { not_before: Duration::MAX, delay: MAX_RETRY_DELAY });
            }
            Err(error @ WriteError::Later(_)) => {
                let delay = before.map_or(FIRST_RETRY_DELAY, |retry| (retry.delay * 2).min(MAX_RETRY_DELAY));
                patch.retry = Some(Retry { not_before: now.elapsed + delay, delay });
                return before.is_none().then_some(error);
            }
        }
        None
    }

    /// Returns whether a failed patch may be tried again.
    pub(super) fn is_retry_due(&self, now: EventTime) -> bool {
        let is_due = |patch: &Patch| patch.retry.is_some_and(|retry| now.elapsed >= retry.not_before);
        self.patches.values().any(|patch| !patch.is_in_flight && is_due(patch))
    }

    /// Sends the annotations that a pod lacks, unless they are on their way.
    pub(super) fn reconcile(
        &mut self,
        now: EventTime,
        uid: &PodUid,
        pod: &Pod,
        missing: Option<Annotations>,
        actions: &mut Vec<Action>,
    ) {
        let Some(annotations) = missing else {
            // The watch has shown what was written. If it is changed back, it is written again.
            if self.patches.get(uid).is_some_and(|patch| !patch.is_in_flight) {
                self.patches.remove(uid);
            }
            return;
        };
        if !self.may_send(now, uid, &annotations) {
            return;
        }
        let retry = self.patches.get(uid).and_then(|patch| patch.retry);
        let patch = Patch { annotations: annotations.clone(), is_in_flight: true, retry };
        self.patches.insert(uid.clone(), patch);
        let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
        actions.push(Action::PatchPod { uid: uid.clone(), namespace, name, annotations });
    }

    pub(super) fn remove_ended(&mut self, active: &BTreeSet<PodUid>) {
        self.patches.retain(|uid, _| active.contains(uid));
    }

    fn may_send(&self, now: EventTime, uid: &PodUid, annotations: &Annotations) -> bool {
        let Some(patch) = self.patches.get(uid) else { return true };
        if patch.is_in_flight {
            return false;
        }
        match patch.retry {
            Some(retry) => now.elapsed >= retry.not_before,
            // The API server has accepted the patch, and the watch has not shown it yet. Timestamps
            // differ every time they are made, so they are not compared.
            None => without_times(&patch.annotations) != without_times(annotations),
        }
    }
}

/// Returns the annotations that a pod should have and lacks, or `None` if it lacks none.
pub(super) fn missing_annotations(
    now: EventTime,
    holdings: Holdings<'_>,
    grants: &GrantDirectories,
    uid: &PodUid,
    pod: &Pod,
) -> Option<Annotations> {
    let gpus = holdings.gpus?;
    let held = holdings.of_pod(uid, pod);
    if !is_settled(&held) {
        return None;
    }
    let unit = gpus.ids.unit();
    let actual: Vec<ContainerGrant> = held
        .into_iter()
        // The kubelet does not list init containers, so an annotation about them is kept.
        .filter(|held| held.source != Source::Annotated || held.grant.role == ContainerRole::Init)
        .map(|held| held.grant)
        .collect();
    let mut wanted = Annotations::new();
    let present = &pod.metadata.annotations;
    if holdings.pods.annotated(uid) != actual || !present.contains_key(grant::KEY) {
        wanted = grant::annotations(&pod.spec, &actual, &gpus.node, unit, now.unix_nanos).ok()?;
    }
    if grants.has_started(uid) || pod.status.phase == "Running" {
        wanted.extend(grant::assigned(&pod.spec, present, unit).ok()?);
    } else {
        // An annotation that says the GPU was assigned is never taken back.
        wanted.retain(|key, value| value != "false" || !present.contains_key(key));
    }
    // A pod that bypassed the scheduler lacks the mark, and users tell it by that.
    wanted.retain(|key, _| !grant::is_scheduler_mark(key) || present.contains_key(key));
    let (times, rest): (Annotations, Annotations) = wanted.into_iter().partition(|(key, _)| is_time(key));
    let mut missing: Annotations =
        rest.into_iter().filter(|(key, value)| present.get(key) != Some(value)).collect();
    if missing.is_empty() {
        return None;
    }
    missing.extend(times);
    Some(missing)
}

fn is_time(key: &str) -> bool {
    key.ends_with("ASSUME_TIME") || key.ends_with("predicate-time")
}

fn without_times(annotations: &Annotations) -> Vec<(&String, &String)> {
    annotations.iter().filter(|(key, _)| !is_time(key)).collect()
}
