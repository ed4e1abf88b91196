//! The scheduler's state: the view of the cluster, the pods that wait for GPUs, and bookings that are not confirmed
//! yet.
//!
//! The state is a pure value. Watch events and binds change it, the verbs read it, and the server and the run loop
//! around it do all IO.

mod access;
mod booking;
mod claims;
mod entries;
mod event;
mod evictions;
mod gangs;
mod guarantees;
mod hold_back;
mod node_reservations;
mod nodes;
mod passed_pods;
mod pod_groups;
mod pods;
mod policies;
mod quotas;
mod recent_uids;
mod releases;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tessera_core::admission::QuotaState;
use tessera_core::claim::ClaimUid;
use tessera_core::cluster_view::ClusterView;
use tessera_core::constraint::NodeConstraints;
use tessera_core::disruption::DisruptionBudget;
use tessera_core::forecast::{Forecast, Learner};
use tessera_core::grant::PodGrant;
use tessera_core::ledger::Ledger;
use tessera_core::placement::static_table::StaticTable;
use tessera_core::quota::{NamespaceUsage, PastUse, Quota};
use tessera_core::taint::Taint;
use tessera_core::units::{NodeName, PodUid};
use tessera_core::workload::Workload;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::disruption::Budget;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::foreign::quota;
use tessera_wire::tessera::{rules::Rules, static_table};

pub use self::access::StateAccess;
use self::booking::Bookings;
pub use self::booking::{BindOrder, BindOutcome, BindRefusal, BindStep, Timestamp, UncertainBinding};
pub(crate) use self::claims::ClaimGroup;
use self::claims::Claims;
pub use self::claims::{ClaimOutcome, ClaimPlan, ClaimRefusal, ClaimWait};
pub(crate) use self::entries::{GpuPod, NodeEntry};
pub use self::event::{StateEvent, UnhealthyGpus, WatchEvent};
use self::evictions::Evictions;
pub use self::evictions::{Claim, Claimant, EvictionOrder, EvictionReply, RoomPlan};
pub use self::gangs::GangNotice;
use self::gangs::Gangs;
pub(crate) use self::gangs::{GangStatus, reservation_name};
use self::hold_back::HoldBack;
use self::node_reservations::NodeReservations;
use self::nodes::Overlay;
pub(crate) use self::nodes::ReadableNode;
use self::pod_groups::PodGroups;
pub use self::pods::ListGeneration;
pub use self::policies::DefaultPolicy;
use self::quotas::Quotas;
use self::recent_uids::RecentUids;
use self::releases::Releases;
use crate::verb::filter::PassOn;

/// Default of [`SchedulerSettings::gang_timeout`]. kube-scheduler retries a pod after 10 s at the latest.
const DEFAULT_GANG_TIMEOUT: Duration = Duration::from_secs(120);

/// Default of [`SchedulerSettings::gang_hold_back`]. Most small jobs end within this time.
const DEFAULT_GANG_HOLD_BACK: Duration = Duration::from_secs(600);

/// Settings that stay fixed while the scheduler runs.
#[derive(Clone, Debug)]
pub struct SchedulerSettings {
    /// The policy of pods without the annotation `tessera.dev/policy`.
    pub policy: DefaultPolicy,
    /// The unit of `aliyun.com/gpu-mem` on nodes that publish none.
    pub memory_unit: MemoryUnit,
    /// The fitting nodes that kube-scheduler may choose from.
    pub pass_on: PassOn,
    /// The location of the quotas and the node labels they use; `None` turns quotas off.
    pub quota: Option<quota::QuotaSettings>,
    /// The kube-schedulers whose pods are bound.
    pub served: ServedSchedulers,
    /// True if policy `static` chooses only sets of its table.
    pub static_strict: bool,
    /// True if claims of dynamic resource allocation count, and pods with claims are bound.
    pub dra: bool,
    /// Time for which the GPUs of a gang stay reserved until all members are bound.
    pub gang_timeout: Duration,
    /// Time for which one waiting gang may hold back GPUs that become free.
    pub gang_hold_back: Duration,
    /// True if pods may be evicted in favour of others.
    pub evict: bool,
}

impl Default for SchedulerSettings {
    fn default() -> Self {
        Self {
            policy: DefaultPolicy::default(),
            memory_unit: MemoryUnit::default(),
            pass_on: PassOn::default(),
            quota: None,
            served: ServedSchedulers::default(),
            static_strict: false,
            dra: false,
            gang_timeout: DEFAULT_GANG_TIMEOUT,
            gang_hold_back: DEFAULT_GANG_HOLD_BACK,
            evict: false,
        }
    }
}

/// Names of kube-schedulers. A pod names its own in `schedulerName`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedSchedulers(pub Vec<String>);

impl ServedSchedulers {
    /// The name of a cluster's own kube-scheduler, which the API server writes to pods that name none.
    pub const DEFAULT: &'static str = "default-scheduler";
    /// The name of the second kube-scheduler in `deploy/scheduler-second`.
    pub const SECOND: &'static str = "tessera";

    fn serve(&self, name: &str) -> bool {
        let name = if name.is_empty() { Self::DEFAULT } else { name };
        self.0.iter().any(|served| served == name)
    }
}

impl Default for ServedSchedulers {
    fn default() -> Self {
        Self([Self::DEFAULT, Self::SECOND].map(str::to_owned).to_vec())
    }
}

impl SchedulerSettings {
    /// Returns the settings that the leader publishes on its lease, for a scheduler that uses the shipped static tables.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules {
            policy: Some(self.policy.0.clone()),
            unit: self.memory_unit,
            quota: self.quota.clone(),
            static_strict: self.static_strict,
            has_shipped_table: true,
        }
    }
}

/// The whole state. It is not `Clone`, because [`VerdictCache`](crate::verb::verdict_cache::VerdictCache)
/// identifies nodes by the revisions of one ledger.
#[derive(Debug)]
pub struct State {
    id: StateId,
    settings: SchedulerSettings,
    /// The nodes, what the pods hold of them, and what the namespaces use. Pods that wait and nodes that cannot be
    /// parsed are not part of it.
    view: ClusterView,
    /// Readable nodes at their position in the ledger, so that a scan of all nodes reads memory in order.
    readable: Vec<Option<NodeEntry>>,
    /// Nodes whose object cannot be parsed.
    unreadable: HashMap<NodeName, NodeEntry>,
    /// PreferNoSchedule taints by node; most clusters have none.
    soft_taints: HashMap<NodeName, Vec<Taint>>,
    /// Properties of GPU nodes that constraints of pods refer to, for explanations.
    constraints: HashMap<NodeName, NodeConstraints>,
    /// Resources outside Tessera's dialects, with the number of nodes that offer them.
    offered_resources: HashMap<String, usize>,
    /// Unhealthy GPUs according to gpushare's ConfigMaps.
    unhealthy: HashMap<NodeName, Overlay>,
    /// PodDisruptionBudgets by namespace and name.
    budgets: BTreeMap<(String, String), DisruptionBudget>,
    /// GPU pods that have not ended, waiting or placed. Of other pods only the view knows.
    gpu_pods: HashMap<PodUid, Box<GpuPod>>,
    gangs: Gangs,
    pod_groups: PodGroups,
    hold_back: Option<HoldBack>,
    /// The round of hold-backs under way. Each waiting gang has one turn in a round.
    hold_back_round: u64,
    evictions: Evictions,
    node_reservations: NodeReservations,
    bookings: Bookings,
    /// Pods that filter has passed to one node alone.
    passed_pods: RecentUids,
    claims: Claims,
    releases: Releases,
    /// Time of the newest event.
    event_time: Duration,
    /// The same time in seconds since 1970.
    event_unix_seconds: i64,
    ended: RecentUids,
    /// Pods that a list did not contain. Only the watch can bring them back.
    missing: RecentUids,
    quotas: Quotas,
    /// The use of ended pods of namespaces with a guarantee.
    past_use: PastUse,
    learner: Learner,
    forecast: Arc<Forecast>,
    table: Arc<StaticTable>,
    /// Number of pod lists begun so far.
    listings: u64,
    is_listing_pods: bool,
    /// Known pods that the current list has not contained yet.
    unlisted_pods: HashSet<PodUid>,
    unlisted_nodes: HashSet<NodeName>,
    unlisted_unhealthy: HashSet<NodeName>,
    /// Number of bookings rolled back.
    rolled_back: u64,
    /// Number of gang reservations that ended before all members were bound.
    unused_reservations: u64,
}

/// Identifies one state value; a new leader starts with a new state.
#[derive(Clone, Debug, Default)]
pub struct StateId(Arc<()>);

impl PartialEq for StateId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for StateId {}

impl State {
    /// Creates an empty state.
    #[must_use]
    pub fn new(settings: SchedulerSettings) -> Self {
        let table = StaticTable { strict: settings.static_strict, ..static_table::shipped() };
        Self {
            id: StateId::default(),
            settings,
            view: ClusterView::default(),
            readable: Vec::new(),
            unreadable: HashMap::new(),
            soft_taints: HashMap::new(),
            constraints: HashMap::new(),
            offered_resources: HashMap::new(),
            unhealthy: HashMap::new(),
            budgets: BTreeMap::new(),
            gpu_pods: HashMap::new(),
            gangs: Gangs::default(),
            pod_groups: PodGroups::default(),
            hold_back: None,
            hold_back_round: 0,
            evictions: Evictions::default(),
            node_reservations: NodeReservations::default(),
            bookings: Bookings::default(),
            passed_pods: RecentUids::default(),
            claims: Claims::default(),
            releases: Releases::default(),
            event_time: Duration::ZERO,
            event_unix_seconds: 0,
            ended: RecentUids::default(),
            missing: RecentUids::default(),
            quotas: Quotas::default(),
            past_use: PastUse::default(),
            learner: Learner::new(Workload::default()),
            forecast: Arc::default(),
            table: Arc::new(table),
            listings: 0,
            is_listing_pods: false,
            unlisted_pods: HashSet::new(),
            unlisted_nodes: HashSet::new(),
            unlisted_unhealthy: HashSet::new(),
            rolled_back: 0,
            unused_reservations: 0,
        }
    }

    /// Notes the time of the events that follow.
    pub fn set_event_time(&mut self, now: Timestamp) {
        self.event_time = now.steady;
        self.event_unix_seconds = now.unix_seconds();
    }

    /// Applies an event.
    pub fn handle(&mut self, event: StateEvent) {
        match event {
            StateEvent::Node(change) => self.handle_node(change),
            StateEvent::Pod(change) => self.handle_pod(change),
            StateEvent::Budget(change) => self.handle_budget(change),
            StateEvent::Unhealthy(change) => self.handle_unhealthy(change),
            StateEvent::Claim(change) => self.handle_claim(change),
            StateEvent::Class(change) => self.handle_class(change),
            StateEvent::Slice(change) => self.handle_slice(change),
            StateEvent::PodGroup(origin, change) => self.handle_pod_group(origin, change),
            StateEvent::PodGroupsWithdrawn(origin) => self.withdraw_pod_groups(origin),
            StateEvent::Quota(quota) => self.quotas.configure(quota),
            StateEvent::ResourceQuota(change) => self.quotas.handle(change),
            StateEvent::Table(table) => {
                self.table = Arc::new(StaticTable { strict: self.settings.static_strict, ..table });
            }
        }
        self.refresh_node_reservations();
    }

    fn handle_budget(&mut self, change: WatchEvent<Budget>) {
        let key = |budget: &Budget| (budget.metadata.namespace.clone(), budget.metadata.name.clone());
        match change {
            // The budgets are missing for a moment. They are advisory, so this is harmless.
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
                let holders = self.ledger().pods().filter(|holder| !ClaimUid::is_holder(holder));
                self.unlisted_pods = self.gpu_pods.keys().chain(holders).cloned().collect();
            }
            WatchEvent::Set(pod) => {
                let uid = PodUid(pod.metadata.uid.clone());
                // The event is outdated, because an ended pod never starts again.
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

    pub(crate) fn id(&self) -> &StateId {
        &self.id
    }

    pub(crate) fn cluster_view(&self) -> &ClusterView {
        &self.view
    }

    pub(crate) fn view_mut(&mut self) -> &mut ClusterView {
        &mut self.view
    }

    pub(crate) fn gang_timeout(&self) -> Duration {
        self.settings.gang_timeout
    }

    /// Returns the ledger of all grants.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        self.view.ledger()
    }

    pub(crate) fn pass_on(&self) -> PassOn {
        self.settings.pass_on
    }

    /// Returns the limits of the namespaces and their usage.
    #[must_use]
    pub fn quota(&self) -> (&Quota, &NamespaceUsage) {
        (self.quotas.in_force(), self.view.usage())
    }

    pub(crate) fn quota_state(&self) -> QuotaState<'_> {
        QuotaState { quota: self.quotas.in_force(), usage: self.view.usage() }
    }

    /// Returns whether a grant is only set aside for a pod whose GPUs are unknown.
    pub(crate) fn is_set_aside(&self, grant: &PodGrant) -> bool {
        self.view.is_set_aside(grant)
    }

    /// Returns the memory unit of nodes that do not publish theirs.
    pub(crate) fn memory_unit(&self) -> MemoryUnit {
        self.settings.memory_unit
    }

    /// Returns the number of bookings rolled back since the start.
    #[must_use]
    pub fn rolled_back(&self) -> u64 {
        self.rolled_back
    }

    /// Returns the number of bookings that the watch has not confirmed yet.
    #[must_use]
    pub fn unconfirmed(&self) -> usize {
        self.bookings.len()
    }

    pub(crate) fn budgets(&self) -> impl Iterator<Item = &DisruptionBudget> {
        self.budgets.values()
    }

    /// Returns a GPU pod, waiting or placed.
    pub(crate) fn pod(&self, uid: &PodUid) -> Option<&GpuPod> {
        self.gpu_pods.get(uid).map(AsRef::as_ref)
    }

    /// Returns all GPU pods in no particular order.
    pub(crate) fn gpu_pods(&self) -> impl Iterator<Item = (&PodUid, &GpuPod)> {
        self.gpu_pods.iter().map(|(uid, pod)| (uid, pod.as_ref()))
    }
}
