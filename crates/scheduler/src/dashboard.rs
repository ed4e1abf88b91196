//! What people look at: pages, and the JSON API behind them, made from the same state that answers kube-scheduler.
//!
//! [`view`] is pure: from the state to values. [`decisions`] remembers what was answered. The rest speaks HTTP. Nothing here
//! changes anything.

mod agent;
mod assets;
mod changes;
pub mod decisions;
mod http;
mod lookup;
mod stream;
pub mod view;

use std::sync::{PoisonError, RwLock};

use tokio::sync::Semaphore;

pub(crate) use self::http::aside;
pub use self::http::routes;
use self::{decisions::Decisions, stream::ChangeFeed};

/// Views made at a time: people must not keep kube-scheduler waiting.
const TURNS: usize = 4;

/// What the dashboard remembers beside the state.
#[derive(Debug)]
pub struct Dashboard {
    /// The last answers to kube-scheduler.
    pub decisions: Decisions,
    feed: ChangeFeed,
    turns: Semaphore,
    leader: RwLock<Option<String>>,
}

impl Default for Dashboard {
    fn default() -> Self {
        Self {
            decisions: Decisions::default(),
            feed: ChangeFeed::default(),
            turns: Semaphore::new(TURNS),
            leader: RwLock::default(),
        }
    }
}

impl Dashboard {
    /// Who else leads, by the name in the lease.
    pub fn set_leader(&self, name: Option<&str>) {
        *self.leader.write().unwrap_or_else(PoisonError::into_inner) = name.map(str::to_owned);
    }

    fn leader(&self) -> Option<String> {
        self.leader.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
