//! Which cards of a node a pod gets, and how well the node suits it.
//!
//! One function, [`place`], serves every dialect and every policy. It looks at values and answers with a value;
//! booking the answer is the [ledger](crate::ledger)'s affair.

pub mod best_effort;
mod part;
mod policy;
mod refusal;
pub mod static_table;
mod whole;

use std::borrow::Cow;

use crate::gpu_set::GpuSet;
use crate::grant::{ContainerGrant, Hold, Usage};
use crate::node::NodeState;
use crate::request::{PodRequest, Request, Role, Traffic};
use crate::units::GpuIndex;

pub use policy::{Policy, UnknownPolicy};
pub use refusal::{CardRefusal, Refusal, card_refusals};

/// The cards a node would give a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// For each container of the pod, in its order; empty for one that asks for no card.
    pub gpus: Vec<GpuSet>,
    /// How well the node suits the pod; comparable between nodes under the same policy only. Higher is better.
    pub score: f64,
}

/// Chooses cards for every container, or says what stands in the way.
///
/// `required` names cards that must be among those of the first container that asks for whole ones.
pub fn place(
    node: &NodeState,
    pod: &PodRequest,
    policy: &Policy,
    required: GpuSet,
) -> Result<Placement, Refusal> {
    refusal::check_node(node, pod)?;
    let mut gpus = vec![GpuSet::EMPTY; pod.containers.len()];
    let mut merit = 0.0;
    let mut required = required;
    // Main containers and sidecars stand side by side, so each sees what the ones before it took.
    let mut beside = Cow::Borrowed(node);
    for (position, container) in pod.containers.iter().enumerate() {
        let Some(request) = container.request.filter(|_| container.role != Role::Init) else {
            continue;
        };
        let ask = Ask::new(
            &beside,
            pod,
            request,
            std::mem::take(&mut required),
            GpuSet::EMPTY,
        )?;
        let chosen = policy.choose(&beside, &ask).ok_or(Refusal::Required)?;
        take(&mut beside, chosen.gpus, ask.hold);
        gpus[position] = chosen.gpus;
        merit += chosen.merit;
    }
    place_inits(node, pod, policy, &mut gpus)?;
    let score = policy.score(node, &after(node, pod, &gpus), merit);
    Ok(Placement { gpus, score })
}

/// Init containers run alone but for the sidecars before them. They reuse the cards of the main containers
/// where those suffice, as kubelet does, so that the pod takes no more than it must.
fn place_inits(
    node: &NodeState,
    pod: &PodRequest,
    policy: &Policy,
    gpus: &mut [GpuSet],
) -> Result<(), Refusal> {
    let own = gpus.iter().copied().fold(GpuSet::EMPTY, GpuSet::union);
    let mut before = Cow::Borrowed(node);
    for (position, container) in pod.containers.iter().enumerate() {
        let Some(request) = container.request else {
            continue;
        };
        match container.role {
            Role::Main => {}
            Role::Sidecar => take(&mut before, gpus[position], Hold::of(request)),
            Role::Init => {
                let ask = Ask::new(&before, pod, request, GpuSet::EMPTY, own)?;
                gpus[position] = policy.choose(&before, &ask).ok_or(Refusal::Required)?.gpus;
            }
        }
    }
    Ok(())
}

fn take(state: &mut Cow<'_, NodeState>, gpus: GpuSet, hold: Hold) {
    for gpu in gpus.iter() {
        state.to_mut().add_usage(gpu, Usage::of(hold));
    }
}

/// The node with the pod on it.
fn after(node: &NodeState, pod: &PodRequest, gpus: &[GpuSet]) -> NodeState {
    let mut state = node.clone();
    state.take(pod.cpu, pod.memory, crate::grant::footprint(&grants(pod, gpus)));
    state
}

fn grants(pod: &PodRequest, gpus: &[GpuSet]) -> Vec<ContainerGrant> {
    let asking = pod.containers.iter().zip(gpus).filter_map(|(container, gpus)| {
        let hold = Hold::of(container.request?);
        Some(ContainerGrant {
            container: container.name.clone(),
            role: container.role,
            cards: gpus.iter().map(|gpu| (gpu, hold)).collect(),
        })
    });
    asking.collect()
}

impl Placement {
    /// The placement as grants, for the ledger and for the pod's annotations.
    #[must_use]
    pub fn grants(&self, pod: &PodRequest) -> Vec<ContainerGrant> {
        grants(pod, &self.gpus)
    }
}

/// What one container asks of one node, as the policies see it.
#[derive(Clone, Copy, Debug)]
struct Ask {
    hold: Hold,
    count: usize,
    /// Cards that could serve; at least `count`.
    candidates: GpuSet,
    /// Candidates that must be chosen.
    required: GpuSet,
    traffic: Traffic,
}

/// What a policy chose.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    gpus: GpuSet,
    /// The policy's own points for this set, if it gives any.
    merit: f64,
}

impl Ask {
    /// Finds the candidates. Those in `preferred` are the only ones where they are enough.
    fn new(
        node: &NodeState,
        pod: &PodRequest,
        request: Request,
        required: GpuSet,
        preferred: GpuSet,
    ) -> Result<Self, Refusal> {
        let hold = Hold::of(request);
        let (count, required) = match request {
            Request::Whole(count) => (usize::from(count), required),
            Request::Share { .. } | Request::Memory(_) => (1, GpuSet::EMPTY),
        };
        let fits = |gpu: &GpuIndex| {
            node.fits(*gpu, hold) && node.node().gpu(*gpu).is_some_and(|card| pod.accepts(&card.model))
        };
        let mut candidates: GpuSet = node.node().topology().gpus().iter().filter(fits).collect();
        if candidates.len() < count || !candidates.is_superset(required) {
            return Err(refusal::of_cards(node, pod, request, required));
        }
        let preferred = candidates.intersection(preferred);
        if preferred.len() >= count {
            candidates = preferred;
        }
        Ok(Self {
            hold,
            count,
            candidates,
            required,
            traffic: pod.traffic,
        })
    }
}

impl Chosen {
    fn plain(gpus: GpuSet) -> Self {
        Self { gpus, merit: 0.0 }
    }
}
