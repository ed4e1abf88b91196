//! Carries out evictions while this replica leads: makes a plan for pods that wait, and evicts one pod after the other.

use std::sync::Arc;
use std::time::Duration;

use tessera_cluster::{EvictionOutcome, FailureLog};

use crate::notices::NoticeReason;
use crate::server::App;
use crate::state::{EvictionOrder, EvictionReply, GangNotice};

/// Interval between two rounds.
const ROUND_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout of an eviction.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(3);

/// Evictions of one round. A round ends early enough to notice that a gang has found room.
const MAX_EVICTIONS: usize = 50;

/// Makes room for waiting pods until the task is aborted.
pub(super) async fn evict(app: Arc<App>) {
    let mut trouble = FailureLog::default();
    loop {
        tokio::time::sleep(ROUND_INTERVAL).await;
        if !app.may_write() {
            continue;
        }
        plan(&app).await;
        for _ in 0..MAX_EVICTIONS {
            let order = app.read().next_eviction(app.now());
            let Some(order) = order else { break };
            carry_out(&app, &order, &mut trouble).await;
        }
    }
}

/// Ends plans that are over, and makes the next one.
async fn plan(app: &Arc<App>) {
    if app.read().has_evictions() {
        let ended = app.write().update_evictions(app.now());
        notify(app, ended);
    }
    let Some(claimant) = app.read().next_claimant(app.now()) else { return };
    let (worker, of, now) = (Arc::clone(app), claimant.clone(), app.now());
    let planned = tokio::task::spawn_blocking(move || worker.read().plan_evictions(&of, now)).await;
    let Ok(Some(plan)) = planned else {
        app.write().defer_evictions(claimant, app.now());
        return;
    };
    tracing::info!(%claimant, victims = plan.victims.len(), "making room for waiting pods");
    let begun = app.write().adopt_evictions(plan, app.now());
    notify(app, begun);
}

fn notify(app: &App, notice: Option<GangNotice>) {
    let Some(GangNotice { pods, message }) = notice else { return };
    tracing::info!(message, "evictions for waiting pods");
    for (namespace, name, uid) in &pods {
        app.notify((namespace, name, uid), NoticeReason::MakingRoom, message.clone());
    }
}

async fn carry_out(app: &App, order: &EvictionOrder, trouble: &mut FailureLog) {
    let EvictionOrder { uid, namespace, name, why } = order;
    let pod = format_args!("{namespace}/{name}").to_string();
    let sent = tessera_cluster::evict(&app.client, (namespace, name), &uid.0);
    let (outcome, reply) = match app.while_leading(EVICTION_TIMEOUT, sent).await {
        Ok(Ok(EvictionOutcome::Accepted)) => {
            tracing::info!(pod, why, "evicted a pod");
            app.notify((namespace, name, &uid.0), NoticeReason::EvictedForGpus, why.clone());
            ("accepted", EvictionReply::Accepted)
        }
        Ok(Ok(EvictionOutcome::Gone)) => ("gone", EvictionReply::Gone),
        Ok(Ok(EvictionOutcome::Refused(error))) => {
            tracing::info!(pod, error, "a disruption budget refuses an eviction; trying again");
            ("refused", EvictionReply::TryAgain)
        }
        Ok(Err(error)) => {
            let error = error.to_string();
            if trouble.record(&error) {
                tracing::warn!(
                    pod,
                    error,
                    "cannot evict a pod; trying again. Check the right to create pods/eviction"
                );
            }
            ("failed", EvictionReply::TryAgain)
        }
        Err(aborted) => {
            tracing::warn!(pod, error = %aborted, "cannot evict a pod; trying again");
            ("failed", EvictionReply::TryAgain)
        }
    };
    if reply == EvictionReply::Accepted {
        trouble.clear();
    }
    app.metrics.evicted(outcome);
    app.write().record_eviction(uid, reply, app.now());
}
