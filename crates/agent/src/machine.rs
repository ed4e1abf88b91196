//! The agent's decisions, without IO: events go in, actions come out.
//!
//! Whoever drives it feeds [`Agent::handle`] with what happened and carries out what it answers, in order. It never waits and
//! never looks at a clock; [`Agent::next_wake`] tells when it wants a [`Event::Tick`].

mod absent;
mod action;
mod admission;
mod books;
mod calls;
mod cards;
mod event;
mod health;
mod isolation;
mod measure;
mod pods;
mod publish;
mod settings;
mod start;
mod steer;
mod truth;
mod view;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use tessera_core::{ledger::Ledger, units::PodUid};
use tessera_node::pod_resources::PodDevices;
use tessera_wire::{device_id::Resource, objects::Pod};

use self::{
    absent::Absent, admission::Admission, calls::Calls, cards::Cards, health::HealthBook, publish::Published,
    truth::Truth,
};
pub use self::{
    action::{Action, Answer},
    event::{CallId, Event, Now, WriteError},
    health::{Verdict, verdict},
    isolation::{Free, Isolation, Library, OPT_OUT, WithoutLibrary},
    measure::{AccountRead, Escape, Measured, OnGpu, Whose},
    publish::NodePatch,
    settings::Settings,
    start::ContainerLimits,
    view::{ContainerView, PodView, View},
};

/// The state of a node's agent.
#[derive(Debug)]
pub struct Agent {
    settings: Settings,
    cards: Option<Cards>,
    /// Why there are no GPUs.
    missing: Option<String>,
    health: HealthBook,
    pods: BTreeMap<PodUid, Pod>,
    /// What those pods ask for and were granted, as their texts say.
    read: BTreeMap<PodUid, books::Read>,
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
    watch: measure::Watch,
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
    pub fn new(settings: Settings) -> Self {
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
            watch: measure::Watch::default(),
            revision: 0,
            books: None,
            books_lack: None,
            notes: Vec::new(),
        }
    }

    /// Takes note of an event and says what to do about it.
    pub fn handle(&mut self, now: Now, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        let untrue = self.take(now, event, &mut actions);
        if !matches!(untrue, Untrue::Nothing) {
            self.retry_calls(now, &mut actions);
        }
        match &untrue {
            Untrue::Nothing | Untrue::Node => {}
            Untrue::Pod(uid) => self.reconcile_pods(now, Some(uid), &mut actions),
            Untrue::Pods | Untrue::All => self.reconcile_pods(now, None, &mut actions),
        }
        if matches!(untrue, Untrue::Node | Untrue::All) {
            self.reconcile_node(now, &mut actions);
        }
        actions.append(&mut self.notes);
        actions
    }

    /// Takes note of an event. A question of the kubelet makes nothing untrue: it waits for an answer, and what follows from that
    /// shows in its next list.
    fn take(&mut self, now: Now, event: Event, actions: &mut Vec<Action>) -> Untrue {
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
                return Untrue::Node;
            }
            Event::NodeMissing => self.on_node_missing(actions),
            Event::Listed(listed) => return self.on_listed(now, listed, actions),
            Event::GrantsBegun(call, outcome) => return self.on_grants_begun(call, outcome, actions),
            Event::PodPatched(uid, outcome) => return self.on_pod_patched(now, uid, outcome, actions),
            Event::NodePatched(outcome) => {
                self.published.node_patched(now, outcome, actions);
                return Untrue::Node;
            }
            Event::UnhealthySet(outcome) => {
                self.published.unhealthy_set(now, outcome, actions);
                return Untrue::Node;
            }
            Event::Tick => return self.on_tick(now, actions),
            Event::StreamOpened(resource) => {
                self.absent.has_socket(resource);
                self.on_stream(resource);
            }
            Event::WithoutSocket(resource, reason) => self.on_without_socket(resource, reason, actions),
            Event::Prefer(call, resource, wish) => self.on_prefer(now, call, resource, wish, actions),
            Event::Allocate(call, resource, ids) => self.on_allocate(now, call, resource, ids, actions),
            Event::PreStart(call, resource, ids) => self.on_pre_start(now, call, resource, ids, actions),
            Event::GrantsOnDisk(pods, limits) => self.truth.found(pods, limits),
            Event::GrantChanged(limits, outcome) => self.truth.changed(now, &limits, outcome, actions),
            Event::Measured(measured) => self.on_measured(now, &measured, actions),
        }
        Untrue::Nothing
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
    fn on_tick(&mut self, now: Now, actions: &mut Vec<Action>) -> Untrue {
        let recovered = self.health.recover(now.elapsed);
        if recovered {
            self.refresh_gpus(actions);
        }
        self.expire_calls(now, actions);
        self.retry_lists(now, actions);
        self.look_for_kubelet(now, actions);
        if recovered {
            return Untrue::All;
        }
        match (self.truth.has_waited(now), self.published.has_waited(now)) {
            (false, false) => Untrue::Nothing,
            (true, false) => Untrue::Pods,
            (false, true) => Untrue::Node,
            (true, true) => Untrue::All,
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
enum Untrue {
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
