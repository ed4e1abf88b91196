//! Tests of the demo: every step succeeds and every invariant holds.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

#[path = "prometheus/common/mod.rs"]
#[allow(dead_code, reason = "these tests need one of the helpers")]
mod common;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::load::poll_foreign;
use serde_json::{Value, json};
use tessera_cluster::node_agent::{NodeClient, WriteFailure};
use tessera_demo::{DemoOptions, built_in_models, run};
use tessera_sim::apiserver::ApiServer;
use tessera_sim::http::HttpClient;
use tokio::sync::mpsc::UnboundedReceiver;

fn options() -> DemoOptions {
    DemoOptions {
        nodes: 4,
        machine_models: built_in_models(),
        pods_per_second: Some(3.0),
        steps: true,
        seed: 1,
        speed: 3.0,
        listen: "127.0.0.1:0".parse().unwrap(),
        kubeconfig_out: None,
        duration: Some(Duration::from_secs(5)),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_step_succeeds_and_all_grants_agree() {
    // Steps hold the stream of pods back while they play. Twice the time that they usually take leaves room for both.
    let options = DemoOptions { duration: Some(Duration::from_secs(10)), ..options() };
    let report = run(options, |_| {}, std::future::pending()).await.unwrap();
    let shown = serde_json::to_string_pretty(&report).unwrap();
    let names: Vec<&str> = report.steps.iter().map(|step| step.name).collect();
    assert_eq!(names, ["fractions", "training", "notebooks", "quota", "gpu-failure", "preemption"]);
    assert!(report.steps.iter().all(|step| step.happened), "{shown}");
    assert!(report.pods.created > 0 && report.pods.succeeded > 0, "pods besides those of the steps: {shown}");
    assert!(report.pods.bound > 20, "{shown}");
    assert_eq!(report.pods.failed, 0, "a kubelet rejected a pod: {shown}");
    assert_eq!(report.pods.evicted, 1, "{shown}");
    assert!(report.invariants.checks > 100, "{shown}");
    assert_eq!(report.invariants.violations, Vec::<String>::new(), "{shown}");
    assert_eq!(report.invariants.differences, Vec::<String>::new(), "{shown}");
    assert_eq!(report.agents.answered, 4, "{shown}");
    assert!(report.is_good());
}

/// The pod rate follows the size of the cluster, so that steps find room in a small one.
#[tokio::test(flavor = "multi_thread")]
async fn small_clusters_show_every_step_or_say_why_not() {
    for nodes in [1, 2, 3, 7, 13] {
        let options = DemoOptions {
            nodes,
            pods_per_second: None,
            speed: 10.0,
            duration: Some(Duration::ZERO),
            ..options()
        };
        let report = run(options, |_| {}, std::future::pending()).await.unwrap();
        let shown = serde_json::to_string_pretty(&report).unwrap();
        assert!(report.steps.iter().all(|step| step.happened), "{nodes} nodes: {shown}");
        let not_shown = |name: &str| {
            report.steps.iter().any(|step| step.name == name && step.detail.starts_with("not shown: "))
        };
        assert_eq!(not_shown("preemption"), nodes == 1, "{shown}");
        assert!(!not_shown("training"), "{shown}");
    }
}

/// A cluster with many nodes shows every step, too: no line of it says FAILED.
#[tokio::test(flavor = "multi_thread")]
async fn large_clusters_show_every_step() {
    for nodes in [21, 200] {
        let options = DemoOptions {
            nodes,
            pods_per_second: None,
            speed: 10.0,
            duration: Some(Duration::ZERO),
            ..options()
        };
        let said = Mutex::new(String::new());
        let say = |text: &str| said.lock().unwrap().push_str(text);
        let report = run(options, say, std::future::pending()).await.unwrap();
        let shown = serde_json::to_string_pretty(&report).unwrap();
        let said = said.into_inner().unwrap();
        assert!(!said.contains("FAILED"), "{nodes} nodes: {said}");
        assert!(report.is_good(), "{nodes} nodes: {shown}");
        assert!(!report.steps.iter().any(|step| step.detail.starts_with("not shown")), "{shown}");
    }
}

/// The stream of pods leaves room for the steps, in every round.
#[tokio::test(flavor = "multi_thread")]
async fn steps_succeed_again_and_again_beside_the_stream() {
    let options = DemoOptions { nodes: 3, pods_per_second: None, speed: 5.0, duration: None, ..options() };
    let (said, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let say = move |text: &str| said.send(text.to_owned()).unwrap_or_default();
    let report = run(options, say, until_rounds(&mut seen, 5)).await.unwrap();
    let shown = serde_json::to_string_pretty(&report).unwrap();
    assert!(report.pods.created > 0 && report.is_good(), "{shown}");
}

/// Returns after this many rounds of the steps, none of which failed.
async fn until_rounds(seen: &mut UnboundedReceiver<String>, rounds: usize) {
    let mut ends = 0;
    while ends < rounds {
        let line = seen.recv().await.unwrap();
        assert!(!line.contains("FAILED"), "{line}");
        ends += usize::from(line.contains(" s  preemption "));
    }
}

/// Agents withdraw devices of GPUs that pods hold for long, so the nodes of later rounds offer less than those of the
/// first.
#[tokio::test(flavor = "multi_thread")]
async fn steps_succeed_beside_pods_that_run_for_long() {
    const ROUNDS: usize = 5;
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    let options = DemoOptions {
        nodes: 1,
        pods_per_second: Some(0.0),
        speed: 10.0,
        kubeconfig_out: Some(kubeconfig.clone()),
        duration: None,
        ..options()
    };
    let (said, seen) = tokio::sync::mpsc::unbounded_channel();
    let until_rounds = async {
        let mut seen: UnboundedReceiver<String> = seen;
        let introduction = seen.recv().await.unwrap();
        assert!(introduction.contains("Press Ctrl-C"), "{introduction}");
        let limits = json!({ "tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "16" });
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "long" },
            "spec": { "containers": [{ "name": "main", "image": "i", "resources": { "limits": limits } }] },
        });
        std::fs::write(directory.path().join("pod.json"), pod.to_string()).unwrap();
        let file = directory.path().join("pod.json").display().to_string();
        kubectl(directory.path(), &format!("apply -f {file}")).await.unwrap();
        until_rounds(&mut seen, ROUNDS).await;
        let offered = "get node node-00 -o jsonpath={.status.allocatable.aliyun\\.com/gpu}";
        let offered: usize = kubectl(directory.path(), offered).await.unwrap().parse().unwrap();
        assert!(offered < 8, "the GPU of the long pod is withdrawn: {offered}");
    };
    let say = move |text: &str| said.send(text.to_owned()).unwrap_or_default();
    run(options, say, until_rounds).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_reported_and_replaced_and_the_kubeconfig_stays() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    let options = DemoOptions {
        nodes: 2,
        pods_per_second: Some(0.0),
        steps: false,
        listen: taken.local_addr().unwrap(),
        kubeconfig_out: Some(kubeconfig.clone()),
        duration: None,
        ..options()
    };
    let said = Mutex::new(String::new());
    let up = tokio::sync::Notify::new();
    let say = |text: &str| {
        said.lock().unwrap().push_str(text);
        up.notify_one();
    };
    // The demo is interrupted with its first message and still stops in order.
    let report = run(options, say, up.notified()).await.unwrap();
    let said = said.into_inner().unwrap();
    assert!(said.contains(&format!("{} is in use", taken.local_addr().unwrap())), "{said}");
    assert!(said.contains("export KUBECONFIG=") && said.ends_with("Stopping."), "{said}");
    assert_eq!((report.nodes, report.gpus, report.pods.created), (2, 16, 0));
    assert!(std::fs::read_to_string(kubeconfig).unwrap().contains("\"server\": \"http://127.0.0.1:"));
}

#[tokio::test]
async fn an_interruption_during_the_start_ends_the_demo_at_once() {
    let error = run(options(), |_| {}, std::future::ready(())).await.unwrap_err();
    assert_eq!(error.to_string(), "interrupted before the cluster was up");
}

#[tokio::test]
async fn too_few_nodes_are_rejected_with_a_remedy() {
    let error = run(DemoOptions { nodes: 0, ..options() }, |_| {}, std::future::pending()).await.unwrap_err();
    assert!(error.to_string().contains("--nodes 1 or more"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_start_reports_its_cause() {
    let refused = |options| async move {
        let silent = |text: &str| panic!("unexpected output: {text}");
        let error = run(options, silent, std::future::pending()).await.unwrap_err();
        std::error::Error::source(&error)
            .map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
    };
    let kubeconfig_out = Some("/does/not/exist/kubeconfig".into());
    let unwritable = refused(DemoOptions { nodes: 2, kubeconfig_out, ..options() }).await;
    assert_eq!(unwritable, "cannot write /does/not/exist/kubeconfig: No such file or directory (os error 2)");
    let nothing = refused(DemoOptions { machine_models: Vec::new(), ..options() }).await;
    assert_eq!(nothing, "no machine model is given to build nodes from");
    let nowhere = refused(DemoOptions { listen: "192.0.2.1:80".parse().unwrap(), ..options() }).await;
    assert!(nowhere.starts_with("cannot listen on 192.0.2.1:80: "), "{nowhere}");
}

#[tokio::test]
async fn an_agent_does_not_patch_another_pod_of_the_same_name() {
    let api = ApiServer::start().await.unwrap();
    let pod =
        json!({ "metadata": { "name": "p" }, "spec": { "containers": [{ "name": "c", "image": "i" }] } });
    let made = api.create("/api/v1/namespaces/default/pods", pod).unwrap();
    let client = NodeClient::new(tessera_cluster::connect_to(&api.url()).unwrap(), "n".to_owned());
    let annotations = [("a".to_owned(), "b".to_owned())].into();
    let refused = client.patch_pod("default", "p", "another-uid", &annotations).await;
    assert!(matches!(refused, Err(WriteFailure::Gone(_))), "{refused:?}");
    client.patch_pod("default", "p", made["metadata"]["uid"].as_str().unwrap(), &annotations).await.unwrap();
    let gone = client.patch_pod("default", "q", "u", &annotations).await;
    assert!(matches!(gone, Err(WriteFailure::Gone(_))), "{gone:?}");
}

/// Returns the address in the URL after `label` in a text.
fn address_after(text: &str, label: &str) -> SocketAddr {
    let (_, rest) = text.split_once(label).unwrap();
    let (_, rest) = rest.split_once("http://").unwrap();
    let end = rest.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ':')).unwrap_or(rest.len());
    rest[..end].trim_end_matches('.').parse().unwrap()
}

/// Sends a request and returns the JSON of the answer.
async fn asked(address: SocketAddr, method: &str, path: &str, body: String) -> Value {
    let mut client = HttpClient::new(&format!("http://{address}")).unwrap();
    let headers = [("content-type", "application/json")];
    let (status, answer) = client.send(method, path, &headers, body).await.unwrap();
    assert!(status < 300, "{method} {path}: {status} {answer}");
    serde_json::from_str(&answer).unwrap()
}

/// The agent of a full node withdraws the devices of all dialects but the holder's, so that nothing of them is
/// allocatable. The node offers them all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_node_stays_in_the_views_of_the_scheduler() {
    let home = tempfile::tempdir().unwrap();
    let kubeconfig = home.path().join("kubeconfig");
    let options = DemoOptions {
        nodes: 3,
        pods_per_second: Some(0.0),
        steps: false,
        speed: 1.0,
        kubeconfig_out: Some(kubeconfig.clone()),
        duration: None,
        ..options()
    };
    let said = Arc::<Mutex<String>>::default();
    let heard = Arc::clone(&said);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
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
    let pod = |resource: &str, amount: &str| {
        json!({
            "metadata": { "name": "full", "namespace": "default" },
            "spec": { "nodeSelector": { "kubernetes.io/hostname": "node-00" }, "restartPolicy": "Never",
                      "containers": [{ "name": "main", "image": "simulated", "resources": { "limits": { resource: amount } } }] },
        })
        .to_string()
    };
    asked(api, "POST", "/api/v1/namespaces/default/pods", pod("aliyun.com/gpu", "8")).await;
    poll_foreign("the agent to withdraw the devices", async || {
        let node = asked(api, "GET", "/api/v1/nodes/node-00", String::new()).await;
        (node["status"]["allocatable"]["aliyun.com/gpu-mem"] == "0").then_some(())
    })
    .await;
    // The scheduler sees the node's status a moment after the API server has it.
    let reason = poll_foreign("the scheduler to see the status", async || {
        let answer = asked(scheduler, "POST", "/what-if", pod("aliyun.com/gpu-mem", "8")).await;
        let nodes = answer["nodes"].as_array().unwrap();
        let reason = nodes.iter().find(|node| node["node"] == "node-00").unwrap()["reason"].clone();
        (reason != Value::Null).then_some(reason)
    })
    .await;
    assert_eq!(reason, "no GPU with 8192 MiB left");
    let shares = asked(scheduler, "GET", "/gpushare-scheduler/inspect", String::new()).await;
    let used: Vec<(&str, u64)> = shares["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| (node["name"].as_str().unwrap(), node["usedGPU"].as_u64().unwrap()))
        .collect();
    assert_eq!(used.len(), 3, "{shares}");
    assert!(used.iter().any(|(name, used)| *name == "node-00" && *used > 600), "{used:?}");
    let listed = asked(scheduler, "GET", "/api/v1/nodes?dialect=gpushare", String::new()).await;
    assert_eq!(listed["total"], 3, "{listed}");
    let _ = stop.send(());
    assert!(demo.await.unwrap().unwrap().is_good());
}

/// Runs kubectl and returns its output or its error.
async fn kubectl(home: &Path, arguments: &str) -> Result<String, String> {
    let output = tokio::process::Command::new("kubectl")
        .args(arguments.split_whitespace())
        .env("KUBECONFIG", home.join("kubeconfig"))
        .env("HOME", home)
        .output()
        .await
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_kubectl_works_with_the_embedded_api_server() {
    let found = std::process::Command::new("kubectl").arg("--help").output();
    assert!(found.is_ok(), "this test needs kubectl; install it (on Debian, the package kubernetes-client)");
    let api = ApiServer::start().await.unwrap();
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    std::fs::write(home.join("kubeconfig"), api.kubeconfig()).unwrap();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "mine", "labels": { "app": "mine" } },
        "spec": { "containers": [{ "name": "main", "image": "i", "resources": { "limits": { "nvidia.com/gpu": "1" } } }] },
    });
    std::fs::write(home.join("pod.json"), pod.to_string()).unwrap();
    let file = home.join("pod.json").display().to_string();
    let class = json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": { "name": "listed" }, "value": 9,
    });
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "listed" } });
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": [class, map] });
    std::fs::write(home.join("list.json"), list.to_string()).unwrap();
    let list = home.join("list.json").display().to_string();
    let steps = [
        ("version", "Server Version: v1.33.0+tessera"),
        ("api-resources", "scheduling.k8s.io/v1     false        PriorityClass"),
        ("create namespace team", "namespace/team created"),
        ("create configmap settings --from-literal=a=b", "configmap/settings created"),
        ("create priorityclass urgent --value=7", "priorityclass.scheduling.k8s.io/urgent created"),
        (&format!("apply -f {file}"), "pod/mine created"),
        (&format!("apply -f {file}"), "pod/mine unchanged"),
        (&format!("apply --server-side --force-conflicts -f {file}"), "pod/mine serverside-applied"),
        (
            &format!("apply -f {list}"),
            "priorityclass.scheduling.k8s.io/listed created\nconfigmap/listed created",
        ),
        (&format!("apply -f {list}"), "configmap/listed unchanged"),
        (&format!("delete -f {list}"), "configmap \"listed\" deleted"),
        ("get pods -o wide", "mine   0/1     Pending   0"),
        ("get pods -A -l app=mine --field-selector=status.phase=Pending -o name", "pod/mine"),
        ("label pod mine tier=gold", "pod/mine labeled"),
        ("annotate pod mine note=hello", "pod/mine annotated"),
        (
            "patch cm settings --type=json -p [{\"op\":\"replace\",\"path\":\"/data/a\",\"value\":\"c\"}]",
            "patched",
        ),
        ("get cm settings -o jsonpath={.data.a}", "c"),
        ("describe pod mine", "nvidia.com/gpu:  1"),
        ("delete pod mine", "pod \"mine\" deleted"),
        ("delete namespace team", "namespace \"team\" deleted"),
    ];
    for (arguments, expected) in steps {
        let said = kubectl(home, arguments).await;
        assert!(said.as_ref().is_ok_and(|said| said.contains(expected)), "kubectl {arguments}: {said:?}");
    }
    let refused = kubectl(home, "get pod mine").await.unwrap_err();
    assert_eq!(refused, "Error from server (NotFound): pods \"mine\" not found\n");
}
