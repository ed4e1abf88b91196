//! The state and the resources that all handlers share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant, SystemTime};

use tessera_cluster::{Client, PodNotice};
use tokio::sync::Semaphore;

use super::MAX_CONCURRENT_CALLS;
use super::retry_wait::RetryWait;
use crate::dashboard::Dashboard;
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
    /// Number of times the state was locked for writing.
    writes: AtomicU64,
    /// Cached verdicts of filter and prioritize.
    pub(crate) verdicts: VerdictCache,
    /// Short waits for pods that fit nowhere.
    pub retry_wait: RetryWait,
    pub(super) call_permits: Semaphore,
    started: Instant,
}

/// Leadership state of this replica, with the end of its permission to bind.
#[derive(Debug, Default)]
pub struct Leadership {
    /// True if this replica leads and all initial lists are complete.
    ready: AtomicBool,
    /// End of the permission to bind, in milliseconds since the start of the process.
    until: AtomicU64,
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
            writes: AtomicU64::new(0),
            verdicts: VerdictCache::default(),
            retry_wait: RetryWait::default(),
            call_permits: Semaphore::new(MAX_CONCURRENT_CALLS),
            started: Instant::now(),
        }
    }

    /// Adds events about pods.
    #[must_use]
    pub fn with_notices(self, notices: Notices) -> Self {
        Self { notices, ..self }
    }

    /// Writes an event about a pod.
    pub(super) fn notify(
        &self,
        (namespace, pod, uid): (&str, &str, &str),
        reason: NoticeReason,
        message: String,
    ) {
        self.notices.send(
            self.now(),
            PodNotice {
                namespace: namespace.to_owned(),
                pod: pod.to_owned(),
                uid: uid.to_owned(),
                is_warning: reason != NoticeReason::GpusChosen,
                reason: reason.to_string(),
                message,
            },
        );
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
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.is_ready() && now < self.leadership.until.load(Ordering::Acquire)
    }

    /// Permits binds for `within` from `begun` on, because the lease was renewed.
    pub fn lead_until(&self, begun: Duration, within: Duration) {
        let until = u64::try_from((begun + within).as_millis()).unwrap_or(u64::MAX);
        self.leadership.until.store(until, Ordering::Release);
        self.metrics.set_leading(true);
    }

    /// Sets whether all initial lists are complete.
    pub fn set_ready(&self, ready: bool) {
        self.leadership.ready.store(ready, Ordering::Release);
    }

    /// Ends the leadership of this replica.
    pub fn follow(&self) {
        self.set_ready(false);
        self.leadership.until.store(0, Ordering::Release);
        self.metrics.set_leading(false);
    }
}

impl StateAccess for App {
    fn with_state<T>(&self, at: impl FnOnce(&State) -> T) -> T {
        at(&self.read())
    }
}
