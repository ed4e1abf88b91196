//! Nodes and pods in the form of the API server.

use serde_json::{Map, Value, json};

/// Returns a node without an agent, whose status only counts its GPUs.
pub(crate) fn old_share_node(name: &str, address: &str, gpus: u64, units: u64) -> Value {
    let resources = json!({ "cpu": "64", "memory": "256Gi", "aliyun.com/gpu-mem": units.to_string(), "aliyun.com/gpu-count": gpus.to_string() });
    json!({
        "metadata": { "name": name },
        "status": { "capacity": resources, "allocatable": resources, "addresses": addresses(address), "conditions": ready() },
    })
}

/// Returns a node with an agent's inventory, which serves every dialect.
pub(crate) fn node(name: &str, address: &str, unit: &str, gpus: &[TestGpu]) -> Value {
    let entries: Vec<Value> = gpus
        .iter()
        .enumerate()
        .map(|(index, gpu)| {
            json!({"uuid": format!("GPU-{name}-{index}"), "minor": index, "model": gpu.model,
                   "memoryMiB": gpu.memory, "unhealthy": gpu.unhealthy})
        })
        .collect();
    let links: Vec<Value> = pairs(gpus.len())
        .map(|(a, b)| json!([a, b, "NODE", if b == a + 1 && a % 2 == 0 { 4 } else { 0 }]))
        .collect();
    let inventory = json!({ "memoryUnit": unit, "gpus": entries, "links": links }).to_string();
    let mib = match unit {
        "GiB" => 1024,
        "MiB" => 1,
        blocks => blocks.trim_end_matches("MiB").parse().unwrap(),
    };
    let memory: u64 = gpus.iter().map(|gpu| gpu.memory / mib).sum();
    let count = gpus.len();
    let resources = json!({
        "cpu": "64", "memory": "256Gi", "nvidia.com/gpu": count.to_string(), "aliyun.com/gpu": count.to_string(),
        "aliyun.com/gpu-mem": memory.to_string(), "tencent.com/vcuda-core": (count * 100).to_string(),
        "tencent.com/vcuda-memory": (gpus.iter().map(|gpu| gpu.memory / 256).sum::<u64>()).to_string(),
    });
    json!({
        "metadata": { "name": name, "annotations": { "tessera.dev/inventory": inventory } },
        "status": { "capacity": resources, "allocatable": resources, "addresses": addresses(address), "conditions": ready() },
    })
}

#[derive(Clone, Copy)]
pub(crate) struct TestGpu {
    pub(crate) model: &'static str,
    pub(crate) memory: u64,
    pub(crate) unhealthy: bool,
}

pub(crate) const T4: TestGpu = TestGpu { model: "Tesla T4", memory: 15_360, unhealthy: false };
pub(crate) const A10: TestGpu = TestGpu { model: "NVIDIA A10", memory: 23_028, unhealthy: false };
pub(crate) const H200: TestGpu = TestGpu { model: "NVIDIA H200", memory: 143_771, unhealthy: false };

/// Returns every pair of GPU indexes.
pub(crate) fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)))
}

fn addresses(address: &str) -> Value {
    json!([{ "type": "InternalIP", "address": address }, { "type": "Hostname", "address": "host" }])
}

fn ready() -> Value {
    json!([{ "type": "Ready", "status": "True" }])
}

/// Returns a pod with one container that runs on a node, or waits if `node` is empty.
pub(crate) fn pod(
    namespace: &str,
    name: &str,
    node: &str,
    limits: &[(&str, u64)],
    annotations: Value,
) -> Value {
    let limits: Map<String, Value> =
        limits.iter().map(|(key, value)| ((*key).to_owned(), value.to_string().into())).collect();
    let mut pod = json!({
        "metadata": { "name": name, "namespace": namespace, "annotations": annotations },
        "spec": { "containers": [{ "name": "main", "image": "train", "resources": { "limits": limits, "requests": limits } }] },
        "status": { "phase": if node.is_empty() { "Pending" } else { "Running" } },
    });
    if !node.is_empty() {
        pod["spec"]["nodeName"] = node.into();
    }
    pod
}

/// Returns a pod with the annotations of gpushare.
pub(crate) fn shared(namespace: &str, name: &str, node: &str, units: u64, gpu: u64) -> Value {
    let annotations = json!({
        "ALIYUN_COM_GPU_MEM_IDX": gpu.to_string(), "ALIYUN_COM_GPU_MEM_POD": units.to_string(),
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1692105746106628538",
    });
    pod(namespace, name, node, &[("aliyun.com/gpu-mem", units)], annotations)
}

/// Returns a pod with whole GPUs and the annotations of gputopology.
pub(crate) fn grouped(name: &str, node: &str, gpus: &[u64]) -> Value {
    let group: Vec<String> = gpus.iter().map(u64::to_string).collect();
    let annotations = json!({ "ALIYUN_COM_GPU_GROUP": group.join(","), "ALIYUN_COM_GPU_ASSIGNED": "true" });
    pod("default", name, node, &[("aliyun.com/gpu", gpus.len() as u64)], annotations)
}

/// Returns a pod with a share and the annotation of Tessera's scheduler.
pub(crate) fn share(name: &str, node: &str, gpu: u64, compute_percent: u64, blocks: u64) -> Value {
    let grant = json!({ "main": [{ "uuid": format!("GPU-{node}-{gpu}"), "index": gpu, "cores": compute_percent, "memoryMiB": blocks * 256 }] });
    let limits = [("tencent.com/vcuda-core", compute_percent), ("tencent.com/vcuda-memory", blocks)];
    pod("team", name, node, &limits, json!({ "tessera.dev/grant": grant.to_string() }))
}
