//! Compares what the pods of a node request with the GPUs and the memory that the node has.
//!
//! Other plugins offer one GPU several times, or do not count one of its parts. Tessera places pods by all dialects
//! together, so this module places the pods of a node as the scheduler would and reports those without a place.

use std::cmp::Reverse;

use serde_json::Value;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::Ledger;
use tessera_core::placement::{Policy, place};
use tessera_core::request::{PodRequest, Request};
use tessera_core::units::{MiB, MilliCpu, Percent};
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::Amount;
use tessera_wire::foreign::pod_spec::BadPod;
use tessera_wire::tessera::{inventory, parsed_node};

use super::cluster::{Node, Pod};

/// Node label of GPU feature discovery: devices that NVIDIA's plugin offers for each GPU.
pub(super) const REPLICAS: &str = "nvidia.com/gpu.replicas";
/// Node label of GPU feature discovery: the number of GPUs.
const COUNT: &str = "nvidia.com/gpu.count";
/// Node label of GPU feature discovery: memory of each GPU in MiB.
const MEMORY: &str = "nvidia.com/gpu.memory";
/// Node label of GPU feature discovery: how MIG instances are offered.
pub(super) const MIG_STRATEGY: &str = "nvidia.com/mig.strategy";
/// Node annotation in which HAMi's device plugin lists the GPUs.
const HAMI_REGISTER: &str = "hami.io/node-nvidia-register";
/// Whole GPUs, or the devices that stand for parts of them.
const WHOLE: &str = "nvidia.com/gpu";
/// Memory that is assumed for each GPU where the node does not say it. No pod requests more.
const ANY_MEMORY: MiB = MiB(1 << 30);

/// The pods of a node that have no place on its GPUs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Misfit {
    /// Number of GPUs of the node.
    pub(super) gpus: usize,
    /// Memory of each GPU, or `None` if the node does not say it.
    pub(super) memory: Option<MiB>,
    /// Names of the pods.
    pub(super) pods: Vec<String>,
}

/// Places the pods of a node, the largest first. Returns `None` if all fit, if the GPUs of the node are not known, or if
/// an agent of Tessera already serves the node.
pub(super) fn misfit<'a>(node: &Node, pods: impl Iterator<Item = &'a Pod>) -> Option<Misfit> {
    let is_served = node.0.metadata.annotations.contains_key(inventory::KEY);
    // The amounts of such a node are those of MIG instances.
    let has_instances_only = node.label(MIG_STRATEGY) == "single";
    if is_served || has_instances_only {
        return None;
    }
    let mut object = node.0.clone();
    if let Some((count, memory)) = counted(node) {
        object.metadata.annotations.remove(HAMI_REGISTER);
        object.status.allocatable.remove(WHOLE);
        object.status.capacity.insert(WHOLE.to_owned(), Amount(count.to_string()));
        if let Some(memory) = memory {
            object.metadata.labels.insert(MEMORY.to_owned(), memory.0.to_string());
        }
    }
    let mut parsed = parsed_node::parse(&object, MemoryUnit::GiB).ok()?;
    let memory = parsed.node.gpus().first()?.memory;
    let memory = (memory > MiB::ZERO).then_some(memory);
    if memory.is_none() {
        object.metadata.labels.insert(MEMORY.to_owned(), ANY_MEMORY.0.to_string());
        parsed = parsed_node::parse(&object, MemoryUnit::GiB).ok()?;
    }
    let gpus = parsed.node.gpus().len();
    let mut wanted: Vec<(String, PodRequest)> = pods
        .filter_map(|pod| Some((pod.name(), pod.object.spec.request(parsed.unit).ok()?)))
        .filter(|(_, request)| request.wants_gpu())
        .collect();
    wanted.sort_by_key(|(name, request)| (Reverse(size(request)), name.clone()));
    let mut ledger = Ledger::default();
    let node_name = parsed.node.name.clone();
    ledger.set_node((*parsed.node).clone());
    let mut without_place = Vec::new();
    for (name, request) in wanted {
        // The kubelet has admitted the pod, so CPU and memory suffice.
        let request = PodRequest { cpu: MilliCpu::ZERO, memory: MiB::ZERO, ..request };
        let state = ledger.node(&node_name)?;
        let Ok(placement) = place(state, &request, &Policy::Binpack, GpuSet::EMPTY) else {
            without_place.push(name);
            continue;
        };
        let containers = placement.grants(&parsed.node, &request);
        let grant = PodGrant {
            pod: name.as_str().into(),
            node: node_name.clone(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers,
        };
        ledger.book(grant).ok()?;
    }
    (!without_place.is_empty()).then_some(Misfit { gpus, memory, pods: without_place })
}

/// Returns the error in the requests of a pod that names GPU resources.
pub(super) fn bad_request(pod: &Pod) -> Option<BadPod> {
    let spec = &pod.object.spec;
    if spec.names_gpu_resources() { spec.request(MemoryUnit::GiB).err() } else { None }
}

/// Returns the number of GPUs and their memory where another plugin's amounts do not tell them.
fn counted(node: &Node) -> Option<(u64, Option<MiB>)> {
    if let Some(text) = node.0.metadata.annotations.get(HAMI_REGISTER) {
        return Some(registered(text)).filter(|(count, _)| *count > 0);
    }
    if let Some(count) = node.number(COUNT) {
        return Some((count, None));
    }
    let replicas = node.number(REPLICAS).filter(|replicas| *replicas > 1)?;
    Some((node.capacity(WHOLE) / replicas, None))
}

/// Returns the number of GPUs in HAMi's annotation and the memory of the smallest. HAMi 2.5 and newer write JSON, older
/// ones `UUID,COUNT,MEMORY,...` with a colon behind each GPU.
fn registered(text: &str) -> (u64, Option<MiB>) {
    let memories: Vec<Option<u64>> = match serde_json::from_str::<Vec<Value>>(text) {
        Ok(gpus) => gpus.iter().map(|gpu| gpu["devmem"].as_u64()).collect(),
        Err(_) => {
            let gpus = text.split(':').filter(|gpu| gpu.contains(','));
            gpus.map(|gpu| gpu.split(',').nth(2)?.trim().parse().ok()).collect()
        }
    };
    (memories.len() as u64, memories.into_iter().flatten().min().map(MiB))
}

/// Returns the order of sizes: whole GPUs, parts of several GPUs, compute, memory.
fn size(request: &PodRequest) -> (u8, u8, Percent, MiB) {
    let of = |request: Request| match request {
        Request::Whole(count) => (count, 0, Percent::ZERO, MiB::ZERO),
        Request::Share(share) => (0, share.count, share.compute_percent, share.memory.on(ANY_MEMORY)),
    };
    let requests = request.containers.iter().filter_map(|container| container.request);
    requests.map(of).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_hamis_annotation_tell_the_gpus() {
        let old = "GPU-a,10,32768,100,NVIDIA-Tesla V100,0,true:GPU-b,10,16384,100,NVIDIA-Tesla V100,0,true:";
        assert_eq!(registered(old), (2, Some(MiB(16_384))));
        let new = r#"[{"id":"GPU-a","count":10,"devmem":32768,"devcore":100,"type":"NVIDIA-A100","numa":0,"health":true}]"#;
        assert_eq!(registered(new), (1, Some(MiB(32_768))));
        assert_eq!(registered("x"), (0, None));
    }
}
