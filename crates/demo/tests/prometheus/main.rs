//! A real Prometheus scrapes the agents and the scheduler of the demo, and evaluates every alert and every query of the
//! dashboard in `deploy/monitoring`.
//!
//! `cargo test -p tessera-demo --test prometheus`; needs Debian's package `prometheus`.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod common;
mod gate;
#[path = "../../../agent/tests/prometheus/server.rs"]
mod server;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;

use common::load::{fetch, poll_foreign};
use gate::Gate;
use serde_json::Value;
use server::{Job, Prometheus, promtool};
use tessera_demo::{DemoOptions, built_in_models, run};
use tessera_sim::http::HttpClient;
use tessera_sim::kubelet::{BUSY, GREEDY, IDLE};

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/monitoring").join(file)
}

/// Returns the rules in the form of Prometheus: the part of the operator's object below `spec`.
fn rules() -> String {
    let text = std::fs::read_to_string(deploy("alerts.yaml")).unwrap();
    let (_, spec) = text.split_once("\nspec:\n").unwrap();
    spec.lines().map(|line| format!("{}\n", line.strip_prefix("  ").unwrap_or(line))).collect()
}

/// Returns every panel of the dashboard with its queries, with variables replaced.
fn queries() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(deploy("dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let of_panel = |panel: &Value| {
        let title = panel["title"].as_str().unwrap().to_owned();
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        targets.into_iter().map(move |target| (title.clone(), target["expr"].as_str().unwrap().to_owned()))
    };
    let fill =
        |query: String| query.replace("$__rate_interval", "10s").replace("$node", NODE).replace("$gpu", ".*");
    panels.iter().flat_map(of_panel).map(|(title, query)| (title, fill(query))).collect()
}

/// The node that the dashboard is asked for. The demo breaks a GPU of its first node.
const NODE: &str = "node-00";

/// Alerts that the demo cannot cause, with the reason. `promtool` evaluates them on series of the test of the agent.
const NOT_IN_THE_DEMO: [(&str, &str); 3] = [
    ("TesseraOverbooked", "the scheduler and the agents prevent it, also for pods that name their node"),
    ("TesseraSourceMissing", "an agent of the demo serves its pages only when its sources have answered"),
    ("TesseraSchedulerDisconnected", "the API server runs in the same process and does not stop"),
];

/// Returns the query of an alert for a short demo: ranges are seconds, certificates should be valid for ten years, and
/// every call of the extender is slow.
fn shortened(query: &str) -> String {
    let replaced = [("[5m]", "[10s]"), ("[15m]", "[10s]"), ("[1h]", "[5s]"), ("offset 1h", "offset 5s")];
    let query = replaced.iter().fold(query.to_owned(), |query, (long, short)| query.replace(long, short));
    let query = query.replace("14 * 86400", "3660 * 86400");
    if query.contains("tessera_scheduler_call_seconds") { query.replace("> 0.5", "> 0") } else { query }
}

/// Appends a line to a file of a node.
fn append(file: &Path, line: &str) {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    writeln!(file, "{line}").unwrap();
}

/// Returns the directories of running demos.
fn demo_directories() -> BTreeSet<PathBuf> {
    let all = std::fs::read_dir(std::env::temp_dir()).unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let is_demo = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("tessera-demo-"))
    };
    all.filter(is_demo).collect()
}

/// Returns the address in the URL after `label` in a text.
fn address_after(text: &str, label: &str) -> SocketAddr {
    let (_, rest) = text.split_once(label).unwrap();
    let (_, rest) = rest.split_once("http://").unwrap();
    let end = rest.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ':')).unwrap_or(rest.len());
    rest[..end].trim_end_matches('.').parse().unwrap()
}

async fn json(address: SocketAddr, path: &str) -> Value {
    let (_, body) = fetch(address, path, "").await.unwrap();
    serde_json::from_slice(&body).unwrap()
}

/// Returns a pod whose container behaves as its name says.
fn special(pod: &str, container: &str, limits: &Value) -> String {
    let pod = serde_json::json!({
        "metadata": {"name": pod},
        "spec": {"restartPolicy": "Never", "nodeSelector": {"kubernetes.io/hostname": NODE},
                 "containers": [{"name": container, "image": "simulated", "resources": {"limits": limits}}]},
    });
    pod.to_string()
}

/// One leader and a connection are good, and nothing is shown as zero that is unknown.
#[test]
fn figures_have_the_right_colours() {
    let dashboard: Value =
        serde_json::from_str(&std::fs::read_to_string(deploy("dashboard.json")).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let colour = |title: &str, value: f64| {
        let panel = panels.iter().find(|panel| panel["title"] == title).unwrap();
        let steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"].as_array().unwrap();
        let reached = steps.iter().rfind(|step| step["value"].as_f64().is_none_or(|least| value >= least));
        reached.unwrap()["color"].as_str().unwrap().to_owned()
    };
    for (title, value, expected) in [
        ("Leader", 0.0, "red"),
        ("Leader", 1.0, "green"),
        ("Leader", 2.0, "red"),
        ("API connection", 0.0, "red"),
        ("API connection", 1.0, "green"),
        ("Unhealthy", 0.0, "green"),
        ("Unhealthy", 1.0, "red"),
    ] {
        assert_eq!(colour(title, value), expected, "{title} {value}");
    }
    for panel in panels.iter().filter(|panel| panel["type"] == "stat") {
        let without = &panel["fieldConfig"]["defaults"]["noValue"];
        assert_eq!(without, "unknown", "{}", panel["title"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_alert_and_panel_is_evaluated_on_the_demo() {
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    let options = DemoOptions {
        nodes: 3,
        machine_models: built_in_models(),
        pods_per_second: None,
        steps: true,
        seed: 1,
        speed: 1.0,
        listen: "127.0.0.1:0".parse().unwrap(),
        kubeconfig_out: Some(kubeconfig.clone()),
        duration: None,
    };
    let before = demo_directories();
    let said = Arc::<Mutex<String>>::default();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let heard = Arc::clone(&said);
    let demo = tokio::spawn(run(options, move |text| heard.lock().unwrap().push_str(text), async {
        let _ = stopped.await;
    }));
    let introduction = poll_foreign("the demo", async || {
        let text = said.lock().unwrap().clone();
        text.contains("Press Ctrl-C").then_some(text)
    })
    .await;
    let scheduler = address_after(&introduction, "Open ");
    let api = address_after(&std::fs::read_to_string(&kubeconfig).unwrap(), "server");
    let nodes = json(api, "/api/v1/nodes").await;
    let agents: Vec<(String, SocketAddr)> = nodes["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| {
            let url = node["metadata"]["annotations"]["tessera.dev/agent"].as_str().unwrap();
            (node["metadata"]["name"].as_str().unwrap().to_owned(), address_after(url, ""))
        })
        .collect();
    assert_eq!(agents.len(), 3, "{nodes}");
    // The scheduler's copy of this family is dropped, as deploy/monitoring/pod-monitor.yaml does.
    let monitor = std::fs::read_to_string(deploy("pod-monitor.yaml")).unwrap();
    assert!(monitor.contains("regex: pod_and_gpu_map_info\n          action: drop"), "{monitor}");
    let dropped = "    metric_relabel_configs: [{ source_labels: [__name__], regex: pod_and_gpu_map_info, action: drop }]\n";
    // Series get the name of their node, as deploy/monitoring/pod-monitor.yaml does.
    for label in ["instance", "node", "node_name"] {
        let line = format!("sourceLabels: [__meta_kubernetes_pod_node_name]\n          targetLabel: {label}");
        assert!(monitor.contains(&line), "{monitor}");
    }
    let mut named = Vec::new();
    for (node, target) in &agents {
        let of_node = ["instance", "node", "node_name"]
            .map(|label| format!("{{ target_label: {label}, replacement: {node} }}"));
        let relabelings = format!("    relabel_configs: [{}]\n", of_node.join(", "));
        named.push((format!("{node}/tessera-agent"), relabelings, Gate::start(*target, true).await));
    }
    // Another replica that claims to lead answers when its gate opens.
    let [leader, second] = [Gate::start(scheduler, true).await, Gate::start(scheduler, false).await];
    let mut jobs: Vec<Job<'_>> = named
        .iter()
        .map(|(name, relabelings, gate)| Job { name, path: "/metrics", target: gate.address, relabelings })
        .collect();
    for (name, gate) in [("tessera-scheduler", &leader), ("second/tessera-scheduler", &second)] {
        jobs.push(Job { name, path: "/metrics", target: gate.address, relabelings: dropped });
    }
    let prometheus = Prometheus::start(&jobs, &rules());
    for job in jobs.iter().filter(|job| job.target != second.address) {
        prometheus.until_some(&format!("up{{job=\"{}\"}} == 1", job.name)).await;
    }
    let share = serde_json::json!({"tencent.com/vcuda-core": "20", "tencent.com/vcuda-memory": "16"});
    let whole = serde_json::json!({"nvidia.com/gpu": "1"});
    for (pod, container, limits) in [
        ("greedy-pod", GREEDY, &share),
        ("idle-pod", IDLE, &share),
        ("busy-pod", BUSY, &share),
        ("hot-pod", BUSY, &whole),
    ] {
        let mut client = HttpClient::new(&format!("http://{api}")).unwrap();
        let path = "/api/v1/namespaces/research/pods";
        let headers = [("content-type", "application/json")];
        let (status, answer) =
            client.send("POST", path, &headers, special(pod, container, limits)).await.unwrap();
        assert_eq!(status, 201, "{answer}");
    }
    prometheus.until_some("rate(tessera_container_busy_seconds_total[10s]) > 0").await;
    prometheus.until_some("rate(tessera_scheduler_calls_total{verb=\"bind\"}[10s]) > 0").await;
    prometheus.until_some("tessera:container_held:ratio > 0").await;
    prometheus.until_some("tessera:container_busy:increase30m > 0").await;
    prometheus.until_some("pod_and_gpu_map_info").await;
    // Escapes, waste, throttling, reduced clocks and a broken GPU happen in the demo.
    prometheus
        .until_some("rate(tessera_container_throttled_seconds_total{pod=\"busy-pod\"}[10s]) > 0.5")
        .await;
    prometheus.until_some("tessera_gpu_clock_limited{reason=\"power_cap\"} == 1").await;
    prometheus.until_some("tessera_container_escaped_processes{pod=\"greedy-pod\"} > 0").await;
    prometheus.until_some("tessera:container_busy:increase30m{pod=\"idle-pod\"} == 0").await;
    prometheus.until_some("tessera_gpu_xid_last_timestamp_seconds").await;
    for (panel, query) in queries() {
        // Values over time need a few scrapes.
        let found = poll_foreign(&format!("panel {panel:?} to have data: {query}"), async || {
            Some(prometheus.query(&query).await).filter(|found| !found.is_empty())
        })
        .await;
        assert!(!found.is_empty());
        let invented = prometheus.query_without_data(&query).await;
        assert!(
            invented.is_empty(),
            "{panel:?} shows values that nothing has measured: {query}: {invented:?}"
        );
    }
    let doubled = prometheus.query("count by (gpu_id, namespace, pod_name) (pod_and_gpu_map_info) > 1").await;
    assert!(doubled.is_empty(), "{doubled:?}");
    let rules = poll_foreign("all rules to be evaluated", async || {
        let rules = prometheus.rules().await;
        rules.iter().all(|rule| rule["health"] != "unknown").then_some(rules)
    })
    .await;
    assert!(rules.len() > 20, "{}", rules.len());
    for rule in &rules {
        assert_eq!(rule["health"], "ok", "{rule}");
    }
    let state = |name: &str| rules.iter().find(|rule| rule["name"] == name).unwrap()["state"].clone();
    for name in [
        "TesseraAgentDown",
        "TesseraAgentNotScraped",
        "TesseraSchedulerDown",
        "TesseraSchedulerNoLeader",
        "TesseraUsageUnknown",
        "TesseraCertificateExpires",
    ] {
        assert_eq!(state(name), "inactive", "{name}");
    }
    for name in ["TesseraEscapedProcess", "TesseraOverMemoryShare", "TesseraGpuXid"] {
        assert_ne!(state(name), "inactive", "{name}");
    }

    // The demo causes every alert that it can.
    let directory = demo_directories().difference(&before).next().unwrap().clone();
    let alerts = || rules.iter().filter(|rule| rule["type"] == "alerting");
    let query = |name: &str| {
        let rule = alerts().find(|rule| rule["name"] == name).unwrap_or_else(|| panic!("no alert {name}"));
        shortened(rule["query"].as_str().unwrap())
    };
    let mut caused = BTreeSet::new();
    let mut until_data = async |name: &'static str| {
        prometheus.until_some(&query(name)).await;
        caused.insert(name);
    };
    for name in [
        "TesseraGpuXid",
        "TesseraOverMemoryShare",
        "TesseraEscapedProcess",
        "TesseraAllocatedButIdle",
        "TesseraCertificateExpires",
        "TesseraExtenderSlow",
    ] {
        until_data(name).await;
    }
    let idle = prometheus.query(&query("TesseraAllocatedButIdle")).await;
    assert!(idle.iter().all(|series| series["metric"]["pod"] != "busy-pod"), "{idle:?}");
    let mut client = HttpClient::new(&format!("http://{api}")).unwrap();
    let headers = [("content-type", "application/json")];
    let waits = special("waiting-pod", IDLE, &serde_json::json!({"nvidia.com/gpu": "9"}));
    client.send("POST", "/api/v1/namespaces/research/pods", &headers, waits).await.unwrap();
    until_data("TesseraPodsWaiting").await;
    let mut verbs = HttpClient::new(&format!("http://{scheduler}")).unwrap();
    poll_foreign("calls of the extender to fail", async || {
        verbs.send("POST", "/scheduler/filter", &headers, "{ not json").await.unwrap();
        let found = prometheus.query(&query("TesseraExtenderErrors")).await;
        (!found.is_empty()).then_some(())
    })
    .await;
    until_data("TesseraExtenderErrors").await;
    // A GPU that an administrator has cordoned works, so the dashboard does not count it as unhealthy.
    let healthy = prometheus.query(&format!("tessera_gpu_healthy{{node=\"{NODE}\"}} == 1")).await;
    let uuid = healthy.last().unwrap()["metric"]["uuid"].as_str().unwrap();
    let patch = serde_json::json!({"metadata": {"annotations": {"tessera.dev/gpu-cordon": uuid}}});
    let merge = [("content-type", "application/merge-patch+json")];
    let (status, answer) =
        client.send("PATCH", &format!("/api/v1/nodes/{NODE}"), &merge, patch.to_string()).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    let cordoned = format!("tessera_gpu_withdrawn{{uuid=\"{uuid}\",reason=\"cordoned\"}}");
    prometheus.until_some(&format!("{cordoned} and on (uuid) tessera_gpu_healthy == 1")).await;
    prometheus.until_some(&format!("{cordoned} and on (uuid) tessera_gpu_allocatable_ratio == 0")).await;
    let (_, unhealthy) = queries().into_iter().find(|(panel, _)| panel == "Unhealthy").unwrap();
    let broken = format!(
        "count(tessera_gpu_withdrawn{{node=\"{NODE}\",reason!~\"cordoned|in MIG mode\"}}) or vector(0)"
    );
    prometheus.until_some(&format!("(({unhealthy}) == ({broken})) and on () {cordoned}")).await;
    // A GPU of the second node breaks and does not come back, and a process of no pod uses another one.
    append(&directory.join("1/gpus.events"), "0 xid 79");
    until_data("TesseraGpuUnhealthy").await;
    append(&directory.join("1/gpus.events"), "2 ecc");
    until_data("TesseraGpuMemoryBroken").await;
    append(&directory.join("1/gpus.events"), "3 hot");
    until_data("TesseraGpuHot").await;
    let processes = directory.join("1/gpus.processes");
    let stray = r#"{"pid":999999,"gpu":1,"memoryMiB":2048,"busyPercent":1}"#;
    poll_foreign("memory that cannot be attributed", async || {
        if !std::fs::read_to_string(&processes).unwrap_or_default().contains(stray) {
            append(&processes, stray);
        }
        let found = prometheus.query(&query("TesseraUnattributedMemory")).await;
        (!found.is_empty()).then_some(())
    })
    .await;
    until_data("TesseraUnattributedMemory").await;
    // The driver of the first node does not answer.
    let (description, away) = (directory.join("0/gpus"), directory.join("0/gpus.away"));
    std::fs::rename(&description, &away).unwrap();
    until_data("TesseraGpuNotRead").await;
    until_data("TesseraUsageUnknown").await;
    std::fs::rename(&away, &description).unwrap();
    // A node has announced an agent, and Prometheus has no target for it.
    let annotations = serde_json::json!({"tessera.dev/agent": "http://127.0.0.1:9"});
    let foreign = serde_json::json!({"metadata": {"name": "foreign", "annotations": annotations},
        "spec": {"unschedulable": true}});
    client.send("POST", "/api/v1/nodes", &headers, foreign.to_string()).await.unwrap();
    until_data("TesseraAgentNotScraped").await;
    // An agent stops, a second replica leads, and then no replica answers.
    named.last().unwrap().2.close();
    until_data("TesseraAgentDown").await;
    second.open();
    until_data("TesseraSchedulerNoLeader").await;
    second.close();
    leader.close();
    until_data("TesseraSchedulerDown").await;
    let series = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/tests/prometheus/alerts.yaml");
    let by_promtool = std::fs::read_to_string(series).unwrap();
    for rule in alerts() {
        let name = rule["name"].as_str().unwrap();
        let reason = NOT_IN_THE_DEMO.iter().find(|(known, _)| *known == name);
        assert!(caused.contains(name) != reason.is_some(), "{name} must have data in the demo or a reason");
        assert!(by_promtool.contains(&format!("alertname: {name}\n")), "promtool does not evaluate {name}");
    }

    let text = String::from_utf8(fetch(scheduler, "/metrics", "").await.unwrap().1).unwrap();
    let is_ours = |line: &&str| line.contains("tessera_scheduler_");
    let ours: String = text.lines().filter(is_ours).map(|line| format!("{line}\n")).collect();
    promtool(Path::new("."), &["check", "metrics"], Some(&ours));
    drop(prometheus);
    let _ = stop.send(());
    demo.await.unwrap().unwrap();
}
