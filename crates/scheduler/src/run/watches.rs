//! Applies the events of watches and changed files to the state.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use tessera_cluster::FailureLog;
use tessera_cluster::watch::WatchChange;
use tessera_core::quota::{Quota, UnreadableLimits};
use tessera_serve::files::Files;
use tessera_wire::foreign::disruption::Budget;
use tessera_wire::foreign::resource_quota::ResourceQuota;
use tessera_wire::foreign::{quota, unhealthy};

use crate::server::App;
use crate::state::{StateEvent, UnhealthyGpus, WatchEvent};

/// Watch events applied per lock, so that an initial list does not lock the state for each object.
const EVENTS_PER_LOCK: usize = 512;

/// Applies the watch events of nodes or pods. Calls `complete` after each complete list.
pub(super) async fn watch_objects<T: Send + 'static>(
    app: Arc<App>,
    what: &'static str,
    changes: impl Stream<Item = WatchChange<T>> + Send,
    event: fn(WatchEvent<T>) -> StateEvent,
    complete: impl Fn() + Send,
) {
    let mut batches = std::pin::pin!(changes.ready_chunks(EVENTS_PER_LOCK));
    let mut trouble = FailureLog::default();
    while let Some(batch) = batches.next().await {
        let (mut listed, mut runs) = (false, None);
        let (has_news, unreadable) = {
            let mut state = app.write();
            let before = state.ledger().last_change();
            state.set_event_time(app.now());
            for change in batch {
                listed |= matches!(change, WatchChange::Listed);
                match watched(change) {
                    Ok(change) => {
                        if change.proves_connection() {
                            trouble.clear();
                            runs = Some(true);
                        }
                        state.handle(event(change));
                    }
                    Err(WatchLost(error)) => {
                        if trouble.record(&error) {
                            tracing::warn!(error, objects = what, "the watch was interrupted; reconnecting");
                        }
                        runs = Some(false);
                    }
                }
            }
            (state.ledger().last_change() != before, state.take_unreadable_reservations())
        };
        for (node, reason) in unreadable {
            tracing::warn!(
                %node,
                reason,
                "cannot read the reservations of a node; none of them counts until the annotation is corrected"
            );
        }
        if let Some(runs) = runs {
            app.metrics.watching(what, runs);
        }
        // A pod event that changes no node is no change: kube-scheduler itself updates the status of waiting pods.
        if has_news {
            app.retry_wait.record_change();
        }
        if listed {
            complete();
        }
    }
}

/// The reason why a watch was interrupted.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct WatchLost(String);

pub(super) fn watched<T>(change: WatchChange<T>) -> Result<WatchEvent<T>, WatchLost> {
    Ok(match change {
        WatchChange::Listing => WatchEvent::Listing,
        WatchChange::Set(object) => WatchEvent::Set(object),
        WatchChange::Gone(object) => WatchEvent::Gone(object),
        WatchChange::Listed => WatchEvent::Listed,
        WatchChange::Lost(reason) => return Err(WatchLost(reason)),
    })
}

/// Applies the quota ConfigMap. A missing ConfigMap means no limits.
pub(super) async fn watch_quota(
    app: Arc<App>,
    home: String,
    changes: impl Stream<Item = WatchChange<BTreeMap<String, String>>> + Send,
    complete: impl Fn() + Send,
) {
    let mut changes = std::pin::pin!(changes);
    let (mut shown, mut is_known, mut trouble) = (false, false, FailureLog::default());
    let take = |limits: Quota| {
        app.write().handle(StateEvent::Quota(limits));
        app.retry_wait.record_change();
    };
    while let Some(change) = changes.next().await {
        if !matches!(change, WatchChange::Lost(_) | WatchChange::Listing) {
            trouble.clear();
        }
        match change {
            WatchChange::Listing => shown = false,
            WatchChange::Set(data) => {
                shown = true;
                if let Some(limits) = limits(&data, &home, is_known) {
                    is_known = !matches!(limits.unreadable, UnreadableLimits::All(_));
                    take(limits);
                }
            }
            WatchChange::Gone(_) => {
                is_known = true;
                take(Quota::default());
            }
            WatchChange::Listed => {
                if !shown {
                    is_known = true;
                    take(Quota::default());
                }
                complete();
            }
            WatchChange::Lost(error) if trouble.record(&error) => {
                tracing::warn!(
                    error,
                    config = home,
                    "cannot watch the quota ConfigMap; the scheduler is not ready until it was read"
                );
            }
            WatchChange::Lost(_) => {}
        }
    }
}

/// Parses the limits. If the text cannot be parsed, the last limits stay in force. Without last limits all
/// namespaces are closed, because a new leader must not grant what a quota forbids.
fn limits(data: &BTreeMap<String, String>, home: &str, is_any_known: bool) -> Option<Quota> {
    match quota::parse(data.get(quota::DATA_KEY).map_or("{}", String::as_str), home) {
        Ok(limits) => {
            if let UnreadableLimits::Of(namespaces) = &limits.unreadable {
                for why in namespaces.values() {
                    tracing::warn!(
                        why,
                        "cannot parse the limits of a namespace; its pods get no GPUs until they are fixed"
                    );
                }
            }
            Some(limits)
        }
        Err(error) if is_any_known => {
            tracing::warn!(%error, "cannot parse the quota; the last limits stay in force");
            None
        }
        Err(error) => {
            tracing::error!(%error, "cannot parse the quota; no pod gets GPUs until it is fixed");
            Some(Quota::all_unreadable(error.to_string()))
        }
    }
}

/// Applies gpushare's ConfigMaps of unhealthy GPUs. Without permission to read them, only the nodes' own reports
/// count.
pub(super) async fn watch_unhealthy(
    app: Arc<App>,
    changes: impl Stream<Item = WatchChange<(String, BTreeMap<String, String>)>> + Send,
    complete: impl Fn() + Send,
) {
    let mut changes = std::pin::pin!(changes);
    let mut trouble = FailureLog::default();
    while let Some(change) = changes.next().await {
        let is_list = matches!(change, WatchChange::Listed);
        match watched(change) {
            Ok(change) => {
                if change.proves_connection() {
                    trouble.clear();
                }
                if let Some(change) = change.and_then(|(name, data)| unhealthy_gpus(&name, &data)) {
                    app.write().handle(StateEvent::Unhealthy(change));
                    app.retry_wait.record_change();
                }
            }
            Err(WatchLost(error)) => {
                if trouble.record(&error) {
                    tracing::warn!(
                        error,
                        "cannot watch the ConfigMaps unhealthy-gpu-NODE in kube-system; their GPUs are treated as healthy"
                    );
                }
                complete();
            }
        }
        if is_list {
            complete();
        }
    }
}

/// Parses a ConfigMap of unhealthy GPUs. Returns `None` for other ConfigMaps.
fn unhealthy_gpus(name: &str, data: &BTreeMap<String, String>) -> Option<UnhealthyGpus> {
    let (node, gpus, bad) = unhealthy::of_config_map(name, data)?;
    for error in bad {
        tracing::warn!(%error, name, "cannot parse an entry of the list of unhealthy GPUs; the entry is ignored");
    }
    Some(UnhealthyGpus { node: node.into(), gpus })
}

/// Applies PodDisruptionBudgets. They are advisory, so readiness does not wait for them.
pub(super) async fn watch_budgets(app: Arc<App>, changes: impl Stream<Item = WatchChange<Budget>> + Send) {
    let mut changes = std::pin::pin!(changes);
    let mut trouble = FailureLog::default();
    while let Some(change) = changes.next().await {
        match watched(change) {
            Ok(change) => {
                if change.proves_connection() {
                    trouble.clear();
                }
                app.write().handle(StateEvent::Budget(change));
            }
            Err(WatchLost(error)) if trouble.record(&error) => {
                tracing::warn!(error, "cannot watch PodDisruptionBudgets; victims are chosen without them");
            }
            Err(_) => {}
        }
    }
}

/// Applies ResourceQuotas. Without permission to read them, only the quota ConfigMap counts.
pub(super) async fn watch_resource_quotas(
    app: Arc<App>,
    changes: impl Stream<Item = WatchChange<ResourceQuota>> + Send,
    complete: impl Fn() + Send,
) {
    let mut changes = std::pin::pin!(changes);
    let mut trouble = FailureLog::default();
    while let Some(change) = changes.next().await {
        let is_list = matches!(change, WatchChange::Listed);
        match watched(change) {
            Ok(change) => {
                if change.proves_connection() {
                    trouble.clear();
                }
                app.write().handle(StateEvent::ResourceQuota(change));
                app.retry_wait.record_change();
            }
            Err(WatchLost(error)) => {
                if trouble.record(&error) {
                    tracing::warn!(
                        error,
                        "cannot watch ResourceQuotas; their limits of nvidia.com/gpumem and gpucores do not count"
                    );
                }
                complete();
            }
        }
        if is_list {
            complete();
        }
    }
}

/// Reads the table of policy `static` now and after each change.
pub(super) async fn watch_static_table(app: Arc<App>, path: PathBuf) {
    let take = |contents: &[Vec<u8>]| {
        let text = contents.first().map(|bytes| String::from_utf8_lossy(bytes)).unwrap_or_default();
        match tessera_wire::tessera::static_table::parse(&text) {
            Ok(table) => app.write().handle(StateEvent::Table(table)),
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "cannot parse the static table; the previous one stays in use");
            }
        }
    };
    let mut files = Files::new(&[&path]);
    match files.read_if_changed() {
        Ok(contents) => contents.iter().for_each(|contents| take(contents)),
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "cannot read the static table; policy static uses the shipped tables until it can be read")
        }
    }
    files.follow(take).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreadable_quota_never_lifts_limits() {
        let data = |json: &str| BTreeMap::from([(quota::DATA_KEY.to_owned(), json.to_owned())]);
        let limits = |data: &BTreeMap<String, String>, is_known| limits(data, "the ConfigMap", is_known);
        let good = data(r#"{"team":{"percent":100}}"#);
        assert!(limits(&good, false).unwrap().limits("team"));
        assert!(limits(&BTreeMap::new(), true).unwrap().namespaces.is_empty());
        assert_eq!(limits(&data("{"), true), None, "the last limits stay");
        let nothing = limits(&data("{"), false).unwrap();
        let why = nothing.why_unreadable("anybody").unwrap();
        assert!(why.starts_with("the ConfigMap cannot be read: EOF while parsing"), "{why}");
        let one = data(r#"{"team":{"percent":"all"},"other":{"percent":100}}"#);
        for is_known in [true, false] {
            let limits = limits(&one, is_known).unwrap();
            assert!(limits.why_unreadable("team").is_some() && limits.why_unreadable("other").is_none());
        }
    }
}
