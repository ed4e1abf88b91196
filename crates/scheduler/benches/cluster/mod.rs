//! Large clusters for the benchmarks.

use serde_json::{Value, json};
use tessera_core::forecast::Forecast;
use tessera_core::units::PodUid;
use tessera_scheduler::state::{
    BindOrder, BindOutcome, BindStep, SchedulerSettings, State, StateEvent, Timestamp, WatchEvent,
};
use tessera_scheduler::verb::filter::PassOn;
use tessera_wire::foreign::extender::{BindingArgs, ExtenderArgs};

const GPUS_PER_NODE: usize = 8;
const PODS: usize = 20_000;
const MEMORY: u64 = 81_920;

/// Devices of `nvidia.com/gpu` for each GPU.
const SLOTS: usize = 10;

fn node(number: usize) -> Value {
    let name = format!("node-{number:05}");
    let gpus: Vec<Value> = (0..GPUS_PER_NODE)
        .map(|index| {
            json!({"uuid": format!("GPU-{number:08x}-1111-2222-3333-{index:012x}"), "minor": index,
                            "model": "NVIDIA H100 80GB HBM3", "memoryMiB": MEMORY, "numa": index / 4})
        })
        .collect();
    let links: Vec<Value> = (0..GPUS_PER_NODE)
        .flat_map(|a| (a + 1..GPUS_PER_NODE).map(move |b| json!([a, b, "NODE", 18])))
        .collect();
    let inventory =
        json!({ "memoryUnit": "GiB", "nvidiaSlots": SLOTS, "gpus": gpus, "links": links }).to_string();
    let devices = (GPUS_PER_NODE * SLOTS).to_string();
    let resources = json!({
        "cpu": "192", "memory": "2048Gi", "pods": "250", "nvidia.com/gpu": devices, "aliyun.com/gpu": "8",
        "aliyun.com/gpu-mem": "640", "tencent.com/vcuda-core": "800", "tencent.com/vcuda-memory": "2560",
    });
    json!({
        "metadata": { "name": name, "uid": name, "annotations": { "tessera.dev/inventory": inventory } },
        "status": { "capacity": resources, "allocatable": resources },
    })
}

fn pod(number: usize, limits: &Value) -> Value {
    json!({
        "metadata": { "name": format!("pod-{number:06}"), "namespace": "team", "uid": format!("{number:08x}-aaaa-bbbb-cccc-ddddeeeeffff") },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": limits, "requests": limits } }] },
    })
}

fn share(compute_percent: u64) -> Value {
    json!({"tencent.com/vcuda-core": compute_percent.to_string(), "tencent.com/vcuda-memory": (compute_percent * 320 / 100).to_string(), "cpu": "2"})
}

/// Returns one of the cluster's pods, in rotating shapes. They are small, so that they also fit on
/// the smallest cluster.
fn running(number: usize) -> Value {
    let limits = match number % 10 {
        0 => json!({"nvidia.com/gpu": "1", "cpu": "4"}),
        1 | 2 => json!({"aliyun.com/gpu-mem": "4", "cpu": "2"}),
        3..6 => share(5),
        6..9 => share(10),
        _ => share(20),
    };
    pod(number, &limits)
}

/// Returns one of the requested pods, in rotating shapes.
pub(crate) fn asked_about(number: usize) -> Value {
    let limits = match number % 6 {
        0 => share(30),
        1 => share(50),
        2 => json!({"nvidia.com/gpu": "1", "cpu": "8"}),
        3 => json!({"aliyun.com/gpu-mem": "16", "cpu": "4"}),
        4 => json!({"aliyun.com/gpu": "2", "cpu": "16"}),
        _ => share(80),
    };
    pod(number, &limits)
}

/// Returns a pod with a part of each of four GPUs.
#[allow(dead_code, reason = "not all benchmarks have such pods")]
pub(crate) fn with_parts(number: usize) -> Value {
    let limits = json!({
        "nvidia.com/gpu": "4", "nvidia.com/gpumem": "4000", "nvidia.com/gpucores": "5", "cpu": "4",
    });
    pod(number, &limits)
}

/// Reserves one GPU of each of the first nodes by an annotation.
#[allow(dead_code, reason = "not all benchmarks have reservations")]
pub(crate) fn reserve(state: &mut State, count: usize) {
    for number in 0..count {
        let mut node = node(number);
        let gpus = json!([{ "uuid": format!("GPU-{number:08x}-1111-2222-3333-{:012x}", 7) }]);
        let reservation = json!([{
            "name": format!("reservation-{number}"), "owner": "bench", "until": "2999-01-01T00:00:00Z", "gpus": gpus,
        }]);
        node["metadata"]["annotations"]["tessera.dev/reservations"] = reservation.to_string().into();
        state.handle(StateEvent::Node(WatchEvent::Set(serde_json::from_value(node).unwrap())));
    }
    println!("{} reservations", state.ledger().reservations().count());
}

/// Creates gangs that fit nowhere. One of them holds back GPUs.
#[allow(dead_code, reason = "not all benchmarks have gangs")]
pub(crate) fn wait_in_gangs(state: &mut State, count: usize, nodes: usize) {
    const SIZE: usize = 4;
    let names: Vec<String> = (0..nodes.min(100)).map(|number| format!("node-{number:05}")).collect();
    for number in 0..count {
        for member in 0..SIZE {
            // Every node runs small pods, so no node has all of its GPUs left.
            let mut pod =
                pod(2_000_000 + number * SIZE + member, &json!({ "nvidia.com/gpu": "8", "cpu": "8" }));
            pod["metadata"]["annotations"] = json!({ "tessera.dev/gang": format!("gang-{number}/{SIZE}") });
            state.handle(StateEvent::Pod(WatchEvent::Set(serde_json::from_value(pod.clone()).unwrap())));
            if member + 1 == SIZE {
                let node_names = Some(names.iter().map(String::as_str).collect());
                let pod = serde_json::from_value(pod).unwrap();
                let args: ExtenderArgs<&str> = ExtenderArgs { pod, nodes: None, node_names };
                assert!(
                    state.filter_member(&args, Timestamp::default()).is_some_and(|answer| answer.fit == 0)
                );
            }
        }
    }
    state.expire_gangs(Timestamp::default());
    println!("{count} waiting gangs of {SIZE} pods, {} reservations", state.ledger().reservations().count());
}

/// Returns a cluster with its pods, each placed by the scheduler itself.
pub(crate) fn cluster(nodes: usize) -> State {
    // Filter passes on all fitting nodes, so that prioritize scores as many nodes as filter checks.
    let mut state = State::new(SchedulerSettings { pass_on: PassOn::All, ..SchedulerSettings::default() });
    for number in 0..nodes {
        state.handle(StateEvent::Node(WatchEvent::Set(serde_json::from_value(node(number)).unwrap())));
    }
    let mut placed = 0;
    for number in 0.. {
        if placed == PODS || number > 10 * PODS {
            break;
        }
        let mut json = running(number);
        state.handle(StateEvent::Pod(WatchEvent::Set(serde_json::from_value(json.clone()).unwrap())));
        let text = |key: &str| json["metadata"][key].as_str().unwrap().to_owned();
        let args = BindingArgs {
            pod_name: text("name"),
            pod_namespace: text("namespace"),
            pod_uid: text("uid"),
            node: format!("node-{:05}", number % nodes),
        };
        let Ok(BindStep::Send(BindOrder { annotations, .. })) = state.begin_bind(&args, Timestamp::default())
        else {
            state.handle(StateEvent::Pod(WatchEvent::Gone(serde_json::from_value(json).unwrap())));
            continue;
        };
        state.end_bind(&PodUid(args.pod_uid), BindOutcome::Bound, Timestamp::default());
        json["spec"]["nodeName"] = args.node.into();
        json["metadata"]["annotations"] = json!(annotations);
        state.handle(StateEvent::Pod(WatchEvent::Set(serde_json::from_value(json).unwrap())));
        placed += 1;
    }
    if let Some(remains) = state.free_capacity_if_due() {
        let forecast = Forecast::new(&state.begin_forecast(&remains), &remains);
        state.adopt_forecast(forecast.into());
    }
    println!("{nodes} nodes x {GPUS_PER_NODE} GPUs, {placed} GPU pods");
    state
}
