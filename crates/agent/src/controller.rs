//! The agent's decisions, without IO: events go in, actions come out.
//!
//! Whoever drives it feeds [`Agent::handle`] with what happened and carries out what it answers, in order. It never waits and
//! never looks at a clock; [`Agent::next_wake`] tells when it wants a [`Event::Tick`].

mod action;
mod admission;
mod allocate;
mod calls;
mod diagnostics;
mod event;
mod health;
mod holdings;
mod inventory;
mod isolation;
mod pods;
mod pre_start;
mod publications;
mod reconcile;
mod settings;
mod usage_check;
mod view;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use tessera_core::{ledger::Ledger, units::PodUid};
use tessera_node::pod_resources::PodDevices;
use tessera_wire::{foreign::objects::Pod, kubelet::device_id::Resource};

pub use self::{
    action::{Action, CallAnswer},
    event::{CallId, Event, EventTime, WriteError},
    health::{IncidentEffect, incident_effect},
    isolation::{InstalledLibrary, Isolation, NotEnforced, OPT_OUT, WithoutLibrary},
    pre_start::ContainerLimits,
    publications::NodePatch,
    settings::AgentSettings,
    usage_check::{AccountSample, Escape, GpuProcess, PodContainer, UsageSample},
    view::{ContainerView, PodView, View},
};
use self::{
    admission::Admission, calls::Calls, diagnostics::Absent, health::HealthBook, inventory::NodeGpus,
    publications::Published, reconcile::Truth,
};

/// The state of a node's agent.
#[derive(Debug)]
pub struct Agent {
    settings: AgentSettings,
    cards: Option<NodeGpus>,
    /// Why there are no GPUs.
    missing: Option<String>,
    health: HealthBook,
    pods: BTreeMap<PodUid, Pod>,
    /// What those pods ask for and were granted, as their texts say.
    read: BTreeMap<PodUid, holdings::Read>,
    /// Whether the API server has told all pods at least once.
    pods_known: bool,
    /// What the kubelet said last.
    listed: Vec<PodDevices>,
    /// Where in it each name stands.
    listed_names: HashMap<(String, String), Vec<usize>>,
    /// Whether it has said anything yet.
    listed_once: bool,
    /// The resources whose devices it has asked for.
    asked_for: BTreeSet<Resource>,
    admission: Admission,
    calls: Calls,
    /// The reading of pods that is on its way.
    reading: Option<pods::Reading>,
    truth: Truth,
    published: Published,
    absent: Absent,
    watch: usage_check::Watch,
    /// Counts the changes of pods and GPUs.
    revision: u64,
    /// The books, until something changes.
    books: Option<Ledger>,
    /// The only pod of which the books do not know the latest: the one being admitted.
    books_lack: Option<PodUid>,
    /// What came up while a question was answered, to be done after it.
    notes: Vec<Action>,
}

impl Agent {
    /// An agent that knows nothing yet.
    #[must_use]
    pub fn new(settings: AgentSettings) -> Self {
        Self {
            health: HealthBook::new(settings.quiet_time, settings.ignored_xids.clone()),
            settings,
            cards: None,
            missing: None,
            pods: BTreeMap::new(),
            read: BTreeMap::new(),
            pods_known: false,
            listed: Vec::new(),
            listed_names: HashMap::new(),
            listed_once: false,
            asked_for: BTreeSet::new(),
            admission: Admission::default(),
            calls: Calls::default(),
            reading: None,
            truth: Truth::default(),
            published: Published::default(),
            absent: Absent::default(),
            watch: usage_check::Watch::default(),
            revision: 0,
            books: None,
            books_lack: None,
            notes: Vec::new(),
        }
    }

    /// Takes note of an event and says what to do about it.
    pub fn handle(&mut self, now: EventTime, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        let untrue = self.take(now, event, &mut actions);
        if !matches!(untrue, Dirty::Nothing) {
            self.retry_calls(now, &mut actions);
        }
        match &untrue {
            Dirty::Nothing | Dirty::Node => {}
            Dirty::Pod(uid) => self.reconcile_pods(now, Some(uid), &mut actions),
            Dirty::Pods | Dirty::All => self.reconcile_pods(now, None, &mut actions),
        }
        if matches!(untrue, Dirty::Node | Dirty::All) {
            self.reconcile_node(now, &mut actions);
        }
        actions.append(&mut self.notes);
        actions
    }

    /// Takes note of an event. A question of the kubelet makes nothing untrue: it waits for an answer, and what follows from that
    /// shows in its next list.
    fn take(&mut self, now: EventTime, event: Event, actions: &mut Vec<Action>) -> Dirty {
        match event {
            Event::Gpus(found) => return self.on_gpus(found, actions),
            Event::Incident(incident) => return self.on_incident(now, &incident, actions),
            Event::Pods(pods) => return self.on_pods(pods, actions),
            Event::PodsRead(read) => return self.on_pods_read(read, actions),
            Event::PodApplied(pod) => return self.on_pod(*pod),
            Event::PodDeleted(uid) => return self.on_pod_deleted(&uid),
            Event::Node(node) => {
                self.absent.node = false;
                self.published.seen(*node);
                return Dirty::Node;
            }
            Event::NodeMissing => self.on_node_missing(actions),
            Event::PodResourcesListed(listed) => return self.on_listed(now, listed, actions),
            Event::GrantsCreated(call, outcome) => return self.on_grants_begun(call, outcome, actions),
            Event::PodPatched(uid, outcome) => return self.on_pod_patched(now, uid, outcome, actions),
            Event::NodePatched(outcome) => {
                self.published.node_patched(now, outcome, actions);
                return Dirty::Node;
            }
            Event::UnhealthySet(outcome) => {
                self.published.unhealthy_set(now, outcome, actions);
                return Dirty::Node;
            }
            Event::Tick => return self.on_tick(now, actions),
            Event::StreamOpened(resource) => {
                self.absent.has_socket(resource);
                self.on_stream(resource);
            }
            Event::PluginSocketFailed(resource, reason) => self.on_without_socket(resource, reason, actions),
            Event::Prefer(call, resource, wish) => self.on_prefer(now, call, resource, wish, actions),
            Event::Allocate(call, resource, ids) => self.on_allocate(now, call, resource, ids, actions),
            Event::PreStart(call, resource, ids) => self.on_pre_start(now, call, resource, ids, actions),
            Event::GrantsOnDisk(pods, limits) => self.truth.found(pods, limits),
            Event::GrantUpdated(limits, outcome) => self.truth.changed(now, &limits, outcome, actions),
            Event::UsageSampled(measured) => self.on_measured(now, &measured, actions),
        }
        Dirty::Nothing
    }

    /// When to send the next tick at the latest; `None`: only for the sake of routine.
    #[must_use]
    pub fn next_wake(&self) -> Option<Duration> {
        self.calls.waiting().then_some(calls::LOOK_AGAIN)
    }

    /// The resources of the dialects served.
    pub fn resources(&self) -> impl Iterator<Item = Resource> {
        Resource::ALL.into_iter().filter(|resource| self.settings.dialects.contains(&resource.dialect()))
    }

    /// Time has passed: for some that have waited for it.
    fn on_tick(&mut self, now: EventTime, actions: &mut Vec<Action>) -> Dirty {
        let recovered = self.health.recover(now.elapsed);
        if recovered {
            self.refresh_gpus(actions);
        }
        self.expire_calls(now, actions);
        self.retry_lists(now, actions);
        self.look_for_kubelet(now, actions);
        if recovered {
            return Dirty::All;
        }
        match (self.truth.has_waited(now), self.published.has_waited(now)) {
            (false, false) => Dirty::Nothing,
            (true, false) => Dirty::Pods,
            (false, true) => Dirty::Node,
            (true, true) => Dirty::All,
        }
    }

    /// The books, and whatever others made of pods and GPUs, are out of date.
    fn pods_or_gpus_changed(&mut self) {
        self.books = None;
        self.revision += 1;
    }

    /// Differs whenever pods or GPUs do: whoever has seen them at one revision need not look again at the same.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }
}

/// What an event may have made untrue of what we have told others.
enum Dirty {
    Nothing,
    /// What we say of one pod.
    Pod(PodUid),
    /// What we say of any pod.
    Pods,
    /// What we say of the node.
    Node,
    All,
}

fn uid_of(pod: &Pod) -> PodUid {
    PodUid(pod.metadata.uid.clone())
}

/// Whether a pod's containers have ended for good.
fn has_ended(pod: &Pod) -> bool {
    matches!(pod.status.phase.as_str(), "Succeeded" | "Failed")
}
