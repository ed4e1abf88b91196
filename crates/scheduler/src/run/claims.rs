//! Watches claims and device classes where the API server serves them.

use std::sync::Arc;
use std::time::Duration;

use tessera_cluster::{FailureLog, claims, watch};
use tessera_wire::tessera::dra::DRIVER;

use super::watches::watch_objects;
use crate::server::App;
use crate::state::StateEvent;

/// Interval between attempts to learn whether the API server serves claims.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Watches claims and classes. Calls `claims_listed` and `classes_listed` after complete lists, or at once if the API
/// server serves none.
pub(super) async fn watch_claims(
    app: Arc<App>,
    claims_listed: impl Fn() + Send,
    classes_listed: impl Fn() + Send,
) {
    let mut trouble = FailureLog::default();
    loop {
        match claims::are_served(&app.client).await {
            Ok(true) => break,
            Ok(false) => {
                tracing::warn!(
                    "the API server does not serve resource.k8s.io/v1, so --dra has no effect; Kubernetes 1.34 and later serve it"
                );
                claims_listed();
                classes_listed();
                return;
            }
            Err(error) => {
                let error = error.to_string();
                if trouble.record(&error) {
                    tracing::warn!(error, "cannot learn whether the API server serves claims; retrying");
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
    let claims = watch_objects(
        Arc::clone(&app),
        "claims",
        watch::claims(app.client.clone()),
        StateEvent::Claim,
        claims_listed,
    );
    let classes = watch_objects(
        Arc::clone(&app),
        "classes",
        watch::classes(app.client.clone()),
        StateEvent::Class,
        classes_listed,
    );
    // Evictions for claims need to know which nodes offer GPUs to claims.
    let slices = async {
        if app.read().may_evict() {
            let changes = watch::slices(app.client.clone(), DRIVER);
            watch_objects(Arc::clone(&app), "slices", changes, StateEvent::Slice, || {}).await;
        }
    };
    tokio::join!(claims, classes, slices);
}
