//! A second look at pods that fit nowhere.
//!
//! kube-scheduler tries such a pod again when something has changed in the cluster, at once, and after that not for minutes. It and
//! we hear of a change at about the same time; if it is faster, we would refuse again what fits by now. So a pod that is
//! asked about again, without our having heard of any node that changed since we refused it, gets an answer when we have.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// How long kube-scheduler is kept waiting: watches of one API server are no further apart, unless something is wrong.
const WAIT: Duration = Duration::from_millis(100);

/// Others do not wait for what somebody has just waited for in vain: kube-scheduler tries all pods that fit nowhere again, one after the
/// other, and so at most a tenth of its time goes by like this.
const NOT_AGAIN_FOR: Duration = Duration::from_secs(1);

/// Refusals remembered; past that all are forgotten, which costs a second look.
const MOST: usize = 10_000;

/// What we have heard, and what we knew when we refused a pod.
#[derive(Debug)]
pub struct SecondLook {
    /// Counts the changes that the watches told.
    news: watch::Sender<u64>,
    /// The last wait that came to nothing: when it ended, and the news of the time.
    in_vain: Mutex<Option<(Instant, u64)>>,
    /// By the pod's UID: the news we had at its last refusal.
    refused: Mutex<HashMap<String, u64>>,
}

impl Default for SecondLook {
    fn default() -> Self {
        Self { news: watch::channel(0).0, in_vain: Mutex::default(), refused: Mutex::default() }
    }
}

impl SecondLook {
    /// The state has taken in what may change a verdict.
    pub fn heard(&self) {
        self.news.send_modify(|news| *news += 1);
    }

    /// A pod was refused everywhere. Returns after there is something new, or after a moment, if it is worth another
    /// look; `false` at once if it is not.
    pub(super) async fn is_due(&self, uid: &str) -> bool {
        let now = *self.news.borrow();
        if !self.is_worth_waiting(uid, now, Instant::now()) {
            return false;
        }
        let mut news = self.news.subscribe();
        let waited = tokio::time::timeout(WAIT, news.wait_for(|news| *news > now)).await;
        let Ok(Ok(heard)) = waited.map(|heard| heard.map(|heard| *heard)) else {
            self.waited_in_vain(now, Instant::now());
            return false;
        };
        self.remember(uid, heard);
        true
    }

    /// Whether the pod was refused before by what we know now, and nobody has just waited for more.
    fn is_worth_waiting(&self, uid: &str, news: u64, at: Instant) -> bool {
        let is_new = self.remember(uid, news) != Some(news);
        let last = *self.in_vain.lock().unwrap_or_else(PoisonError::into_inner);
        let is_vain = |(ended, known)| known == news && at.saturating_duration_since(ended) < NOT_AGAIN_FOR;
        !is_new && !last.is_some_and(is_vain)
    }

    fn waited_in_vain(&self, news: u64, at: Instant) {
        *self.in_vain.lock().unwrap_or_else(PoisonError::into_inner) = Some((at, news));
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
        let told = async {
            tokio::task::yield_now().await;
            look.heard();
        };
        let (due, ()) = tokio::join!(look.is_due("a"), told);
        assert!(due, "something came while it waited");
        assert!(!look.is_due("a").await, "nothing came");
    }

    #[test]
    fn pods_that_come_one_after_the_other_do_not_all_wait() {
        let (look, now) = (SecondLook::default(), Instant::now());
        for pod in ["a", "b"] {
            assert!(!look.is_worth_waiting(pod, 7, now), "the first time");
        }
        assert!(look.is_worth_waiting("a", 7, now));
        look.waited_in_vain(7, now);
        assert!(!look.is_worth_waiting("b", 7, now + NOT_AGAIN_FOR / 2), "a has just waited for it");
        assert!(look.is_worth_waiting("b", 7, now + NOT_AGAIN_FOR), "something else may have happened");
        assert!(!look.is_worth_waiting("b", 8, now), "we know what kube-scheduler knows");
        assert!(look.is_worth_waiting("b", 8, now), "nobody has waited for more than this");
    }
}
