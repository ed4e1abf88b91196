//! `defragment` plans moves, and carries them out with reservations after a confirmation.

use std::process::Stdio;

use serde_json::{Value, json};

use crate::stage::{GPU, Stage};
use crate::states::{T4, grouped, node, pod};

/// Returns a pod with a controller, which creates it again after an eviction.
fn owned(mut pod: Value, annotations: &[(&str, &str)]) -> Value {
    let owner = json!([{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "u", "controller": true }]);
    pod["metadata"]["ownerReferences"] = owner;
    pod["metadata"]["labels"] = json!({ "app": "web" });
    for (key, value) in annotations {
        pod["metadata"]["annotations"][*key] = (*value).into();
    }
    pod
}

/// Two nodes with two GPUs and a pod with one GPU each, and a pod that waits for two GPUs.
fn fragmented(annotations: &[(&str, &str)]) -> Stage {
    let nodes = ["a", "b"].map(|name| node(name, "10.0.0.1", "GiB", &[T4, T4]));
    let waiting = pod("default", "large", "", &[("aliyun.com/gpu", 2)], json!({}));
    let pods = [
        owned(grouped("one", "a", &[0]), annotations),
        owned(grouped("two", "b", &[1]), annotations),
        waiting,
    ];
    Stage::of(&nodes, &pods)
}

fn budget(stage: &Stage, allowed: u64) {
    let budget = json!({
        "metadata": { "name": "web", "namespace": "default" },
        "spec": { "selector": { "matchLabels": { "app": "web" } } },
        "status": { "disruptionsAllowed": allowed },
    });
    let path = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    stage.server.create(path, budget.clone()).unwrap();
    stage.server.patch(&format!("{path}/web/status"), &json!({ "status": budget["status"] })).unwrap();
}

fn planned(stage: &Stage, arguments: &[&str]) -> (Option<i32>, Value) {
    let output = stage.run(GPU, &[&["defragment", "-o", "json"], arguments].concat());
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{errors}")))
}

#[test]
fn makes_room_for_the_pod_that_waits() {
    let stage = fragmented(&[]);
    let (code, plan) = planned(&stage, &[]);
    assert_eq!((code, &plan["fitting"]), (Some(0), &json!(1)), "{plan}");
    assert_eq!(plan["moves"].as_array().unwrap().len(), 1, "{plan}");
    assert_ne!(plan["moves"][0]["to"], plan["places"][0]["node"], "{plan}");
    assert_eq!(plan["places"][0]["wanted"], "default/large");
    let text = stage.text(GPU, &["defragment"]);
    assert!(text.starts_with("1 pod would be evicted and created again elsewhere."), "{text}");
    assert!(text.contains("Then 1 of 1 that are wanted have room."), "{text}");
    let (_, same) = planned(&stage, &["--shape", "1x2"]);
    assert_eq!(same["moves"].as_array().unwrap().len(), 1, "{same}");
    let (code, none) = planned(&stage, &["--shape", "2x2"]);
    assert_eq!((code, &none["moves"]), (Some(1), &json!([])), "{none}");
}

#[test]
fn keeps_budgets_marks_and_limits() {
    let unmet = |stage: &Stage, arguments: &[&str]| {
        let (code, plan) = planned(stage, arguments);
        assert_eq!((code, &plan["moves"]), (Some(1), &json!([])), "{plan}");
        plan
    };
    for (key, value) in [
        ("tessera.dev/do-not-evict", "true"),
        ("cluster-autoscaler.kubernetes.io/safe-to-evict", "false"),
        ("karpenter.sh/do-not-disrupt", "true"),
    ] {
        let plan = unmet(&fragmented(&[(key, value)]), &[]);
        assert_eq!(plan["staying"][format!("annotation {key} forbids it")], 2, "{plan}");
    }
    let stage = fragmented(&[]);
    unmet(&stage, &["--max-evictions", "0"]);
    unmet(&stage, &["--shape", "1x2", "--max-priority", "-1"]);
    budget(&stage, 0);
    unmet(&stage, &[]);
}

#[test]
fn says_what_a_shape_looks_like() {
    let stage = fragmented(&[]);
    for wrong in ["8", "0x8", "2x0", "x", "2x999"] {
        let output = stage.run(GPU, &["defragment", "--shape", wrong]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("write NODESxGPUS, such as 2x8"), "{wrong}: {said}");
    }
    let idle = Stage::of(&[node("a", "10.0.0.1", "GiB", &[T4])], &[]);
    assert!(idle.text(GPU, &["defragment"]).starts_with("No pod waits for GPUs."));
}

const RESERVATIONS: &str = "tessera.dev/reservations";

/// Returns the reservations of a node.
fn reservations(stage: &Stage, node: &str) -> Value {
    let object = stage.server.get(&format!("/api/v1/nodes/{node}")).unwrap();
    let text = object["metadata"]["annotations"][RESERVATIONS].as_str().unwrap_or("[]").to_owned();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn evicts_nothing_without_a_confirmation() {
    let stage = fragmented(&[]);
    let mut command = stage.command(GPU);
    let output = command.args(["defragment", "--apply"]).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("standard input is no terminal; add --yes to go on without"), "{said}");
    assert_eq!(output.status.code(), Some(1));
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.starts_with("1 pod would be evicted"), "the plan is shown before: {shown}");
    assert_eq!((reservations(&stage, "a"), reservations(&stage, "b")), (json!([]), json!([])));
}

/// No kubelet ends the evicted pod, so the command waits. What it has done stays in the cluster, and the same command
/// goes on.
#[test]
fn an_interrupted_run_loses_nothing() {
    let stage = fragmented(&[]);
    let (_, plan) = planned(&stage, &[]);
    let (node, victim) = (plan["places"][0]["node"].clone(), plan["moves"][0]["pod"].clone());
    let node = node.as_str().unwrap();
    let arguments = ["defragment", "--apply", "--yes", "--step-timeout", "1s", "-o", "json"];
    let output = stage.run(GPU, &arguments);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    assert_eq!((&answer["done"], &answer["evicted"]), (&json!(false), &json!([victim])), "{answer}");
    let problem = answer["problem"].as_str().unwrap();
    assert!(problem.contains("in vain for pod default/"), "{problem}");
    assert_eq!(answer["reservations"], json!([format!("{node}: defragment/default/large")]));
    // The GPU of the pod that ends becomes free, so no other pod is evicted.
    let again: Value = serde_json::from_str(&stage.text(GPU, &arguments)).unwrap();
    assert_eq!((&again["moves"], &again["places"][0]["node"]), (&json!([]), &json!(node)), "{again}");
    let kept = reservations(&stage, node);
    assert_eq!(kept.as_array().unwrap().len(), 1, "{kept}");
    assert_eq!(
        (&kept[0]["name"], &kept[0]["pod"]["name"]),
        (&json!("defragment/default/large"), &json!("large"))
    );
    let overview = stage.text(GPU, &["overview"]);
    assert!(overview.contains("2 GPUs reserved for pod default/large until "), "{overview}");
    let details = stage.text(GPU, &["-d", node]);
    assert!(details.contains("2 GPUs reserved for pod default/large until "), "{details}");
    let explained = stage.text(GPU, &["explain", "large"]);
    assert!(
        explained.contains(&format!("GPUs of node {node} are reserved for this pod until ")),
        "{explained}"
    );
    assert!(explained.contains("not all of them are free yet"), "{explained}");
    // The free GPU of the node is kept.
    let document: Value = serde_json::from_str(&stage.text(GPU, &[node, "-o", "json"])).unwrap();
    assert_eq!(document["nodes"][0]["reservations"][0]["kept"].as_array().unwrap().len(), 1, "{document}");
    let smaller = stage.text(GPU, &["what-if", "nvidia.com/gpu=1"]);
    assert!(smaller.contains("fits on 1 of 2 nodes"), "{smaller}");
    let released = stage.text(GPU, &["defragment", "--release"]);
    assert_eq!(released, format!("{node}: defragment/default/large released\n"));
    assert_eq!(reservations(&stage, node), json!([]));
}

#[test]
fn reports_reservations_that_it_cannot_read() {
    let stage = fragmented(&[]);
    let wrong = json!({ "metadata": { "annotations": { RESERVATIONS: "nonsense" } } });
    stage.server.patch("/api/v1/nodes/a", &wrong).unwrap();
    let output = stage.run(GPU, &[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.starts_with("warning: node a: annotation tessera.dev/reservations is not understood"),
        "{said}"
    );
    assert!(output.status.success());
}
