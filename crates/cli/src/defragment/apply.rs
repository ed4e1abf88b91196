//! Carries out a confirmed plan: reserves the places, evicts the pods one after the other, and ends the reservations.
//!
//! All state is in the cluster: the reservations on the nodes and the pods themselves. A run that is interrupted loses
//! nothing, and the same command continues where it ended.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use tessera_cluster::annotate_node::{self, VersionedNode};
use tessera_cluster::{Client, EvictionOutcome, evict};
use tessera_core::grant::PodGrant;
use tessera_core::units::{Count, PodUid};
use tessera_wire::foreign::time;
use tessera_wire::tessera::reservation::{self, NodeReservation, ReservedPod};

use super::progress::{ClusterNow, NextStep, PlannedMove, Progress, Victim};
use super::{DefragmentView, Movers, Planned, RESERVATION_PREFIX, Situation, reservation_name};
use crate::args::Defragment;
use crate::options::SourceOptions;

/// Time between two reads of the cluster while a step is under way.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Attempts to change a node that others change at the same time.
const MAX_ATTEMPTS: usize = 5;

/// Longest owner of a reservation. Names of users are shorter.
const MAX_OWNER_CHARS: usize = 64;

/// What was done, as it is shown. Its keys are stable.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AppliedView {
    /// The plan that was confirmed.
    plan: DefragmentView,
    /// Evicted pods, as NAMESPACE/NAME.
    pub(crate) evicted: Vec<String>,
    /// Reservations that are left, as NODE: NAME.
    pub(crate) reservations: Vec<String>,
    /// End of the reservations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) until: Option<String>,
    /// True if all moves are done and all wanted pods have their GPUs.
    pub(crate) done: bool,
    /// Why the run ended early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
}

/// Asks on the terminal whether to go on.
pub(crate) fn confirm(view: &DefragmentView) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!(
            "--apply asks before it evicts pods, and standard input is no terminal; add --yes to go on without"
        );
    }
    eprint!("\nEvict {}? [y/N] ", Count(view.moves.len(), "pod"));
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Carries out the plan until it is done, fails or is interrupted. Progress goes to standard error.
pub(crate) async fn apply(
    client: &Client,
    source: &SourceOptions,
    options: &Defragment,
    situation: &Situation,
    planned: Planned,
) -> Result<AppliedView> {
    let until_seconds = situation.now_seconds.saturating_add(seconds(options.reserve_for));
    let mut progress =
        Progress::new(situation.moves(&planned), situation.awaited(&planned), seconds(options.step_timeout));
    let mut view = AppliedView {
        plan: planned.view.clone(),
        evicted: Vec::new(),
        reservations: Vec::new(),
        until: Some(time::rfc3339(until_seconds)),
        done: false,
        problem: None,
    };
    let run = run(client, source, &mut progress, situation.reservations(&planned, options, until_seconds));
    let outcome = tokio::select! {
        outcome = run => outcome,
        _ = tokio::signal::ctrl_c() => Ok(Some("interrupted".to_owned())),
    };
    view.evicted = progress.evicted;
    view.problem = match outcome {
        Ok(problem) => problem,
        Err(error) => Some(format!("{error:#}")),
    };
    view.done = view.problem.is_none();
    let places = planned.plan.places.iter();
    let made: BTreeSet<(&str, String)> = places
        .map(|place| (place.node.0.as_str(), reservation_name(options, planned.name(&place.pod))))
        .collect();
    if view.done && !options.keep {
        for (node, name) in &made {
            change(client, node, |entries| entries.retain(|entry| entry.name != *name)).await?;
        }
        view.until = None;
    } else {
        view.reservations = made.iter().map(|(node, name)| format!("{node}: {name}")).collect();
    }
    Ok(view)
}

/// Ends all reservations that `defragment` has made. Returns their nodes and names.
pub(crate) async fn release(client: &Client, situation: &Situation) -> Result<Vec<String>> {
    let mut released = Vec::new();
    for (node, facts) in &situation.survey.nodes {
        let ours: Vec<&NodeReservation> = facts.reservations.iter().filter(|entry| is_ours(entry)).collect();
        if !ours.is_empty() {
            change(client, &node.0, |entries| entries.retain(|entry| !is_ours(entry))).await?;
            released.extend(ours.iter().map(|entry| format!("{node}: {}", entry.name)));
        }
    }
    Ok(released)
}

/// Returns why the run ended early, or `None` if it is done.
async fn run(
    client: &Client,
    source: &SourceOptions,
    progress: &mut Progress,
    reservations: BTreeMap<String, Vec<NodeReservation>>,
) -> Result<Option<String>> {
    for (node, new) in reservations {
        let names: Vec<String> = new.iter().map(|entry| entry.name.clone()).collect();
        change(client, &node, |entries| {
            entries.retain(|entry| !names.contains(&entry.name));
            entries.extend(new.clone());
        })
        .await?;
        eprintln!("node/{node} reserved: {}", names.join(", "));
    }
    let mut said = String::new();
    loop {
        let now = Situation::read(client, source).await?;
        match progress.next(&now, now.now_seconds) {
            NextStep::Done => return Ok(None),
            NextStep::Stop(why) => return Ok(Some(why)),
            NextStep::Wait(what) => {
                if said != what {
                    eprintln!("waiting for {what}");
                    said = what;
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            NextStep::Evict(step) => {
                let PlannedMove { namespace, name, pod, .. } = &step;
                match evict(client, (namespace, name), &pod.0).await? {
                    EvictionOutcome::Refused(why) => {
                        return Ok(Some(format!(
                            "the API server does not evict pod {namespace}/{name} now: {why}"
                        )));
                    }
                    // The next read shows that the pod is gone.
                    EvictionOutcome::Gone => {}
                    EvictionOutcome::Accepted => {
                        eprintln!("pod/{name} in {namespace} evicted");
                        progress.record_eviction(&step, &now);
                    }
                }
            }
        }
    }
}

/// Changes the reservations of a node. Those that have ended are removed on the way.
async fn change(client: &Client, node: &str, edit: impl Fn(&mut Vec<NodeReservation>)) -> Result<()> {
    for _ in 0..MAX_ATTEMPTS {
        let VersionedNode { node: object, version } = annotate_node::read(client, node).await?;
        let known =
            reservation::parse(&object.metadata.annotations).with_context(|| format!("node {node:?}"))?;
        let mut entries = known.clone();
        let now_seconds = crate::load::now_seconds();
        entries.retain(|entry| entry.until_seconds() > now_seconds);
        edit(&mut entries);
        if entries == known {
            return Ok(());
        }
        let changes = [(reservation::KEY, reservation::print(&entries))].into();
        if annotate_node::write(client, node, &version, &changes).await? {
            return Ok(());
        }
    }
    bail!("node {node:?} changes too often; try again");
}

fn is_ours(entry: &NodeReservation) -> bool {
    entry.name.starts_with(RESERVATION_PREFIX)
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

impl Planned {
    fn name(&self, wanted: &PodUid) -> &str {
        self.names.get(wanted).map_or("", String::as_str)
    }
}

impl Situation {
    fn moves(&self, planned: &Planned) -> Vec<PlannedMove> {
        let moves = planned.plan.moves.iter().filter_map(|step| {
            let (pod, controller) = self.holder(&step.to.pod)?;
            Some(PlannedMove {
                wanted: step.wanted.clone(),
                pod: step.to.pod.clone(),
                namespace: pod.metadata.namespace.clone(),
                name: pod.metadata.name.clone(),
                node: step.from.clone(),
                controller: controller?.to_owned(),
            })
        });
        moves.collect()
    }

    /// Returns the wanted pods that have a place in the plan.
    fn awaited(&self, planned: &Planned) -> Vec<(PodUid, String)> {
        let places = planned.plan.places.iter().filter(|place| self.is_waiting(&place.pod));
        places.map(|place| (place.pod.clone(), planned.name(&place.pod).to_owned())).collect()
    }

    /// Returns the reservations of the plan's places, by node.
    fn reservations(
        &self,
        planned: &Planned,
        options: &Defragment,
        until_seconds: i64,
    ) -> BTreeMap<String, Vec<NodeReservation>> {
        let owner = std::env::var("USER").unwrap_or_else(|_| "kubectl inspect gpu".to_owned());
        let owner: String = owner.chars().take(MAX_OWNER_CHARS).collect();
        let mut by_node: BTreeMap<String, Vec<NodeReservation>> = BTreeMap::new();
        for place in &planned.plan.places {
            let Some(state) = self.survey.state(&place.node) else { continue };
            let name = reservation_name(options, planned.name(&place.pod));
            let texts = (name, owner.clone());
            let entry =
                NodeReservation::of_grant(texts, until_seconds, self.reserved_pod(place), (place, state));
            by_node.entry(place.node.0.clone()).or_default().push(entry);
        }
        by_node
    }

    fn reserved_pod(&self, place: &PodGrant) -> Option<ReservedPod> {
        let pod = self.survey.waiting.iter().find(|pod| pod.metadata.uid == place.pod.0)?;
        let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
        Some(ReservedPod { namespace, name, uid: place.pod.0.clone() })
    }

    fn holder(&self, uid: &PodUid) -> Option<(&tessera_wire::foreign::objects::Pod, Option<&str>)> {
        let (pod, controller) = self.holders.iter().find(|(pod, _)| pod.metadata.uid == uid.0)?;
        Some((pod, controller.as_ref().map(|controller| controller.uid.as_str())))
    }

    fn is_waiting(&self, uid: &PodUid) -> bool {
        self.waiting.iter().any(|(waiting, _)| waiting == uid)
    }
}

impl ClusterNow for Situation {
    fn is_wanted(&self, pod: &PodUid) -> bool {
        // Nodes of a shape are no pods.
        pod.0.contains(' ') || self.is_waiting(pod)
    }

    fn victim(&self, pod: &PodUid) -> Option<Victim> {
        let (object, _) = self.holder(pod)?;
        let mut movers = Movers::new(&self.survey);
        let held = self.held(&mut movers).remove(pod)?;
        let node = tessera_core::units::NodeName(object.spec.node_name.clone());
        Some(Victim { node, fixed: held.fixed })
    }

    fn has_other_place(&self, pod: &PodUid) -> bool {
        self.has_other_place(pod)
    }

    fn pods_of(&self, controller: &str) -> Vec<(PodUid, bool)> {
        let is_own = |owner: Option<&str>| owner == Some(controller);
        let placed =
            self.holders.iter().filter(|(_, owner)| is_own(owner.as_ref().map(|owner| owner.uid.as_str())));
        let placed = placed.map(|(pod, _)| (PodUid(pod.metadata.uid.clone()), true));
        let waiting = self.waiting.iter().filter(|(_, owner)| is_own(owner.as_deref()));
        placed.chain(waiting.map(|(uid, _)| (uid.clone(), false))).collect()
    }
}
