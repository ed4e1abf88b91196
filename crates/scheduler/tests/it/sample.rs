//! Pods whose sample of nodes has no suitable GPU while another node has one.

use tessera_scheduler::verb::verdict_cache::VerdictCache;

use crate::fixtures::*;

/// Nodes that kube-scheduler offers at least if it does not offer all of them.
const SAMPLE: usize = 100;

#[test]
fn a_pod_is_sent_back_for_another_sample_a_few_times() {
    let names: Vec<String> = (0..SAMPLE).map(|number| format!("full-{number}")).collect();
    let mut nodes: Vec<_> = names.iter().map(|name| node(name, 1, "GiB")).collect();
    nodes.push(node("idle", 1, "GiB"));
    let mut state = state(&nodes);
    for name in &names {
        bind(&mut state, &share(&format!("on-{name}"), 60), name);
    }
    let offered: Vec<&str> = names.iter().map(String::as_str).collect();
    let (memory, pod) = (VerdictCache::default(), share("p", 50));
    let error = format!(
        "none of the {SAMPLE} nodes that kube-scheduler offered has suitable GPUs, but another node has; \
         kube-scheduler will try other nodes"
    );
    for _ in 0..3 {
        let answer = filter_with(&state, &pod, &offered, &memory);
        assert_eq!(answer.error, error);
        assert_eq!(answer.failed_nodes.len(), SAMPLE);
    }
    assert_eq!(filter_with(&state, &pod, &offered, &memory).error, "", "other nodes may be forbidden");
    assert_eq!(filter(&state, &pod, &["idle"]).node_names.unwrap(), ["idle"]);
    assert_eq!(filter(&state, &pod, &offered[1..]).error, "", "kube-scheduler has checked all nodes");
    bind(&mut state, &share("last", 60), "idle");
    assert_eq!(filter(&state, &pod, &offered).error, "", "no other node fits");
}

#[test]
fn a_node_without_cpu_is_no_reason_for_another_sample() {
    let names: Vec<String> = (0..SAMPLE).map(|number| format!("small-{number}")).collect();
    let mut nodes: Vec<_> = names.iter().map(|name| node(name, 1, "GiB")).collect();
    let mut busy = node("busy", 2, "GiB");
    busy["status"]["allocatable"]["cpu"] = "1".into();
    nodes.push(busy);
    let state = state(&nodes);
    let offered: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut pod = whole("p", 2);
    assert_ne!(filter(&state, &pod, &offered).error, "");
    pod["spec"]["containers"][0]["resources"]["requests"] = serde_json::json!({ "cpu": "2" });
    assert_eq!(filter(&state, &pod, &offered).error, "");
}
