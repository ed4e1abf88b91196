//! What the pods of a plan request of each node.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use tessera_core::admission::{Admission, NodeOffer, PodQuery};
use tessera_core::constraint::PodConstraints;
use tessera_core::defragment::{Goal, Requests, Wanted};
use tessera_core::placement::Policy;
use tessera_core::request::{PodRequest, Request};
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::objects::{Pod, PodSpec};
use tessera_wire::tessera::gang;
use tessera_wire::tessera::parsed_pod::ParsedPod;

use crate::args::Shape;
use crate::survey::Survey;

/// What the pods of the plan request of each node.
#[derive(Debug)]
pub(super) struct Movers<'a> {
    survey: &'a Survey,
    pods: HashMap<PodUid, Mover<'a>>,
}

#[derive(Debug)]
struct Mover<'a> {
    constraints: PodConstraints,
    kind: MoverKind<'a>,
}

#[derive(Debug)]
enum MoverKind<'a> {
    /// A pod of the cluster. The quota of its namespace counts only while it waits.
    Pod { parsed: Box<ParsedPod<'a>>, waits: bool },
    /// A part of the wanted shape.
    Shape(PodRequest),
}

impl<'a> Movers<'a> {
    pub(super) fn new(survey: &'a Survey) -> Self {
        Self { survey, pods: HashMap::new() }
    }

    /// Adds a pod. Returns false if its request cannot be parsed.
    pub(super) fn add(&mut self, uid: &PodUid, pod: &'a Pod, waits: bool) -> bool {
        let Ok(parsed) = ParsedPod::of(self.survey, pod) else { return false };
        let kind = MoverKind::Pod { parsed: Box::new(parsed), waits };
        self.pods.insert(uid.clone(), Mover { constraints: pod.spec.constraints(), kind });
        true
    }

    pub(super) fn add_shape(&mut self, shape: Shape, max_priority: i32) -> (Goal, BTreeMap<PodUid, String>) {
        let mut names = BTreeMap::new();
        for number in 1..=shape.nodes {
            // No pod has such a UID, because UIDs have no spaces.
            let uid = PodUid(format!("shape {number:05}"));
            let kind = MoverKind::Shape(PodRequest::of_mains([Request::Whole(shape.gpus)]));
            self.pods.insert(uid.clone(), Mover { constraints: PodSpec::default().constraints(), kind });
            names.insert(uid, format!("node {number} of {} with {} free GPUs", shape.nodes, shape.gpus));
        }
        let wanted = names.keys().map(|pod| Wanted { pod: pod.clone(), max_priority }).collect();
        (Goal { wanted, on_different_nodes: true, all_or_nothing: true }, names)
    }

    /// Adds the waiting pods, those of the highest priority first, then the largest. Pods of gangs are left out: only
    /// room for all of them at the same time would help.
    pub(super) fn add_waiting(&mut self) -> (Goal, BTreeMap<PodUid, String>) {
        let (mut names, mut order) = (BTreeMap::new(), Vec::new());
        for pod in &self.survey.waiting {
            let meta = &pod.metadata;
            let is_alone = matches!(gang::membership(pod), Ok(None));
            let uid = PodUid(meta.uid.clone());
            if !is_alone || !pod.spec.asks_for_gpus() || !self.add(&uid, pod, true) {
                continue;
            }
            let priority = pod.spec.priority.unwrap_or(0);
            names.insert(uid.clone(), format!("{}/{}", meta.namespace, meta.name));
            order.push((Reverse(priority), Reverse(self.gpu_count(&uid)), uid));
        }
        order.sort();
        let wanted =
            order.into_iter().map(|(Reverse(max_priority), _, pod)| Wanted { pod, max_priority }).collect();
        (Goal { wanted, ..Goal::default() }, names)
    }

    fn gpu_count(&self, uid: &PodUid) -> usize {
        let Some(MoverKind::Pod { parsed, .. }) = self.pods.get(uid).map(|mover| &mover.kind) else {
            return 0;
        };
        let request = parsed.request(self.survey.rules.unit);
        request.containers.iter().filter_map(|container| container.request).map(Request::gpu_count).sum()
    }
}

impl Requests for Movers<'_> {
    fn request_on(&self, pod: &PodUid, node: &NodeName) -> Option<PodRequest> {
        let Mover { constraints, kind } = self.pods.get(pod)?;
        let facts = self.survey.nodes.get(node)?;
        if facts.problem.is_some() || constraints.unmet_on(&node.0, &facts.constraints).is_some() {
            return None;
        }
        let (parsed, waits) = match kind {
            MoverKind::Shape(request) => return Some(request.clone()),
            MoverKind::Pod { parsed, waits } => (parsed, *waits),
        };
        let request = parsed.request(facts.unit);
        let offer = NodeOffer {
            state: self.survey.state(node)?,
            service: facts.dialects.service(parsed.shape.dialects, facts.is_agent_unavailable),
            quota_labels: &facts.quota_labels,
        };
        let query = PodQuery { namespace: parsed.namespace, request: &request, policy: &Policy::Simple };
        let quota = waits.then(|| self.survey.limits());
        Admission { offer, query, quota }.check().ok()?;
        Some(request.into_owned())
    }
}
