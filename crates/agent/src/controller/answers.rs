//! Decides calls of the kubelet: identifies the pod, asks the allocator, and records the answer.

use std::collections::BTreeSet;

use tessera_core::{node::NodeState, request::ContainerRole, units::PodUid};
use tessera_node::device_plugin::{Allocation, PreferenceRequest};
use tessera_wire::kubelet::device_id::Resource;

use super::{
    Action, Agent, CallAnswer, CallError, CallId, ContainerLimits, EventTime,
    allocate::Allocator,
    calls::{KubeletCall, PendingCall},
    identify::PodFinder,
    limits::container_limits,
    pods::{has_ended, name_of},
    pre_start::HolderFinder,
};

/// Outcome of a decision.
enum Decision {
    Answer(CallAnswer),
    /// The answer follows when the shell has carried out an action.
    Deferred,
    /// The container may start when other containers have returned memory. The error is the answer if they do not.
    AwaitMemory(CallError),
}

impl Agent {
    pub(super) fn on_prefer(
        &mut self,
        now: EventTime,
        id: CallId,
        resource: Resource,
        wish: PreferenceRequest,
        actions: &mut Vec<Action>,
    ) {
        let known = self.pod_finder().follow_up(now, resource, wish.count);
        let answer =
            known.and_then(|(uid, container)| self.answer_prefer(&uid, &container, resource, &wish, false));
        match answer {
            Some(answer) => actions.push(Action::Answer(id, answer)),
            None => self.calls.add(now, id, KubeletCall::Prefer(resource, wish), actions),
        }
    }

    pub(super) fn on_allocate(
        &mut self,
        now: EventTime,
        id: CallId,
        resource: Resource,
        ids: BTreeSet<String>,
        actions: &mut Vec<Action>,
    ) {
        // The kubelet makes no other call between a preference and its allocation.
        let preferred = self.admissions.take_preferred(resource);
        let known = preferred.or_else(|| self.pod_finder().follow_up(now, resource, ids.len()));
        let answer = known
            .and_then(|(uid, container)| self.answer_allocate(now, &uid, &container, resource, &ids, false));
        match answer {
            Some(answer) => actions.push(Action::Answer(id, answer)),
            None => self.calls.add(now, id, KubeletCall::Allocate(resource, ids), actions),
        }
    }

    /// Tries to decide the pending calls again, after something has changed.
    pub(super) fn retry_calls(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        for mut call in self.calls.take_all() {
            match self.decide(now, &call, actions) {
                Some(Decision::Answer(answer)) => actions.push(Action::Answer(call.id, answer)),
                Some(Decision::Deferred) => {}
                Some(Decision::AwaitMemory(_)) => {
                    call.awaits_memory = true;
                    self.calls.put_back(call);
                }
                None => self.calls.put_back(call),
            }
        }
    }

    /// Decides the calls that have timed out, and refuses those that are still undecided.
    pub(super) fn expire_calls(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        for call in self.calls.take_expired(now) {
            match self.decide(now, &call, actions) {
                Some(Decision::Answer(answer)) => actions.push(Action::Answer(call.id, answer)),
                Some(Decision::Deferred) => {}
                Some(Decision::AwaitMemory(error)) => {
                    actions.push(Action::Answer(call.id, CallAnswer::Started(Err(error))));
                }
                None => {
                    let answer = self.calls.timeout_answer(&call.call, self.pods.is_complete());
                    actions.push(Action::Answer(call.id, answer));
                }
            }
        }
    }

    /// Decides a call, or returns `None` while more must be known.
    fn decide(&mut self, now: EventTime, call: &PendingCall, actions: &mut Vec<Action>) -> Option<Decision> {
        if !call.is_covered() {
            return None;
        }
        let is_well_informed = call.is_well_informed();
        match &call.call {
            KubeletCall::Prefer(resource, wish) => {
                let (uid, container) = self.identify(call, *resource, wish.count)?;
                let answer = self.answer_prefer(&uid, &container, *resource, wish, is_well_informed)?;
                Some(Decision::Answer(answer))
            }
            KubeletCall::Allocate(resource, ids) => {
                let (uid, container) = self.identify(call, *resource, ids.len())?;
                let answer = self.answer_allocate(now, &uid, &container, *resource, ids, is_well_informed)?;
                Some(Decision::Answer(answer))
            }
            KubeletCall::PreStart(resource, ids) => self.answer_pre_start(call.id, *resource, ids, actions),
        }
    }

    /// Identifies the pod and container of a call. All other listed pods have been admitted before.
    fn identify(&mut self, call: &PendingCall, resource: Resource, count: usize) -> Option<(PodUid, String)> {
        let finder = self.pod_finder();
        let found = finder.identify(call, resource, count)?;
        for uid in finder.listed_uids().into_iter().filter(|uid| *uid != found.0) {
            self.admissions.pass_over(uid);
        }
        Some(found)
    }

    /// Answers `GetPreferredAllocation` for a container.
    ///
    /// Returns `None` instead of a refusal, which is final, unless the call is well informed.
    fn answer_prefer(
        &mut self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        wish: &PreferenceRequest,
        is_well_informed: bool,
    ) -> Option<CallAnswer> {
        let preferred = self.preferred_devices(uid, container, resource, wish);
        match &preferred {
            Ok(_) => self.admissions.record_preference(resource, uid, container),
            Err(_) if !is_well_informed => return None,
            Err(_) => self.admissions.record_refusal(uid),
        }
        self.ledger.pod_changed(uid);
        Some(CallAnswer::Preferred(preferred))
    }

    /// Answers `Allocate` for a container, with the same rule for refusals as
    /// [`answer_prefer`](Self::answer_prefer).
    fn answer_allocate(
        &mut self,
        now: EventTime,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        ids: &BTreeSet<String>,
        is_well_informed: bool,
    ) -> Option<CallAnswer> {
        let given = self.container_response(uid, container, resource, ids);
        match &given {
            Ok(_) => self.admissions.record_answer(now, uid, container, resource, ids.clone()),
            Err(_) if !is_well_informed => return None,
            Err(_) => self.admissions.record_refusal(uid),
        }
        self.ledger.pod_changed(uid);
        Some(CallAnswer::Allocated(given.map(Box::new)))
    }

    /// Answers `PreStartContainer`: has the limits of the container written.
    ///
    /// An error delays only this container, and the kubelet calls again.
    fn answer_pre_start(
        &mut self,
        id: CallId,
        resource: Resource,
        ids: &BTreeSet<String>,
        actions: &mut Vec<Action>,
    ) -> Option<Decision> {
        let finder = HolderFinder { holdings: self.holdings(), grants: &self.grants };
        let mut holders = finder.holders(resource, ids);
        let is_of_earlier_agent = holders.is_empty();
        if is_of_earlier_agent {
            holders = finder.init_holders(resource, ids);
        }
        let uids: BTreeSet<&PodUid> = holders.iter().map(|(uid, _)| uid).collect();
        if uids.len() > 1 {
            let error = CallError::SeveralHolders(resource);
            return Some(Decision::Answer(CallAnswer::Started(Err(error))));
        }
        let Some(uid) = uids.into_iter().next().cloned() else {
            let may_restart = finder.may_restart(resource, ids);
            return may_restart.then_some(Decision::Answer(CallAnswer::Started(Ok(()))));
        };
        for (uid, container) in holders.iter().filter(|_| is_of_earlier_agent) {
            self.admissions.record_earlier_answer(uid, container, resource, ids);
            self.ledger.pod_changed(uid);
        }
        let pod = self.pods.get(&uid)?;
        let (isolation, gpus) = (&self.settings.isolation, self.inventory.gpus());
        let limits: Result<Vec<ContainerLimits>, CallError> = self
            .holdings()
            .of_pod(&uid, pod)
            .iter()
            // An init container and a main container with equal requests hold the same devices, so
            // either of them may be the one that starts.
            .filter(|held| holders.iter().any(|(_, container)| *container == held.grant.container))
            .filter_map(|held| container_limits(isolation.meaning, gpus, &uid, pod, held).transpose())
            .map(|limits| limits.map(|limits| self.grants.granted(limits, isolation)))
            .collect();
        match limits {
            Ok(limits) => {
                // The pod may be new to the ledger.
                self.lend(actions);
                if let Some(error) = self.borrowed_memory(&limits) {
                    return Some(Decision::AwaitMemory(error));
                }
                self.grants.begin(id, uid, &limits);
                actions.push(Action::CreateGrants(id, limits));
                Some(Decision::Deferred)
            }
            Err(error) => Some(Decision::Answer(CallAnswer::Started(Err(error)))),
        }
    }

    fn preferred_devices(
        &mut self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        wish: &PreferenceRequest,
    ) -> Result<Vec<String>, CallError> {
        let request = self.allocator()?.request(uid, container, resource)?;
        let state = self.state_beside(uid, container, request.claim.role)?;
        let free = self.without_held(uid, resource, wish);
        let allocator = self.allocator()?;
        allocator
            .preferred_devices(uid, &request, &state, resource, &free)
            .or_else(|_| allocator.preferred_devices(uid, &request, &state, resource, wish))
    }

    /// Returns the offer of the kubelet without the devices of other pods.
    ///
    /// A kubelet can offer devices that it has just given to another pod: while it waits for the answer to `Allocate`,
    /// a podresources call makes it forget which devices it has reserved.
    fn without_held(&self, uid: &PodUid, resource: Resource, wish: &PreferenceRequest) -> PreferenceRequest {
        let is_other =
            |other: &PodUid| other != uid && self.pods.get(other).is_some_and(|pod| !has_ended(pod));
        let mut held = self.admissions.held_by(resource, is_other);
        let own_name = self.pods.get(uid).map(name_of);
        let others =
            self.kubelet.listed().iter().filter(|pod| Some((&*pod.namespace, &*pod.name)) != own_name);
        let containers = others.flat_map(|pod| &pod.containers);
        held.extend(containers.filter_map(|container| container.ids.get(resource.name())).flatten());
        let mut free = wish.clone();
        free.available.retain(|id| !held.contains(id) || wish.required.contains(id));
        free
    }

    fn container_response(
        &mut self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        ids: &BTreeSet<String>,
    ) -> Result<Allocation, CallError> {
        let request = self.allocator()?.request(uid, container, resource)?;
        let state = self.state_beside(uid, container, request.claim.role)?;
        let (given, notices) = self.allocator()?.response(uid, &request, &state, resource, ids)?;
        self.notices.extend(notices);
        Ok(given)
    }

    /// Returns what is left of the node for one container.
    fn state_beside(
        &mut self,
        uid: &PodUid,
        container: &str,
        role: ContainerRole,
    ) -> Result<NodeState, CallError> {
        let holdings = super::holdings(
            &self.settings,
            &self.inventory,
            &self.pods,
            &self.kubelet,
            &self.admissions,
            &self.claims,
        );
        let ledger = self.ledger.except(uid, holdings);
        let state = holdings.beside(ledger, uid, container, role);
        state.ok_or_else(|| CallError::PodGone(uid.clone()))
    }

    fn pod_finder(&self) -> PodFinder<'_> {
        PodFinder {
            settings: &self.settings,
            gpus: self.inventory.gpus(),
            pods: &self.pods,
            kubelet: &self.kubelet,
            admissions: &self.admissions,
            withdrawn: self.capacity.published(),
        }
    }

    fn allocator(&self) -> Result<Allocator<'_>, CallError> {
        let gpus = self.inventory.gpus().ok_or(CallError::GpusUnknown)?;
        Ok(Allocator {
            settings: &self.settings,
            gpus,
            cordoned: self.cordoned(),
            pods: &self.pods,
            admissions: &self.admissions,
            node_labels: self.publication.node_labels(),
        })
    }
}
