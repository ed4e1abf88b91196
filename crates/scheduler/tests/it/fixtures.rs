//! Nodes, pods and states for the tests.

use std::sync::Arc;

use serde_json::{Value, json};
use tessera_core::forecast::Forecast;
use tessera_core::units::PodUid;
use tessera_scheduler::state::{
    BindOrder, BindOutcome, BindStep, SchedulerSettings, State, StateEvent, Timestamp, WatchEvent,
};
use tessera_scheduler::verb::filter::PassOn;
use tessera_scheduler::verb::verdict_cache::VerdictCache;
use tessera_wire::foreign::extender::{BindingArgs, ExtenderArgs, FilterResult};
use tessera_wire::foreign::objects::Pod;

/// Memory of every GPU in MiB.
pub(crate) const GPU_MIB: u64 = 16_384;

/// Returns a node with GPUs that serves every dialect and counts GPU memory in `unit`.
pub(crate) fn node(name: &str, gpu_count: usize, unit: &str) -> Value {
    let gpus: Vec<Value> = (0..gpu_count)
        .map(|index| json!({"uuid": format!("GPU-{name}-{index}"), "minor": index, "model": "T4", "memoryMiB": GPU_MIB}))
        .collect();
    let inventory = json!({ "memoryUnit": unit, "nvidiaSlots": 10, "gpus": gpus }).to_string();
    let memory = if unit == "GiB" { GPU_MIB / 1024 } else { GPU_MIB };
    let resources = json!({
        "cpu": "64", "memory": "256Gi", "pods": "110",
        "nvidia.com/gpu": gpu_count.to_string(), "aliyun.com/gpu": gpu_count.to_string(),
        "aliyun.com/gpu-mem": (gpu_count as u64 * memory).to_string(),
        "tencent.com/vcuda-core": (gpu_count * 100).to_string(),
        "tencent.com/vcuda-memory": (gpu_count as u64 * GPU_MIB / 256).to_string(),
    });
    json!({
        "metadata": { "name": name, "labels": {"model": "T4", "pool": "public"},
                      "annotations": { "tessera.dev/inventory": inventory } },
        "status": { "capacity": resources, "allocatable": resources },
    })
}

/// Sets what a node's kubelet reports of a resource.
pub(crate) fn offer(node: &mut Value, resource: &str, capacity: u64, allocatable: u64) {
    node["status"]["capacity"][resource] = capacity.to_string().into();
    node["status"]["allocatable"][resource] = allocatable.to_string().into();
}

/// Returns a pod with one container that has these limits.
pub(crate) fn pod(name: &str, limits: &[(&str, &str)]) -> Value {
    let limits: serde_json::Map<String, Value> =
        limits.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
    json!({
        "metadata": { "name": name, "namespace": "team", "uid": format!("uid-{name}") },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": limits, "requests": limits } }] },
        "status": { "phase": "Pending" },
    })
}

pub(crate) fn share(name: &str, compute_percent: u64) -> Value {
    let memory = (compute_percent * GPU_MIB / 256 / 100).max(1).to_string();
    pod(
        name,
        &[("tencent.com/vcuda-core", &compute_percent.to_string()), ("tencent.com/vcuda-memory", &memory)],
    )
}

/// Returns a pod with this many percent of the compute and memory of each of several GPUs.
pub(crate) fn parts(name: &str, gpus: u64, percent: u64) -> Value {
    let (gpus, percent) = (gpus.to_string(), percent.to_string());
    pod(
        name,
        &[
            ("nvidia.com/gpu", &gpus),
            ("nvidia.com/gpumem-percentage", &percent),
            ("nvidia.com/gpucores", &percent),
        ],
    )
}

pub(crate) fn annotated(mut pod: Value, annotations: &[(&str, &str)]) -> Value {
    let all: serde_json::Map<String, Value> =
        annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
    pod["metadata"]["annotations"] = all.into();
    pod
}

pub(crate) fn whole(name: &str, count: u64) -> Value {
    pod(name, &[("nvidia.com/gpu", &count.to_string())])
}

pub(crate) fn parse(pod: &Value) -> Pod {
    serde_json::from_value(pod.clone()).unwrap()
}

/// Returns a state with these nodes.
pub(crate) fn state(nodes: &[Value]) -> State {
    state_with(nodes, SchedulerSettings::default())
}

/// Returns a state with these nodes and quotas, and otherwise these settings.
pub(crate) fn state_with(nodes: &[Value], settings: SchedulerSettings) -> State {
    let quota =
        tessera_wire::foreign::quota::parse_settings(r#"{"GPUModelLabel":"model","GPUPoolLabel":"pool"}"#)
            .unwrap();
    let pass_on = PassOn::All;
    let mut state = State::new(SchedulerSettings { quota: Some(quota), pass_on, ..settings });
    for node in nodes {
        set_node(&mut state, node);
    }
    state
}

pub(crate) fn set_node(state: &mut State, node: &Value) {
    state.handle(StateEvent::Node(WatchEvent::Set(serde_json::from_value(node.clone()).unwrap())));
}

pub(crate) fn set_pod(state: &mut State, pod: &Value) {
    state.handle(StateEvent::Pod(WatchEvent::Set(parse(pod))));
}

pub(crate) fn filter(state: &State, pod: &Value, nodes: &[&str]) -> FilterResult {
    filter_with(state, pod, nodes, &VerdictCache::default())
}

/// Returns the answer of filter as kube-scheduler parses it.
pub(crate) fn filter_with(state: &State, pod: &Value, nodes: &[&str], memory: &VerdictCache) -> FilterResult {
    let answer = serde_json::to_string(&state.filter(&question(pod, nodes), memory)).unwrap();
    serde_json::from_str(&answer).unwrap()
}

/// Returns the scores of these nodes. A node that the answer leaves out has score 0.
pub(crate) fn grades(state: &State, pod: &Value, nodes: &[&str], memory: &VerdictCache) -> Vec<i64> {
    let args = question(pod, nodes);
    let graded = state.prioritize(&args, memory);
    let grade = |name: &&str| graded.iter().find(|host| host.host == *name).map_or(0, |host| host.score);
    nodes.iter().map(grade).collect()
}

pub(crate) fn question<'a>(pod: &Value, nodes: &[&'a str]) -> ExtenderArgs<&'a str> {
    ExtenderArgs { pod: parse(pod), nodes: None, node_names: Some(nodes.to_vec()) }
}

pub(crate) fn bind_args(pod: &Value, node: &str) -> BindingArgs {
    let pod = parse(pod);
    BindingArgs {
        pod_name: pod.metadata.name,
        pod_namespace: pod.metadata.namespace,
        pod_uid: pod.metadata.uid,
        node: node.to_owned(),
    }
}

/// Returns a pod of a gang with whole GPUs.
pub(crate) fn member(gang: &str, size: usize, number: usize, gpus: u64) -> Value {
    let mut pod = whole(&format!("{gang}-{number}"), gpus);
    pod["metadata"]["annotations"] = json!({ "tessera.dev/gang": format!("{gang}/{size}") });
    pod["metadata"]["creationTimestamp"] = format!("2026-01-01T00:00:{number:02}Z").into();
    pod
}

/// Returns the answer of filter as the server gives it.
pub(crate) fn ask(state: &mut State, pod: &Value, nodes: &[&str], now: u64) -> FilterResult {
    let args = question(pod, nodes);
    let answer =
        state.filter_member(&args, at(now)).map(|verdicts| serde_json::to_string(&verdicts).unwrap());
    let answer = answer
        .unwrap_or_else(|| serde_json::to_string(&state.filter(&args, &VerdictCache::default())).unwrap());
    serde_json::from_str(&answer).unwrap()
}

pub(crate) fn passed(answer: &FilterResult) -> Vec<String> {
    answer.node_names.clone().unwrap_or_default()
}

/// Returns the one reason of an answer that rejects every node.
pub(crate) fn reason(answer: &FilterResult) -> String {
    assert_eq!(passed(answer), [""; 0]);
    let mut texts: Vec<&String> = answer.failed_and_unresolvable_nodes.values().collect();
    texts.dedup();
    texts.first().map_or_else(|| answer.error.clone(), |text| (*text).clone())
}

/// Binds a pod like kube-scheduler does after filter has passed a node.
pub(crate) fn bind_member(state: &mut State, pod: &Value, node: &str, now: u64) -> Value {
    let BindStep::Send(BindOrder { annotations, .. }) =
        state.begin_bind(&bind_args(pod, node), at(now)).unwrap()
    else {
        panic!("nothing to send");
    };
    state.end_bind(&PodUid(parse(pod).metadata.uid), BindOutcome::Bound, at(now));
    let mut bound = pod.clone();
    bound["spec"]["nodeName"] = node.into();
    for (key, value) in annotations {
        bound["metadata"]["annotations"][key] = value.into();
    }
    set_pod(state, &bound);
    bound
}

/// Deletes a pod.
pub(crate) fn end(state: &mut State, pod: &Value) {
    state.handle(StateEvent::Pod(WatchEvent::Gone(parse(pod))));
}

/// Binds a pod as the server does, with an API server that accepts every binding.
pub(crate) fn bind(state: &mut State, pod: &Value, node: &str) -> Value {
    set_pod(state, pod);
    let BindStep::Send(BindOrder { annotations, .. }) =
        state.begin_bind(&bind_args(pod, node), at(0)).unwrap()
    else {
        panic!("nothing to send");
    };
    state.end_bind(&PodUid(parse(pod).metadata.uid), BindOutcome::Bound, at(0));
    let mut bound = pod.clone();
    bound["spec"]["nodeName"] = node.into();
    bound["metadata"]["annotations"] = json!(annotations);
    set_pod(state, &bound);
    bound
}

/// Makes a forecast if one is due. The state has not adopted it yet.
pub(crate) fn due_forecast(state: &mut State) -> Option<Arc<Forecast>> {
    let remains = state.free_capacity_if_due()?;
    Some(Arc::new(Forecast::new(&state.begin_forecast(&remains), &remains)))
}

pub(crate) fn at(seconds: u64) -> Timestamp {
    Timestamp { steady: std::time::Duration::from_secs(seconds), unix_nanos: 17 }
}
