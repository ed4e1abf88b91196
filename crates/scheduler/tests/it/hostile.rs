//! With arbitrary annotations on nodes and pods, every verb answers and no existing grant is lost.

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_scheduler::metrics::Metrics;
use tessera_scheduler::state::{BindOutcome, State, StateEvent, WatchEvent};
use tessera_scheduler::verb::explain::{explain, what_if};
use tessera_scheduler::verb::preempt::preempt;
use tessera_scheduler::verb::verdict_cache::VerdictCache;
use tessera_wire::foreign::extender::PreemptionArgs;
use tessera_wire::metrics::Format;

use crate::fixtures::*;

/// Generates numbers at and beyond the limits of their range.
fn number() -> impl Strategy<Value = Value> {
    let edges =
        [0, 1, 7, 63, 64, 99, 100, 101, 255, 256, 16_384, u64::from(u32::MAX), 1 << 30, 1 << 63, u64::MAX];
    prop_oneof![
        12 => prop::sample::select(edges.to_vec()).prop_map(Value::from),
        1 => Just(json!(-1)),
        1 => Just(json!(1.5)),
        1 => Just(Value::Null),
        1 => Just(json!("many")),
    ]
}

/// Generates amounts as a manifest may contain them.
fn amount() -> impl Strategy<Value = String> {
    let texts = [
        "0",
        "1",
        "2",
        "50",
        "100",
        "150",
        "6400",
        "25600",
        "18446744073709551615",
        "9E",
        "8k",
        "10G",
        "-1",
        "0.5",
        "x",
        "",
    ];
    prop::sample::select(texts.to_vec()).prop_map(str::to_owned)
}

const RESOURCES: [&str; 12] = [
    "cpu",
    "memory",
    "nvidia.com/gpu",
    "aliyun.com/gpu",
    "aliyun.com/gpu-mem",
    "aliyun.com/gpu-count",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-memory",
    "nvidia.com/gpumem",
    "nvidia.com/gpumem-percentage",
    "nvidia.com/gpucores",
    "nvidia.com/priority",
];

fn amounts(most: usize) -> impl Strategy<Value = Value> {
    let pairs = prop::collection::btree_map(prop::sample::select(RESOURCES.to_vec()), amount(), 0..most);
    pairs.prop_map(|pairs| json!(pairs))
}

fn inventory() -> impl Strategy<Value = String> {
    let gpu = || {
        (number(), number(), 0..3u8).prop_map(|(memory, minor, name)| {
        json!({"uuid": format!("GPU-{name}"), "minor": minor, "model": "T4", "memoryMiB": memory})
    })
    };
    let gpus =
        prop_oneof![4 => prop::collection::vec(gpu(), 0..5), 1 => prop::collection::vec(gpu(), 60..70)];
    let links = prop::collection::vec(
        (number(), number(), prop::sample::select(vec!["PIX", "SYS", "NV4", "?"]), number()),
        0..4,
    );
    let unit = prop::sample::select(vec!["GiB", "MiB", "256MiB", "0MiB", "4294967295MiB", "stone"]);
    (gpus, links, unit, number()).prop_map(|(gpus, links, unit, slots)| {
        json!({ "memoryUnit": unit, "nvidiaSlots": slots, "gpus": gpus, "links": links }).to_string()
    })
}

fn hostile_node() -> impl Strategy<Value = Value> {
    let topology =
        prop::sample::select(vec!["", "{}", "[]", r#"{"GPU_NV1_0_1":""}"#, r#"{"GPU_NV255_0_63":"x"}"#]);
    let told = prop_oneof![inventory(), ".{0,20}"];
    (0..3u8, prop::option::weighted(0.7, told), topology, amounts(8), amounts(8)).prop_map(
        |(name, inventory, topology, capacity, allocatable)| {
            let mut annotations = json!({ "GPU_TOPOLOGY": topology });
            if let Some(inventory) = inventory {
                annotations["tessera.dev/inventory"] = inventory.into();
            }
            let metadata = json!({ "name": format!("n{name}"), "annotations": annotations, "labels": {"nvidia.com/gpu.memory": "99999999999999999999"} });
            json!({ "metadata": metadata, "status": { "capacity": capacity, "allocatable": allocatable } })
        },
    )
}

fn annotations() -> impl Strategy<Value = Value> {
    let gpu = (0..3u8, number(), number(), number()).prop_map(|(uuid, index, compute_percent, memory)| {
        json!({"uuid": format!("GPU-{uuid}"), "index": index, "cores": compute_percent, "memoryMiB": memory})
    });
    let ours = prop::collection::vec(gpu, 0..4).prop_map(|gpus| json!({ "c0": gpus }).to_string());
    let words = prop::sample::select(vec![
        "0",
        "0,1",
        "0,0,0",
        "255",
        "256",
        "-1",
        ",",
        "{\"0\":{\"0\":18446744073709551615}}",
        "{}",
        "x",
        "best-effort",
        "spread",
        "static",
        "true",
        "GPU-0,GPU-2",
        "numa,mutex,spread",
        "slot=4294967295,core=4294967295,memory=4294967295",
        "9E",
    ]);
    let keys = prop::sample::select(vec![
        "ALIYUN_COM_GPU_GROUP",
        "ALIYUN_COM_GPU_MEM_IDX",
        "scheduler.framework.gpushare.allocation",
        "tencent.com/predicate-gpu-idx-0",
        "tessera.dev/policy",
        "tessera.dev/traffic",
        "nvidia.com/use-gputype",
        "nvidia.com/nouse-gpuuuid",
        "nvidia.com/numa-bind",
        "hami.io/node-scheduler-policy",
        "hami.io/gpu-scheduler-policy",
        "hami.io/device-scoring-weights",
        "tessera.dev/gpu-memory-limit",
    ]);
    let others = prop::collection::btree_map(keys, words, 0..6);
    (prop::option::of(prop_oneof![3 => ours, 1 => ".{0,20}".prop_map(String::from)]), others).prop_map(
        |(ours, others)| {
            let mut annotations = json!(others);
            if let Some(ours) = ours {
                annotations["tessera.dev/grant"] = ours.into();
            }
            annotations
        },
    )
}

fn hostile_pod() -> impl Strategy<Value = Value> {
    let container = |role: &'static str| {
        (amounts(4), amounts(3)).prop_map(move |(limits, requests)| {
            json!({ "name": "c0", "restartPolicy": role, "resources": { "limits": limits, "requests": requests } })
        })
    };
    let containers = prop::collection::vec(container(""), 0..3);
    let inits = prop::collection::vec(prop_oneof![container("Always"), container("")], 0..2);
    let place = prop::option::of(0..3u8);
    (0..6u8, containers, inits, place, annotations()).prop_map(|(name, mut containers, mut inits, place, annotations)| {
        for (number, container) in inits.iter_mut().chain(&mut containers).enumerate() {
            container["name"] = format!("c{number}").into();
        }
        let node = place.map(|node| format!("n{node}")).unwrap_or_default();
        json!({
            "metadata": { "name": format!("p{name}"), "namespace": "team", "uid": format!("uid-{name}-{node}"), "annotations": annotations },
            "spec": { "nodeName": node, "containers": containers, "initContainers": inits, "priority": i32::MAX, "overhead": {"cpu": "9E"} },
            "status": { "phase": "Pending" },
        })
    })
}

/// Binds a valid pod to a valid node. Returns the bound pod.
fn granted(state: &mut State) -> Value {
    set_node(state, &node("good", 2, "GiB"));
    let mut pod = whole("good", 1);
    set_pod(state, &pod);
    state.begin_bind(&bind_args(&pod, "good"), at(0)).unwrap();
    state.end_bind(&"uid-good".into(), BindOutcome::Bound, at(0));
    pod["spec"]["nodeName"] = "good".into();
    pod
}

proptest! {
    #[test]
    fn every_verb_answers_hostile_nodes_and_pods(nodes in prop::collection::vec(hostile_node(), 0..6), pods in prop::collection::vec(hostile_pod(), 0..8)) {
        let mut state = state(&[]);
        granted(&mut state);
        let memory = VerdictCache::default();
        let names = ["n0", "n1", "n2", "good", "unknown"];
        for node in &nodes {
            set_node(&mut state, node);
            for pod in &pods {
                set_pod(&mut state, pod);
                let answer = filter_with(&state, pod, &names, &memory);
                let told = answer.failed_nodes.len() + answer.failed_and_unresolvable_nodes.len();
                prop_assert_eq!(told + answer.node_names.unwrap().len(), names.len(), "each node once");
                prop_assert!(grades(&state, pod, &names, &memory).iter().all(|grade| (0..=10).contains(grade)));
                let victims = json!({"Pods": [{"UID": "uid-good"}], "NumPDBViolations": 0});
                let args = json!({ "Pod": pod, "NodeNameToMetaVictims": { "n0": victims, "good": victims } });
                let _victims = preempt(&state, &serde_json::from_value::<PreemptionArgs>(args).unwrap());
                let _explained = what_if(&state, &parse(pod));
                let name = pod["metadata"]["name"].as_str().unwrap();
                let _explained = explain(&state, "team", name);
                if pod["spec"]["nodeName"] == "" {
                    let _refused_or_not = state.begin_bind(&bind_args(pod, "n0"), at(1));
                }
            }
        }
        let _text = Metrics::default().text(Some(&state), Format::default());
        let _views = (state.inspect_topology(None, true), state.inspect_share(None));
        let due = due_forecast(&mut state);
        due.into_iter().for_each(|forecast| state.adopt_forecast(forecast));
        for pod in &pods {
            state.handle(StateEvent::Pod(WatchEvent::Gone(parse(pod))));
        }
        let held = state.ledger().node(&"good".into()).unwrap().idle().len();
        prop_assert_eq!(held, 1, "what was granted before is still granted");
    }
}
