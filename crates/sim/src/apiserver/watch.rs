//! Watches: the events since a version and all later ones.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::kinds::ResourceKind;
use super::store::{Store, StoreEvent, Subscription};
use super::table;

/// Options of a watch.
#[derive(Debug, Clone, Copy)]
pub(super) struct WatchOptions {
    pub(super) bookmarks: bool,
    pub(super) timeout: Duration,
    /// Sends rows of a table instead of objects.
    pub(super) as_table: Option<table::Include>,
}

/// Interval of bookmarks, if the client wants them.
const BOOKMARK_EVERY: Duration = Duration::from_secs(60);

struct WatchStream {
    store: Arc<Store>,
    kind: &'static ResourceKind,
    options: WatchOptions,
    backlog: std::vec::IntoIter<StoreEvent>,
    queue: mpsc::UnboundedReceiver<StoreEvent>,
    ends: Instant,
    bookmark_at: Instant,
    sent_columns: bool,
}

/// Answers with a stream of events, one JSON object per line.
pub(super) fn answer(
    store: Arc<Store>,
    kind: &'static ResourceKind,
    subscription: Subscription,
    options: WatchOptions,
) -> Response {
    let watch = WatchStream {
        store,
        kind,
        options,
        backlog: subscription.backlog.into_iter(),
        queue: subscription.queue,
        ends: Instant::now() + options.timeout,
        // The first bookmark follows the backlog.
        bookmark_at: Instant::now(),
        sent_columns: false,
    };
    let lines = stream::unfold(watch, |mut watch| async move {
        let line = watch.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), watch))
    });
    ([("content-type", "application/json")], Body::from_stream(lines)).into_response()
}

impl WatchStream {
    async fn next(&mut self) -> Option<String> {
        if let Some(event) = self.backlog.next() {
            return Some(self.encode(&event));
        }
        let bookmark_at = if self.options.bookmarks { self.bookmark_at } else { self.ends };
        tokio::select! {
            biased;
            event = self.queue.recv() => {
                let mut lines = self.encode(&event?);
                while let Ok(event) = self.queue.try_recv() {
                    lines += &self.encode(&event);
                }
                Some(lines)
            }
            () = tokio::time::sleep_until(self.ends) => None,
            () = tokio::time::sleep_until(bookmark_at) => {
                self.bookmark_at = Instant::now() + BOOKMARK_EVERY;
                self.bookmark()
            }
        }
    }

    /// Returns a bookmark with the version up to which all events were sent. If an event has
    /// arrived meanwhile, returns that event instead.
    fn bookmark(&mut self) -> Option<String> {
        let version = self.store.version();
        match self.queue.try_recv() {
            Ok(event) => Some(self.encode(&event)),
            Err(mpsc::error::TryRecvError::Disconnected) => None,
            Err(mpsc::error::TryRecvError::Empty) => {
                let mut mark = json!({
                    "kind": self.kind.name, "apiVersion": self.kind.api_version(),
                    "metadata": { "resourceVersion": version.to_string(), "creationTimestamp": null },
                });
                if self.kind.plural == "pods" {
                    mark["spec"] = json!({ "containers": null });
                    mark["status"] = json!({});
                }
                Some(format!("{}\n", json!({ "type": "BOOKMARK", "object": mark })))
            }
        }
    }

    fn encode(&mut self, event: &StoreEvent) -> String {
        let Some(include) = self.options.as_table else {
            return format!("{{\"type\":\"{}\",\"object\":{}}}\n", event.kind, event.object.text);
        };
        let mut table = table::of(self.kind, std::slice::from_ref(&event.object), include);
        if std::mem::replace(&mut self.sent_columns, true) {
            table["columnDefinitions"] = serde_json::Value::Null;
        }
        format!("{}\n", json!({ "type": event.kind, "object": table }))
    }
}
