//! Handlers of the events: each passes an event to the parts it concerns.

use std::collections::BTreeSet;

use tessera_core::units::PodUid;
use tessera_node::{gpus::DiscoveredGpus, pod_resources::PodDevices};
use tessera_wire::{foreign::objects::Pod, kubelet::device_id::Resource};

use super::{
    Action, Agent, CallAnswer, CallError, CallId, Dirty, Event, EventTime, ShellError, Warning, WriteError,
    calls::KubeletCall, capacity::Reasons, diagnostics::KubeletLack, holdings, pods::has_ended,
    reconcile::missing_annotations, usage_check::Granted,
};

impl Agent {
    /// Passes an event to the part it concerns, and returns what it made stale.
    ///
    /// A call of the kubelet makes nothing stale: it waits for an answer, and the consequences show
    /// in the kubelet's next list.
    pub(super) fn apply(&mut self, now: EventTime, event: Event, actions: &mut Vec<Action>) -> Dirty {
        match event {
            Event::Gpus(found) => return self.on_gpus(found, actions),
            Event::Incident(incident) => {
                let changed = self.inventory.on_incident(now, &incident, actions);
                return self.gpus_changed(changed, actions);
            }
            Event::Pods(pods) => {
                let is_first = self.pods.replace(pods, self.inventory.gpus());
                return self.pods_replaced(is_first, actions);
            }
            Event::PodsRead(read) => return self.on_pods_read(read, actions),
            Event::PodApplied(pod) => {
                let uid = self.pods.apply(*pod, self.inventory.gpus());
                self.note_arrival(&uid);
                self.invalidate();
                return Dirty::Pod(uid);
            }
            Event::PodDeleted(uid) => {
                self.pods.delete(&uid);
                self.invalidate();
                return Dirty::Pods;
            }
            Event::Node(node) => {
                self.diagnostics.node_found();
                let cordoned = self.cordoned();
                self.publication.set_node(*node);
                if self.cordoned() != cordoned {
                    self.capacity.invalidate();
                }
                return Dirty::Node;
            }
            Event::NodeMissing => {
                self.publication.node_is_missing();
                self.capacity.invalidate();
                self.diagnostics.node_missing(&self.settings, actions);
            }
            Event::PodResourcesListed(listed) => return self.on_listed(now, listed, actions),
            Event::GrantsCreated(call, outcome) => return self.on_grants_created(call, outcome, actions),
            Event::PodPatched(uid, outcome) => return self.on_pod_patched(now, uid, outcome, actions),
            Event::NodePatched(outcome) => {
                self.publication.node_patched(now, outcome, actions);
                return Dirty::Node;
            }
            Event::UnhealthySet(outcome) => {
                self.publication.unhealthy_set(now, outcome, actions);
                return Dirty::Node;
            }
            Event::Tick => return self.on_tick(now, actions),
            Event::StreamOpened(resource) => self.on_stream_opened(now, resource, actions),
            Event::InstanceStreamOpened(resource) => self.on_instance_stream_opened(now, &resource),
            Event::StopRequested => {
                self.on_stop_requested(now, actions);
                return Dirty::Node;
            }
            Event::PluginSocketFailed(resource, reason) => {
                self.diagnostics.socket_failed(resource, reason, actions);
            }
            Event::DevicesOffered(offered) => self.on_devices_offered(offered, actions),
            Event::Prefer(call, resource, wish) => {
                self.serve_again(resource, actions);
                self.on_prefer(now, call, resource, wish, actions);
            }
            Event::Allocate(call, resource, ids) => {
                self.serve_again(resource, actions);
                self.on_allocate(now, call, resource, ids, actions);
            }
            Event::PreStart(call, resource, ids) => {
                self.serve_again(resource, actions);
                self.calls.add(now, call, KubeletCall::PreStart(resource, ids), actions);
            }
            Event::GrantsOnDisk(pods, limits) => {
                self.loans.found(&pods);
                self.grants.found(pods, limits);
            }
            Event::ClaimsOnDisk(claims) => self.on_claims_on_disk(claims),
            Event::PrepareClaim(call, claim) => self.on_prepare(call, claim, actions),
            Event::UnprepareClaim(call, claim) => self.on_unprepare(call, &claim, actions),
            Event::ClaimRead(claim, read) => self.on_claim_read(now, &claim, read, actions),
            Event::ClaimStored(uid, outcome) => self.on_claim_stored(&uid, outcome, actions),
            Event::ClaimRemoved(call, outcome) => self.on_claim_removed(now, call, outcome, actions),
            Event::Slice(observed) => self.on_slice(observed.map(|slice| *slice)),
            Event::SliceWritten(outcome) => self.on_slice_written(now, outcome, actions),
            Event::GrantUpdated(limits, outcome) => self.grants.updated(now, &limits, outcome, actions),
            Event::AccountFileGrew(container, bytes) => {
                self.overruns.report(now, &self.pods, container, bytes, actions);
            }
            Event::UsageSampled(sample) => {
                // A waiting process reads its limits after the measurement, so they are written first.
                self.grants.learn_contexts(&sample, actions);
                let granted = Granted {
                    settings: &self.settings,
                    holdings: holdings(
                        &self.settings,
                        &self.inventory,
                        &self.pods,
                        &self.kubelet,
                        &self.admissions,
                        &self.claims,
                    ),
                    grants: &self.grants,
                    node_labels: self.publication.node_labels(),
                };
                self.usage.check(now, &sample, granted, actions);
                self.follow_loans(now, &sample, actions);
                if self.calls.await_memory() {
                    self.retry_calls(now, actions);
                }
            }
        }
        Dirty::Nothing
    }

    fn on_gpus(&mut self, found: Result<DiscoveredGpus, ShellError>, actions: &mut Vec<Action>) -> Dirty {
        let changed = self.inventory.on_discovery(found, actions);
        self.gpus_changed(changed, actions)
    }

    /// Passes changed GPUs on to the pods and the kubelet.
    fn gpus_changed(&mut self, changed: bool, actions: &mut Vec<Action>) -> Dirty {
        if !changed {
            return Dirty::Nothing;
        }
        self.pods.parse_all(self.inventory.gpus());
        self.invalidate();
        self.inventory.publish_devices(self.settings.resources(), self.capacity.published(), actions);
        self.inventory.publish_instances(actions);
        Dirty::All
    }

    /// Withdraws devices whose part of a GPU other dialects hold or whose GPU is cordoned, and offers others again.
    ///
    /// Nothing is withdrawn before pods and the kubelet's list are known: devices in use must stay healthy.
    pub(super) fn reconcile_capacity(&mut self, now: EventTime, is_tick: bool, actions: &mut Vec<Action>) {
        let is_known = self.pods.is_complete() && self.kubelet.has_listed();
        if !is_known || !self.capacity.is_due(now, is_tick) {
            return;
        }
        let reasons = Reasons { held: self.settings.withdraw_held, cordoned: self.cordoned() };
        let holdings = holdings(
            &self.settings,
            &self.inventory,
            &self.pods,
            &self.kubelet,
            &self.admissions,
            &self.claims,
        );
        if self.capacity.reconcile(now, self.settings.resources(), reasons, holdings) {
            self.inventory.publish_devices(self.settings.resources(), self.capacity.published(), actions);
        }
    }

    fn on_pods_read(&mut self, read: Result<Vec<Pod>, ShellError>, actions: &mut Vec<Action>) -> Dirty {
        let Some((covers, is_first)) = self.pods.finish_read(read, self.inventory.gpus()) else {
            return Dirty::Nothing;
        };
        self.calls.pods_were_read(covers);
        self.pods_replaced(is_first, actions)
    }

    fn pods_replaced(&mut self, is_first: bool, actions: &mut Vec<Action>) -> Dirty {
        self.invalidate();
        if is_first {
            // The kubelet's devices can be attributed to pods only now.
            self.calls.request_list(actions);
        }
        Dirty::Pods
    }

    fn on_listed(
        &mut self,
        now: EventTime,
        listed: Result<Vec<PodDevices>, ShellError>,
        actions: &mut Vec<Action>,
    ) -> Dirty {
        let mut is_changed = false;
        let outcome = listed.map(|listed| is_changed = self.kubelet.replace_list(listed));
        if is_changed {
            self.invalidate();
        }
        self.find_bypassed_calls(actions);
        self.calls.list_arrived(now, outcome, actions);
        // Pending calls may have waited for exactly this list, even if it is the same as before.
        if is_changed || !self.calls.is_empty() { Dirty::Pods } else { Dirty::Nothing }
    }

    fn on_stream_opened(&mut self, now: EventTime, resource: Resource, actions: &mut Vec<Action>) {
        self.serve_again(resource, actions);
        self.availability.stream_opened(now);
        self.diagnostics.socket_works(resource);
        self.kubelet.open_stream(resource.name());
        self.admissions.begin_session();
    }

    fn on_instance_stream_opened(&mut self, now: EventTime, resource: &str) {
        self.availability.stream_opened(now);
        self.kubelet.open_stream(resource);
    }

    fn on_grants_created(
        &mut self,
        call: CallId,
        outcome: Result<(), ShellError>,
        actions: &mut Vec<Action>,
    ) -> Dirty {
        let uid = self.grants.finish(call, outcome.is_ok());
        actions.push(Action::Answer(call, CallAnswer::Started(outcome.map_err(CallError::Limits))));
        uid.map_or(Dirty::Nothing, Dirty::Pod)
    }

    fn on_pod_patched(
        &mut self,
        now: EventTime,
        uid: PodUid,
        outcome: Result<(), WriteError>,
        actions: &mut Vec<Action>,
    ) -> Dirty {
        if let (Some(reason), Some(pod)) = (self.patches.finished(now, &uid, outcome), self.pods.get(&uid)) {
            let warning = Warning::new("cannot annotate a pod with its GPUs, will try again");
            actions.push(Action::Warn(warning.pod(pod).error(&reason)));
        }
        Dirty::Pod(uid)
    }

    /// Does what has become due with time.
    fn on_tick(&mut self, now: EventTime, actions: &mut Vec<Action>) -> Dirty {
        let is_restored = self.inventory.restore_quiet(now, actions);
        let gpus = self.gpus_changed(is_restored, actions);
        self.expire_calls(now, actions);
        self.retry_waiting_claims(now, actions);
        let has_gpus = self.inventory.gpus().is_some();
        self.calls.request_due_list(now, has_gpus, actions);
        self.request_due_check(now, actions);
        if !self.pods.is_reading()
            && let Some(covers) = self.calls.start_due_read(now)
        {
            self.pods.begin_read(covers);
            actions.push(Action::ReadPods);
        }
        let list_error = self.calls.list_error();
        let closed = self.closed_streams();
        let has_all_streams = closed.is_empty();
        let lack = KubeletLack::of(&self.kubelet, closed, list_error);
        // Before there are GPUs to offer, no kubelet is expected.
        let lack = lack.filter(|_| has_gpus);
        self.diagnostics.check_kubelet(now, &self.settings, lack, list_error, actions);
        let serves_now = self.availability.update(now, &self.kubelet, has_all_streams, &self.pods);
        if is_restored {
            return gpus;
        }
        let are_pods_due = self.grants.is_retry_due(now) || self.patches.is_retry_due(now);
        match (are_pods_due, serves_now || self.publication.is_retry_due(now)) {
            (false, false) => Dirty::Nothing,
            (true, false) => Dirty::Pods,
            (false, true) => Dirty::Node,
            (true, true) => Dirty::All,
        }
    }

    /// Corrects limits and annotations of one pod or of all, and removes what ended pods left.
    pub(super) fn reconcile_pods(
        &mut self,
        now: EventTime,
        only: Option<&PodUid>,
        actions: &mut Vec<Action>,
    ) {
        if self.inventory.gpus().is_none() || !self.kubelet.has_listed() {
            return;
        }
        let holdings = holdings(
            &self.settings,
            &self.inventory,
            &self.pods,
            &self.kubelet,
            &self.admissions,
            &self.claims,
        );
        self.grants.reconcile(now, holdings, &self.settings.isolation, only, actions);
        for (uid, pod) in self.pods.active().filter(|(uid, _)| only.is_none_or(|only| only == *uid)) {
            self.bad_annotations.report(uid, pod, &self.pods, actions);
            let missing = missing_annotations(now, holdings, &self.grants, uid, pod);
            self.patches.reconcile(now, uid, pod, missing, actions);
        }
        self.lend(actions);
        let may_have_ended = only.is_none_or(|uid| self.pods.get(uid).is_some_and(has_ended));
        if self.pods.is_complete() && may_have_ended {
            let active: BTreeSet<PodUid> = self.pods.active().map(|(uid, _)| uid.clone()).collect();
            let kept = active.iter().cloned().chain(self.claims.uids()).collect();
            self.grants.remove_ended(&kept, actions);
            self.patches.remove_ended(&active);
            self.overruns.remove_ended(&active);
            self.bad_annotations.remove_ended(&active);
            self.admissions.retain(|uid| active.contains(uid));
        }
    }
}
