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

use super::changes::Prints;
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
pub(super) struct Hub {
    news: watch::Sender<Arc<News>>,
    gathering: AtomicBool,
}

/// What has changed since the version before. Whoever has missed a version looks at everything again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct News {
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

impl Default for Hub {
    fn default() -> Self {
        Self { news: watch::Sender::default(), gathering: AtomicBool::new(false) }
    }
}

pub(super) async fn follow(FromApp(app): FromApp<Arc<App>>) -> Response {
    let hub = &app.dashboard.hub;
    if hub.news.receiver_count() >= MOST_FOLLOWERS {
        return problem(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many pages are open; this one asks now and then instead",
        );
    }
    let news = hub.news.subscribe();
    if !hub.gathering.swap(true, Ordering::AcqRel) {
        tokio::spawn(gather(Arc::clone(&app)));
    }
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Sse::new(events(news)).keep_alive(keep_alive).into_response()
}

/// The news as it stands, then every newer one. A reader that is slow gets the newest and sees from the version what it missed.
fn events(news: watch::Receiver<Arc<News>>) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold((news, true), |(mut news, first)| async move {
        if !first && news.changed().await.is_err() {
            return None;
        }
        let now = Arc::clone(&news.borrow_and_update());
        let text = serde_json::to_string(&*now).unwrap_or_default();
        let event = Event::default().event("change").id(now.version.to_string()).data(text);
        Some((Ok(event), (news, false)))
    })
}

/// Looks for changes for as long as somebody listens.
async fn gather(app: Arc<App>) {
    let hub = &app.dashboard.hub;
    let mut writes = None;
    let mut prints = Prints::default();
    loop {
        let (ready, decisions) = (app.is_ready(), app.dashboard.decisions.last());
        let seen = app.writes();
        let changes = if writes == Some(seen) {
            super::changes::Changes::default()
        } else {
            writes = Some(seen);
            let fresh = Prints::of(&*app);
            let changes = fresh.since(&prints);
            prints = fresh;
            changes
        };
        hub.news.send_if_modified(|news| {
            if changes.is_empty() && news.ready == ready && news.decisions == decisions && news.version > 0 {
                return false;
            }
            let many_nodes = changes.nodes.len() > MOST_NAMED;
            *news = Arc::new(News {
                version: news.version + 1,
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
        if hub.news.receiver_count() == 0 {
            hub.gathering.store(false, Ordering::Release);
            // Somebody may have come just before that, and gone by.
            if hub.news.receiver_count() == 0 || hub.gathering.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }
}
