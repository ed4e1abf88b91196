//! Live updates as server-sent events, at a limited rate.

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

/// Interval between two checks for changes.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Concurrent streams. Each holds a connection and a permit of the pages.
const MAX_STREAMS: usize = 64;

/// Nodes named in one event. With more changed nodes, clients load all their data again.
const MAX_NAMED_NODES: usize = 200;

/// Interval of keep-alive comments, so that proxies do not close an idle stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The newest event, and whether a task produces events.
#[derive(Debug)]
pub(super) struct ChangeFeed {
    notice: watch::Sender<Arc<ChangeNotice>>,
    gathering: AtomicBool,
}

/// The changes since the previous version. A client that missed a version loads its data again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ChangeNotice {
    /// Version that grows by one with every event; it restarts with the process.
    version: u64,
    /// True if this replica leads and knows the cluster.
    ready: bool,
    /// Names of changed nodes, unless there are too many.
    nodes: Vec<String>,
    /// True if too many nodes changed to name them.
    many_nodes: bool,
    /// True if the waiting pods changed.
    waiting: bool,
    /// True if the quotas changed.
    quota: bool,
    /// Sequence number of the newest decision.
    decisions: u64,
}

impl Default for ChangeFeed {
    fn default() -> Self {
        Self { notice: watch::Sender::default(), gathering: AtomicBool::new(false) }
    }
}

pub(super) async fn follow(FromApp(app): FromApp<Arc<App>>) -> Response {
    let feed = &app.dashboard.feed;
    if feed.notice.receiver_count() >= MAX_STREAMS {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "too many live streams are open; poll instead");
    }
    let notice = feed.notice.subscribe();
    if !feed.gathering.swap(true, Ordering::AcqRel) {
        tokio::spawn(gather(Arc::clone(&app)));
    }
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Sse::new(events(notice)).keep_alive(keep_alive).into_response()
}

/// Streams the current event and every newer one. A slow client gets only the newest event.
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

/// Produces events while any stream is open.
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
            let many_nodes = changes.nodes.len() > MAX_NAMED_NODES;
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
        tokio::time::sleep(CHECK_INTERVAL).await;
        if feed.notice.receiver_count() == 0 {
            feed.gathering.store(false, Ordering::Release);
            // A stream may have been opened between the check and the store.
            if feed.notice.receiver_count() == 0 || feed.gathering.swap(true, Ordering::AcqRel) {
                gathering.ended = true;
                return;
            }
        }
    }
}

/// Clears the flag if the task is cancelled, so that another task can start.
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
