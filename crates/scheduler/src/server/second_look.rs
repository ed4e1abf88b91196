//! A second look at pods that fit nowhere.
//!
//! kube-scheduler tries such a pod again when something has changed in the cluster, at once, and after that not for minutes. It and
//! we hear of a change at about the same time; if it is faster, we would refuse again what fits by now. So a pod that is
//! asked about again, without our having heard anything since we refused it, gets an answer when we have.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

/// How long kube-scheduler is kept waiting: watches of one API server are no further apart, unless something is wrong.
const WAIT: Duration = Duration::from_millis(100);

/// Refusals remembered; past that all are forgotten, which costs a second look.
const MOST: usize = 10_000;

/// What we have heard, and what we knew when we refused a pod.
#[derive(Debug)]
pub struct SecondLook {
    /// Counts what the watches told.
    news: watch::Sender<u64>,
    /// By the pod's UID: the news we had at its last refusal.
    refused: Mutex<HashMap<String, u64>>,
}

impl Default for SecondLook {
    fn default() -> Self {
        Self { news: watch::channel(0).0, refused: Mutex::default() }
    }
}

impl SecondLook {
    /// The state has taken something in.
    pub fn heard(&self) {
        self.news.send_modify(|news| *news += 1);
    }

    /// A pod was refused everywhere. Returns after there is something new, or after a moment, if it is worth another
    /// look; `false` at once if it is not.
    pub(super) async fn is_due(&self, uid: &str) -> bool {
        let now = *self.news.borrow();
        if self.remember(uid, now) != Some(now) {
            return false;
        }
        let mut news = self.news.subscribe();
        let waited = tokio::time::timeout(WAIT, news.wait_for(|news| *news > now)).await;
        let Ok(Ok(heard)) = waited.map(|heard| heard.map(|heard| *heard)) else { return false };
        self.remember(uid, heard);
        true
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
}
