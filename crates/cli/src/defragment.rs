//! `defragment`: which pods to move so that waiting pods or a wanted shape fit, and how the moves are carried out.

pub(crate) mod apply;
mod movers;
mod progress;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::Serialize;
use tessera_cluster::Client;
use tessera_core::defragment::{
    Fixed, Goal, HeldPod, Plan, Scene, fixed_pods, other_place, plan as plan_moves,
};
use tessera_core::disruption::DisruptionBudget;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::Ledger;
use tessera_core::placement::Policy;
use tessera_core::units::PodUid;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::foreign::owned_pod::{Controller, OwnedPod};
use tessera_wire::tessera::eviction;
use tessera_wire::tessera::parsed_pod::PolicyResolver as _;
use tessera_wire::tessera::reservation::NodeReservation;

use self::movers::Movers;
use crate::args::{Defragment, Shape};
use crate::load;
use crate::options::{NodeSelection, SourceOptions};
use crate::show::age::seconds_since;
use crate::survey::Survey;

/// Start of the names of reservations that `defragment` makes.
const RESERVATION_PREFIX: &str = "defragment/";

/// The plan as it is shown. Its keys are stable.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DefragmentView {
    /// Number of waiting pods, or of wanted nodes.
    pub(crate) wanted: usize,
    /// Number of them that have room after the moves.
    pub(crate) fitting: usize,
    /// Seconds of GPU time that the evictions lose.
    pub(crate) lost_gpu_seconds: u64,
    /// Evictions, in this order.
    pub(crate) moves: Vec<MoveView>,
    /// The wanted pods or nodes with the GPUs that they get.
    pub(crate) places: Vec<PlaceView>,
    /// Waiting pods, or nodes of the shape, that fit nowhere.
    pub(crate) unmet: Vec<String>,
    /// Number of pods that stay, by reason.
    pub(crate) staying: BTreeMap<String, usize>,
}

/// One eviction.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MoveView {
    pub(crate) pod: String,
    pub(crate) from: String,
    /// Node with room for the pod after its eviction.
    pub(crate) to: String,
    pub(crate) gpus: Vec<u8>,
    pub(crate) lost_gpu_seconds: u64,
}

/// Room for a wanted pod.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PlaceView {
    pub(crate) wanted: String,
    pub(crate) node: String,
    pub(crate) gpus: Vec<u8>,
}

impl DefragmentView {
    /// Returns whether all wanted pods fit, or moves make room for some of them.
    pub(crate) fn is_of_use(&self) -> bool {
        self.unmet.is_empty() || !self.moves.is_empty()
    }
}

/// The cluster as it was read for a plan.
#[derive(Debug)]
pub(crate) struct Situation {
    survey: Survey,
    /// Pods on nodes that request GPUs, with their controllers.
    holders: Vec<(Pod, Option<Controller>)>,
    /// Waiting pods that request GPUs, as UID and UID of the controller.
    waiting: Vec<(PodUid, Option<String>)>,
    budgets: Vec<DisruptionBudget>,
    now_seconds: i64,
}

/// A plan with the names of what is wanted.
#[derive(Debug)]
pub(crate) struct Planned {
    plan: Plan,
    names: BTreeMap<PodUid, String>,
    pub(crate) view: DefragmentView,
}

/// Connects to the API server for a plan.
pub(crate) async fn client(source: &SourceOptions) -> Result<Client> {
    if source.endpoint.is_some() {
        bail!(
            "--endpoint does not show which pods may be evicted; remove it to read the cluster with your kubeconfig"
        );
    }
    load::client(source).await
}

impl Situation {
    /// Reads the cluster.
    pub(crate) async fn read(client: &Client, source: &SourceOptions) -> Result<Self> {
        let budgets = load::budgets(client).await?;
        let (mut holders, mut waiting) = (Vec::new(), Vec::new());
        let through = |listed: OwnedPod| {
            let (pod, controller) = listed.split();
            if pod.spec.asks_for_gpus() {
                match pod.spec.node_name.is_empty() {
                    true => {
                        let uid = PodUid(pod.metadata.uid.clone());
                        waiting.push((uid, controller.map(|controller| controller.uid)));
                    }
                    false => holders.push((pod.clone(), controller)),
                }
            }
            pod
        };
        let survey = load::survey_through(client, source, &NodeSelection::default(), through).await?;
        let now_seconds = survey.now_seconds;
        Ok(Self { survey, holders, waiting, budgets, now_seconds })
    }

    /// Returns the pods that hold GPUs, and adds them to `movers`.
    fn held<'a>(&'a self, movers: &mut Movers<'a>) -> BTreeMap<PodUid, HeldPod> {
        let mut held = BTreeMap::new();
        for (pod, controller) in &self.holders {
            let uid = PodUid(pod.metadata.uid.clone());
            if self.survey.pod(&uid).is_none() {
                continue;
            }
            let fixed = eviction::fixed(pod, controller.as_ref().map(|controller| controller.kind.as_str()));
            let grant = self.survey.grant(&uid);
            let fixed = fixed.or_else(|| grant.is_none().then_some(Fixed::UnknownGpus));
            let fixed = fixed.or_else(|| (!movers.add(&uid, pod, false)).then_some(Fixed::UnknownGpus));
            let pod = HeldPod {
                namespace: pod.metadata.namespace.clone(),
                name: pod.metadata.name.clone(),
                labels: pod.metadata.labels.clone(),
                priority: pod.spec.priority.unwrap_or(0),
                cost: grant.map_or(Duration::ZERO, |grant| cost(pod, grant, self.now_seconds)),
                fixed,
            };
            held.insert(uid, pod);
        }
        held
    }

    /// Plans the moves. Reservations that an earlier run has made for the same purpose count as free, so that a run
    /// continues an earlier one.
    pub(crate) fn plan(&self, options: &Defragment) -> Planned {
        let mut movers = Movers::new(&self.survey);
        let held = self.held(&mut movers);
        let (goal, names) = match options.shape {
            Some(shape) => movers.add_shape(shape, options.max_priority),
            None => movers.add_waiting(),
        };
        let mut ledger = self.survey.cluster_view().ledger().clone();
        for (node, facts) in &self.survey.nodes {
            for entry in facts.reservations.iter().filter(|entry| is_for(entry, options, &goal)) {
                ledger.cancel_reservation(&entry.ledger_name(node));
            }
        }
        // The GPUs of pods that are being deleted become free without a move.
        for (uid, _) in held.iter().filter(|(_, pod)| pod.fixed == Some(Fixed::Ending)) {
            ledger.release(uid);
        }
        let policy = self.survey.policy(None);
        let scene = self.scene(&ledger, &held, &movers, &policy, options.max_evictions);
        let plan = plan_moves(scene, &goal);
        let view = describe(&plan, &goal, &names, &held);
        Planned { plan, names, view }
    }

    /// Returns whether the pod has another place in the cluster as it is now, beside all reservations.
    fn has_other_place(&self, pod: &PodUid) -> bool {
        let mut movers = Movers::new(&self.survey);
        let held = self.held(&mut movers);
        let policy = self.survey.policy(None);
        let ledger = self.survey.cluster_view().ledger();
        other_place(self.scene(ledger, &held, &movers, &policy, 1), pod).is_some()
    }

    fn scene<'a>(
        &'a self,
        ledger: &'a Ledger,
        pods: &'a BTreeMap<PodUid, HeldPod>,
        requests: &'a Movers<'a>,
        policy: &'a Policy,
        max_moves: usize,
    ) -> Scene<'a> {
        Scene { ledger, pods, budgets: &self.budgets, requests, policy, max_moves }
    }
}

/// Returns the name of the reservations for a wanted pod, or for a node of the shape.
fn reservation_name(options: &Defragment, wanted: &str) -> String {
    match options.shape {
        Some(Shape { nodes, gpus }) => format!("{RESERVATION_PREFIX}{nodes}x{gpus}"),
        None => format!("{RESERVATION_PREFIX}{wanted}"),
    }
}

/// Returns whether an earlier run with the same goal has made the reservation.
fn is_for(entry: &NodeReservation, options: &Defragment, goal: &Goal) -> bool {
    match &entry.pod {
        Some(pod) => goal.wanted.iter().any(|wanted| wanted.pod.0 == pod.uid),
        None => options.shape.is_some() && entry.name == reservation_name(options, ""),
    }
}

fn describe(
    found: &Plan,
    goal: &Goal,
    names: &BTreeMap<PodUid, String>,
    held: &BTreeMap<PodUid, HeldPod>,
) -> DefragmentView {
    let name = |uid: &PodUid| names.get(uid).cloned().unwrap_or_default();
    let full_name = |uid: &PodUid| held.get(uid).map(|pod| format!("{}/{}", pod.namespace, pod.name));
    DefragmentView {
        wanted: goal.wanted.len(),
        fitting: found.places.len(),
        lost_gpu_seconds: found.moves.iter().map(|step| step.cost.as_secs()).sum(),
        moves: found
            .moves
            .iter()
            .map(|step| MoveView {
                pod: full_name(&step.to.pod).unwrap_or_default(),
                from: step.from.to_string(),
                to: step.to.node.to_string(),
                gpus: gpus(&step.to),
                lost_gpu_seconds: step.cost.as_secs(),
            })
            .collect(),
        places: found
            .places
            .iter()
            .map(|place| PlaceView {
                wanted: name(&place.pod),
                node: place.node.to_string(),
                gpus: gpus(place),
            })
            .collect(),
        unmet: found.unmet.iter().map(name).collect(),
        staying: fixed_pods(held).into_iter().map(|(fixed, count)| (fixed.describe(), count)).collect(),
    }
}

/// Returns the GPU time that the eviction of a pod loses: the lost work on each of its GPUs.
fn cost(pod: &Pod, grant: &PodGrant, now_seconds: i64) -> Duration {
    let age = seconds_since(pod.metadata.creation_timestamp.as_deref(), now_seconds).unwrap_or(0);
    let lost = eviction::lost_work(&pod.metadata.annotations, Duration::from_secs(age));
    lost.saturating_mul(u32::try_from(grant.footprint().count()).unwrap_or(u32::MAX))
}

fn gpus(grant: &PodGrant) -> Vec<u8> {
    grant.footprint().map(|(gpu, _)| gpu.0).collect()
}
