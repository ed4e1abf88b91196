//! The agent's decisions, without IO: events go in, actions come out.
//!
//! Whoever drives it feeds [`Agent::handle`] with what happened and carries out what it answers, in order. It never waits and
//! never looks at a clock; [`Agent::next_wake`] tells when it wants a [`Event::Tick`].

mod admission;
mod books;
mod calls;
mod health;
mod isolation;
mod measure;
mod publish;
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

use tessera_core::{
    gpu::{Gpu, Health},
    ledger::Ledger,
    node::Node,
    placement::Policy,
    units::{MiB, MilliCpu, NodeName, PodUid},
};
use tessera_node::{
    device_plugin::{Allocation, Device, Wish},
    gpus::{Found, Incident},
    pod_resources::PodDevices,
};
use tessera_wire::{
    device_id::{DeviceIds, Resource},
    dialect::{Dialect, MemoryUnit},
    hand_over::HandOver,
    inventory::Inventory,
    objects::{self, Pod},
};

use self::{admission::Admission, calls::Calls, health::HealthBook, publish::Published, truth::Truth};
pub use self::{
    health::{Verdict, verdict},
    isolation::{Free, Isolation, Library, OPT_OUT, WithoutLibrary},
    measure::{AccountRead, Escape, Measured, OnCard, Whose},
    start::ContainerLimits,
    view::{ContainerView, PodView, View},
};

/// How the agent of a node is set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node.
    pub node: NodeName,
    /// The vocabularies served.
    pub dialects: Vec<Dialect>,
    /// What one unit of `aliyun.com/gpu-mem` shall be.
    pub memory_unit: MemoryUnit,
    /// How cards are chosen for pods that nobody placed.
    pub policy: Policy,
    /// How cards are handed to containers.
    pub hand_over: HandOver,
    /// How containers are held to their shares.
    pub isolation: Isolation,
    /// Where grant directories lie on the node.
    pub grants: String,
    /// The node's type, where the administrator says; otherwise its label does.
    pub instance_type: Option<String>,
    /// Labels to set on the node.
    pub labels: BTreeMap<String, String>,
    /// How long a card that had a passing trouble must stay quiet to be trusted again.
    pub quiet_time: Duration,
    /// Where others reach this agent's pages, if they do.
    pub advertise: Option<String>,
}

/// The time of an event: since some fixed moment, and by the calendar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Only ever grows.
    pub elapsed: Duration,
    /// Nanoseconds since 1970.
    pub unix_nanos: u128,
}

/// Names a question of the kubelet until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// Something happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The cards were looked for: found, or the reason why not.
    Gpus(Result<Found, String>),
    /// Something happened to a card.
    Incident(Incident),
    /// A kubelet has opened the device stream of a resource: it is there, perhaps anew.
    StreamOpened(Resource),
    /// All pods of this node, as the API server has them now.
    Pods(Vec<Pod>),
    /// A pod of this node is new or has changed.
    PodApplied(Box<Pod>),
    /// A pod of this node is gone.
    PodDeleted(PodUid),
    /// The node's object, as it is now.
    Node(Box<objects::Node>),
    /// What the kubelet's podresources said, or why it said nothing: answers [`Action::List`].
    Listed(Result<Vec<PodDevices>, String>),
    /// The kubelet asks which devices to take.
    Prefer(CallId, Resource, Wish),
    /// The kubelet gives a container these devices.
    Allocate(CallId, Resource, BTreeSet<String>),
    /// The kubelet is about to start a container that holds these devices.
    PreStart(CallId, Resource, BTreeSet<String>),
    /// What was found on disk when the agent started: pods with a grant directory, and the limits in them.
    GrantsOnDisk(BTreeSet<PodUid>, Vec<ContainerLimits>),
    /// How making the grants for a start went: answers [`Action::BeginGrants`].
    GrantsBegun(CallId, Result<(), String>),
    /// How changing limits went: answers [`Action::ChangeGrant`].
    GrantChanged(Box<ContainerLimits>, Result<(), String>),
    /// What containers really use.
    Measured(Box<Measured>),
    /// How [`Action::PatchPod`] went.
    PodPatched(PodUid, Result<(), WriteError>),
    /// How [`Action::PatchNode`] went.
    NodePatched(Result<(), String>),
    /// How [`Action::SetUnhealthy`] went.
    UnhealthySet(Result<(), String>),
    /// Time has passed.
    Tick,
}

/// A write to the API server that did not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteError {
    /// The object is gone or is another one by now: no point in trying again.
    Gone,
    /// It may work later.
    Later(String),
}

/// Something to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Tell the kubelet the devices of a resource.
    Publish(Resource, Vec<Device>),
    /// Ask the kubelet's podresources once.
    List,
    /// Read the pods of this node afresh; nobody waits for it.
    ReadPods,
    /// Answer a question of the kubelet.
    Answer(CallId, Answer),
    /// Make the grants of containers that are about to start, with nothing used yet; then report.
    BeginGrants(CallId, Vec<ContainerLimits>),
    /// Put other limits in force for a container that runs; then report.
    ChangeGrant(Box<ContainerLimits>),
    /// Tell a container how much of a card it uses beyond what its processes know of.
    SetUnledgered {
        /// The pod's UID.
        pod: PodUid,
        /// The container.
        container: String,
        /// The card's place in the container's limits.
        card: usize,
        /// How much.
        bytes: u64,
        /// As of when, on the clock that agent and library share.
        at: u64,
    },
    /// End a process, if it still is the one that started then.
    Kill {
        /// Its number.
        pid: u32,
        /// When it started, in ticks.
        started: u64,
    },
    /// Remove the grant directory of a pod that has ended.
    RemoveGrants(PodUid),
    /// Set annotations of a pod, if it still is the one with this UID.
    PatchPod {
        /// Its UID.
        uid: PodUid,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// The annotations.
        annotations: BTreeMap<String, String>,
    },
    /// Set annotations and labels of the node, and resources in its status.
    PatchNode(NodePatch),
    /// Tell gpushare which cards are broken.
    SetUnhealthy(Vec<u8>),
    /// Worth a line in the log.
    Warn(String),
    /// Worth telling the owner of a pod: an event of Kubernetes.
    TellOwner {
        /// The pod's UID.
        uid: PodUid,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// One word, for machines.
        reason: &'static str,
        /// What happened, for people.
        message: String,
    },
}

pub use publish::NodePatch;

/// What the kubelet is answered. An error's text reaches the pod's owner.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Take these devices.
    Preferred(Result<Vec<String>, String>),
    /// The container gets this.
    Allocated(Result<Box<Allocation>, String>),
    /// The container may start.
    Started(Result<(), String>),
}

/// The state of a node's agent.
#[derive(Debug)]
pub struct Agent {
    settings: Settings,
    cards: Option<Cards>,
    /// Why there are no cards.
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
    truth: Truth,
    published: Published,
    watch: measure::Watch,
    /// The books, until something changes.
    books: Option<Ledger>,
    /// The only pod of which the books do not know the latest: the one being admitted.
    books_lack: Option<PodUid>,
    /// What came up while a question was answered, to be done after it.
    notes: Vec<Action>,
}

/// The cards of the node and the names of their devices.
#[derive(Clone, Debug, PartialEq)]
struct Cards {
    found: Found,
    ids: DeviceIds,
    node: Node,
}

impl Agent {
    /// An agent that knows nothing yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            health: HealthBook::new(settings.quiet_time),
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
            truth: Truth::default(),
            published: Published::default(),
            watch: measure::Watch::default(),
            books: None,
            books_lack: None,
            notes: Vec::new(),
        }
    }

    /// Takes note of an event and says what to do about it.
    pub fn handle(&mut self, now: Now, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        let ticking = matches!(event, Event::Tick | Event::Measured(_));
        let scope = Scope::of(&event, &self.truth);
        let admitting = matches!(event, Event::Prefer(..) | Event::Allocate(..) | Event::PreStart(..));
        match event {
            Event::Gpus(found) => self.on_gpus(found, &mut actions),
            Event::Incident(incident) => self.on_incident(now, &incident, &mut actions),
            Event::StreamOpened(resource) => {
                self.asked_for.insert(resource);
                self.on_stream();
            }
            Event::Pods(pods) => self.on_pods(pods, &mut actions),
            Event::PodApplied(pod) => {
                let uid = uid_of(&pod);
                self.pods.insert(uid.clone(), *pod);
                self.read_pod(&uid);
            }
            Event::PodDeleted(uid) => {
                self.pods.remove(&uid);
                self.read.remove(&uid);
            }
            Event::Node(node) => self.published.seen(*node),
            Event::Listed(listed) => self.on_listed(now, listed, &mut actions),
            Event::Prefer(call, resource, wish) => self.on_prefer(now, call, resource, wish, &mut actions),
            Event::Allocate(call, resource, ids) => self.on_allocate(now, call, resource, ids, &mut actions),
            Event::PreStart(call, resource, ids) => self.on_pre_start(now, call, resource, ids, &mut actions),
            Event::GrantsOnDisk(pods, limits) => self.truth.found(pods, limits),
            Event::GrantsBegun(call, outcome) => self.on_grants_begun(call, outcome, &mut actions),
            Event::GrantChanged(limits, outcome) => self.truth.changed(&limits, outcome, &mut actions),
            Event::Measured(measured) => self.on_measured(now, &measured, &mut actions),
            Event::PodPatched(uid, outcome) => self.truth.patched(now, &uid, &outcome),
            Event::NodePatched(outcome) => self.published.node_patched(now, outcome, &mut actions),
            Event::UnhealthySet(outcome) => self.published.unhealthy_set(now, outcome, &mut actions),
            Event::Tick => self.on_tick(now, &mut actions),
        }
        // The kubelet waits for an answer, and nothing to be told of has changed.
        if !admitting {
            if !ticking {
                self.books = None;
                self.retry_calls(now, &mut actions);
            }
            match scope {
                Scope::Nothing => {}
                Scope::Pod(uid) => {
                    self.change_limits(|other| *other == uid, &mut actions);
                    self.reconcile_pods(now, Some(&uid), &mut actions);
                }
                Scope::All => {
                    self.reconcile_pods(now, None, &mut actions);
                    self.reconcile_node(now, &mut actions);
                }
                Scope::Pods => {
                    self.change_limits(|_| true, &mut actions);
                    self.reconcile_pods(now, None, &mut actions);
                }
            }
        }
        actions.append(&mut self.notes);
        actions
    }

    /// When to send the next tick at the latest; `None`: only for the sake of routine.
    #[must_use]
    pub fn next_wake(&self) -> Option<Duration> {
        self.calls.waiting().then_some(calls::LOOK_AGAIN)
    }

    fn on_gpus(&mut self, found: Result<Found, String>, actions: &mut Vec<Action>) {
        match found {
            Ok(found) => {
                let found = self.with_lost_names(found);
                if self.cards.as_ref().is_some_and(|cards| cards.found == found) {
                    return;
                }
                self.missing = None;
                self.set_cards(found, actions);
                self.publish_devices(actions);
            }
            Err(reason) => {
                if self.missing.as_ref() != Some(&reason) && self.cards.is_none() {
                    actions.push(Action::Warn(format!("no GPUs to offer yet: {reason}")));
                }
                self.missing = Some(reason);
            }
        }
    }

    /// A card that does not answer keeps the name it had, as a broken one.
    fn with_lost_names(&self, mut found: Found) -> Found {
        for gpu in &mut found.gpus {
            let known = self.cards.as_ref().and_then(|cards| cards.found.gpus.get(gpu.index.position()));
            if gpu.uuid.0.starts_with("lost-")
                && let Some(known) = known
            {
                *gpu = Gpu { health: Health::Unhealthy, ..known.clone() };
            }
        }
        found
    }

    fn set_cards(&mut self, found: Found, actions: &mut Vec<Action>) {
        let asked = self.settings.memory_unit;
        let unit = DeviceIds::unit_that_fits(&found.gpus, asked);
        if unit != asked && self.cards.as_ref().is_none_or(|cards| cards.ids.unit() != unit) {
            actions.push(Action::Warn(format!(
                "units of {asked} would be more than a kubelet takes: aliyun.com/gpu-mem counts in {unit} on this node"
            )));
        }
        let mut gpus = found.gpus.clone();
        for gpu in &mut gpus {
            if self.health.is_bad(&gpu.uuid) {
                gpu.health = Health::Unhealthy;
            }
        }
        let name = self.settings.node.clone();
        // CPU and main memory are the scheduler's affair.
        match Node::new(name, gpus, found.topology.clone(), MilliCpu(u64::MAX), MiB(u64::MAX)) {
            Ok(node) => {
                let ids = DeviceIds::new(&found.gpus, unit);
                self.cards = Some(Cards { found, ids, node });
                self.read_pods();
            }
            Err(error) => actions.push(Action::Warn(error.to_string())),
        }
    }

    /// Health has changed: the same cards, seen anew.
    fn refresh_cards(&mut self, actions: &mut Vec<Action>) {
        if let Some(cards) = self.cards.take() {
            self.set_cards(cards.found, actions);
        }
        self.publish_devices(actions);
        self.books = None;
    }

    fn publish_devices(&self, actions: &mut Vec<Action>) {
        let Some(cards) = &self.cards else { return };
        for resource in self.resources() {
            let device = |(id, gpu)| {
                let card = cards.node.gpu(gpu)?;
                let healthy = card.health == Health::Healthy;
                Some(Device { id, healthy, numa_node: card.numa.map(i64::from) })
            };
            actions.push(Action::Publish(resource, cards.ids.all(resource).filter_map(device).collect()));
        }
    }

    /// The resources of the dialects served.
    pub fn resources(&self) -> impl Iterator<Item = Resource> {
        Resource::ALL.into_iter().filter(|resource| self.settings.dialects.contains(&resource.dialect()))
    }

    fn on_pods(&mut self, pods: Vec<Pod>, actions: &mut Vec<Action>) {
        self.pods = pods.into_iter().map(|pod| (uid_of(&pod), pod)).collect();
        self.read_pods();
        self.pods_are_fresh();
        if !std::mem::replace(&mut self.pods_known, true) {
            // What the kubelet holds belongs to these pods.
            self.calls.want_list(actions);
        }
    }

    fn on_tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.health.recover(now.elapsed) {
            self.refresh_cards(actions);
        }
        self.expire_calls(now, actions);
        self.retry_lists(now, actions);
    }

    /// What the agent would publish of its cards.
    fn inventory(&self) -> Option<Inventory> {
        let cards = self.cards.as_ref()?;
        Some(Inventory {
            gpus: cards.node.gpus().to_vec(),
            topology: cards.node.topology().clone(),
            memory_unit: cards.ids.unit(),
        })
    }
}

/// What an event may have made untrue.
enum Scope {
    Nothing,
    Pod(PodUid),
    Pods,
    All,
}

impl Scope {
    fn of(event: &Event, truth: &Truth) -> Self {
        match event {
            Event::PodApplied(pod) => Self::Pod(uid_of(pod)),
            Event::GrantsBegun(call, _) => truth.starting.get(call).cloned().map_or(Self::Nothing, Self::Pod),
            Event::PodPatched(..)
            | Event::GrantsOnDisk(..)
            | Event::GrantChanged(..)
            | Event::Measured(_)
            | Event::StreamOpened(_) => Self::Nothing,
            Event::Pods(_) | Event::PodDeleted(_) | Event::Listed(_) => Self::Pods,
            _ => Self::All,
        }
    }
}

fn uid_of(pod: &Pod) -> PodUid {
    PodUid(pod.metadata.uid.clone())
}

/// Whether a pod's containers have ended for good.
fn has_ended(pod: &Pod) -> bool {
    matches!(pod.status.phase.as_str(), "Succeeded" | "Failed")
}
