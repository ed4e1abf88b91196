//! Reads all agents in rounds while this replica leads.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures::{StreamExt as _, stream};
use tessera_core::units::NodeName;

use super::super::view::{cluster, node, waste};
use super::UsageLog;
use crate::server::App;
use crate::state::{State, StateAccess as _};

/// Shortest pause between two rounds.
const MIN_ROUND: Duration = Duration::from_secs(10);

/// Time between two checks whether the replica has read the cluster.
const READY_INTERVAL: Duration = Duration::from_secs(1);

/// Agents asked per second on average, so that a large cluster costs the scheduler little.
const AGENTS_PER_SECOND: u32 = 20;

/// Agents asked at a time, half of what the reader allows, so that pages of users do not wait for silent agents.
const MAX_CONCURRENT: usize = 2;

/// Asks all agents again and again. What an earlier term of this replica knew is outdated.
pub(crate) async fn poll(app: Arc<App>) {
    with_log(&app, |log| *log = UsageLog::default());
    loop {
        if !app.is_ready() {
            tokio::time::sleep(READY_INTERVAL).await;
            continue;
        }
        let nodes = round(&app).await;
        let by_size = Duration::from_secs(1) * u32::try_from(nodes).unwrap_or(u32::MAX) / AGENTS_PER_SECOND;
        tokio::time::sleep(MIN_ROUND.max(by_size)).await;
    }
}

/// Returns the UIDs of the pods that use GPUs of claims, by node.
fn claim_users(state: &State) -> HashMap<NodeName, Vec<String>> {
    let mut users: HashMap<NodeName, Vec<String>> = HashMap::new();
    for (grant, claim) in state.claim_holders() {
        let pods = claim.consumer_pods().map(|consumer| consumer.uid.clone());
        users.entry(grant.node.clone()).or_default().extend(pods);
    }
    users
}

/// Asks every agent once. Returns the number of nodes.
async fn round(app: &Arc<App>) -> usize {
    let begun = millis(app);
    let worker = Arc::clone(app);
    // Views of a large cluster take a while, and must not delay answers to kube-scheduler.
    let listed = tokio::task::spawn_blocking(move || {
        let by_claims = worker.with_state(claim_users);
        let mut agents = Vec::new();
        worker.for_each_node(|state, name| {
            if let Some(agent) = node::agent(state, &name.0) {
                let holders = state.ledger().grants_on(name).map(|grant| grant.pod.0.clone());
                let users = by_claims.get(name).into_iter().flatten().cloned();
                agents.push((agent, holders.chain(users).collect::<HashSet<String>>()));
            }
        });
        agents
    });
    // A panic was logged when it happened.
    let Ok(agents) = listed.await else { return 0 };
    let nodes = agents.len();
    stream::iter(agents)
        .for_each_concurrent(MAX_CONCURRENT, async |(agent, holders)| {
            // The page of the node shows why an agent does not answer.
            if let Ok(used) = app.agents.read(Some(agent)).await {
                with_log(app, |log| log.observe(millis(app), &holders, &used));
            }
        })
        .await;
    let worker = Arc::clone(app);
    let ended = tokio::task::spawn_blocking(move || {
        with_log(&worker, |log| log.forget_unsampled(begun));
        let held = cluster::cluster(&*worker).gpus.taken;
        let totals = {
            let log = worker.dashboard.usage.read().unwrap_or_else(PoisonError::into_inner);
            worker.with_state(|state| waste::totals(state, &log))
        };
        with_log(&worker, |log| log.add_point(totals.point(begun, held)));
    });
    let _panicked = ended.await;
    nodes
}

fn with_log(app: &App, change: impl FnOnce(&mut UsageLog)) {
    change(&mut app.dashboard.usage.write().unwrap_or_else(PoisonError::into_inner));
}

fn millis(app: &App) -> u64 {
    u64::try_from(app.now().unix_nanos / 1_000_000).unwrap_or(u64::MAX)
}
