//! Measurements of agents, and agents that do not answer.

use serde_json::{Value, json};
use tessera_sim::http::HttpClient;
use tokio::net::TcpListener;

use crate::stage::{GPU, Stage, kubeconfig};
use crate::states::{T4, node, share};

pub(crate) fn agent(stage: &Stage, document: Value) -> String {
    stage.runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answer = axum::routing::get(move || async move { axum::Json(document) });
        tokio::spawn(
            async move { axum::serve(listener, axum::Router::new().route("/v1/use", answer)).await },
        );
        url
    })
}

#[test]
fn top_shows_measured_use_and_names_silent_agents() {
    let stage = Stage::new();
    let url = agent(
        &stage,
        json!({
            "gpus": [{ "uuid": "GPU-n1-0", "index": 0, "memoryUsedMiB": 5000, "busyPercent": 61.4 }],
            "containers": [{ "namespace": "team", "pod": "third", "uid": "u", "container": "main", "gpus": [
                { "uuid": "GPU-n1-0", "index": 0, "grantedPercent": 33, "grantedMiB": 5120, "memoryUsedMiB": 4900, "busyPercent": 30.2, "throttledPercent": 4.0 }] }],
        }),
    );
    let mut measured = node("n1", "10.0.0.1", "GiB", &[T4]);
    measured["metadata"]["annotations"]["tessera.dev/agent"] = url.into();
    let mut silent = node("n2", "10.0.0.2", "GiB", &[T4]);
    silent["metadata"]["annotations"]["tessera.dev/agent"] = "http://127.0.0.1:1".into();
    stage.node(&measured);
    stage.node(&silent);
    stage.pod(&share("third", "n1", 0, 33, 20));
    let text = stage.text(GPU, &["top"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "NODE  GPU  POD         CONTAINER  BUSY  GRANTED  MEMORY(MiB)  GRANTED(MiB)  WAITED"
    );
    assert_eq!(lines[2], "n1    0    team/third  main       30%   33%      4900         5120          4%");
    assert!(lines[3].starts_with("n2    -    no answer from http://127.0.0.1:1/v1/use: "), "{text}");
    let json: Value = serde_json::from_str(&stage.text(GPU, &["top", "-o", "json"])).unwrap();
    assert_eq!(json["nodes"][0]["containers"][0]["gpus"][0]["memoryUsedMiB"], 4900);
    assert!(json["nodes"][1]["gpus"].is_null() && json["nodes"][1]["error"].is_string(), "{json}");

    // A list of containers has no line for a node whose agent does not answer.
    for arguments in [&["top", "--sort", "busy"][..], &["top", "-n", "5"]] {
        let top = stage.run(GPU, arguments);
        let (shown, warned) =
            (String::from_utf8(top.stdout).unwrap(), String::from_utf8(top.stderr).unwrap());
        assert!(shown.contains("team/third") && !shown.contains("n2"), "{arguments:?}: {shown}");
        let expected =
            "warning: node n2: the use of its containers is unknown: no answer from http://127.0.0.1:1";
        assert!(warned.starts_with(expected), "{arguments:?}: {warned:?}");
    }
    assert!(stage.run(GPU, &["top"]).stderr.is_empty(), "the table has a line for the node");

    let tree = stage.run(GPU, &["tree"]);
    let (shown, warned) = (String::from_utf8(tree.stdout).unwrap(), String::from_utf8(tree.stderr).unwrap());
    assert!(shown.contains("GPU0 67% and 10 GiB of 15 GiB free, 4 GiB in use\n"), "{shown}");
    assert!(warned.starts_with("warning: node n2: the memory in use is unknown: no answer from"), "{warned}");
}

/// Waste is what a container holds, by the larger of compute and memory, beyond what it uses. A container that was
/// granted memory alone holds that part of the GPU.
#[test]
fn containers_with_memory_alone_can_waste_most() {
    let stage = Stage::new();
    let container = |pod: &str, percent: u64, mib: u64, busy: f64| {
        json!({ "namespace": "team", "pod": pod, "uid": pod, "container": "main", "gpus": [{ "uuid": "GPU-n1-0",
            "index": 0, "grantedPercent": percent, "grantedMiB": mib, "memoryUsedMiB": 100, "busyPercent": busy }] })
    };
    let containers = [
        container("half", 50, 1024, 30.0),
        container("notes", 0, 12288, 1.0),
        container("tenth", 10, 1024, 9.0),
    ];
    let url = agent(&stage, json!({ "gpus": [], "containers": containers }));
    let mut measured = node("n1", "10.0.0.1", "GiB", &[T4]);
    measured["metadata"]["annotations"]["tessera.dev/agent"] = url.into();
    stage.node(&measured);
    let text = stage.text(GPU, &["top", "--sort", "waste", "--no-headers"]);
    let pods: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    assert_eq!(pods, ["team/notes", "team/half", "team/tenth"]);
}

/// An extender of another project has no API of a dashboard, so that MIG instances and reservations are unknown.
#[test]
fn details_of_another_extender_say_what_is_unknown() {
    let stage = Stage::new();
    let url = stage.runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answer = axum::routing::get(|| async { axum::Json(json!({ "nodes": [] })) });
        let router = axum::Router::new().route("/gputopology-scheduler/inspect", answer);
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    });
    let warned = |arguments: &[&str]| {
        let output = stage.run(GPU, arguments);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let expected =
        format!("warning: MIG instances and reservations are unknown and not shown: {url}/api/v1/nodes");
    let details = warned(&["-d", "--endpoint", &url]);
    assert!(details.starts_with(&expected), "{details:?} {expected:?}");
    assert_eq!(warned(&["--endpoint", &url]), "");
}

/// Starts an API server whose proxy of Services leads to this answer of the scheduler. It passes all other requests on
/// to the API server of the stage, and becomes the server of its kubeconfig.
fn add_service(stage: &Stage, answer: Value) {
    let path = "/api/v1/namespaces/gpu-system/services/tessera-scheduler:dashboard/proxy/api/v1/nodes/n1/use";
    let behind = stage.server.url();
    let pass_on = move |uri: axum::http::Uri| async move {
        let mut client = HttpClient::new(&behind).unwrap();
        let (code, body) = client.send("GET", &uri.to_string(), &[], "").await.unwrap();
        (axum::http::StatusCode::from_u16(code).unwrap(), [("content-type", "application/json")], body)
    };
    let url = stage.runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answer = axum::routing::get(move || async move { axum::Json(answer) });
        let router = axum::Router::new().route(path, answer).fallback(pass_on);
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    });
    std::fs::write(stage.kubeconfig(), kubeconfig(&url)).unwrap();
}

#[test]
fn agents_that_need_a_token_are_read_through_the_scheduler() {
    let stage = Stage::new();
    let measured = json!({ "use": {
        "gpus": [{ "uuid": "GPU-n1-0", "index": 0, "memoryUsedMiB": 5000, "busyPercent": 61.4 }], "containers": [],
    } });
    let mut node = node("n1", "10.0.0.1", "GiB", &[T4]);
    node["metadata"]["annotations"]["tessera.dev/agent"] = "https://127.0.0.1:1".into();
    let certificate = format!("sha256:{}", "ab".repeat(32));
    node["metadata"]["annotations"]["tessera.dev/agent-certificate"] = certificate.into();
    stage.node(&node);
    let is_shown =
        |text: &str| text.lines().nth(1).is_some_and(|line| line.contains("61%") && line.contains("5000"));

    // With --endpoint, the scheduler is asked directly.
    let scheduler = stage.runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let document = measured.clone();
        let answer = axum::routing::get(move || async move { axum::Json(document) });
        let router = axum::Router::new().route("/api/v1/nodes/n1/use", answer);
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    });
    let text = stage.text(GPU, &["top", "--endpoint", &scheduler]);
    assert!(is_shown(&text), "{text}");

    // Without it, the API server's proxy leads to the scheduler. This API server has none.
    let text = stage.text(GPU, &["top"]);
    for words in
        ["the agent needs a token", "--endpoint URL", "services/proxy", "kube-system/tessera-scheduler"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    let text = stage.text(GPU, &["top", "--endpoint", "http://127.0.0.1:1"]);
    assert!(text.contains("--endpoint http://127.0.0.1:1 does not answer"), "{text}");
    let json: Value = serde_json::from_str(&stage.text(GPU, &["top", "-o", "json"])).unwrap();
    assert!(json["nodes"][0]["error"].is_string() && json["nodes"][0]["gpus"].is_null(), "{json}");

    add_service(&stage, measured);
    let text = stage.text(GPU, &["top", "--scheduler-namespace", "gpu-system"]);
    assert!(is_shown(&text), "{text}");
    add_service(&stage, json!({ "notMeasured": "the agent at 127.0.0.1:1 did not answer in time" }));
    let text = stage.text(GPU, &["top", "--scheduler-namespace", "gpu-system"]);
    assert!(text.contains("n1    -    the agent at 127.0.0.1:1 did not answer in time"), "{text}");
}
