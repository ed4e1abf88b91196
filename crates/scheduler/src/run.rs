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

/// How long the API server may take to tell of a pod in doubt.
const ASK_WITHIN: Duration = Duration::from_secs(3);

/// Watch events taken in at once, so that an initial list does not lock the state for each of its objects.
const BATCH: usize = 512;

/// Nodes judged by a new forecast before others may have the state.
const JUDGED_AT_ONCE: usize = 512;

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
                let term = candidate.term();
                if reign.as_ref().is_none_or(|reign| reign.term != term) {
                    tracing::info!(term, "leading");
                    app.follow();
                    end(reign.take()).await;
                    reign = Some(Reign::begin(&app, &settings, table.clone(), term));
                }
                app.lead_until(begun, timing.renew_within);
            }
            Ok(false) => {
                app.follow();
                if reign.is_some() {
                    tracing::warn!("somebody else leads");
                    end(reign.take()).await;
                }
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
    end(reign).await;
    if let Err(error) = candidate.resign().await {
        tracing::warn!(%error, "cannot give the lease back");
    }
}

/// The tasks of a leader.
struct Reign {
    /// Of the election, for which they were begun.
    term: u64,
    tasks: JoinSet<()>,
}

/// Ends the tasks of a leader. After that none of them touches the state.
async fn end(reign: Option<Reign>) {
    if let Some(mut reign) = reign {
        reign.tasks.shutdown().await;
    }
}

impl Reign {
    /// Starts from nothing: lists made after the lease was taken show everything earlier leaders did.
    fn begin(app: &Arc<App>, settings: &Settings, table: Option<PathBuf>, term: u64) -> Self {
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

/// The limits of the namespaces; a ConfigMap that is not there means none.
async fn feed_quota(
    app: Arc<App>,
    changes: impl Stream<Item = Change<BTreeMap<String, String>>> + Send,
    complete: impl Fn() + Send,
) {
    let mut changes = std::pin::pin!(changes);
    let (mut shown, mut is_known, mut is_told) = (false, false, false);
    while let Some(change) = changes.next().await {
        is_told &= matches!(change, Change::Lost(_));
        match change {
            Change::Listing => shown = false,
            Change::Set(data) => {
                shown = true;
                if let Some(limits) = limits(&data, is_known) {
                    is_known = !limits.is_unreadable;
                    app.write().handle(Event::Quota(limits));
                }
            }
            Change::Gone(_) => {
                is_known = true;
                app.write().handle(Event::Quota(Quota::default()));
            }
            Change::Listed => {
                if !shown {
                    is_known = true;
                    app.write().handle(Event::Quota(Quota::default()));
                }
                complete();
            }
            Change::Lost(error) if !std::mem::replace(&mut is_told, true) => {
                tracing::warn!(
                    error,
                    "cannot watch the quota's ConfigMap; nothing is answered before it was read"
                );
            }
            Change::Lost(_) => {}
        }
    }
}

/// The limits a ConfigMap holds. Those that cannot be read leave the last ones in force, and where there are none yet, close
/// everything: a leader that has just started must not hand out what a quota keeps back.
fn limits(data: &BTreeMap<String, String>, is_any_known: bool) -> Option<Quota> {
    match quota::parse(data.get(quota::DATA_KEY).map_or("{}", String::as_str)) {
        Ok(limits) => Some(limits),
        Err(error) if is_any_known => {
            tracing::warn!(%error, "the quota cannot be read; the last one stays");
            None
        }
        Err(error) => {
            tracing::error!(%error, "the quota cannot be read: no pod gets GPUs until its ConfigMap is mended");
            Some(Quota::unreadable())
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
    look_ahead(&app).await;
    app.set_ready(true);
    tracing::info!("ready");
    loop {
        tokio::time::sleep(TICK).await;
        settle_doubts(&app).await;
        look_ahead(&app).await;
    }
}

/// Asks the API server about pods whose bindings it left unanswered.
async fn settle_doubts(app: &App) {
    let doubts = app.read().doubts(app.now());
    for doubt in doubts {
        let asked = get_pod(&app.client, &doubt.namespace, &doubt.name);
        // Whoever gets no answer is asked about again.
        match tokio::time::timeout(ASK_WITHIN, asked).await {
            Ok(Ok(found)) => app.write().settle(&doubt, found, app.now()),
            Ok(Err(error)) => tracing::warn!(%error, "a booking stays in doubt"),
            Err(_) => tracing::warn!("a booking stays in doubt: the API server does not answer"),
        }
    }
}

/// Makes a forecast where one is due, and judges the nodes by it for the kinds of pods that come before anybody has to wait for
/// that. Lends the state for a few nodes at a time.
async fn look_ahead(app: &App) {
    let due = app.read().forecast();
    let Some((learner, forecast)) = due else { return };
    let mut kinds = app.memory.under(&forecast);
    for kind in &mut kinds {
        let mut begin = 0;
        while begin < app.read().ledger().positions() {
            kind.judge(&app.read(), begin..begin + JUDGED_AT_ONCE);
            begin += JUDGED_AT_ONCE;
            tokio::task::yield_now().await;
        }
    }
    app.write().adopt((learner, forecast));
    app.memory.put(kinds);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_that_cannot_be_read_never_opens_what_it_closes() {
        let data = |json: &str| BTreeMap::from([(quota::DATA_KEY.to_owned(), json.to_owned())]);
        let good = data(r#"{"team":{"percent":100}}"#);
        assert!(limits(&good, false).unwrap().limits("team"));
        assert!(limits(&BTreeMap::new(), true).unwrap().namespaces.is_empty());
        assert_eq!(limits(&data("{"), true), None, "the last one stays");
        assert_eq!(limits(&data("{"), false), Some(Quota::unreadable()));
    }
}
