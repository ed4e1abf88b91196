//! What the cluster holds: nodes with their GPUs, and pods with what they hold of them, in the core's own book.
//!
//! A pure value, made from objects of the API server: first all nodes, then the pods one by one, so that no pod need be kept.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tessera_core::admission::QuotaState;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::Ledger;
use tessera_core::node::NodeState;
use tessera_core::placement::set_aside;
use tessera_core::quota::{GpuAmount, NamespaceUsage, Quota, QuotaLabels};
use tessera_core::request::{PodRequest, Request};
use tessera_core::units::{MiB, MilliCpu, NodeName, PodUid};
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit};
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::tessera::rules::Rules;
use tessera_wire::tessera::{grant, node_use};
use tessera_wire::{foreign::dialect::DialectSet, tessera::parsed_node};

/// All of it.
#[derive(Debug, Default)]
pub struct Survey {
    /// What the scheduler goes by.
    pub rules: Rules,
    /// What each namespace may take.
    pub quota: Quota,
    /// Every node by name, also those without GPUs.
    pub nodes: BTreeMap<NodeName, NodeFacts>,
    /// Pods without a node that ask for GPUs, by namespace and name.
    pub waiting: Vec<Pod>,
    ledger: Ledger,
    pods: HashMap<PodUid, PodFacts>,
    /// Pods on a node of whom nobody told the GPUs, with what they ask for.
    unsure: BTreeMap<NodeName, BTreeMap<PodUid, PodRequest>>,
    /// CPU and memory of pods without GPUs.
    plain: BTreeMap<NodeName, (MilliCpu, MiB)>,
    accounts: NamespaceUsage,
}

/// What gpushare's lists say: the broken GPUs of nodes, as far as lists were shown to us.
pub type BrokenGpus = BTreeMap<NodeName, GpuSet>;

/// What is known of a node beside its GPUs.
#[derive(Clone, Debug, Default)]
pub struct NodeFacts {
    /// Why it cannot be read, if so.
    pub problem: Option<String>,
    /// What one unit of `aliyun.com/gpu-mem` is here.
    pub unit: MemoryUnit,
    /// Which vocabularies it serves.
    pub serves: DialectSet,
    /// Its internal address.
    pub address: Option<String>,
    /// Where its agent answers, if it has an address at all.
    pub agent: Option<String>,
    /// What it is to a quota.
    pub place: QuotaLabels,
    /// Whether its kubelet says that it is well; `None` where nobody says.
    pub ready: Option<bool>,
    /// Whether new pods shall stay away.
    pub cordoned: bool,
}

/// What is known of a pod beside its grant.
#[derive(Clone, Debug)]
pub struct PodFacts {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Whether its deletion has begun: it holds its GPUs until its containers have ended.
    pub terminating: bool,
}

/// A pod on a node, of whom nobody told the GPUs.
#[derive(Clone, Copy, Debug)]
pub struct Unsure<'a> {
    /// Which pod.
    pub pod: &'a PodFacts,
    /// Memory it asks for; whole GPUs count in full.
    pub memory: MiB,
}

impl Survey {
    /// Begins with all nodes. Those of their GPUs that are listed as broken are, whatever the node says.
    #[must_use]
    pub fn of_nodes(rules: Rules, nodes: impl IntoIterator<Item = Node>, broken: &BrokenGpus) -> Self {
        let mut survey = Self { rules, ..Self::default() };
        for node in nodes {
            let name = NodeName(node.metadata.name.clone());
            let mut facts = NodeFacts::new(&node, &survey.rules);
            match parsed_node::parse(&node, survey.rules.unit) {
                Ok(spec) => {
                    (facts.unit, facts.serves) = (spec.unit, spec.dialects);
                    let node = match broken.get(&name) {
                        Some(cards) => spec.node.with_unhealthy(*cards),
                        None => Arc::unwrap_or_clone(spec.node),
                    };
                    survey.ledger.set_node(node);
                }
                Err(error) => facts.problem = Some(error.to_string()),
            }
            survey.nodes.insert(name, facts);
        }
        survey
    }

    /// Takes a pod in. Ended ones, and those of nodes not shown, hold nothing.
    pub fn add(&mut self, pod: Pod) {
        if matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
            return;
        }
        let asks = pod.spec.asks_for_gpus();
        if pod.spec.node_name.is_empty() {
            if asks {
                self.waiting.push(pod);
            }
            return;
        }
        let node = NodeName(pod.spec.node_name.clone());
        let Some(facts) = self.nodes.get(&node) else { return };
        let (cpu, memory) = pod.spec.host_needs();
        if !asks {
            let sum = self.plain.entry(node).or_default();
            *sum = (sum.0 + cpu, sum.1 + memory);
            return;
        }
        let uid = PodUid(pod.metadata.uid);
        let known = self.ledger.node(&node).and_then(|state| {
            grant::complete(&pod.spec, &pod.metadata.annotations, state.node(), facts.unit)
        });
        match known {
            Some(containers) => {
                self.enter(
                    PodGrant { pod: uid.clone(), node, cpu, memory, containers },
                    &pod.metadata.namespace,
                );
            }
            None => {
                let request = pod.spec.request(facts.unit).unwrap_or_default();
                self.unsure.entry(node).or_default().insert(uid.clone(), request);
            }
        }
        let terminating = pod.metadata.deletion_timestamp.is_some();
        let (namespace, name) = (pod.metadata.namespace, pod.metadata.name);
        self.pods.insert(uid, PodFacts { namespace, name, terminating });
    }

    /// All pods are in: GPUs are set aside for those of whom nobody told theirs, as the scheduler does.
    #[must_use]
    pub fn finish(mut self) -> Self {
        for (node, pods) in self.unsure.clone() {
            for (uid, request) in pods {
                let guess = self.ledger.node(&node).map(|state| set_aside(state, &request));
                let namespace = self.pods.get(&uid).map(|pod| pod.namespace.clone()).unwrap_or_default();
                let PodRequest { cpu, memory, .. } = request;
                let containers = guess.unwrap_or_default();
                self.enter(PodGrant { pod: uid, node: node.clone(), cpu, memory, containers }, &namespace);
            }
        }
        for (node, (cpu, memory)) in std::mem::take(&mut self.plain) {
            let pod = PodUid(format!("pods without GPUs on {node}"));
            self.ledger.observe(PodGrant { pod, node, cpu, memory, containers: Vec::new() });
        }
        self.waiting.sort_by(|a, b| {
            let key = |pod: &Pod| (pod.metadata.namespace.clone(), pod.metadata.name.clone());
            key(a).cmp(&key(b))
        });
        self
    }

    fn enter(&mut self, grant: PodGrant, namespace: &str) {
        if let (Some(state), Some(facts)) = (self.ledger.node(&grant.node), self.nodes.get(&grant.node))
            && !self.quota.namespaces.is_empty()
        {
            let taken = GpuAmount::of_grants(&grant.containers, state.node());
            self.accounts.add(namespace, facts.place.model.as_deref().unwrap_or_default(), taken);
        }
        self.ledger.observe(grant);
    }

    /// Nodes with GPUs, by name.
    pub fn with_gpus(&self) -> impl Iterator<Item = (&NodeFacts, &NodeState)> {
        self.nodes.iter().filter_map(|(name, facts)| {
            let state = self.ledger.node(name)?;
            (!state.node().gpus().is_empty()).then_some((facts, state))
        })
    }

    /// Nodes that share the memory of their GPUs, by name.
    pub fn sharing(&self) -> impl Iterator<Item = (&NodeFacts, &NodeState)> {
        let shares = DialectSet::default().with(Dialect::Gpushare);
        self.with_gpus().filter(move |(facts, _)| facts.serves.covers(shares))
    }

    /// What is left of a node.
    #[must_use]
    pub fn state(&self, node: &NodeName) -> Option<&NodeState> {
        self.ledger.node(node)
    }

    /// Pods that hold GPUs of a node, by namespace and name; only those whose GPUs are known.
    #[must_use]
    pub fn holders(&self, node: &NodeName) -> Vec<(&PodFacts, &PodGrant)> {
        let unsure = self.unsure.get(node);
        let known = self
            .ledger
            .grants_on(node)
            .filter(|grant| unsure.is_none_or(|pods| !pods.contains_key(&grant.pod)));
        let mut holders: Vec<_> =
            known.filter_map(|grant| Some((self.pods.get(&grant.pod)?, grant))).collect();
        holders.sort_by(|(a, _), (b, _)| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        holders
    }

    /// Everything that is held of a node, whether anybody told where or not.
    #[must_use]
    pub fn grants(&self, node: &NodeName) -> Vec<&PodGrant> {
        self.ledger.grants_on(node).filter(|grant| self.pods.contains_key(&grant.pod)).collect()
    }

    /// Who a pod is.
    #[must_use]
    pub fn pod(&self, uid: &PodUid) -> Option<&PodFacts> {
        self.pods.get(uid)
    }

    /// What a pod holds.
    #[must_use]
    pub fn grant(&self, uid: &PodUid) -> Option<&PodGrant> {
        self.ledger.grant(uid)
    }

    /// Pods on a node of whom nobody told the GPUs, by namespace and name.
    #[must_use]
    pub fn unsure(&self, node: &NodeName) -> Vec<Unsure<'_>> {
        let card = self
            .ledger
            .node(node)
            .and_then(|state| state.node().gpus().first())
            .map_or(MiB::ZERO, |gpu| gpu.memory);
        let asked = self.unsure.get(node).into_iter().flatten();
        let mut unsure: Vec<Unsure<'_>> = asked
            .filter_map(|(uid, request)| {
                Some(Unsure { pod: self.pods.get(uid)?, memory: memory_of(request, card) })
            })
            .collect();
        unsure.sort_by(|a, b| (&a.pod.namespace, &a.pod.name).cmp(&(&b.pod.namespace, &b.pod.name)));
        unsure
    }

    /// Who may take how much.
    #[must_use]
    pub fn limits(&self) -> QuotaState<'_> {
        QuotaState { quota: &self.quota, usage: &self.accounts }
    }
}

/// Memory of all containers together.
fn memory_of(request: &PodRequest, card: MiB) -> MiB {
    let of_one = |request: Request| match request {
        Request::Whole(count) => MiB(card.0.saturating_mul(u64::from(count))),
        Request::Share { memory, .. } | Request::Memory(memory) => memory,
    };
    request.containers.iter().filter_map(|container| container.request).map(of_one).sum()
}

// === impl NodeFacts ===

impl NodeFacts {
    fn new(node: &Node, rules: &Rules) -> Self {
        let label = |key: &String| node.metadata.labels.get(key).cloned();
        let quota = rules.quota.as_ref();
        let internal = node.status.addresses.iter().find(|address| address.kind == "InternalIP");
        let address = internal.map(|address| address.address.clone());
        let named = node.metadata.annotations.get(node_use::ADDRESS_KEY).cloned();
        let agent = named.or_else(|| address.as_ref().map(|address| agent_at(address)));
        let ready = node.status.conditions.iter().find(|condition| condition.kind == "Ready");
        Self {
            problem: None,
            unit: rules.unit,
            serves: DialectSet::default(),
            agent,
            address,
            place: QuotaLabels {
                model: quota.and_then(|quota| label(&quota.model_label)),
                pool: quota.and_then(|quota| label(&quota.pool_label)),
            },
            ready: ready.map(|condition| condition.status == "True"),
            cordoned: node.spec.unschedulable,
        }
    }

    /// As kubectl words it: `Ready`, `NotReady,SchedulingDisabled`.
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

/// Where an agent listens that tells nothing else; IPv6 addresses stand in brackets.
fn agent_at(address: &str) -> String {
    let port = node_use::DEFAULT_PORT;
    if address.contains(':') {
        format!("http://[{address}]:{port}")
    } else {
        format!("http://{address}:{port}")
    }
}
