//! Live updates as server-sent events: what has changed, a few times a second at most, however much does.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::State as FromApp;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, stream};
use serde::Serialize;
use tokio::sync::watch;

use super::changes::Fingerprints;
use super::http::problem;
use crate::server::App;

/// How often changes are told.
const EVERY: Duration = Duration::from_millis(250);

/// Pages that are followed at a time; a connection each, of the 512 that kube-scheduler needs too.
const MOST_FOLLOWERS: usize = 64;

/// More nodes than this are not named: whoever shows any of them looks again.
const MOST_NAMED: usize = 200;

/// So that proxies do not take a quiet stream for a dead one.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The newest news, and whether somebody gathers it.
#[derive(Debug)]
pub(super) struct ChangeFeed {
    notice: watch::Sender<Arc<ChangeNotice>>,
    gathering: AtomicBool,
}

/// What has changed since the version before. Whoever has missed a version looks at everything again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ChangeNotice {
    /// Grows by one with every change told; starts anew with every process.
    version: u64,
    /// Whether this replica leads and knows the cluster.
    ready: bool,
    /// The nodes, by name, unless there are too many.
    nodes: Vec<String>,
    /// Whether there are too many to name.
    many_nodes: bool,
    /// Whether other pods wait than before.
    waiting: bool,
    /// Whether the limits are others.
    quota: bool,
    /// The number of the newest decision.
    decisions: u64,
}

impl Default for ChangeFeed {
    fn default() -> Self {
        Self { notice: watch::Sender::default(), gathering: AtomicBool::new(false) }
    }
}

pub(super) async fn follow(FromApp(app): FromApp<Arc<App>>) -> Response {
    let feed = &app.dashboard.feed;
    if feed.notice.receiver_count() >= MOST_FOLLOWERS {
        return problem(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many pages are open; this one asks now and then instead",
        );
    }
    let notice = feed.notice.subscribe();
    if !feed.gathering.swap(true, Ordering::AcqRel) {
        tokio::spawn(gather(Arc::clone(&app)));
    }
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Sse::new(events(notice)).keep_alive(keep_alive).into_response()
}

/// The news as it stands, then every newer one. A reader that is slow gets the newest and sees from the version what it missed.
fn events(notice: watch::Receiver<Arc<ChangeNotice>>) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold((notice, true), |(mut notice, first)| async move {
        if !first && notice.changed().await.is_err() {
            return None;
        }
        let now = Arc::clone(&notice.borrow_and_update());
        let text = serde_json::to_string(&*now).unwrap_or_default();
        let event = Event::default().event("change").id(now.version.to_string()).data(text);
        Some((Ok(event), (notice, false)))
    })
}

/// Looks for changes for as long as somebody listens.
async fn gather(app: Arc<App>) {
    let feed = &app.dashboard.feed;
    let mut gathering = Gathering { feed, ended: false };
    let mut writes = None;
    let mut prints = Fingerprints::default();
    loop {
        let (ready, decisions) = (app.is_ready(), app.dashboard.decisions.last());
        let seen = app.writes();
        let changes = if writes == Some(seen) {
            super::changes::Changes::default()
        } else {
            writes = Some(seen);
            let fresh = Fingerprints::of(&*app);
            let changes = fresh.since(&prints);
            prints = fresh;
            changes
        };
        feed.notice.send_if_modified(|notice| {
            if changes.is_empty()
                && notice.ready == ready
                && notice.decisions == decisions
                && notice.version > 0
            {
                return false;
            }
            let many_nodes = changes.nodes.len() > MOST_NAMED;
            *notice = Arc::new(ChangeNotice {
                version: notice.version + 1,
                ready,
                nodes: if many_nodes { Vec::new() } else { changes.nodes },
                many_nodes,
                waiting: changes.waiting,
                quota: changes.quota,
                decisions,
            });
            true
        });
        tokio::time::sleep(EVERY).await;
        if feed.notice.receiver_count() == 0 {
            feed.gathering.store(false, Ordering::Release);
            // Somebody may have come just before that, and gone by.
            if feed.notice.receiver_count() == 0 || feed.gathering.swap(true, Ordering::AcqRel) {
                gathering.ended = true;
                return;
            }
        }
    }
}

/// Somebody gathers. If he is broken off, another one may begin.
struct Gathering<'a> {
    feed: &'a ChangeFeed,
    ended: bool,
}

impl Drop for Gathering<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.feed.gathering.store(false, Ordering::Release);
        }
    }
}
