//! What all handlers share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant, SystemTime};

use tessera_cluster::{Client, PodNotice};
use tokio::sync::Semaphore;

use super::CALLS;
use super::retry_wait::RetryWait;
use crate::dashboard::Dashboard;
use crate::metrics::Metrics;
use crate::notices::{NoticeReason, Notices};
use crate::state::{State, StateAccess, Timestamp};
use crate::verb::verdict_cache::VerdictCache;

/// The state and the world around it.
pub struct App {
    state: RwLock<State>,
    /// Where bindings are sent.
    pub client: Client,
    /// What we tell of ourselves.
    pub metrics: Metrics,
    /// What we tell users of their pods.
    pub notices: Notices,
    /// Whether we lead.
    pub leadership: Leadership,
    /// What the dashboard remembers beside the state.
    pub dashboard: Dashboard,
    /// How often the state was opened for writing.
    writes: AtomicU64,
    /// What nodes said to kinds of pods.
    pub(crate) verdicts: VerdictCache,
    /// For pods that fit nowhere.
    pub retry_wait: RetryWait,
    pub(super) turns: Semaphore,
    started: Instant,
}

/// Whether we lead, and whether we know enough to.
#[derive(Debug, Default)]
pub struct Leadership {
    /// Leading, and all lists complete.
    ready: AtomicBool,
    /// Until when the lease lets us write, milliseconds since the start.
    until: AtomicU64,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("leadership", &self.leadership).finish_non_exhaustive()
    }
}

impl App {
    /// Nothing known yet, and not leading.
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
            turns: Semaphore::new(CALLS),
            started: Instant::now(),
        }
    }

    /// The same, telling users of their pods.
    #[must_use]
    pub fn with_notices(self, notices: Notices) -> Self {
        Self { notices, ..self }
    }

    /// Tells users something about their pod.
    pub(super) fn tell(
        &self,
        (namespace, pod, uid): (&str, &str, &str),
        reason: NoticeReason,
        message: String,
    ) {
        self.notices.tell(
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

    /// The state, to look at. A panic while it was written to would have left it half changed; but its methods only fail
    /// before they change anything.
    pub fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, to change.
    pub fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.writes.fetch_add(1, Ordering::Release);
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Grows whenever the state may have changed.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Acquire)
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Timestamp { steady: self.started.elapsed(), unix_nanos: unix.as_nanos() }
    }

    /// Whether this replica answers.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.leadership.ready.load(Ordering::Acquire)
    }

    /// Whether this replica may bind.
    #[must_use]
    pub fn may_write(&self) -> bool {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.is_ready() && now < self.leadership.until.load(Ordering::Acquire)
    }

    /// The lease lets us write for so long from a moment on.
    pub fn lead_until(&self, begun: Duration, within: Duration) {
        let until = u64::try_from((begun + within).as_millis()).unwrap_or(u64::MAX);
        self.leadership.until.store(until, Ordering::Release);
        self.metrics.set_leading(true);
    }

    /// All is known that has to be.
    pub fn set_ready(&self, ready: bool) {
        self.leadership.ready.store(ready, Ordering::Release);
    }

    /// Somebody else leads.
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
