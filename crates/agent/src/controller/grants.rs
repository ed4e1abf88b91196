//! Grant directories on the node: which pods have one, and which limits are written in them.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::units::PodUid;
use tessera_limits::allocation_size::{DEFAULT_CONTEXT, round_up_to_blocks};
use tessera_limits::{Bytes, UuidBytes};

use super::{
    Action, CallId, ContainerLimits, EventTime, GpuProcess, Isolation, PodContainer, ShellError, UsageSample,
    Warning,
    holdings::{Holdings, Source},
    limits::container_limits,
};

/// Delay before limits that could not be written are written again.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Grant directories of this agent and of earlier ones.
#[derive(Debug, Default)]
pub(super) struct GrantDirectories {
    /// Pods whose grants are being created for a starting container.
    starting: BTreeMap<CallId, PodUid>,
    /// Pods of which a container has started under this agent.
    started: BTreeSet<PodUid>,
    directories: BTreeSet<PodUid>,
    limits: BTreeMap<PodContainer, ContainerLimits>,
    /// Containers whose limits could not be written.
    unwritten: BTreeSet<PodContainer>,
    /// Time at which limits that could not be written may be written again.
    retry_at: Option<Duration>,
}

impl GrantDirectories {
    /// Takes over directories of an earlier agent.
    pub(super) fn found(&mut self, pods: BTreeSet<PodUid>, limits: Vec<ContainerLimits>) {
        self.directories.extend(pods);
        self.limits.extend(limits.into_iter().map(|limits| (limits.key(), limits)));
    }

    /// Notes that the grants of a starting container are being created.
    pub(super) fn begin(&mut self, call: CallId, uid: PodUid, limits: &[ContainerLimits]) {
        if !limits.is_empty() {
            self.directories.insert(uid.clone());
        }
        self.limits.extend(limits.iter().map(|limits| (limits.key(), limits.clone())));
        self.starting.insert(call, uid);
    }

    /// Notes that the creation of grants has ended. Returns the pod.
    pub(super) fn finish(&mut self, call: CallId, is_created: bool) -> Option<PodUid> {
        let uid = self.starting.remove(&call)?;
        if is_created {
            self.started.insert(uid.clone());
        }
        Some(uid)
    }

    /// Notes the result of an update. A failed one is tried again later.
    pub(super) fn updated(
        &mut self,
        now: EventTime,
        limits: &ContainerLimits,
        outcome: Result<(), ShellError>,
        actions: &mut Vec<Action>,
    ) {
        if let Err(reason) = outcome {
            let ContainerLimits { namespace, name, container, .. } = limits;
            let warning =
                Warning::new("cannot write new limits of a container; the old ones stay, will try again");
            let warning = warning.pod_name(format!("{namespace}/{name}")).container(container);
            actions.push(Action::Warn(warning.error(&reason)));
            self.unwritten.insert(limits.key());
            self.retry_at = Some(now.elapsed + RETRY_DELAY);
        }
    }

    /// Returns whether limits that could not be written may be written again.
    pub(super) fn is_retry_due(&self, now: EventTime) -> bool {
        self.retry_at.is_some_and(|at| now.elapsed >= at)
    }

    /// Returns whether the last limits of a container could not be written.
    pub(super) fn is_unwritten(&self, container: &PodContainer) -> bool {
        self.unwritten.contains(container)
    }

    /// Changes the memory of a GPU that a container may use.
    pub(super) fn set_memory(
        &mut self,
        container: &PodContainer,
        uuid: UuidBytes,
        memory: Bytes,
        actions: &mut Vec<Action>,
    ) {
        let Some(limits) = self.limits.get_mut(container) else { return };
        if let Some(gpu) = limits.gpus.iter_mut().find(|gpu| gpu.uuid == uuid && gpu.memory != memory) {
            gpu.memory = memory;
            self.unwritten.remove(container);
            actions.push(Action::UpdateGrant(Box::new(limits.clone())));
        }
    }

    /// Returns whether a container of the pod has started under this agent.
    pub(super) fn has_started(&self, uid: &PodUid) -> bool {
        self.started.contains(uid)
    }

    /// Returns the limits of a container, as they were last written.
    pub(super) fn limits_of(&self, container: &PodContainer) -> Option<&ContainerLimits> {
        self.limits.get(container)
    }

    /// Returns whether there are limits for a container of this name.
    pub(super) fn has_limits_named(&self, namespace: &str, pod: &str, container: &str) -> bool {
        self.limits.values().any(|limits| {
            (limits.namespace.as_str(), limits.name.as_str(), limits.container.as_str())
                == (namespace, pod, container)
        })
    }

    /// Adopts the sizes of contexts that a sample shows, and writes them to the containers.
    ///
    /// A size applies only to the container in which it was measured, because a container can write
    /// anything into its account.
    pub(super) fn learn_contexts(&mut self, sample: &UsageSample, actions: &mut Vec<Action>) {
        for account in &sample.accounts {
            let Some(limits) = self.limits.get_mut(&account.container) else { continue };
            let mut has_learned = false;
            for &(pid, position) in &account.context_only {
                let Some(gpu) = limits.gpus.get_mut(position).filter(|gpu| gpu.context == Bytes::ZERO) else {
                    continue;
                };
                let is_it = |process: &&GpuProcess| {
                    process.container == account.container
                        && process.own_pid == Some(pid)
                        && UuidBytes::parse(&process.gpu.0) == Some(gpu.uuid)
                };
                let size = sample.processes.iter().find(is_it).and_then(|process| process.bytes);
                // More than the upper bound of a context is not a context alone.
                let is_context = |size: &Bytes| (Bytes(1)..=DEFAULT_CONTEXT).contains(size);
                if let Some(size) = size.map(Bytes).filter(is_context) {
                    gpu.context = round_up_to_blocks(size);
                    has_learned = true;
                }
            }
            if has_learned {
                actions.push(Action::UpdateGrant(Box::new(limits.clone())));
            }
        }
    }

    /// Returns the limits that a container gets: those that follow from its pod now, with the size of contexts that
    /// was measured, the memory that the container has borrowed, and the ceiling that it was first granted unless
    /// changes are allowed. Otherwise the owner of a pod could lift its own limit.
    pub(super) fn granted(&self, limits: ContainerLimits, isolation: &Isolation) -> ContainerLimits {
        let Some(known) = self.limits.get(&limits.key()) else { return limits };
        let limits = limits.with_contexts_of(known).with_loans_of(known);
        if isolation.allow_ceiling_changes { limits } else { limits.with_ceilings_of(known) }
    }

    /// Updates the limits of running containers that differ from what they should be.
    ///
    /// They differ if the agent's settings have changed, or the annotation with the ceiling where
    /// that is allowed. The library raises limits at once, and lowers them as soon as what it holds
    /// permits.
    pub(super) fn reconcile(
        &mut self,
        now: EventTime,
        holdings: Holdings<'_>,
        isolation: &Isolation,
        only: Option<&PodUid>,
        actions: &mut Vec<Action>,
    ) {
        self.retry_at = self.retry_at.filter(|at| now.elapsed < *at);
        for (uid, pod) in holdings.pods.active().filter(|(uid, _)| only.is_none_or(|only| only == *uid)) {
            if !self.directories.contains(uid) {
                continue;
            }
            let held = holdings.of_pod(uid, pod);
            for held in held.iter().filter(|held| held.source != Source::Annotated) {
                let key = (uid.clone(), held.grant.container.clone());
                let limits = container_limits(isolation.meaning, holdings.gpus, uid, pod, held);
                let (Some(known), Ok(Some(limits))) = (self.limits.get(&key), limits) else { continue };
                let limits = self.granted(limits, isolation);
                if *known != limits || self.unwritten.contains(&key) {
                    self.unwritten.remove(&key);
                    self.limits.insert(key, limits.clone());
                    actions.push(Action::UpdateGrant(Box::new(limits)));
                }
            }
        }
    }

    /// Forgets pods that are not in `active` and removes their directories.
    pub(super) fn remove_ended(&mut self, active: &BTreeSet<PodUid>, actions: &mut Vec<Action>) {
        let ended = self.directories.extract_if(.., |uid| !active.contains(uid));
        actions.extend(ended.map(Action::RemoveGrants));
        self.limits.retain(|(uid, _), _| active.contains(uid));
        self.unwritten.retain(|(uid, _)| active.contains(uid));
        self.started.retain(|uid| active.contains(uid));
    }
}
