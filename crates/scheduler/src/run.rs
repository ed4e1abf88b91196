//! Leader election, and the tasks that keep the state current while this replica leads.

mod claims;
mod evictions;
mod neighbour;
mod pod_groups;
mod watches;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tessera_cluster::FailureLog;
use tessera_cluster::get_pod;
use tessera_cluster::lease::{Candidate, LeaseError, LeaseTiming, Turn, turn};
use tessera_cluster::watch;
use tessera_core::forecast::Forecast;
use tessera_wire::foreign::pod_group::POD_GROUP_APIS;
use tessera_wire::{
    foreign::unhealthy,
    tessera::rules::{self, Rules},
};
use tokio::sync::watch as signal;
use tokio::task::JoinSet;

pub use self::neighbour::Neighbour;
use self::neighbour::NeighbourWatch;
use self::watches::{
    watch_budgets, watch_objects, watch_quota, watch_resource_quotas, watch_static_table, watch_unhealthy,
};
use crate::notices::NoticeReason;
use crate::server::App;
use crate::state::{ClaimWait, GangNotice, SchedulerSettings, State, StateEvent};

/// The replica's part in the leader election.
#[derive(Clone, Debug)]
pub struct Membership {
    /// Identity of this process, different after every restart.
    pub identity: String,
    /// Namespace of the lease.
    pub namespace: String,
    /// Name of the lease.
    pub lease: String,
    /// Intervals of the election.
    pub timing: LeaseTiming,
    /// Address of the pages, if replicas that do not lead may forward requests there.
    pub pages: Option<SocketAddr>,
    /// Address of the verbs, if replicas that do not lead may forward calls there.
    pub verbs: Option<SocketAddr>,
    /// True if clients reach the replica by a Service, so that calls still arrive for a moment when it ends.
    pub is_behind_service: bool,
    /// The kube-scheduler in the same pod. The replica leads only while this one does.
    pub neighbour: Option<Neighbour>,
}

/// Interval between checks of uncertain bindings and of the forecast.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);

/// Time for which a replica that ends still answers calls. kube-proxy follows a change of the endpoints within a second.
const LAST_CALLS: Duration = Duration::from_secs(3);

/// Interval at which a replica that ends reads the lease.
const LAST_CALLS_INTERVAL: Duration = Duration::from_millis(200);

/// Timeout for reading a pod from the API server.
const READ_TIMEOUT: Duration = Duration::from_secs(3);

/// Nodes judged by a new forecast per lock of the state.
const NODES_PER_STEP: usize = 512;

/// Takes part in the leader election until `stop` completes, then releases the lease.
pub async fn lead(
    app: Arc<App>,
    settings: SchedulerSettings,
    membership: Membership,
    table: Option<PathBuf>,
    stop: impl Future<Output = ()>,
) {
    let Membership { identity, namespace, lease, timing, pages, verbs, is_behind_service, neighbour } =
        membership;
    let start = |neighbour: &Neighbour| NeighbourWatch::start(app.client.clone(), &namespace, neighbour);
    let mut neighbour = neighbour.as_ref().map(start);
    let candidate = Candidate::new(app.client.clone(), &namespace, &lease, identity, timing);
    let rules = Rules { has_shipped_table: table.is_none(), ..settings.rules() };
    let mut annotations = rules::print(&rules);
    annotations.extend(pages.map(|pages| (rules::PAGES.to_owned(), pages.to_string())));
    annotations.extend(verbs.map(|verbs| (rules::VERBS.to_owned(), verbs.to_string())));
    let mut candidate = candidate.with_annotations(annotations);
    let mut tasks_of_term: Option<LeaderTasks> = None;
    let mut trouble = FailureLog::default();
    let mut stop = std::pin::pin!(stop.fuse());
    loop {
        let neighbour_leads = neighbour.as_mut().map(NeighbourWatch::leads);
        let polled = match turn(neighbour_leads, candidate.held().is_some()) {
            Turn::Compete => candidate.poll().await,
            Turn::Observe => candidate.observe().await.map(|()| false),
            Turn::StepDown => {
                tracing::info!("the kube-scheduler of this pod lost its lease; another replica leads now");
                step_down(&app, &mut candidate, tasks_of_term.take()).await.map(|()| false)
            }
        };
        if let Some(neighbour_leads) = neighbour_leads {
            app.record_neighbour(neighbour_leads, polled.is_ok());
        }
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
                let now = app.now().steady;
                if let Some((since, timing)) = candidate.held() {
                    app.lead_until(now.saturating_sub(since), timing);
                }
            }
            Ok(false) => {
                app.follow();
                if tasks_of_term.is_some() {
                    tracing::warn!(leader = candidate.other_leader(), "another replica leads now");
                    end(tasks_of_term.take()).await;
                }
                record_leader(&app, &candidate, neighbour.is_some());
            }
            // Filter and prioritize still answer from memory. Binds stop when the lease expires.
            Err(error) => {
                if trouble.record(&error.to_string()) {
                    tracing::warn!(
                        %error, lease = %format_args!("{namespace}/{lease}"), "cannot take or renew the lease; retrying"
                    );
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(candidate.next_poll()) => {}
            () = NeighbourWatch::changed(neighbour.as_mut()) => {}
            () = &mut stop => break,
        }
    }
    if let Err(error) = step_down(&app, &mut candidate, tasks_of_term).await {
        tracing::warn!(%error, lease = %format_args!("{namespace}/{lease}"), "cannot release the lease; another replica leads after it expires");
    }
    if is_behind_service {
        answer_last_calls(&app, &mut candidate, neighbour.is_some()).await;
    }
}

/// Waits until every client of the Service knows that this replica has ended. Meanwhile its servers answer the API
/// server's calls of the webhook, and forward calls to the leader unless the replica is paired with a kube-scheduler.
async fn answer_last_calls(app: &App, candidate: &mut Candidate, is_paired: bool) {
    let end = tokio::time::Instant::now() + LAST_CALLS;
    while tokio::time::Instant::now() < end {
        if candidate.observe().await.is_ok() {
            record_leader(app, candidate, is_paired);
        }
        tokio::time::sleep(candidate.next_poll().min(LAST_CALLS_INTERVAL)).await;
    }
}

/// Records the replica that leads, as the lease names it.
fn record_leader(app: &App, candidate: &Candidate, is_paired: bool) {
    let leader = candidate.other_leader();
    let published = |key| leader.and_then(|_| candidate.published(key)?.parse().ok());
    let verbs = published(rules::VERBS);
    app.dashboard.set_leader(leader, published(rules::PAGES), verbs);
    if !is_paired {
        app.record_leader(verbs);
    }
}

/// Stops leading and releases the lease.
async fn step_down(
    app: &App,
    candidate: &mut Candidate,
    tasks_of_term: Option<LeaderTasks>,
) -> Result<(), LeaseError> {
    app.follow();
    end(tasks_of_term).await;
    // Another replica may lead as soon as the lease is released.
    app.leadership.requests_ended().await;
    candidate.resign().await
}

/// The tasks of the leader during one term.
struct LeaderTasks {
    term: u64,
    tasks: JoinSet<()>,
}

/// Stops the tasks of a leader. Afterwards no task changes the state.
async fn end(tasks_of_term: Option<LeaderTasks>) {
    if let Some(mut tasks_of_term) = tasks_of_term {
        tasks_of_term.tasks.shutdown().await;
    }
}

impl LeaderTasks {
    /// Starts with an empty state. Lists that begin after the lease was acquired show everything earlier leaders did.
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
            StateEvent::Node,
            mark(&listed, |lists| &mut lists.nodes),
        ));
        tasks.spawn(watch_objects(
            Arc::clone(app),
            "pods",
            watch::pods(client()),
            StateEvent::Pod,
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
        let [claims_listed, classes_listed] =
            [mark(&listed, |lists| &mut lists.claims), mark(&listed, |lists| &mut lists.classes)];
        if settings.dra {
            tasks.spawn(claims::watch_claims(Arc::clone(app), claims_listed, classes_listed));
        } else {
            claims_listed();
            classes_listed();
        }
        let changes = watch::config_maps(client(), unhealthy::NAMESPACE);
        tasks.spawn(watch_unhealthy(Arc::clone(app), changes, mark(&listed, |lists| &mut lists.unhealthy)));
        let changes = watch::resource_quotas(client());
        let complete = mark(&listed, |lists| &mut lists.resource_quotas);
        tasks.spawn(watch_resource_quotas(Arc::clone(app), changes, complete));
        for (number, api) in POD_GROUP_APIS.into_iter().enumerate() {
            let listed = Arc::clone(&listed);
            let complete = move || listed.send_modify(|lists| lists.pod_groups[number] = true);
            tasks.spawn(pod_groups::watch_pod_groups(Arc::clone(app), api, complete));
        }
        tasks.spawn(watch_budgets(Arc::clone(app), watch::budgets(client())));
        if let Some(path) = table {
            tasks.spawn(watch_static_table(Arc::clone(app), path));
        }
        tasks.spawn(crate::dashboard::usage::poll(Arc::clone(app)));
        if settings.evict {
            tasks.spawn(evictions::evict(Arc::clone(app)));
        }
        tasks.spawn(maintain(Arc::clone(app), all_listed));
        Self { term, tasks }
    }
}

/// The initial lists that are complete.
#[derive(Debug, Default, Clone, Copy)]
struct Lists {
    nodes: bool,
    pods: bool,
    quota: bool,
    unhealthy: bool,
    resource_quotas: bool,
    claims: bool,
    classes: bool,
    pod_groups: [bool; POD_GROUP_APIS.len()],
}

fn mark(listed: &Arc<signal::Sender<Lists>>, which: fn(&mut Lists) -> &mut bool) -> impl Fn() + Send + use<> {
    let listed = Arc::clone(listed);
    move || listed.send_modify(|lists| *which(lists) = true)
}

/// Sets the replica ready after the initial lists, then maintains the forecast and uncertain bindings.
async fn maintain(app: Arc<App>, mut lists: signal::Receiver<Lists>) {
    let complete = |lists: &Lists| {
        let Lists { nodes, pods, quota, unhealthy, resource_quotas, claims, classes, pod_groups } = *lists;
        let are_groups_known = pod_groups.iter().all(|is_listed| *is_listed);
        nodes && pods && quota && unhealthy && resource_quotas && claims && classes && are_groups_known
    };
    if lists.wait_for(complete).await.is_err() {
        return;
    }
    refresh_forecast(&app).await;
    let now = app.now();
    app.write().plan_started_gangs(now);
    app.set_ready(true);
    tracing::info!("ready");
    loop {
        tokio::time::sleep(MAINTENANCE_INTERVAL).await;
        resolve_uncertain_bindings(&app).await;
        maintain_gangs(&app);
        notify_waiting_claims(&app);
        if app.read().has_expired_claims(app.now()) {
            app.write().expire_claim_bookings(app.now());
        }
        refresh_forecast(&app).await;
    }
}

/// Writes events about claims whose pods wait.
fn notify_waiting_claims(app: &App) {
    if !app.read().has_claim_waits() {
        return;
    }
    let waits = app.write().take_claim_waits();
    for ClaimWait { namespace, claim, uid, message } in waits {
        app.notify_claim((&namespace, &claim, &uid), NoticeReason::ClaimWaits, message);
    }
}

/// Ends reservations of gangs that are not bound in time, and reports what their pods wait for.
fn maintain_gangs(app: &App) {
    if !app.read().has_reservations_to_check() {
        return;
    }
    let now = app.now();
    let notices = app.write().expire_gangs(now);
    for GangNotice { pods, message } in notices {
        tracing::info!(message, "a gang is incomplete");
        for (namespace, name, uid) in &pods {
            app.notify((namespace, name, uid), NoticeReason::GangIncomplete, message.clone());
        }
    }
}

/// Reads the pods from the API server whose bindings had no answer.
async fn resolve_uncertain_bindings(app: &App) {
    let bindings = app.read().uncertain_bindings(app.now());
    for uncertain in bindings {
        let asked = get_pod(&app.client, &uncertain.namespace, &uncertain.name);
        let error = match tokio::time::timeout(READ_TIMEOUT, asked).await {
            Ok(Ok(found)) => {
                app.write().resolve_uncertain(&uncertain, found, app.now());
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {READ_TIMEOUT:?}"),
        };
        tracing::warn!(
            error,
            pod = %format_args!("{}/{}", uncertain.namespace, uncertain.name), "cannot read whether the pod was bound; its GPUs stay booked, retrying"
        );
    }
}

/// Computes a forecast if one is due and judges the nodes by it for recent request shapes. The state is locked
/// only to copy the free capacity, and then for a few nodes at a time.
async fn refresh_forecast(app: &App) {
    let due = app.read().free_capacity_if_due();
    let Some(remains) = due else { return };
    let workload = app.write().begin_forecast(&remains);
    let making = tokio::task::spawn_blocking(move || Arc::new(Forecast::new(&workload, &remains)));
    let Ok(forecast) = making.await else { return };
    let mut shapes = app.verdicts.shapes_for(&forecast);
    for shape in &mut shapes {
        let mut begin = 0;
        while begin < app.read().ledger().positions() {
            shape.refresh(&app.read(), begin..begin + NODES_PER_STEP);
            begin += NODES_PER_STEP;
            tokio::task::yield_now().await;
        }
    }
    app.write().adopt_forecast(forecast);
    app.verdicts.insert(shapes);
}
