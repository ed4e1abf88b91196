//! Explanations give the same reasons as the scheduler, and what would help.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tessera_core::forecast::Forecast;
use tessera_scheduler::server::{App, BODY_LIMIT, router};
use tessera_scheduler::state::{SchedulerSettings, State, StateEvent, WatchEvent};
use tessera_scheduler::verb::verdict_cache::VerdictCache;
use tessera_sim::kube_scheduler::REPORTS;
use tessera_wire::foreign::extender::ExtenderArgs;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::{foreign::quota, tessera::rules};
use tokio::net::TcpListener;

use crate::stage::{GPU, SHARE, Stage};
use crate::states::{A10, T4, TestGpu, grouped, node, pod, share, shared};

const QUOTA: &str = r#"{"closed":{"quota":{"T4":1}},"team":{"memoryMiB":204800}}"#;

fn nodes() -> Vec<Value> {
    let mut broken = node("broken", "10.0.0.9", "GiB", &[T4]);
    broken["metadata"]["annotations"]["tessera.dev/inventory"] = "{".into();
    let mut not_served = node("not-served", "10.0.0.8", "GiB", &[T4; 4]);
    for kind in ["capacity", "allocatable"] {
        not_served["status"][kind]["aliyun.com/gpu-mem"] = "0".into();
    }
    let mut all = vec![
        node("a10", "10.0.0.1", "GiB", &[A10, A10]),
        node("blocks", "10.0.0.2", "256MiB", &[T4, T4]),
        node("t4", "10.0.0.3", "GiB", &[T4, T4, TestGpu { unhealthy: true, ..T4 }, T4]),
        not_served,
        broken,
        json!({ "metadata": { "name": "cpu" }, "status": { "allocatable": { "cpu": "4", "memory": "8Gi" } } }),
    ];
    all.iter_mut().for_each(|node| node["metadata"]["labels"] = json!({ "model": "T4" }));
    all
}

fn placed() -> Vec<Value> {
    vec![
        grouped("pair", "t4", &[0, 1]),
        share("half", "t4", 3, 50, 24),
        shared("team", "twelve", "a10", 12, 0),
        pod("team", "bypassed", "a10", &[("nvidia.com/gpu", 1)], json!({})),
        shared("default", "some", "blocks", 30, 1),
        pod("default", "plain", "t4", &[("cpu", 10)], json!({})),
    ]
}

fn waiting() -> Vec<Value> {
    let request = |name: &str, limits: &[(&str, u64)]| pod("team", name, "", limits, json!({}));
    let vcuda = |name: &str, core, memory| {
        request(name, &[("tencent.com/vcuda-core", core), ("tencent.com/vcuda-memory", memory)])
    };
    vec![
        request("whole-two", &[("nvidia.com/gpu", 2)]),
        request("whole-nine", &[("aliyun.com/gpu", 9)]),
        request("memory-eleven", &[("aliyun.com/gpu-mem", 11)]),
        request("memory-huge", &[("aliyun.com/gpu-mem", 900)]),
        vcuda("share-sixty", 60, 40),
        vcuda("share-large", 30, 85),
        request("bad", &[("tencent.com/vcuda-core", 150)]),
        pod("closed", "over-quota", "", &[("nvidia.com/gpu", 2)], json!({})),
        pod("team", "by-policy", "", &[("aliyun.com/gpu", 3)], json!({ "tessera.dev/policy": "link" })),
    ]
}

fn settings() -> SchedulerSettings {
    let quota = quota::parse_settings(r#"{"GPUModelLabel":"model","GPUPoolLabel":"pool"}"#).unwrap();
    SchedulerSettings { quota: Some(quota), ..SchedulerSettings::default() }
}

/// Returns the cluster with the rules of a scheduler and its quota.
fn stage() -> Stage {
    let stage = Stage::of(&nodes(), &placed());
    waiting().iter().for_each(|pod| stage.pod(pod));
    stage.scheduler(&json!(rules::print(&settings().rules())));
    let quota = json!({ "metadata": { "name": "gpuquota" }, "data": { "gpu_quota": QUOTA } });
    stage.server.create("/api/v1/namespaces/kube-system/configmaps", quota).unwrap();
    stage
}

/// Returns the state of a scheduler that watches the same cluster.
fn scheduler(stage: &Stage) -> State {
    let mut state = State::new(settings());
    state.handle(StateEvent::Quota(quota::parse(QUOTA, "the ConfigMap").unwrap()));
    for node in stage.server.list("/api/v1/nodes") {
        state.handle(StateEvent::Node(WatchEvent::Set(serde_json::from_value(node).unwrap())));
    }
    for pod in stage.server.list("/api/v1/pods") {
        state.handle(StateEvent::Pod(WatchEvent::Set(serde_json::from_value(pod).unwrap())));
    }
    with_forecast(state)
}

/// Returns the state with the forecast that a scheduler makes as soon as it knows the cluster.
pub(crate) fn with_forecast(mut state: State) -> State {
    let capacity = state.free_capacity_if_due().unwrap();
    let forecast = Forecast::new(&state.begin_forecast(&capacity), &capacity);
    state.adopt_forecast(Arc::new(forecast));
    state
}

/// Returns the reasons that kube-scheduler would put into the pod's event, by node.
fn event(state: &State, pod: &Value, nodes: &[String]) -> BTreeMap<String, String> {
    let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
    let args = ExtenderArgs { pod, nodes: None, node_names: Some(nodes.to_vec()) };
    let verdicts = state.filter(&args, &VerdictCache::default());
    let refused = verdicts.failed().chain(verdicts.unresolvable());
    refused.map(|(node, words)| (node.to_owned(), words.to_owned())).collect()
}

#[test]
fn explain_gives_the_reasons_of_the_scheduler() {
    let stage = stage();
    let state = scheduler(&stage);
    let names: Vec<String> =
        nodes().iter().map(|node| node["metadata"]["name"].as_str().unwrap().to_owned()).collect();
    let mut compared = 0;
    for pod in waiting() {
        let (namespace, name) =
            (pod["metadata"]["namespace"].as_str().unwrap(), pod["metadata"]["name"].as_str().unwrap());
        let event = event(&state, &pod, &names);
        let output = stage.run(GPU, &["explain", "-n", namespace, name, "-o", "json"]);
        if name == "bad" {
            let said = String::from_utf8(output.stderr).unwrap();
            let begin = format!("error: the GPU request of pod {namespace}/{name} is invalid: ");
            assert_eq!(said, format!("{begin}{}\n", event["t4"]), "an invalid request is an error");
            continue;
        }
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let explained: BTreeMap<String, String> = answer["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|node| Some((node["node"].as_str()?.to_owned(), node["reason"].as_str()?.to_owned())))
            .collect();
        assert_eq!(explained, event, "{name}");
        compared += explained.len();
    }
    assert!(compared > 20, "only {compared} reasons were compared");
}

#[test]
fn explain_and_what_if_match_their_golden_files() {
    let stage = stage();
    stage.server.patch("/api/v1/namespaces/team/pods/whole-two/status", &json!({ "status": { "phase": "Pending", "conditions": [
        { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/6 nodes are available: 2 fewer than 2 idle GPUs." }] } })).unwrap();
    stage.golden("explain-whole.txt", GPU, &["explain", "-n", "team", "whole-two"]);
    stage.golden("explain-memory.txt", GPU, &["explain", "team/memory-huge"]);
    stage.golden("explain-share.txt", GPU, &["--context", "team", "explain", "share-large", "-o", "wide"]);
    stage.golden("explain-quota.txt", GPU, &["explain", "closed/over-quota"]);
    stage.golden("explain-placed.txt", GPU, &["explain", "default/pair"]);
    stage.golden("explain-bypassed.txt", GPU, &["explain", "team/bypassed"]);
    stage.golden("what-if-fits.txt", GPU, &["what-if", "aliyun.com/gpu-mem=8"]);
    let output =
        stage.run(GPU, &["what-if", "tencent.com/vcuda-core=40,tencent.com/vcuda-memory=20", "cpu=60"]);
    assert_eq!(output.status.code(), Some(0));
    crate::stage::golden("what-if-share.txt", &String::from_utf8(output.stdout).unwrap());
    let plain = stage.run(GPU, &["explain", "plain"]);
    let said = String::from_utf8(plain.stderr).unwrap();
    assert_eq!(said, "error: pod default/plain requests no GPU; `kubectl describe pod` shows why it waits\n");
}

/// kube-scheduler's report comes first, and a waiting pod is never said to fit.
#[test]
fn a_waiting_pod_is_never_said_to_fit() {
    let mut tainted = node("free", "10.0.0.1", "GiB", &[T4, T4]);
    tainted["spec"] = json!({"taints": [{"key": "gpu", "effect": "NoSchedule"}]});
    let stage = Stage::of(&[tainted, node("open", "10.0.0.2", "GiB", &[T4, T4])], &[]);
    let mut waits = pod("team", "waits", "", &[("nvidia.com/gpu", 1)], json!({}));
    waits["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
    waits["status"] = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
        "reason": "Unschedulable", "message": "0/2 nodes are available: 1 node(s) had untolerated taint(s)."}]});
    stage.pod(&waits);
    let text = stage.text(GPU, &["explain", "team/waits"]);
    let expected = "\
pod team/waits waits
kube-scheduler: 0/2 nodes are available: 1 node(s) had untolerated taint(s).
requests nvidia.com/gpu=1
the GPUs of 1 of 2 nodes would do (policy tessera)
only kube-scheduler checks: the nodes of its volumes

NODES  REASON
1      node has the taint gpu:NoSchedule, which the pod does not tolerate

open: GPU 0
";
    assert_eq!(text, expected);
    assert_eq!(stage.text(GPU, &["explain", "team/waits", "-o", "name"]), "node/open\n");
    let what_if = stage.text(GPU, &["what-if", "nvidia.com/gpu=1"]);
    assert!(what_if.contains("fits on 1 of 2 nodes"), "{what_if}");
    let mut slice = pod("team", "slice", "", &[("nvidia.com/mig-1g.5gb", 1)], json!({}));
    slice["status"] = json!({"phase": "Pending"});
    stage.pod(&slice);
    let text = stage.text(GPU, &["explain", "team/slice"]);
    assert!(text.contains("requests nvidia.com/mig-1g.5gb, which no node offers\n"), "{text}");
    assert!(text.contains("the GPUs of 0 of 2 nodes would do"), "{text}");
    let text = stage.text(GPU, &["overview"]);
    assert!(text.contains("\n  team/slice "), "the overview lists what the dashboard lists: {text}");
}

/// Whatever keeps kube-scheduler from placing a pod: no view of the plugin says that it fits, all of them show the
/// report, and the views by the API server and by the scheduler agree.
#[test]
fn no_view_says_that_a_waiting_pod_fits() {
    let stage = Stage::of(&[node("free", "10.0.0.1", "GiB", &[T4, T4])], &[]);
    stage.scheduler(&json!(rules::print(&settings().rules())));
    for (place, (reason, message)) in REPORTS.iter().enumerate() {
        let mut waits = pod("team", &format!("p-{place}"), "", &[("nvidia.com/gpu", 1)], json!({}));
        waits["status"] = json!({ "phase": "Pending", "conditions": [{ "type": "PodScheduled",
            "status": "False", "reason": reason, "message": message }] });
        stage.pod(&waits);
    }
    stage.pod(&pod("team", "unseen", "", &[("nvidia.com/gpu", 1)], json!({})));
    let url = serve(&stage, scheduler(&stage));
    let by = |arguments: &[&str]| {
        let asked: Vec<&str> = arguments.iter().chain(&["--endpoint", &url]).copied().collect();
        [stage.text(GPU, arguments), stage.text(GPU, &asked)]
    };
    for (place, (_, message)) in REPORTS.iter().enumerate() {
        let name = format!("team/p-{place}");
        let [api, scheduler] = by(&["explain", &name]);
        assert_eq!(api, scheduler, "{message}");
        let begin = format!("pod {name} waits\nkube-scheduler: {message}\n");
        assert!(api.starts_with(&begin), "the report comes first: {api}");
        assert!(!api.contains("fits"), "{message}: {api}");
        let [api, scheduler] = by(&["explain", &name, "-o", "json"]);
        assert_eq!(api, scheduler, "{message}");
        assert!(!api.contains("\"fits\": true") && !api.contains("fits on"), "{message}: {api}");
        assert!(api.contains("\"waits\": true"), "{message}: {api}");
    }
    let [api, scheduler] = by(&["explain", "team/unseen"]);
    assert_eq!(api, scheduler);
    let unseen = "pod team/unseen waits\nkube-scheduler has not reported on the pod yet";
    assert!(api.starts_with(unseen) && !api.contains("fits"), "{api}");
    let overview = |endpoint: &[&str]| {
        let mut command = stage.command(GPU);
        let output = command.arg("overview").args(endpoint).env("COLUMNS", "200").output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    for text in [overview(&[]), overview(&["--endpoint", &url])] {
        assert!(text.contains(&format!("{} pods wait for GPUs:", REPORTS.len() + 1)), "{text}");
        for (place, (_, message)) in REPORTS.iter().enumerate() {
            let name = format!("  team/p-{place} ");
            let line = text.lines().find(|line| line.starts_with(&name)).unwrap();
            assert!(line.ends_with(message), "{line}");
        }
        assert!(!text.contains("fits"), "{text}");
    }
}

/// Pods with GPUs close nodes by anti-affinity and ports, with and without the scheduler.
#[test]
fn other_pods_close_nodes_in_both_views() {
    let nodes = ["a", "b"].map(|name| {
        let mut node = node(name, "10.0.0.1", "GiB", &[T4, T4]);
        node["metadata"]["labels"] = json!({ "kubernetes.io/hostname": name });
        node
    });
    let mut holder = pod("team", "holder", "a", &[("nvidia.com/gpu", 1)], json!({}));
    holder["metadata"]["labels"] = json!({ "app": "train" });
    holder["spec"]["containers"][0]["ports"] = json!([{ "containerPort": 80, "hostPort": 80 }]);
    let stage = Stage::of(&nodes, &[holder]);
    stage.scheduler(&json!(rules::print(&settings().rules())));
    let mut apart = pod("team", "apart", "", &[("nvidia.com/gpu", 1)], json!({}));
    apart["spec"]["affinity"] = json!({ "podAntiAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [
        { "topologyKey": "kubernetes.io/hostname", "labelSelector": { "matchLabels": { "app": "train" } } }] } });
    stage.pod(&apart);
    let mut port = pod("team", "port", "", &[("nvidia.com/gpu", 1)], json!({}));
    port["spec"]["containers"][0]["ports"] = json!([{ "containerPort": 80, "hostPort": 80 }]);
    stage.pod(&port);
    let url = serve(&stage, scheduler(&stage));
    for (name, reason, unchecked) in [
        (
            "team/apart",
            "a pod there is excluded by the pod's anti-affinity (kubernetes.io/hostname)",
            "required pod anti-affinity to pods without GPUs",
        ),
        ("team/port", "port 80/TCP of the host is in use", "ports of the host that pods without GPUs use"),
    ] {
        let text = stage.text(GPU, &["explain", name]);
        assert_eq!(text, stage.text(GPU, &["explain", name, "--endpoint", &url]));
        assert!(text.contains("the GPUs of 1 of 2 nodes would do"), "{text}");
        assert!(text.contains(&format!("only kube-scheduler checks: {unchecked}\n")), "{text}");
        assert!(text.contains(&format!("\n1      {reason}\n")), "{text}");
    }
}

/// What pods hold of a resource of another device plugin is known to kube-scheduler alone.
#[test]
fn resources_that_other_pods_may_hold_are_named() {
    let mut node = node("n", "10.0.0.1", "GiB", &[T4, T4]);
    node["status"]["allocatable"]["rdma/hca"] = "3".into();
    let stage = Stage::of(&[node], &[]);
    let asks = |name: &str, adapters: u32| {
        let mut pod = pod("team", name, "", &[("nvidia.com/gpu", 1)], json!({}));
        let limits = json!({ "rdma/hca": adapters.to_string() });
        pod["spec"]["containers"][0]["resources"]["limits"]["rdma/hca"] = limits["rdma/hca"].clone();
        let second = json!({ "name": "second", "resources": { "limits": limits } });
        pod["spec"]["containers"].as_array_mut().unwrap().push(second);
        stage.pod(&pod);
        stage.text(GPU, &["explain", &format!("team/{name}")])
    };
    let text = asks("few", 1);
    assert!(text.contains("only kube-scheduler checks: other resources that pods hold\n"), "{text}");
    assert!(text.contains("the GPUs of 1 of 1 node would do"), "{text}");
    let text = asks("many", 2);
    assert!(text.contains("node offers 3 of rdma/hca, and the pod requests 4"), "{text}");
}

/// Invalid limits affect only the pods that they concern.
#[test]
fn invalid_limits_are_reported_for_affected_pods() {
    let stage = stage();
    let write = |text: &str| {
        let data = json!({ "data": { "gpu_quota": text } });
        stage.server.patch("/api/v1/namespaces/kube-system/configmaps/gpuquota", &data).unwrap();
    };
    let before = stage.text(GPU, &[]);
    write(r#"{"closed":{"quota":{"T4":"1"}}}"#);
    let output_text = stage.text(GPU, &["explain", "closed/over-quota"]);
    let why =
        "the limits of namespace closed in key gpu_quota of ConfigMap kube-system/gpuquota cannot be read: ";
    assert!(output_text.contains(why), "{output_text}");
    let open = stage.text(GPU, &["what-if", "-n", "open", "aliyun.com/gpu-mem=8"]);
    assert!(open.contains("fits on 3 of 6 nodes"), "{open}");
    write("{");
    assert_eq!(stage.text(GPU, &[]), before);
    let output = stage.run(GPU, &["what-if", "-n", "open", "aliyun.com/gpu-mem=8"]);
    let output_text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output_text.contains("key gpu_quota of ConfigMap kube-system/gpuquota cannot be read: EOF"),
        "{output_text}"
    );
}

/// Compares the outputs in docs/inspect.md with real ones.
#[test]
fn documentation_shows_real_output() {
    let mut nodes: Vec<Value> =
        nodes().into_iter().filter(|node| node["metadata"]["name"] != "broken").collect();
    nodes[3]["metadata"]["name"] = "more-t4".into();
    let stage = Stage::of(&nodes, &placed());
    waiting().iter().for_each(|pod| stage.pod(pod));
    stage.scheduler(&json!(rules::print(&settings().rules())));
    let documentation = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/inspect.md");
    let documentation = std::fs::read_to_string(documentation).unwrap();
    for line in ["explain -n team share-large", "what-if aliyun.com/gpu-mem=8"] {
        let shown = stage.text(GPU, &line.split_whitespace().collect::<Vec<_>>());
        let block = format!("```\n$ kubectl inspect gpu {line}\n{shown}```\n");
        assert!(documentation.contains(&block), "docs/inspect.md does not show:\n{block}");
    }
}

/// Serves the pages of a scheduler with this state and returns their URL.
pub(crate) fn serve(stage: &Stage, state: State) -> String {
    let client = stage.runtime.block_on(async { tessera_cluster::connect_to(&stage.server.url()).unwrap() });
    stage.runtime.block_on(async {
        let app = Arc::new(App::new(state, client));
        app.set_ready(true);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router(app, BODY_LIMIT, &[], None)).await });
        url
    })
}

/// Claims hold GPUs like pods, and gangs wait together: the plugin says the same as the scheduler about both.
#[test]
fn claims_and_gangs_are_shown_as_the_scheduler_shows_them() {
    let mut t4 = node("t4", "10.0.0.3", "GiB", &[T4; 4]);
    let uuid = serde_json::from_str::<Value>(
        t4["metadata"]["annotations"]["tessera.dev/inventory"].as_str().unwrap(),
    )
    .unwrap()["gpus"][3]["uuid"]
        .clone();
    t4["metadata"]["annotations"]["tessera.dev/gpu-cordon"] = uuid;
    t4["spec"]["unschedulable"] = true.into();
    t4["status"]["conditions"] = json!([{ "type": "Ready", "status": "True" }]);
    let stage = Stage::of(&[t4, node("a10", "10.0.0.1", "GiB", &[A10, A10])], &[]);
    stage.scheduler(&json!(rules::print(&settings().rules())));
    let selector = json!({ "cel": { "expression": "device.driver == \"gpu.tessera.dev\"" } });
    let class = json!({ "metadata": { "name": "tessera" }, "spec": { "selectors": [selector] } });
    stage.server.create("/apis/resource.k8s.io/v1/deviceclasses", class.clone()).unwrap();
    let device = |gpu: u8| {
        json!({ "request": "gpu", "driver": "gpu.tessera.dev", "pool": "t4", "device": format!("gpu-{gpu}"),
            "consumedCapacity": { "cores": "50", "memory": "4096Mi" } })
    };
    let claim = |name: &str, count: u8, status: &Value| {
        let request = json!({ "deviceClassName": "tessera", "allocationMode": "ExactCount", "count": count });
        let claim = json!({ "metadata": { "name": name, "namespace": "team" },
            "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": request }] } } });
        let path = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims";
        stage.server.create(path, claim).unwrap();
        stage.server.patch(&format!("{path}/{name}/status"), &json!({ "status": status })).unwrap();
    };
    let mut uses_held = pod("team", "uses-held", "t4", &[], json!({}));
    uses_held["spec"]["resourceClaims"] = json!([{ "name": "gpu", "resourceClaimName": "held" }]);
    stage.pod(&uses_held);
    let uid = &stage.server.get("/api/v1/namespaces/team/pods/uses-held").unwrap()["metadata"]["uid"];
    let user = json!({ "resource": "pods", "name": "uses-held", "uid": uid });
    claim(
        "held",
        1,
        &json!({ "allocation": { "devices": { "results": [device(1)] } }, "reservedFor": [user] }),
    );
    claim("wanted", 3, &json!({}));
    let mut by_claim = pod("team", "by-claim", "", &[], json!({}));
    by_claim["spec"]["resourceClaims"] = json!([{ "name": "gpu", "resourceClaimName": "wanted" }]);
    stage.pod(&by_claim);
    for name in ["gang-0", "gang-1"] {
        stage.pod(&pod("team", name, "", &[("nvidia.com/gpu", 2)], json!({ "tessera.dev/gang": "train/4" })));
    }
    stage.pod(&pod("team", "bad", "", &[("tencent.com/vcuda-core", 150)], json!({})));
    let mut state = State::new(SchedulerSettings { dra: true, ..settings() });
    for class in stage.server.list("/apis/resource.k8s.io/v1/deviceclasses") {
        state.handle(StateEvent::Class(WatchEvent::Set(serde_json::from_value(class).unwrap())));
    }
    for node in stage.server.list("/api/v1/nodes") {
        state.handle(StateEvent::Node(WatchEvent::Set(serde_json::from_value(node).unwrap())));
    }
    for claim in stage.server.list("/apis/resource.k8s.io/v1/resourceclaims") {
        state.handle(StateEvent::Claim(WatchEvent::Set(serde_json::from_value(claim).unwrap())));
    }
    for pod in stage.server.list("/api/v1/pods") {
        state.handle(StateEvent::Pod(WatchEvent::Set(serde_json::from_value(pod).unwrap())));
    }
    let url = serve(&stage, state);
    let endpoint = ["--endpoint", url.as_str()];
    let both = |arguments: &[&str]| {
        let asked: Vec<&str> = arguments.iter().chain(&endpoint).copied().collect();
        let (api, scheduler) = (stage.text(GPU, arguments), stage.text(GPU, &asked));
        assert_eq!(api, scheduler, "{arguments:?}");
        api
    };
    let tree = both(&["tree", "t4", "--no-agents", "-o", "wide"]);
    assert!(tree.contains("team/held/claim [50% 4 GiB]") && tree.contains("GPU3 cordoned"), "{tree}");
    let details = both(&["-d", "t4"]);
    assert!(details.starts_with("gpu policy: tessera\n"), "{details}");
    both(&[]);
    let running = "pod team/uses-held is placed on node t4\n  GPU1: 50% and 4096 MiB\n\
                   chosen because: they are the devices of claim held\n";
    assert_eq!(both(&["explain", "team/uses-held"]), running);
    let text = both(&["explain", "team/by-claim"]);
    assert!(text.contains("requests claim: 3 GPUs"), "{text}");
    assert!(text.contains("only kube-scheduler checks: the devices of its claims"), "{text}");
    let text = both(&["explain", "team/gang-0"]);
    let gang = "gang team/train: 2 of 4 pods exist, 0 have nodes; it waits until all of them exist\n";
    assert!(text.contains(gang), "{text}");
    // The ages below the heading depend on the time of the call.
    let asked: Vec<&str> = ["overview", "-o", "wide"].iter().chain(&endpoint).copied().collect();
    let heading = |text: &str| text.split_once("wait for GPUs:").unwrap().0.to_owned();
    let (api, scheduler) = (stage.text(GPU, &["overview", "-o", "wide"]), stage.text(GPU, &asked));
    assert_eq!(heading(&api), heading(&scheduler));
    assert!(api.contains("4 pods wait for GPUs:") && api.contains("SchedulingDisabled"), "{api}");
    assert!(api.contains("team/held/claim 50% 4 GiB"), "{api}");
    assert!(api.contains("1 cordoned, 3 on cordoned nodes"), "{api}");
}

#[test]
fn endpoint_queries_a_scheduler() {
    let stage = stage();
    let url = serve(&stage, scheduler(&stage));
    let endpoint = ["--endpoint", url.as_str()];
    let both = |program: &str, arguments: &[&str]| {
        let asked: Vec<&str> = arguments.iter().chain(&endpoint).copied().collect();
        (stage.text(program, arguments), stage.text(program, &asked))
    };
    let (api, scheduler) = both(GPU, &[]);
    assert_eq!(api, scheduler);
    let (api, scheduler) = both(GPU, &["-d", "t4"]);
    assert_eq!(api, scheduler);
    assert!(api.starts_with("gpu policy: tessera\n"), "{api}");
    let scheduler =
        stage.text(SHARE, &["--no-headers", "blocks", "--endpoint", &format!("{url}/gpushare-scheduler/")]);
    assert_eq!(scheduler, "blocks  unknown  0/60  30/60  30/120\n");
    let of_pods =
        ["team/share-large", "team/whole-two", "closed/over-quota", "default/pair", "team/bypassed"];
    for pod in of_pods {
        for form in ["wide", "json"] {
            let (api, scheduler) = both(GPU, &["explain", pod, "-o", form]);
            assert_eq!(api, scheduler, "{pod}");
        }
    }
    let (api, scheduler) = both(
        GPU,
        &["what-if", "aliyun.com/gpu-mem=8", "cpu=4", "-n", "team", "-a", "tessera.dev/policy=share"],
    );
    assert_eq!(api, scheduler);
    let (api, scheduler) = both(GPU, &["tree", "t4", "--no-agents", "-o", "wide"]);
    assert_eq!(api, scheduler);
    for wide in [&["-o", "wide"][..], &["-o", "wide", "blocks", "--no-headers"]] {
        // One node cannot be read, which the scheduler knows and the columns do not show.
        let (api, scheduler) = both(GPU, wide);
        assert_eq!(api, scheduler, "{wide:?}");
    }
    let errors = |arguments: &[&str]| {
        let asked: Vec<&str> = arguments.iter().chain(&endpoint).copied().collect();
        let error = |arguments: &[&str]| String::from_utf8(stage.run(GPU, arguments).stderr).unwrap();
        (error(arguments), error(&asked))
    };
    let (api, scheduler) = errors(&["explain", "team/bad"]);
    assert_eq!(api, scheduler);
    assert!(api.starts_with("error: the GPU request of pod team/bad is invalid: "), "{api}");
    let (api, scheduler) = both(GPU, &["--context", "team", "explain", "share-large"]);
    assert_eq!(api, scheduler, "the namespace of the context counts with --endpoint, too");
    let (api, scheduler) = both(
        GPU,
        &["--context", "team", "what-if", "aliyun.com/gpu-mem=8", "-a", "tessera.dev/policy=share"],
    );
    assert_eq!(api, scheduler);
    for view in ["overview", "tree", "top"] {
        let output = stage.run(GPU, &[view, "--endpoint", "http://127.0.0.1:1"]);
        let said = String::from_utf8(output.stderr).unwrap();
        let warning = "warning: the API server is read, because --endpoint http://127.0.0.1:1 cannot be: ";
        assert!(said.contains(warning), "{view} says where its data come from: {said}");
    }
    let unreachable = stage.run(GPU, &["explain", "team/waits", "--endpoint", "http://127.0.0.1:1"]);
    let said = String::from_utf8(unreachable.stderr).unwrap();
    assert!(said.starts_with("error: cannot reach http://127.0.0.1:1/explain/team/waits: "), "{said}");
    assert!(said.ends_with("; check the address of --endpoint and the port-forward\n"), "{said}");
    let unknown = stage.run(GPU, &["tree", "nobody", "--endpoint", &url]);
    let said = String::from_utf8(unknown.stderr).unwrap();
    assert_eq!(said, "error: node nobody does not exist or has ended\n", "the scheduler has answered");
    for bad in ["", "a/b/c", "/name", "team/", "pod/"] {
        let (api, scheduler) = errors(&["explain", bad]);
        assert_eq!(api, format!("error: {bad:?} is not a pod; write NAME or NAMESPACE/NAME\n"));
        assert_eq!(api, scheduler);
    }
    // The scheduler alone is enough: there is no API server behind this kubeconfig.
    std::fs::write(stage.kubeconfig(), "{}").unwrap();
    for command in [&["top", "--once"][..], &["tree"], &["overview"], &["what-if", "nvidia.com/gpu=1"]] {
        let asked: Vec<&str> = command.iter().chain(&endpoint).copied().collect();
        let text = stage.text(GPU, &asked);
        assert!(text.contains("blocks"), "{command:?}: {text}");
    }
    let unknown = stage.run(GPU, &["nobody", "--endpoint", &url]);
    assert_eq!(
        String::from_utf8(unknown.stderr).unwrap(),
        "error: node nobody is not known or has no GPU of this kind\n"
    );
}
