//! Watches: the history from a version on, and what comes.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Value, json};

use super::http::Query;
use super::path::Target;
use super::store::{Change, Store};

struct Watch {
    store: Arc<Store>,
    target: Target,
    query: Query,
    version: u64,
    changed: tokio::sync::watch::Receiver<u64>,
    hung_up: tokio::sync::watch::Receiver<u64>,
    /// Whether a bookmark is owed once the backlog is told.
    bookmark: bool,
    ended: bool,
}

/// A stream of events, one JSON object a line.
pub(super) fn answer(store: Arc<Store>, target: Target, query: Query, version: u64) -> Response {
    let watch = Watch {
        changed: store.changes(),
        hung_up: store.hang_ups(),
        bookmark: query.bookmarks,
        store,
        target,
        query,
        version,
        ended: false,
    };
    let lines = stream::unfold(watch, |mut watch| async move {
        let line = watch.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), watch))
    });
    ([("content-type", "application/json")], Body::from_stream(lines)).into_response()
}

impl Watch {
    async fn next(&mut self) -> Option<String> {
        let limit = self.query.timeout.unwrap_or(Duration::from_secs(300));
        let ends = tokio::time::sleep(limit);
        tokio::pin!(ends);
        loop {
            if self.ended {
                return None;
            }
            self.changed.borrow_and_update();
            match self.store.since(&self.target, self.version) {
                Err(problem) => {
                    self.ended = true;
                    return Some(line("ERROR", &problem.into_body()));
                }
                Ok((version, changes)) => {
                    self.version = version;
                    let events: String = changes.iter().filter_map(|change| self.event(change)).collect();
                    if !events.is_empty() {
                        return Some(events);
                    }
                    if std::mem::take(&mut self.bookmark) {
                        return Some(line("BOOKMARK", &self.mark()));
                    }
                }
            }
            tokio::select! {
                changed = self.changed.changed() => changed.ok()?,
                _ = self.hung_up.changed() => return None,
                () = &mut ends => return None,
            }
        }
    }

    fn mark(&self) -> Value {
        json!({
            "kind": self.target.kind(), "apiVersion": self.target.api_version,
            "metadata": { "resourceVersion": self.version.to_string(), "creationTimestamp": null },
            "spec": { "containers": null }, "status": {},
        })
    }

    /// What a change is to somebody who sees only what is selected.
    fn event(&self, change: &Change) -> Option<String> {
        let shown = |object: &Value| self.query.selects(&self.target, object);
        let before = change.before.as_deref().is_some_and(shown);
        let after = !change.is_deletion && shown(&change.object);
        let kind = match (before, after) {
            (false, false) => return None,
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
        };
        Some(line(kind, &change.object))
    }
}

fn line(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({ "type": kind, "object": object }))
}
