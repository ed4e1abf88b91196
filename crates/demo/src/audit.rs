//! Watches over the cluster: no GPU may carry more than it has at any moment, and in the end all books must agree.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::ledger::Ledger;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName, PodUid};
use tessera_sim::apiserver::{ApiServer, Happened};
use tessera_sim::kubelet::Held;
use tessera_wire::device_id::{DeviceIds, Resource};
use tessera_wire::dialect::{MemoryUnit, vcuda};
use tessera_wire::objects::{Node, Pod};
use tessera_wire::{grant, node_spec};
use tokio::task::JoinHandle;

use crate::node::DemoNode;

/// Follows every change of the API server from the start.
pub(crate) struct Audit {
    book: Arc<Mutex<Book>>,
    task: JoinHandle<()>,
}

/// What the annotations say, summed up.
#[derive(Debug, Default)]
pub(crate) struct Book {
    ledger: Ledger,
    pub(crate) checks: u64,
    pub(crate) violations: Vec<String>,
}

/// More would only repeat themselves.
const MOST_VIOLATIONS: usize = 20;

impl Audit {
    pub(crate) fn start(api: &Arc<ApiServer>) -> Self {
        let book = Arc::<Mutex<Book>>::default();
        let (api, kept) = (Arc::clone(api), Arc::clone(&book));
        let task = tokio::spawn(async move {
            let watches = (api.watch("/api/v1/nodes", ""), api.watch("/api/v1/pods", ""));
            let (Ok(mut nodes), Ok(mut pods)) = watches else { return };
            loop {
                tokio::select! {
                    Some(Happened::Set(node)) = nodes.next() => lock(&kept).see_node(node),
                    Some(happened) = pods.next() => lock(&kept).see_pod(happened),
                    else => return,
                }
            }
        });
        Self { book, task }
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        lock(&self.book)
    }

    /// Where the kubelet of a node and the annotations of its pods differ.
    pub(crate) fn compare_kubelet(&self, node: &DemoNode) -> Vec<String> {
        let book = self.book();
        let ids = DeviceIds::new(&node.gpus, MemoryUnit::GiB);
        let name = NodeName(node.name.clone());
        let mut granted: BTreeMap<(String, String), ContainerGrant> = BTreeMap::new();
        for grant in book.ledger.grants_on(&name) {
            for container in &grant.containers {
                granted.insert((grant.pod.0.clone(), container.container.clone()), container.clone());
            }
        }
        let mut held: BTreeMap<(String, String), Vec<Held>> = BTreeMap::new();
        for entry in node.node.kubelet().book() {
            held.entry((entry.pod.clone(), entry.container.clone())).or_default().push(entry);
        }
        let mut differences = Vec::new();
        for (who, grant) in &granted {
            let said = held.remove(who).unwrap_or_default();
            if said.is_empty() || !said.iter().all(|held| agrees(held, grant, &ids)) {
                let cards = &grant.cards;
                differences
                    .push(format!("{name}: {who:?} is annotated {cards:?}; the kubelet says {said:?}"));
            }
        }
        differences.extend(held.keys().map(|who| format!("{name}: only the kubelet knows {who:?}")));
        differences
    }

    /// Where the scheduler's ledger and the annotations differ.
    pub(crate) fn compare_ledger(&self, ledger: &Ledger, node: &str) -> Vec<String> {
        let book = self.book();
        let name = NodeName(node.to_owned());
        let cards = |ledger: &Ledger| -> BTreeMap<PodUid, Vec<(GpuIndex, Hold)>> {
            let sorted = |grant: &PodGrant| {
                let all = grant.containers.iter().flat_map(|container| container.cards.clone());
                (grant.pod.clone(), all.collect())
            };
            ledger.grants_on(&name).map(sorted).collect()
        };
        let (annotated, booked) = (cards(&book.ledger), cards(ledger));
        if annotated == booked {
            return Vec::new();
        }
        vec![format!("{name}: annotations say {annotated:?}, the scheduler's ledger {booked:?}")]
    }
}

impl Drop for Audit {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Book {
    fn see_node(&mut self, node: Value) {
        let Ok(node) = serde_json::from_value::<Node>(node) else { return };
        if let Ok(spec) = node_spec::parse(&node, MemoryUnit::GiB) {
            self.ledger.set_node(Arc::unwrap_or_clone(spec.node));
            self.check();
        }
    }

    fn see_pod(&mut self, happened: Happened) {
        let (pod, is_gone) = match happened {
            Happened::Set(pod) => (pod, false),
            Happened::Gone(pod) => (pod, true),
        };
        let Ok(pod) = serde_json::from_value::<Pod>(pod) else { return };
        let uid = PodUid(pod.metadata.uid.clone());
        if is_gone || matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
            self.ledger.release(&uid);
        } else if let Some(containers) = self.granted(&pod) {
            let node = NodeName(pod.spec.node_name.clone());
            self.ledger.observe(PodGrant {
                pod: uid,
                node,
                containers,
                cpu: MilliCpu::ZERO,
                memory: MiB::ZERO,
            });
        }
        self.check();
    }

    fn granted(&self, pod: &Pod) -> Option<Vec<ContainerGrant>> {
        let state = self.ledger.node(&NodeName(pod.spec.node_name.clone()))?;
        grant::parse(&pod.spec, &pod.metadata.annotations, state.node(), MemoryUnit::GiB).ok().flatten()
    }

    fn check(&mut self) {
        self.checks += 1;
        for (node, cards) in self.ledger.overbooked() {
            if self.violations.len() < MOST_VIOLATIONS {
                self.violations.push(format!("{node}: GPUs {cards:?} carry more than they have"));
            }
        }
    }
}

/// Whether the devices a container holds are those of its grant.
fn agrees(held: &Held, grant: &ContainerGrant, ids: &DeviceIds) -> bool {
    let Some(resource) = Resource::named(&held.resource) else { return false };
    let mut counts: BTreeMap<GpuIndex, u64> = BTreeMap::new();
    for id in &held.ids {
        let Some((card, _)) = ids.read(resource, id) else { return false };
        *counts.entry(card).or_default() += 1;
    }
    let amount = |hold: Hold, count: u64| match (hold, resource) {
        (Hold::Whole, _) => true,
        (Hold::Share { compute_percent, .. }, Resource::VcudaCore) => u64::from(compute_percent.0) == count,
        (Hold::Share { memory, .. }, Resource::VcudaMemory) => memory.0 == count * vcuda::BLOCK.0,
        (Hold::Share { memory, .. }, Resource::GpuMemory) => memory.0 == count * ids.unit().mib(),
        (Hold::Share { .. }, Resource::NvidiaGpu | Resource::AliyunGpu) => false,
    };
    counts.len() == grant.cards.len()
        && grant.cards.iter().all(|(card, hold)| counts.get(card).is_some_and(|count| amount(*hold, *count)))
}

fn lock(book: &Mutex<Book>) -> MutexGuard<'_, Book> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}
