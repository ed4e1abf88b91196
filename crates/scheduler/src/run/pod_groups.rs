//! Watches the objects with the sizes of gangs, such as PodGroups and JobSets, where the API server serves them.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tessera_cluster::watch::{self, WatchChange};
use tessera_cluster::{FailureLog, is_served};
use tessera_wire::foreign::pod_group::PodGroupApi;

use super::watches::watched;
use crate::server::App;
use crate::state::StateEvent;

/// Interval at which the scheduler checks whether the API server serves the objects of a kind.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Interval between attempts while the API server does not answer.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Watches the objects of one kind whenever the API server serves them. Calls `complete` after the first complete
/// list, or as soon as it is known that they cannot be read.
pub(super) async fn watch_pod_groups(app: Arc<App>, api: PodGroupApi, complete: impl Fn() + Send) {
    let mut trouble = FailureLog::default();
    loop {
        match is_served(&app.client, api.group, api.version, api.plural).await {
            Ok(true) => {
                tracing::info!(
                    kind = api.kind,
                    group = api.group,
                    version = api.version,
                    "reading the sizes of gangs"
                );
                watch_while_served(&app, api, &complete).await;
                app.write().handle(StateEvent::PodGroupsWithdrawn(api.origin));
                tracing::info!(
                    kind = api.kind,
                    group = api.group,
                    version = api.version,
                    "the API server no longer serves these objects; their pods are placed one by one"
                );
            }
            Ok(false) => {
                complete();
                tokio::time::sleep(CHECK_INTERVAL).await;
            }
            Err(error) => {
                let error = error.to_string();
                if trouble.record(&error) {
                    tracing::warn!(
                        error,
                        kind = api.kind,
                        group = api.group,
                        "cannot learn whether the API server serves the sizes of gangs; retrying"
                    );
                }
                // An API group that cannot be asked for must not keep the scheduler from its work.
                complete();
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Applies the objects of one kind until the API server no longer serves them. A watch that fails otherwise is
/// repeated, and the objects known by then stay in force.
async fn watch_while_served(app: &App, api: PodGroupApi, complete: impl Fn()) {
    let mut changes = std::pin::pin!(watch::pod_groups(app.client.clone(), api));
    let mut trouble = FailureLog::default();
    while let Some(change) = changes.next().await {
        let is_list = matches!(change, WatchChange::Listed);
        match watched(change) {
            Ok(change) => {
                if change.proves_connection() {
                    trouble.clear();
                }
                app.write().handle(StateEvent::PodGroup(api.origin, change));
                app.retry_wait.record_change();
            }
            Err(lost) => {
                if matches!(is_served(&app.client, api.group, api.version, api.plural).await, Ok(false)) {
                    return;
                }
                let error = lost.to_string();
                if trouble.record(&error) {
                    tracing::warn!(
                        error,
                        kind = api.kind,
                        group = api.group,
                        "cannot watch the sizes of gangs; pods of groups that are not known are placed one by one"
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
