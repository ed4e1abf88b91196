//! The web pages and their JSON API, made from the state that answers kube-scheduler. Everything is
//! read-only.
//!
//! [`view`] is pure: it converts the state to values. [`decisions`] stores recent answers. The
//! other modules speak HTTP.

mod agent;
mod assets;
mod changes;
pub mod decisions;
mod forward;
mod http;
pub mod login;
mod lookup;
mod stream;
pub mod usage;
pub mod view;

use std::net::SocketAddr;
use std::sync::{PoisonError, RwLock};

use tokio::sync::Semaphore;

pub use self::agent::AgentReader;
pub(crate) use self::forward::{Forwarder, forward};
pub(crate) use self::http::MAX_MANIFEST_BYTES;
pub use self::http::routes;
pub(crate) use self::http::run_view;
use self::{decisions::Decisions, stream::ChangeFeed, usage::UsageLog};

/// Views made concurrently, so that users do not slow down kube-scheduler.
const MAX_CONCURRENT_VIEWS: usize = 4;

/// The data of the dashboard besides the state.
#[derive(Debug)]
pub struct Dashboard {
    /// The most recent answers to kube-scheduler.
    pub decisions: Decisions,
    feed: ChangeFeed,
    view_permits: Semaphore,
    leader: RwLock<Leader>,
    /// What pods use of the GPUs they hold.
    pub usage: RwLock<UsageLog>,
}

/// Another replica that leads.
#[derive(Clone, Debug, Default)]
struct Leader {
    identity: Option<String>,
    /// Address of its pages, if requests may be forwarded there.
    pages: Option<SocketAddr>,
    /// Address of its verbs, if calls may be forwarded there.
    verbs: Option<SocketAddr>,
}

impl Default for Dashboard {
    fn default() -> Self {
        Self {
            decisions: Decisions::default(),
            feed: ChangeFeed::default(),
            view_permits: Semaphore::new(MAX_CONCURRENT_VIEWS),
            leader: RwLock::default(),
            usage: RwLock::default(),
        }
    }
}

impl Dashboard {
    /// Sets another leader and the addresses of its pages and verbs, as the lease names them.
    pub fn set_leader(&self, identity: Option<&str>, pages: Option<SocketAddr>, verbs: Option<SocketAddr>) {
        let leader = Leader { identity: identity.map(str::to_owned), pages, verbs };
        *self.leader.write().unwrap_or_else(PoisonError::into_inner) = leader;
    }

    fn leader(&self) -> Option<String> {
        self.leader.read().unwrap_or_else(PoisonError::into_inner).identity.clone()
    }

    pub(crate) fn leader_verbs(&self) -> Option<SocketAddr> {
        self.leader.read().unwrap_or_else(PoisonError::into_inner).verbs
    }

    fn leader_pages(&self) -> Option<SocketAddr> {
        self.leader.read().unwrap_or_else(PoisonError::into_inner).pages
    }
}
