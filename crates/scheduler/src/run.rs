//! Keeping the lease, and the state fed while we hold it.

mod watches;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tessera_cluster::FailureLog;
use tessera_cluster::get_pod;
use tessera_cluster::lease::{Candidate, LeaseTiming};
use tessera_cluster::watch;
use tessera_core::forecast::Forecast;
use tessera_wire::{foreign::unhealthy, tessera::rules};
use tokio::sync::watch as signal;
use tokio::task::JoinSet;

use self::watches::{watch_budgets, watch_objects, watch_quota, watch_static_table, watch_unhealthy};
use crate::server::App;
use crate::state::{ClusterEvent, SchedulerSettings, State};

/// How the replica takes part.
#[derive(Clone, Debug)]
pub struct Membership {
    /// Who it is: another one for every process.
    pub identity: String,
    /// Where the lease lies.
    pub namespace: String,
    /// Its name.
    pub lease: String,
    /// How long things take.
    pub timing: LeaseTiming,
}

/// How often bookings in doubt and the forecast are looked at.
const TICK: Duration = Duration::from_secs(1);

/// How long the API server may take to tell of a pod in doubt.
const ASK_WITHIN: Duration = Duration::from_secs(3);

/// Nodes judged by a new forecast before others may have the state.
const JUDGED_AT_ONCE: usize = 512;

/// Takes part in the election and serves while it leads, until `stop` fires. The lease is given back then.
pub async fn lead(
    app: Arc<App>,
    settings: SchedulerSettings,
    membership: Membership,
    table: Option<PathBuf>,
    stop: impl Future<Output = ()>,
) {
    let Membership { identity, namespace, lease, timing } = membership;
    let candidate = Candidate::new(app.client.clone(), &namespace, &lease, identity, timing);
    let mut candidate = candidate.with_annotations(rules::print(&settings.rules()));
    let mut tasks_of_term: Option<LeaderTasks> = None;
    let mut trouble = FailureLog::default();
    let mut stop = std::pin::pin!(stop.fuse());
    loop {
        let begun = app.now().steady;
        let polled = candidate.poll().await;
        if polled.is_ok() && trouble.clear() {
            tracing::info!("the lease can be reached again");
        }
        match polled {
            Ok(true) => {
                let term = candidate.term();
                if tasks_of_term.as_ref().is_none_or(|tasks_of_term| tasks_of_term.term != term) {
                    tracing::info!(term, "leading");
                    app.follow();
                    end(tasks_of_term.take()).await;
                    tasks_of_term = Some(LeaderTasks::begin(&app, &settings, table.clone(), term));
                }
                app.lead_until(begun, timing.renew_within);
            }
            Ok(false) => {
                app.follow();
                if tasks_of_term.is_some() {
                    tracing::warn!(leader = candidate.other_leader(), "somebody else leads");
                    end(tasks_of_term.take()).await;
                }
                app.dashboard.set_leader(candidate.other_leader());
            }
            // Answers go on from memory; binds stop when the lease has run out.
            Err(error) => {
                if trouble.record(&error.to_string()) {
                    tracing::warn!(
                        "cannot take or renew the lease {namespace}/{lease}, will try again: {error}"
                    );
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(timing.retry) => {}
            () = &mut stop => break,
        }
    }
    app.follow();
    end(tasks_of_term).await;
    if let Err(error) = candidate.resign().await {
        tracing::warn!(%error, "cannot give the lease {namespace}/{lease} back; others lead once it has run out");
    }
}

/// The tasks of a leader.
struct LeaderTasks {
    /// Of the election, for which they were begun.
    term: u64,
    tasks: JoinSet<()>,
}

/// Ends the tasks of a leader. After that none of them touches the state.
async fn end(tasks_of_term: Option<LeaderTasks>) {
    if let Some(mut tasks_of_term) = tasks_of_term {
        tasks_of_term.tasks.shutdown().await;
    }
}

impl LeaderTasks {
    /// Starts from nothing: lists made after the lease was taken show everything earlier leaders did.
    fn begin(app: &Arc<App>, settings: &SchedulerSettings, table: Option<PathBuf>, term: u64) -> Self {
        *app.write() = State::new(settings.clone());
        let (listed, all_listed) = signal::channel(Lists::default());
        let listed = Arc::new(listed);
        let client = || app.client.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(watch_objects(
            Arc::clone(app),
            "nodes",
            watch::nodes(client()),
            ClusterEvent::Node,
            mark(&listed, |lists| &mut lists.nodes),
        ));
        tasks.spawn(watch_objects(
            Arc::clone(app),
            "pods",
            watch::pods(client()),
            ClusterEvent::Pod,
            mark(&listed, |lists| &mut lists.pods),
        ));
        match &settings.quota {
            Some(quota) => {
                let changes = watch::config_map(client(), &quota.namespace, &quota.name);
                tasks.spawn(watch_quota(
                    Arc::clone(app),
                    quota.origin(),
                    changes,
                    mark(&listed, |lists| &mut lists.quota),
                ));
            }
            None => mark(&listed, |lists| &mut lists.quota)(),
        }
        let changes = watch::config_maps(client(), unhealthy::NAMESPACE);
        tasks.spawn(watch_unhealthy(Arc::clone(app), changes, mark(&listed, |lists| &mut lists.unhealthy)));
        tasks.spawn(watch_budgets(Arc::clone(app), watch::budgets(client())));
        if let Some(path) = table {
            tasks.spawn(watch_static_table(Arc::clone(app), path));
        }
        tasks.spawn(maintain(Arc::clone(app), all_listed));
        Self { term, tasks }
    }
}

/// Which lists are complete.
#[derive(Debug, Default, Clone, Copy)]
struct Lists {
    nodes: bool,
    pods: bool,
    quota: bool,
    unhealthy: bool,
}

fn mark(listed: &Arc<signal::Sender<Lists>>, which: fn(&mut Lists) -> &mut bool) -> impl Fn() + Send + use<> {
    let listed = Arc::clone(listed);
    move || listed.send_modify(|lists| *which(lists) = true)
}

/// Becomes ready when everything is known, then looks ahead and settles doubts.
async fn maintain(app: Arc<App>, mut lists: signal::Receiver<Lists>) {
    let complete = |lists: &Lists| lists.nodes && lists.pods && lists.quota && lists.unhealthy;
    if lists.wait_for(complete).await.is_err() {
        return;
    }
    refresh_forecast(&app).await;
    app.set_ready(true);
    tracing::info!("ready");
    loop {
        tokio::time::sleep(TICK).await;
        resolve_uncertain_bindings(&app).await;
        refresh_forecast(&app).await;
    }
}

/// Asks the API server about pods whose bindings it left unanswered.
async fn resolve_uncertain_bindings(app: &App) {
    let doubts = app.read().uncertain_bindings(app.now());
    for doubt in doubts {
        let asked = get_pod(&app.client, &doubt.namespace, &doubt.name);
        let error = match tokio::time::timeout(ASK_WITHIN, asked).await {
            Ok(Ok(found)) => {
                app.write().resolve_uncertain(&doubt, found, app.now());
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {ASK_WITHIN:?}"),
        };
        tracing::warn!(
            error,
            "cannot learn whether pod {}/{} was bound; its GPUs stay booked, and the API server is asked again",
            doubt.namespace,
            doubt.name
        );
    }
}

/// Makes a forecast where one is due, and judges the nodes by it for the kinds of pods that come before anybody has to wait for
/// that. Has the state only to take what the forecast is made from, and then for a few nodes at a time.
async fn refresh_forecast(app: &App) {
    let due = app.read().free_capacity_if_due();
    let Some(remains) = due else { return };
    let workload = app.write().begin_forecast(&remains);
    let making = tokio::task::spawn_blocking(move || Arc::new(Forecast::new(&workload, &remains)));
    let Ok(forecast) = making.await else { return };
    let mut kinds = app.verdicts.under(&forecast);
    for kind in &mut kinds {
        let mut begin = 0;
        while begin < app.read().ledger().positions() {
            kind.judge(&app.read(), begin..begin + JUDGED_AT_ONCE);
            begin += JUDGED_AT_ONCE;
            tokio::task::yield_now().await;
        }
    }
    app.write().adopt_forecast(forecast);
    app.verdicts.put(kinds);
}
