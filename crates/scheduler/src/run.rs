//! Keeping the lease, and the state fed while we hold it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, Stream, StreamExt};
use tessera_cluster::get_pod;
use tessera_cluster::lease::{Candidate, Timing};
use tessera_cluster::watch::{self, Change};
use tessera_core::quota::Quota;
use tessera_wire::disruption::Budget;
use tessera_wire::{quota, rules, unhealthy};
use tokio::sync::watch as signal;
use tokio::task::JoinSet;

use crate::files::Files;
use crate::server::App;
use crate::state::{Event, Settings, State, Unhealthy, Watched};

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
    pub timing: Timing,
}

/// How often bookings in doubt and the forecast are looked at.
const TICK: Duration = Duration::from_secs(1);

/// Watch events taken in at once, so that an initial list does not lock the state for each of its objects.
const BATCH: usize = 512;

/// Takes part in the election and serves while it leads, until `stop` fires. The lease is given back then.
pub async fn lead(
    app: Arc<App>,
    settings: Settings,
    membership: Membership,
    table: Option<PathBuf>,
    stop: impl Future<Output = ()>,
) {
    let Membership { identity, namespace, lease, timing } = membership;
    let candidate = Candidate::new(app.client.clone(), &namespace, &lease, identity, timing);
    let mut candidate = candidate.telling(rules::print(&settings.rules()));
    let mut reign: Option<Reign> = None;
    let mut stop = std::pin::pin!(stop.fuse());
    loop {
        let begun = app.now().steady;
        match candidate.poll().await {
            Ok(true) => {
                app.lead_until(begun, timing.renew_within);
                if reign.is_none() {
                    tracing::info!("leading");
                    reign = Some(Reign::begin(&app, &settings, table.clone()));
                }
            }
            Ok(false) => {
                if reign.take().is_some() {
                    tracing::warn!("somebody else leads");
                }
                app.follow();
                app.dashboard.set_leader(candidate.other_leader());
            }
            // Answers go on from memory; binds stop when the lease has run out.
            Err(error) => tracing::warn!(%error, "cannot renew the lease"),
        }
        tokio::select! {
            () = tokio::time::sleep(timing.retry) => {}
            () = &mut stop => break,
        }
    }
    app.follow();
    drop(reign);
    if let Err(error) = candidate.resign().await {
        tracing::warn!(%error, "cannot give the lease back");
    }
}

/// The tasks of a leader. Ends them when dropped.
struct Reign {
    _tasks: JoinSet<()>,
}

impl Reign {
    /// Starts from nothing: lists made after the lease was taken show everything earlier leaders did.
    fn begin(app: &Arc<App>, settings: &Settings, table: Option<PathBuf>) -> Self {
        *app.write() = State::new(settings.clone());
        let (listed, all_listed) = signal::channel(Lists::default());
        let listed = Arc::new(listed);
        let client = || app.client.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(feed(
            Arc::clone(app),
            watch::nodes(client()),
            Event::Node,
            mark(&listed, |lists| &mut lists.nodes),
        ));
        tasks.spawn(feed(
            Arc::clone(app),
            watch::pods(client()),
            Event::Pod,
            mark(&listed, |lists| &mut lists.pods),
        ));
        match &settings.quota {
            Some(quota) => {
                let changes = watch::config_map(client(), &quota.namespace, &quota.name);
                tasks.spawn(feed_quota(Arc::clone(app), changes, mark(&listed, |lists| &mut lists.quota)));
            }
            None => mark(&listed, |lists| &mut lists.quota)(),
        }
        let changes = watch::config_maps(client(), unhealthy::NAMESPACE);
        tasks.spawn(feed_unhealthy(Arc::clone(app), changes, mark(&listed, |lists| &mut lists.unhealthy)));
        tasks.spawn(feed_budgets(Arc::clone(app), watch::budgets(client())));
        if let Some(path) = table {
            tasks.spawn(follow_table(Arc::clone(app), path));
        }
        tasks.spawn(keep_up(Arc::clone(app), all_listed));
        Self { _tasks: tasks }
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

async fn feed<T: Send + 'static>(
    app: Arc<App>,
    changes: impl Stream<Item = Change<T>> + Send,
    event: fn(Watched<T>) -> Event,
    complete: impl Fn() + Send,
) {
    let mut batches = std::pin::pin!(changes.ready_chunks(BATCH));
    while let Some(batch) = batches.next().await {
        let mut listed = false;
        {
            let mut state = app.write();
            for change in batch {
                listed |= matches!(change, Change::Listed);
                match watched(change) {
                    Ok(change) => {
                        app.metrics.connected.set(1);
                        state.handle(event(change));
                    }
                    Err(error) => {
                        app.metrics.connected.set(0);
                        tracing::warn!(error, "a watch is interrupted");
                    }
                }
            }
        }
        app.second_look.heard();
        if listed {
            complete();
        }
    }
}

fn watched<T>(change: Change<T>) -> Result<Watched<T>, String> {
    Ok(match change {
        Change::Listing => Watched::Listing,
        Change::Set(object) => Watched::Set(object),
        Change::Gone(object) => Watched::Gone(object),
        Change::Listed => Watched::Listed,
        Change::Lost(error) => return Err(error),
    })
}

/// The limits of the namespaces. Limits that cannot be read leave the last ones in force; a ConfigMap that is not there
/// means none.
async fn feed_quota(
    app: Arc<App>,
    changes: impl Stream<Item = Change<BTreeMap<String, String>>> + Send,
    complete: impl Fn() + Send,
) {
    let mut changes = std::pin::pin!(changes);
    let mut shown = false;
    while let Some(change) = changes.next().await {
        match change {
            Change::Listing => shown = false,
            Change::Set(data) => {
                shown = true;
                match quota::parse(data.get(quota::DATA_KEY).map_or("{}", String::as_str)) {
                    Ok(limits) => app.write().handle(Event::Quota(limits)),
                    Err(error) => tracing::warn!(%error, "the quota is not used; the last one stays"),
                }
            }
            Change::Gone(_) => app.write().handle(Event::Quota(Quota::default())),
            Change::Listed => {
                if !shown {
                    app.write().handle(Event::Quota(Quota::default()));
                }
                complete();
            }
            Change::Lost(_) => {}
        }
    }
}

/// gpushare's lists of broken cards. Where they may not be read, what nodes say of themselves must do.
async fn feed_unhealthy(
    app: Arc<App>,
    changes: impl Stream<Item = Change<(String, BTreeMap<String, String>)>> + Send,
    complete: impl Fn() + Send,
) {
    let mut changes = std::pin::pin!(changes);
    let mut is_told = false;
    while let Some(change) = changes.next().await {
        let is_list = matches!(change, Change::Listed);
        match watched(change) {
            Ok(change) => {
                is_told = false;
                if let Some(change) = change.and_then(|(name, data)| broken_cards(&name, &data)) {
                    app.write().handle(Event::Unhealthy(change));
                    app.second_look.heard();
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!(error, "cannot watch the ConfigMaps unhealthy-gpu-NODE in kube-system");
                }
                complete();
            }
        }
        if is_list {
            complete();
        }
    }
}

/// What a ConfigMap says of a node's cards, if it is such a list.
fn broken_cards(name: &str, data: &BTreeMap<String, String>) -> Option<Unhealthy> {
    let (node, cards, bad) = unhealthy::of_config_map(name, data)?;
    for error in bad {
        tracing::warn!(%error, name, "a list of broken GPUs cannot be read as a whole");
    }
    Some(Unhealthy { node: node.into(), cards })
}

/// Disruption budgets: advice for choosing victims, so nobody waits for them.
async fn feed_budgets(app: Arc<App>, changes: impl Stream<Item = Change<Budget>> + Send) {
    let mut changes = std::pin::pin!(changes);
    let mut is_told = false;
    while let Some(change) = changes.next().await {
        match watched(change) {
            Ok(change) => app.write().handle(Event::Budget(change)),
            Err(error) if !std::mem::replace(&mut is_told, true) => {
                tracing::warn!(error, "cannot watch disruption budgets; victims are chosen without them");
            }
            Err(_) => {}
        }
    }
}

/// Reads the table of policy `static` now and whenever it changes.
async fn follow_table(app: Arc<App>, path: PathBuf) {
    let take = |contents: &[Vec<u8>]| {
        let text = contents.first().map(|bytes| String::from_utf8_lossy(bytes)).unwrap_or_default();
        match tessera_wire::static_table::parse(&text) {
            Ok(table) => app.write().handle(Event::Table(table)),
            Err(error) => tracing::warn!(%error, "the static table is not used; the last one stays"),
        }
    };
    let mut files = Files::new(&[&path]);
    match files.read_if_changed() {
        Ok(contents) => contents.iter().for_each(|contents| take(contents)),
        Err(error) => tracing::warn!(%error, path = %path.display(), "cannot read the static table"),
    }
    files.follow(take).await;
}

/// Becomes ready when everything is known, then looks ahead and settles doubts.
async fn keep_up(app: Arc<App>, mut lists: signal::Receiver<Lists>) {
    let complete = |lists: &Lists| lists.nodes && lists.pods && lists.quota && lists.unhealthy;
    if lists.wait_for(complete).await.is_err() {
        return;
    }
    look_ahead(&app);
    app.set_ready(true);
    tracing::info!("ready");
    loop {
        tokio::time::sleep(TICK).await;
        settle_doubts(&app).await;
        look_ahead(&app);
    }
}

/// Asks the API server about pods whose bindings it left unanswered.
async fn settle_doubts(app: &App) {
    let doubts = app.read().doubts(app.now());
    for doubt in doubts {
        match get_pod(&app.client, &doubt.namespace, &doubt.name).await {
            Ok(found) => app.write().settle(&doubt, found, app.now()),
            // It is asked again.
            Err(error) => tracing::warn!(%error, "a booking stays in doubt"),
        }
    }
}

fn look_ahead(app: &App) {
    let due = app.read().forecast();
    if let Some(forecast) = due {
        app.write().adopt(forecast);
    }
}
