//! What the scheduler knows: nodes, pods, what each holds, and what is promised but not yet confirmed.
//!
//! A pure value. Watch events and binds change it, every verb reads it, and the shell around it does the talking.

mod access;
mod booking;
mod entries;
mod event;
mod nodes;
mod pods;
mod policies;
mod recent_uids;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use tessera_core::disruption::DisruptionBudget;
use tessera_core::forecast::{Forecast, Learner};
use tessera_core::ledger::Ledger;
use tessera_core::placement::static_table::StaticTable;
use tessera_core::quota::{NamespaceUsage, Quota};
use tessera_core::taint::SoftTaint;
use tessera_core::units::{NodeName, PodUid};
use tessera_core::workload::Workload;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::disruption::Budget;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::foreign::quota;
use tessera_wire::tessera::rules::Rules;

pub use self::access::StateAccess;
pub use self::booking::{BindOrder, BindOutcome, BindRefusal, BindStep, Timestamp, UncertainBinding};
pub(crate) use self::entries::{GpuPod, NodeEntry};
pub use self::event::{ClusterEvent, UnhealthyGpus, WatchEvent};
use self::nodes::Overlay;
pub(crate) use self::nodes::ReadableNode;
pub use self::pods::ListGeneration;
pub use self::policies::DefaultPolicy;
use self::recent_uids::RecentUids;
use self::{booking::Booking, entries::PodEntry};
use crate::verb::filter::PassOn;

/// What holds for as long as the scheduler runs.
#[derive(Clone, Debug, Default)]
pub struct SchedulerSettings {
    /// The policy of pods that name none.
    pub policy: DefaultPolicy,
    /// What `aliyun.com/gpu-mem` counts on nodes that do not say.
    pub memory_unit: MemoryUnit,
    /// Which of the nodes that fit kube-scheduler gets to choose among.
    pub pass_on: PassOn,
    /// Which node labels a quota goes by; `None` without one.
    pub quota: Option<quota::QuotaSettings>,
}

impl SchedulerSettings {
    /// The settings as others are told them.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules { policy: Some(self.policy.0.clone()), unit: self.memory_unit, quota: self.quota.clone() }
    }
}

/// All of it. Not to be copied: [`Memory`](crate::verb::memory::Memory) knows its nodes by when they changed.
#[derive(Debug)]
pub struct State {
    identity: StateId,
    settings: SchedulerSettings,
    ledger: Ledger,
    /// Nodes that can be read, each where the ledger has it: to ask all of them is to go through memory in order.
    readable: Vec<Option<NodeEntry>>,
    /// Nodes that cannot.
    unreadable: HashMap<NodeName, NodeEntry>,
    /// By node, taints that only ask pods to stay away; most clusters have none.
    soft_taints: HashMap<NodeName, Vec<SoftTaint>>,
    /// GPUs that gpushare's lists call broken, and what the node says of itself.
    unhealthy: HashMap<NodeName, Overlay>,
    /// By namespace and name.
    budgets: BTreeMap<(String, String), DisruptionBudget>,
    /// Pods that wait for GPUs, and all that are on a node.
    pods: HashMap<PodUid, PodEntry>,
    /// Pods with GPUs, by node; also of nodes not known (yet).
    on_node: HashMap<NodeName, BTreeSet<PodUid>>,
    /// Those of them whose GPUs nobody told: they bypassed us. Where they sit is a guess.
    unsure: HashMap<NodeName, BTreeSet<PodUid>>,
    bookings: HashMap<PodUid, Booking>,
    ended: RecentUids,
    /// Pods a list did not show: only the watch is believed about them.
    missing: RecentUids,
    quota: Quota,
    accounts: NamespaceUsage,
    charges: HashMap<PodUid, entries::Charge>,
    learner: Learner,
    forecast: Arc<Forecast>,
    table: Arc<StaticTable>,
    /// Lists of pods begun so far.
    listings: u64,
    is_listing_pods: bool,
    /// What a list in progress has not shown yet.
    unlisted_pods: HashSet<PodUid>,
    unlisted_nodes: HashSet<NodeName>,
    unlisted_unhealthy: HashSet<NodeName>,
    /// Bookings taken back.
    rolled_back: u64,
}

/// Tells a state from every other one, also from those before it.
#[derive(Clone, Debug, Default)]
pub struct StateId(Arc<()>);

impl PartialEq for StateId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for StateId {}

impl State {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(settings: SchedulerSettings) -> Self {
        Self {
            identity: StateId::default(),
            settings,
            ledger: Ledger::default(),
            readable: Vec::new(),
            unreadable: HashMap::new(),
            soft_taints: HashMap::new(),
            unhealthy: HashMap::new(),
            budgets: BTreeMap::new(),
            pods: HashMap::new(),
            on_node: HashMap::new(),
            unsure: HashMap::new(),
            bookings: HashMap::new(),
            ended: RecentUids::default(),
            missing: RecentUids::default(),
            quota: Quota::default(),
            accounts: NamespaceUsage::default(),
            charges: HashMap::new(),
            learner: Learner::new(Workload::default()),
            forecast: Arc::default(),
            table: Arc::default(),
            listings: 0,
            is_listing_pods: false,
            unlisted_pods: HashSet::new(),
            unlisted_nodes: HashSet::new(),
            unlisted_unhealthy: HashSet::new(),
            rolled_back: 0,
        }
    }

    /// Takes note of something that happened.
    pub fn handle(&mut self, event: ClusterEvent) {
        match event {
            ClusterEvent::Node(change) => self.handle_node(change),
            ClusterEvent::Pod(change) => self.handle_pod(change),
            ClusterEvent::Budget(change) => self.handle_budget(change),
            ClusterEvent::Unhealthy(change) => self.handle_unhealthy(change),
            ClusterEvent::Quota(quota) => self.quota = quota,
            ClusterEvent::Table(table) => self.table = Arc::new(table),
        }
    }

    fn handle_budget(&mut self, change: WatchEvent<Budget>) {
        let key = |budget: &Budget| (budget.metadata.namespace.clone(), budget.metadata.name.clone());
        match change {
            // For a moment there are none: they are advice, and nothing rests on them.
            WatchEvent::Listing => self.budgets.clear(),
            WatchEvent::Set(budget) => drop(self.budgets.insert(key(&budget), budget.into())),
            WatchEvent::Gone(budget) => drop(self.budgets.remove(&key(&budget))),
            WatchEvent::Listed => {}
        }
    }

    fn handle_pod(&mut self, change: WatchEvent<Pod>) {
        match change {
            WatchEvent::Listing => {
                self.listings += 1;
                self.is_listing_pods = true;
                self.unlisted_pods = self.pods.keys().cloned().collect();
            }
            WatchEvent::Set(pod) => {
                let uid = PodUid(pod.metadata.uid.clone());
                // What has ended never begins again: old news.
                if !self.ended.contains(&uid) {
                    self.mark_shown(&uid);
                    self.set_pod(pod);
                }
            }
            WatchEvent::Gone(pod) => self.end_pod(PodUid(pod.metadata.uid)),
            WatchEvent::Listed => {
                self.is_listing_pods = false;
                for uid in std::mem::take(&mut self.unlisted_pods) {
                    self.pod_missing_from_list(&uid);
                }
            }
        }
    }

    /// Which state this is.
    pub(crate) fn identity(&self) -> &StateId {
        &self.identity
    }

    /// The book of grants.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(crate) fn pass_on(&self) -> PassOn {
        self.settings.pass_on
    }

    /// What each namespace has taken, and what it may take.
    #[must_use]
    pub fn quota(&self) -> (&Quota, &NamespaceUsage) {
        (&self.quota, &self.accounts)
    }

    /// Bookings taken back since the start.
    #[must_use]
    pub fn rolled_back(&self) -> u64 {
        self.rolled_back
    }

    /// Bookings that no watch has confirmed yet.
    #[must_use]
    pub fn unconfirmed(&self) -> usize {
        self.bookings.len()
    }

    pub(crate) fn budgets(&self) -> impl Iterator<Item = &DisruptionBudget> {
        self.budgets.values()
    }

    /// A pod with GPUs, waiting or placed.
    pub(crate) fn pod(&self, uid: &PodUid) -> Option<&GpuPod> {
        match self.pods.get(uid)? {
            PodEntry::Gpu(pod) => Some(pod),
            PodEntry::Plain => None,
        }
    }

    /// All pods with GPUs, in no particular order.
    pub(crate) fn gpu_pods(&self) -> impl Iterator<Item = (&PodUid, &GpuPod)> {
        self.pods.iter().filter_map(|(uid, record)| match record {
            PodEntry::Gpu(pod) => Some((uid, pod.as_ref())),
            PodEntry::Plain => None,
        })
    }
}
