//! Nodes and pods with GPUs.

use anyhow::Result;
use k8s_openapi::{
    api::core::v1::{Node, Pod},
    apimachinery::pkg::api::resource::Quantity,
};
use serde_json::{Value, json};
use tessera_wire::{foreign::dialect::hami, tessera::inventory};

use crate::harness::{pod, virtual_node};

/// Memory of every GPU in MiB.
pub(super) const GPU_MEMORY_MIB: u64 = 16_384;

/// Returns a virtual node with small GPUs that serves every dialect.
pub(super) fn gpu_node(name: &str, gpu_count: u64, unit: &str) -> Node {
    node_of_model(name, gpu_count, unit, "T4", GPU_MEMORY_MIB)
}

/// Returns a virtual node with GPUs of one model that serves every dialect.
pub(super) fn node_of_model(name: &str, gpu_count: u64, unit: &str, model: &str, memory_mib: u64) -> Node {
    let mut node = virtual_node(name);
    let gpus: Vec<Value> = (0..gpu_count)
        .map(|index| json!({"uuid": format!("GPU-{name}-{index}"), "minor": index, "model": model, "memoryMiB": memory_mib}))
        .collect();
    let inventory = json!({ "memoryUnit": unit, "gpus": gpus }).to_string();
    node.metadata.annotations = Some([("tessera.dev/inventory".to_owned(), inventory)].into());
    if let Some(labels) = &mut node.metadata.labels {
        labels.insert("gpu-model".into(), model.into());
        labels.insert("gpu-pool".into(), "public".into());
    }
    let unit = if unit == "GiB" { 1024 } else { 1 };
    let amounts = [
        ("nvidia.com/gpu", gpu_count),
        ("aliyun.com/gpu", gpu_count),
        ("aliyun.com/gpu-mem", gpu_count * memory_mib / unit),
        ("tencent.com/vcuda-core", gpu_count * 100),
        ("tencent.com/vcuda-memory", gpu_count * memory_mib / 256),
    ];
    if let Some(status) = &mut node.status {
        for resources in [&mut status.capacity, &mut status.allocatable].into_iter().flatten() {
            resources.extend(amounts.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_string()))));
        }
    }
    node
}

/// Offers several devices of `nvidia.com/gpu` for each GPU, as the agent does where HAMi's resources are in use.
pub(super) fn split_into_slots(mut node: Node, gpus: u64, slots: u64) -> Result<Node> {
    for inventory in node.metadata.annotations.iter_mut().filter_map(|all| all.get_mut(inventory::KEY)) {
        let mut document: Value = serde_json::from_str(inventory)?;
        document["nvidiaSlots"] = json!(slots);
        *inventory = document.to_string();
    }
    let status = node.status.get_or_insert_default();
    for resources in [&mut status.capacity, &mut status.allocatable].into_iter().flatten() {
        resources.insert(hami::COUNT.to_owned(), Quantity((gpus * slots).to_string()));
    }
    Ok(node)
}

pub(super) fn share(name: &str, compute_percent: u64) -> Pod {
    let memory = (compute_percent * GPU_MEMORY_MIB / 256 / 100).max(1).to_string();
    asking(
        name,
        &[("tencent.com/vcuda-core", &compute_percent.to_string()), ("tencent.com/vcuda-memory", &memory)],
    )
}

pub(super) fn whole(name: &str, gpu_count: u64) -> Pod {
    asking(name, &[("nvidia.com/gpu", &gpu_count.to_string())])
}

pub(super) fn asking(name: &str, resources: &[(&str, &str)]) -> Pod {
    pod(name, "true", resources)
}

pub(super) fn with_priority(mut pod: Pod, priority: i32) -> Pod {
    if let Some(spec) = &mut pod.spec {
        spec.priority_class_name = Some(if priority > 0 { "high" } else { "low" }.to_owned());
    }
    pod
}

/// Returns the value of an annotation, or an empty text.
pub(super) fn annotation<'a>(pod: &'a Pod, key: &str) -> &'a str {
    pod.metadata.annotations.as_ref().and_then(|all| all.get(key)).map_or("", String::as_str)
}
