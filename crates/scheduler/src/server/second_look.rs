//! A second look at pods that fit nowhere.
//!
//! kube-scheduler tries such a pod again when something has changed in the cluster, at once, and after that not for minutes. It and
//! we hear of a change at about the same time; if it is faster, we would refuse again what fits by now. So a pod that is
//! asked about again, without our having heard of any node that changed since we refused it, gets an answer when we have.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// How long kube-scheduler is kept waiting: watches of one API server are no further apart, unless something is wrong.
const WAIT: Duration = Duration::from_millis(100);

/// So many waits may come to nothing one after the other, and then one in each of these spans: pods that fit nowhere come again with
/// whatever happens in a busy cluster, and kube-scheduler does nothing else meanwhile.
const WAITS: u32 = 5;
const WAIT_EVERY: Duration = Duration::from_secs(2);

/// Refusals remembered; past that all are forgotten, which costs a second look.
const MOST: usize = 10_000;

/// What we have heard, and what we knew when we refused a pod.
#[derive(Debug)]
pub struct SecondLook {
    /// Counts the changes that the watches told.
    news: watch::Sender<u64>,
    patience: Mutex<Patience>,
    /// By the pod's UID: the news we had at its last refusal.
    refused: Mutex<HashMap<String, u64>>,
}

impl Default for SecondLook {
    fn default() -> Self {
        let patience = Mutex::new(Patience { waits: WAITS, since: Instant::now() });
        Self { news: watch::channel(0).0, patience, refused: Mutex::default() }
    }
}

/// How often kube-scheduler may be kept waiting.
#[derive(Debug)]
struct Patience {
    waits: u32,
    /// Since when there are so many.
    since: Instant,
}

impl Patience {
    /// Takes one wait, if there is any.
    fn take(&mut self, at: Instant) -> bool {
        let spans = at.saturating_duration_since(self.since).as_nanos() / WAIT_EVERY.as_nanos();
        if spans > 0 {
            self.waits = self.waits.saturating_add(u32::try_from(spans).unwrap_or(u32::MAX)).min(WAITS);
            self.since = at;
        }
        let may_wait = self.waits > 0;
        self.waits -= u32::from(may_wait);
        may_wait
    }

    /// A wait was worth it.
    fn give_back(&mut self) {
        self.waits = (self.waits + 1).min(WAITS);
    }
}

impl SecondLook {
    /// The state has taken in what may change a verdict.
    pub fn heard(&self) {
        self.news.send_modify(|news| *news += 1);
    }

    /// How often that was so.
    #[must_use]
    pub fn news(&self) -> u64 {
        *self.news.borrow()
    }

    /// A pod was refused everywhere. Returns after there is something new, or after a moment, if it is worth another
    /// look; `false` at once if it is not.
    pub(super) async fn is_due(&self, uid: &str) -> bool {
        let now = self.news();
        if self.remember(uid, now) != Some(now) || !self.patience().take(Instant::now()) {
            return false;
        }
        let mut news = self.news.subscribe();
        let waited = tokio::time::timeout(WAIT, news.wait_for(|news| *news > now)).await;
        let Ok(Ok(heard)) = waited.map(|heard| heard.map(|heard| *heard)) else { return false };
        self.patience().give_back();
        self.remember(uid, heard);
        true
    }

    fn patience(&self) -> MutexGuard<'_, Patience> {
        self.patience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The news at the refusal before this one, if it is remembered.
    fn remember(&self, uid: &str, news: u64) -> Option<u64> {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.len() >= MOST {
            refused.clear();
        }
        refused.insert(uid.to_owned(), news)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_who_comes_again_without_news_is_looked_at_twice() {
        let look = SecondLook::default();
        assert!(!look.is_due("a").await, "the first time");
        look.heard();
        assert!(!look.is_due("a").await, "we know what kube-scheduler knows");
        assert!(!look.is_due("a").await, "nothing came");
        let told = async {
            tokio::task::yield_now().await;
            look.heard();
        };
        let (due, ()) = tokio::join!(look.is_due("a"), told);
        assert!(due, "something came while it waited");
    }

    #[test]
    fn only_so_many_waits_come_to_nothing() {
        let begin = Instant::now();
        let mut patience = Patience { waits: WAITS, since: begin };
        let taken = |patience: &mut Patience, at| (0..100).filter(|_| patience.take(at)).count();
        assert_eq!(taken(&mut patience, begin), 5);
        assert_eq!(taken(&mut patience, begin + WAIT_EVERY / 2), 0);
        assert_eq!(taken(&mut patience, begin + WAIT_EVERY), 1);
        assert_eq!(taken(&mut patience, begin + WAIT_EVERY * 4), 3);
        assert_eq!(taken(&mut patience, begin + WAIT_EVERY * 1_000), 5);
        patience.give_back();
        assert_eq!(
            taken(&mut patience, begin + WAIT_EVERY * 1_000),
            1,
            "what came to something costs nothing"
        );
    }
}
