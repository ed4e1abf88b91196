//! The state of the cluster: nodes with their GPUs, and the grants of pods in the core's ledger.
//!
//! A survey is a pure value, built from objects of the API server: first from all nodes, then from
//! one pod after the other, so that it need not keep the pods.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tessera_core::admission::QuotaState;
use tessera_core::cluster_view::{ClusterView, PodGpus};
use tessera_core::constraint::NodeConstraints;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::node::NodeState;
use tessera_core::quota::{Quota, QuotaLabels};
use tessera_core::request::{PodRequest, Request};
use tessera_core::units::{MiB, NodeName, PodUid};
use tessera_wire::foreign::constraint;
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit};
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::tessera::agent_address::AgentAddress;
use tessera_wire::tessera::placed_pod::{has_ended, placed_pod};
use tessera_wire::tessera::rules::Rules;
use tessera_wire::{foreign::dialect::DialectSet, tessera::parsed_node};

/// The state of the cluster.
#[derive(Debug, Default)]
pub struct Survey {
    /// Rules that the scheduler publishes.
    pub rules: Rules,
    /// Quota of each namespace.
    pub quota: Quota,
    /// All nodes by name, including nodes without GPUs.
    pub nodes: BTreeMap<NodeName, NodeFacts>,
    /// Waiting pods that request GPUs, sorted by namespace and name.
    pub waiting: Vec<Pod>,
    view: ClusterView,
    /// Facts about the pods on a node that request GPUs.
    pods: HashMap<PodUid, PodFacts>,
}

/// Unhealthy GPUs of nodes, from gpushare's lists.
pub type UnhealthyGpus = BTreeMap<NodeName, GpuSet>;

/// Facts about a node besides its GPUs.
#[derive(Clone, Debug, Default)]
pub struct NodeFacts {
    /// Error if the node object cannot be parsed.
    pub problem: Option<String>,
    /// Size of one unit of `aliyun.com/gpu-mem` on the node.
    pub unit: MemoryUnit,
    /// Dialects that the node serves.
    pub dialects: DialectSet,
    /// Amount of `aliyun.com/gpu-mem` that the node offers.
    pub shared_memory: MiB,
    /// Internal address of the node.
    pub address: Option<String>,
    /// Address of the node's agent, if the node has an address.
    pub agent: Option<AgentAddress>,
    /// Labels that quotas refer to.
    pub quota_labels: QuotaLabels,
    /// Value of the condition `Ready`, or `None` without it.
    pub ready: Option<bool>,
    /// Properties that constraints of pods refer to.
    pub constraints: NodeConstraints,
    /// True if the node accepts no new pods.
    pub cordoned: bool,
}

/// Facts about a pod besides its grant.
#[derive(Clone, Debug)]
pub struct PodFacts {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// True if the deletion of the pod has begun. It holds its GPUs until its containers have
    /// ended.
    pub terminating: bool,
}

/// A pod on a node whose GPUs are unknown.
#[derive(Clone, Copy, Debug)]
pub struct UnknownGpus<'a> {
    /// The pod.
    pub facts: &'a PodFacts,
    /// Requested memory. A whole GPU counts with its full memory.
    pub memory: MiB,
}

impl Survey {
    /// Creates a survey of these nodes. GPUs in `unhealthy` count as unhealthy even if the node
    /// reports them as healthy.
    #[must_use]
    pub fn of_nodes(rules: Rules, nodes: impl IntoIterator<Item = Node>, unhealthy: &UnhealthyGpus) -> Self {
        let mut survey = Self { rules, ..Self::default() };
        for node in nodes {
            let name = NodeName(node.metadata.name.clone());
            let mut facts = NodeFacts::new(&node, &survey.rules);
            match parsed_node::parse(&node, survey.rules.unit) {
                Ok(spec) => {
                    (facts.unit, facts.dialects) = (spec.unit, spec.dialects);
                    facts.shared_memory = spec.shared_memory;
                    let node = match unhealthy.get(&name) {
                        Some(gpus) => spec.node.with_unhealthy(*gpus),
                        None => Arc::unwrap_or_clone(spec.node),
                    };
                    survey.view.set_node(node, facts.quota_labels.clone(), []);
                }
                Err(error) => facts.problem = Some(error.to_string()),
            }
            survey.nodes.insert(name, facts);
        }
        survey
    }

    /// Adds a pod. Ended pods and pods of nodes outside the survey are skipped.
    pub fn add(&mut self, pod: Pod) {
        if has_ended(&pod) {
            return;
        }
        if pod.spec.node_name.is_empty() {
            if pod.spec.asks_for_gpus() {
                self.waiting.push(pod);
            }
            return;
        }
        let node = NodeName(pod.spec.node_name.clone());
        let Some(facts) = self.nodes.get(&node) else { return };
        let state = self.view.ledger().node(&node);
        let Some(placed) = placed_pod(&pod, state.map(NodeState::node), facts.unit) else { return };
        if placed.gpus != PodGpus::NotRequested {
            let terminating = pod.metadata.deletion_timestamp.is_some();
            let (namespace, name) = (pod.metadata.namespace, pod.metadata.name);
            self.pods.insert(placed.uid.clone(), PodFacts { namespace, name, terminating });
        }
        self.view.note_pod(placed);
    }

    /// Completes the survey after the last pod. Sets GPUs aside for pods whose GPUs are unknown,
    /// like the scheduler.
    #[must_use]
    pub fn finish(mut self) -> Self {
        self.view.settle_all();
        self.waiting.sort_by(|a, b| {
            let key = |pod: &Pod| (pod.metadata.namespace.clone(), pod.metadata.name.clone());
            key(a).cmp(&key(b))
        });
        self
    }

    /// Returns the nodes with GPUs, sorted by name.
    pub fn with_gpus(&self) -> impl Iterator<Item = (&NodeFacts, &NodeState)> {
        self.nodes.iter().filter_map(|(name, facts)| {
            let state = self.view.ledger().node(name)?;
            (!state.node().gpus().is_empty()).then_some((facts, state))
        })
    }

    /// Returns the nodes that share GPU memory, sorted by name, including nodes with an unknown number of GPUs.
    pub fn sharing(&self) -> impl Iterator<Item = (&NodeFacts, &NodeState)> {
        let shares = DialectSet::default().with(Dialect::Gpushare);
        let sharing = self.nodes.iter().filter(move |(_, facts)| facts.dialects.covers(shares));
        sharing.filter_map(|(name, facts)| Some((facts, self.view.ledger().node(name)?)))
    }

    /// Returns the state of a node.
    #[must_use]
    pub fn state(&self, node: &NodeName) -> Option<&NodeState> {
        self.view.ledger().node(node)
    }

    /// Returns the pods on a node whose GPUs are known, with their grants, sorted by namespace and
    /// name.
    #[must_use]
    pub fn holders(&self, node: &NodeName) -> Vec<(&PodFacts, &PodGrant)> {
        let known = self.view.ledger().grants_on(node).filter(|grant| !self.view.is_set_aside(grant));
        let mut holders: Vec<_> =
            known.filter_map(|grant| Some((self.pods.get(&grant.pod)?, grant))).collect();
        holders.sort_by(|(a, _), (b, _)| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        holders
    }

    /// Returns all grants on a node, including guesses for pods whose GPUs are unknown.
    #[must_use]
    pub fn grants(&self, node: &NodeName) -> Vec<&PodGrant> {
        self.view.ledger().grants_on(node).filter(|grant| self.pods.contains_key(&grant.pod)).collect()
    }

    /// Returns the facts of a pod.
    #[must_use]
    pub fn pod(&self, uid: &PodUid) -> Option<&PodFacts> {
        self.pods.get(uid)
    }

    /// Returns the grant of a pod, or `None` if its GPUs are unknown.
    #[must_use]
    pub fn grant(&self, uid: &PodUid) -> Option<&PodGrant> {
        self.view.ledger().grant(uid).filter(|grant| !self.view.is_set_aside(grant))
    }

    /// Returns the pods on a node whose GPUs are unknown, sorted by namespace and name.
    #[must_use]
    pub fn unknown_gpus(&self, node: &NodeName) -> Vec<UnknownGpus<'_>> {
        let gpu_memory = self
            .view
            .ledger()
            .node(node)
            .and_then(|state| state.node().gpus().first())
            .map_or(MiB::ZERO, |gpu| gpu.memory);
        let requests = self.view.unknown_pods(node);
        let mut pods: Vec<UnknownGpus<'_>> = requests
            .filter_map(|(uid, request)| {
                Some(UnknownGpus { facts: self.pods.get(uid)?, memory: memory_of(request, gpu_memory) })
            })
            .collect();
        pods.sort_by(|a, b| (&a.facts.namespace, &a.facts.name).cmp(&(&b.facts.namespace, &b.facts.name)));
        pods
    }

    /// Returns the quotas and their current use.
    #[must_use]
    pub fn limits(&self) -> QuotaState<'_> {
        QuotaState { quota: &self.quota, usage: self.view.usage() }
    }
}

/// Returns the requested memory of all containers together.
fn memory_of(request: &PodRequest, gpu_memory: MiB) -> MiB {
    let of_one = |request: Request| match request {
        Request::Whole(count) => MiB(gpu_memory.0.saturating_mul(u64::from(count))),
        Request::Share { memory, .. } | Request::Memory(memory) => memory,
    };
    request.containers.iter().filter_map(|container| container.request).map(of_one).sum()
}

impl NodeFacts {
    fn new(node: &Node, rules: &Rules) -> Self {
        let label = |key: &String| node.metadata.labels.get(key).cloned();
        let quota = rules.quota.as_ref();
        let internal = node.status.addresses.iter().find(|address| address.kind == "InternalIP");
        let address = internal.map(|address| address.address.clone());
        let agent = AgentAddress::of(node);
        let ready = node.status.conditions.iter().find(|condition| condition.kind == "Ready");
        Self {
            problem: None,
            unit: rules.unit,
            dialects: DialectSet::default(),
            shared_memory: MiB::ZERO,
            agent,
            address,
            quota_labels: QuotaLabels {
                model: quota.and_then(|quota| label(&quota.model_label)),
                pool: quota.and_then(|quota| label(&quota.pool_label)),
            },
            ready: ready.map(|condition| condition.status == "True"),
            constraints: constraint::of_node(node),
            cordoned: node.spec.unschedulable,
        }
    }

    /// Returns the status in kubectl's form: `Ready`, `NotReady,SchedulingDisabled`.
    #[must_use]
    pub fn status(&self) -> String {
        let ready = match self.ready {
            Some(true) => "Ready",
            Some(false) => "NotReady",
            None => "Unknown",
        };
        if self.cordoned { format!("{ready},SchedulingDisabled") } else { ready.to_owned() }
    }
}
