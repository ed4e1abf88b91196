//! The state and the resources that all handlers share.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant, SystemTime};

use serde::Deserialize;
use tessera_cluster::lease::LeaseTiming;
use tessera_cluster::{Client, Notice, NoticeKind};
use tessera_wire::bounded::Counted;
use tokio::sync::watch;

use super::calls::{CallPools, Caller};
use super::forward::CallSender;
use super::retry_wait::RetryWait;
use crate::dashboard::{AgentReader, Dashboard};
use crate::metrics::Metrics;
use crate::notices::{NoticeReason, Notices};
use crate::state::{State, StateAccess, Timestamp};
use crate::verb::verdict_cache::VerdictCache;

/// The state, the API client and everything else that handlers use.
pub struct App {
    state: RwLock<State>,
    /// The client of the API server.
    pub client: Client,
    /// The metrics of this replica.
    pub metrics: Metrics,
    /// Events for users about their pods.
    pub notices: Notices,
    /// Leadership state of this replica.
    pub leadership: Leadership,
    /// Recent decisions and live updates of the dashboard.
    pub dashboard: Dashboard,
    /// Reads current usage from the agents.
    pub agents: AgentReader,
    /// Number of times the state was locked for writing.
    writes: AtomicU64,
    /// Cached verdicts of filter and prioritize.
    pub(crate) verdicts: VerdictCache,
    /// Short waits for pods that fit nowhere.
    pub retry_wait: RetryWait,
    /// Sends calls to the leader while this replica waits, if it has a certificate for that.
    call_sender: OnceLock<CallSender>,
    verb_pools: CallPools,
    page_pools: CallPools,
    webhook_pools: CallPools,
    started: Instant,
}

/// Leadership state of this replica, with the end of its permission to bind.
#[derive(Debug, Default)]
pub struct Leadership {
    /// True if this replica leads and all initial lists are complete.
    ready: AtomicBool,
    /// End of the permission to bind, in milliseconds since the start of the process.
    until: AtomicU64,
    /// Time at which running requests of the leader are aborted, in milliseconds since the start of
    /// the process.
    abort_at: AtomicU64,
    /// Number of running requests of the leader.
    requests: watch::Sender<usize>,
    /// The value of `ready`, for calls that wait for it.
    readiness: watch::Sender<bool>,
    /// True if a kube-scheduler runs in the same pod.
    is_paired: AtomicBool,
    /// True if this replica waits and is of use: beside a kube-scheduler that does not lead while the leases can be
    /// read, or because it forwards calls to the leader.
    follows: AtomicBool,
    /// Time since which the kube-scheduler in the same pod leads without this replica, in milliseconds since the start
    /// of the process plus one. Zero if it does not.
    unserved_since: AtomicU64,
}

/// Longest time for which a call waits for this replica to lead, or for another one that it is forwarded to. kube-scheduler
/// gives up after 5 s, and retries a pod whose call failed after 1 s at the earliest.
pub(super) const READY_WAIT: Duration = Duration::from_secs(3);

/// Time after which a leading kube-scheduler without its extender is reported. A restarted extender may have to wait for
/// its lease, which is far shorter unless `--lease-seconds` or a slow API server lengthens it.
const UNSERVED_LIMIT: Duration = Duration::from_secs(30);

impl Leadership {
    /// Returns whether this replica waits, is ready to take over, and lets no call fail until then.
    #[must_use]
    pub fn follows(&self) -> bool {
        self.follows.load(Ordering::Acquire)
    }

    /// Waits until no request of the leader runs.
    pub async fn requests_ended(&self) {
        let mut requests = self.requests.subscribe();
        // The sender lives as long as `self`, so the wait cannot fail.
        drop(requests.wait_for(|requests| *requests == 0).await);
    }
}

/// A request of the leader was aborted. The API server may have executed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the API server did not answer in time")]
pub struct RequestAborted;

/// Counts a request until it ends.
struct RunningRequest<'a>(&'a watch::Sender<usize>);

impl<'a> RunningRequest<'a> {
    fn begin(requests: &'a watch::Sender<usize>) -> Self {
        requests.send_modify(|requests| *requests += 1);
        Self(requests)
    }
}

impl Drop for RunningRequest<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|requests| *requests -= 1);
    }
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("leadership", &self.leadership).finish_non_exhaustive()
    }
}

impl App {
    /// Creates an app that does not lead.
    #[must_use]
    pub fn new(state: State, client: Client) -> Self {
        Self {
            state: RwLock::new(state),
            client,
            metrics: Metrics::default(),
            notices: Notices::default(),
            leadership: Leadership::default(),
            dashboard: Dashboard::default(),
            agents: AgentReader::default(),
            writes: AtomicU64::new(0),
            verdicts: VerdictCache::default(),
            retry_wait: RetryWait::default(),
            call_sender: OnceLock::new(),
            verb_pools: CallPools::of(Caller::KubeScheduler),
            page_pools: CallPools::of(Caller::PageClient),
            webhook_pools: CallPools::of(Caller::ApiServer),
            started: Instant::now(),
        }
    }

    /// Adds events about pods.
    #[must_use]
    pub fn with_notices(self, notices: Notices) -> Self {
        Self { notices, ..self }
    }

    /// Sets how agents are read.
    #[must_use]
    pub fn with_agents(self, agents: AgentReader) -> Self {
        Self { agents, ..self }
    }

    /// Writes an event about a pod.
    pub(crate) fn notify(&self, pod: (&str, &str, &str), reason: NoticeReason, message: String) {
        self.notify_of(NoticeKind::Pod, pod, reason, message);
    }

    /// Queues an event about a claim with this namespace, name and UID.
    pub(crate) fn notify_claim(&self, claim: (&str, &str, &str), reason: NoticeReason, message: String) {
        self.notify_of(NoticeKind::ResourceClaim, claim, reason, message);
    }

    fn notify_of(
        &self,
        kind: NoticeKind,
        (namespace, name, uid): (&str, &str, &str),
        reason: NoticeReason,
        message: String,
    ) {
        let is_warning = reason.is_warning();
        let (namespace, name, uid) = (namespace.to_owned(), name.to_owned(), uid.to_owned());
        let reason = reason.to_string();
        self.notices.send(self.now(), Notice { kind, namespace, name, uid, is_warning, reason, message });
    }

    /// Returns what the running calls of this caller share.
    pub(super) fn pools(&self, caller: Caller) -> &CallPools {
        match caller {
            Caller::KubeScheduler => &self.verb_pools,
            Caller::PageClient => &self.page_pools,
            Caller::ApiServer => &self.webhook_pools,
        }
    }

    /// Parses the body of a call. All bodies of a caller in memory share one budget of elements.
    pub(crate) fn parse<'b, T: Deserialize<'b>>(
        &self,
        caller: Caller,
        body: &'b [u8],
    ) -> Result<Counted<T>, serde_json::Error> {
        self.pools(caller).elements.parse(body)
    }

    /// Locks the state for reading. A poisoned lock is used, because the methods of the state fail
    /// only before they change anything.
    pub fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state for writing.
    pub fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.writes.fetch_add(1, Ordering::Release);
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a counter that grows whenever the state may have changed.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Acquire)
    }

    /// Returns the current time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Timestamp { steady: self.started.elapsed(), unix_nanos: unix.as_nanos() }
    }

    /// Returns whether this replica leads and knows the whole cluster.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.leadership.ready.load(Ordering::Acquire)
    }

    /// Returns whether this replica may bind: it is ready and its lease is valid.
    #[must_use]
    pub fn may_write(&self) -> bool {
        self.is_ready() && self.has_lease()
    }

    /// Returns whether the lease of this replica is valid. It may still be reading the cluster.
    pub(super) fn has_lease(&self) -> bool {
        millis(self.started.elapsed()) < self.leadership.until.load(Ordering::Acquire)
    }

    /// Sends a request that only the leader may send. It is aborted after `timeout`, and when the lease
    /// was not renewed for so long that another replica may lead soon.
    pub async fn while_leading<T>(
        &self,
        timeout: Duration,
        request: impl Future<Output = T>,
    ) -> Result<T, RequestAborted> {
        let _running = RunningRequest::begin(&self.leadership.requests);
        let mut request = std::pin::pin!(request);
        let timed_out = self.started.elapsed() + timeout;
        loop {
            // Each renewal defers this moment.
            let abort_at = Duration::from_millis(self.leadership.abort_at.load(Ordering::Acquire));
            let left = abort_at.min(timed_out).saturating_sub(self.started.elapsed());
            if left.is_zero() {
                return Err(RequestAborted);
            }
            if let Ok(answer) = tokio::time::timeout(left, &mut request).await {
                return Ok(answer);
            }
        }
    }

    /// Permits binds, because the lease was renewed by a write that began at `begun`.
    pub fn lead_until(&self, begun: Duration, timing: LeaseTiming) {
        self.leadership.until.store(millis(begun + timing.renew_within), Ordering::Release);
        self.leadership.abort_at.store(millis(begun + timing.abort_within()), Ordering::Release);
        self.metrics.set_leading(true);
    }

    /// Records whether the kube-scheduler in the same pod leads, and whether the leases can be read.
    pub fn record_neighbour(&self, neighbour_leads: bool, are_leases_readable: bool) {
        let Leadership { is_paired, follows, unserved_since, .. } = &self.leadership;
        is_paired.store(true, Ordering::Release);
        follows.store(!neighbour_leads && are_leases_readable, Ordering::Release);
        let is_unserved = neighbour_leads && !self.is_ready();
        let since = match unserved_since.load(Ordering::Acquire) {
            0 if is_unserved => millis(self.started.elapsed()) + 1,
            since if is_unserved => since,
            _ => 0,
        };
        unserved_since.store(since, Ordering::Release);
    }

    /// Returns whether the kube-scheduler in the same pod leads for long without this replica. It should restart, so
    /// that another pod leads.
    #[must_use]
    pub fn is_neighbour_unserved(&self) -> bool {
        let since = self.leadership.unserved_since.load(Ordering::Acquire);
        since != 0 && millis(self.started.elapsed()) >= since + millis(UNSERVED_LIMIT)
    }

    /// Lets this replica forward calls to the leader while it waits.
    pub fn forward_calls(&self, sender: CallSender) {
        // The listeners are opened once.
        drop(self.call_sender.set(sender));
    }

    /// Returns how calls are sent to the leader, if this replica can do that.
    pub(super) fn call_sender(&self) -> Option<&CallSender> {
        self.call_sender.get()
    }

    /// Records that another replica leads, whose verbs have this address. Without one, the calls of kube-scheduler
    /// must not reach this replica.
    pub fn record_leader(&self, verbs: Option<SocketAddr>) {
        let forwards = self.call_sender.get().is_some() && verbs.is_some();
        self.leadership.follows.store(forwards, Ordering::Release);
    }

    /// Waits a moment until this replica is ready, if the kube-scheduler in the same pod may lead already.
    pub(super) async fn wait_until_ready(&self) {
        if self.is_ready() || !self.leadership.is_paired.load(Ordering::Acquire) {
            return;
        }
        let mut readiness = self.leadership.readiness.subscribe();
        // Without leadership in time the call gets its usual refusal.
        drop(tokio::time::timeout(READY_WAIT, readiness.wait_for(|ready| *ready)).await);
    }

    /// Sets whether all initial lists are complete.
    pub fn set_ready(&self, ready: bool) {
        self.leadership.ready.store(ready, Ordering::Release);
        self.leadership.readiness.send_replace(ready);
    }

    /// Ends the leadership of this replica. Its running requests end by themselves or are aborted.
    pub fn follow(&self) {
        self.set_ready(false);
        self.leadership.until.store(0, Ordering::Release);
        self.metrics.set_leading(false);
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl StateAccess for App {
    fn with_state<T>(&self, at: impl FnOnce(&State) -> T) -> T {
        at(&self.read())
    }
}
