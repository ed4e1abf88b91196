//! Audits the cluster: no GPU may be overbooked at any time, and at the end kubelets, annotations
//! and the scheduler's ledger must agree.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tessera_core::cluster_view::ClusterView;
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::ledger::{Ledger, NodeGrant};
use tessera_core::quota::QuotaLabels;
use tessera_core::units::{GpuIndex, NodeName, PodUid};
use tessera_sim::apiserver::{ApiServer, ObjectChange};
use tessera_sim::kubelet::HeldDevices;
use tessera_wire::foreign::dialect::{MemoryUnit, vcuda};
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::kubelet::device_id::{DeviceIds, Resource};
use tessera_wire::tessera::parsed_node;
use tessera_wire::tessera::placed_pod::{has_ended, placed_pod};
use tokio::task::JoinHandle;

use crate::node::DemoNode;

/// The task that applies every change of the API server to a [`GrantAudit`].
pub(crate) struct GrantAuditor {
    audit: Arc<Mutex<GrantAudit>>,
    task: JoinHandle<()>,
}

/// The sum of all grants in pod annotations, checked after every change.
#[derive(Debug, Default)]
pub(crate) struct GrantAudit {
    view: ClusterView,
    pub(crate) checks: u64,
    pub(crate) violations: Vec<String>,
}

/// Further violations would only repeat the first ones.
const MAX_VIOLATIONS: usize = 20;

impl GrantAuditor {
    pub(crate) fn start(api: &Arc<ApiServer>) -> Self {
        let audit = Arc::<Mutex<GrantAudit>>::default();
        let (api, shared) = (Arc::clone(api), Arc::clone(&audit));
        let task = tokio::spawn(async move {
            let watches = (api.watch("/api/v1/nodes", ""), api.watch("/api/v1/pods", ""));
            let (Ok(mut nodes), Ok(mut pods)) = watches else { return };
            loop {
                tokio::select! {
                    Some(ObjectChange::Applied(node)) = nodes.next() => lock(&shared).apply_node(node),
                    Some(event) = pods.next() => lock(&shared).apply_pod(event),
                    else => return,
                }
            }
        });
        Self { audit, task }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, GrantAudit> {
        lock(&self.audit)
    }

    /// Returns the differences between a node's kubelet and the annotations of its pods.
    pub(crate) fn compare_kubelet(&self, node: &DemoNode) -> Vec<String> {
        let audit = self.state();
        let ids = DeviceIds::new(&node.gpus, MemoryUnit::GiB);
        let name = NodeName(node.name.clone());
        let mut granted: BTreeMap<(String, String), ContainerGrant> = BTreeMap::new();
        let is_annotated = |grant: &&PodGrant| !audit.view.is_set_aside(grant);
        for grant in audit.view.ledger().grants_on(&name).filter(is_annotated) {
            for container in &grant.containers {
                granted.insert((grant.pod.0.clone(), container.container.clone()), container.clone());
            }
        }
        let mut held: BTreeMap<(String, String), Vec<HeldDevices>> = BTreeMap::new();
        for entry in node.node.kubelet().held_devices() {
            held.entry((entry.pod.clone(), entry.container.clone())).or_default().push(entry);
        }
        let mut differences = Vec::new();
        for (who, grant) in &granted {
            let said = held.remove(who).unwrap_or_default();
            if said.is_empty() || !said.iter().all(|held| agrees(held, grant, &ids)) {
                let gpus = &grant.holds;
                differences.push(format!(
                    "{name}: {who:?} is annotated with GPUs {gpus:?}; the kubelet reports {said:?}"
                ));
            }
        }
        differences.extend(held.keys().map(|who| format!("{name}: {who:?} holds devices without a grant")));
        differences
    }

    /// Returns the differences between the scheduler's ledger and the annotations.
    pub(crate) fn compare_ledger(&self, ledger: &Ledger, node: &str) -> Vec<String> {
        let audit = self.state();
        let name = NodeName(node.to_owned());
        let gpus = |ledger: &Ledger| -> BTreeMap<PodUid, Vec<(GpuIndex, Hold)>> {
            let sorted = |grant: &PodGrant| {
                let all = grant.containers.iter().flat_map(|container| container.holds.clone());
                (grant.pod.clone(), all.collect())
            };
            ledger.grants_on(&name).map(sorted).collect()
        };
        let (annotated, booked) = (gpus(audit.view.ledger()), gpus(ledger));
        let in_doubt = ledger.counted_on(&name).filter(|counted| matches!(counted, NodeGrant::InDoubt(_)));
        let in_doubt: Vec<&PodUid> = in_doubt.map(|counted| &counted.grant().pod).collect();
        if annotated == booked && in_doubt.is_empty() {
            return Vec::new();
        }
        vec![format!(
            "{name}: the annotations name {annotated:?}, the scheduler's ledger {booked:?} and bookings in doubt of pods {in_doubt:?}"
        )]
    }
}

impl Drop for GrantAuditor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl GrantAudit {
    fn apply_node(&mut self, node: Value) {
        let Ok(node) = serde_json::from_value::<Node>(node) else { return };
        if let Ok(spec) = parsed_node::parse(&node, MemoryUnit::GiB) {
            self.view.set_node(Arc::unwrap_or_clone(spec.node), QuotaLabels::default(), []);
            self.check();
        }
    }

    fn apply_pod(&mut self, event: ObjectChange) {
        let (pod, is_gone) = match event {
            ObjectChange::Applied(pod) => (pod, false),
            ObjectChange::Deleted(pod) => (pod, true),
        };
        let Ok(pod) = serde_json::from_value::<Pod>(pod) else { return };
        if is_gone || has_ended(&pod) {
            self.view.remove_pod(&PodUid(pod.metadata.uid));
        } else if let Some(state) = self.view.ledger().node(&NodeName(pod.spec.node_name.clone()))
            && let Some(placed) = placed_pod(&pod, Some(state.node()), MemoryUnit::GiB)
        {
            self.view.set_pod(placed);
        }
        self.check();
    }

    fn check(&mut self) {
        self.checks += 1;
        for (node, gpus) in self.view.ledger().overbooked() {
            if self.violations.len() < MAX_VIOLATIONS {
                self.violations.push(format!("{node}: GPUs {gpus:?} are overbooked"));
            }
        }
    }
}

/// Returns whether the devices of a container are those of its grant.
fn agrees(held: &HeldDevices, grant: &ContainerGrant, ids: &DeviceIds) -> bool {
    let Some(resource) = Resource::named(&held.resource) else { return false };
    let mut counts: BTreeMap<GpuIndex, u64> = BTreeMap::new();
    for id in &held.ids {
        let Some((gpu, _)) = ids.read(resource, id) else { return false };
        *counts.entry(gpu).or_default() += 1;
    }
    let amount = |hold: Hold, count: u64| match (hold, resource) {
        (Hold::Whole, _) => true,
        (Hold::Share { compute_percent, .. }, Resource::VcudaCore) => u64::from(compute_percent.0) == count,
        (Hold::Share { memory, .. }, Resource::VcudaMemory) => memory.0 == count * vcuda::BLOCK.0,
        (Hold::Share { memory, .. }, Resource::GpuMemory) => memory.0 == count * ids.unit().mib(),
        (Hold::Share { .. }, Resource::NvidiaGpu | Resource::AliyunGpu) => false,
    };
    counts.len() == grant.holds.len()
        && grant.holds.iter().all(|(gpu, hold)| counts.get(gpu).is_some_and(|count| amount(*hold, *count)))
}

fn lock(audit: &Mutex<GrantAudit>) -> MutexGuard<'_, GrantAudit> {
    audit.lock().unwrap_or_else(PoisonError::into_inner)
}
