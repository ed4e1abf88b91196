//! Filter and prioritize: which nodes can take a pod, and which of them are the best.

use serde_json::{Value, json};
use tessera_scheduler::dashboard::view::{ListQuery, nodes};
use tessera_scheduler::state::{DefaultPolicy, SchedulerSettings, State, StateEvent, WatchEvent};
use tessera_scheduler::verb::verdict_cache::VerdictCache;
use tessera_wire::tessera::explanation::{Explainer, PodExplanation};
use tessera_wire::tessera::static_table;

use crate::fixtures::*;

#[test]
fn every_rejected_node_has_a_reason_and_unresolvable_ones_are_marked() {
    let mut small = node("small", 1, "GiB");
    offer(&mut small, "nvidia.com/gpu", 0, 0);
    let mut broken = node("broken", 1, "GiB");
    broken["metadata"]["annotations"]["tessera.dev/inventory"] = "{".into();
    let state = state(&[node("big", 4, "GiB"), small, broken, json!({"metadata": {"name": "cpu"}})]);
    let answer = filter(&state, &whole("p", 2), &["big", "small", "broken", "cpu", "nobody"]);
    assert_eq!(answer.node_names.unwrap(), ["big"]);
    assert_eq!(answer.failed_nodes.keys().collect::<Vec<_>>(), ["nobody"]);
    let hopeless = &answer.failed_and_unresolvable_nodes;
    assert_eq!(hopeless["small"], "node does not offer this kind of GPU resource");
    assert!(hopeless["broken"].starts_with("node cannot be read: tessera.dev/inventory"));
    assert_eq!(hopeless["cpu"], "no GPU");
    let mut bad = whole("p", 1);
    bad["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-core"] = "150".into();
    let refused = filter(&state, &bad, &["big"]).failed_and_unresolvable_nodes;
    assert!(
        refused["big"].starts_with("container main: tencent.com/vcuda-core: 150 is more than one GPU"),
        "{refused:?}"
    );
}

#[test]
fn memory_requests_are_counted_in_the_unit_of_the_node() {
    let state = state(&[node("gib", 1, "GiB"), node("mib", 1, "MiB")]);
    let answer = filter(&state, &pod("p", &[("aliyun.com/gpu-mem", "100")]), &["gib", "mib"]);
    assert_eq!(answer.node_names.unwrap(), ["mib"]);
    assert_eq!(answer.failed_and_unresolvable_nodes["gib"], "no GPU has 102400 MiB");
}

#[test]
fn prioritize_follows_the_policy_of_the_pod() {
    let mut state = state(&[node("empty", 2, "GiB"), node("begun", 2, "GiB")]);
    bind(&mut state, &share("first", 50), "begun");
    let by_policy = |state: &State, policy: &str| {
        let mut pod = share("second", 50);
        pod["metadata"]["annotations"] = json!({"tessera.dev/policy": policy});
        grades(state, &pod, &["empty", "begun", "nobody"], &VerdictCache::default())
    };
    assert_eq!(by_policy(&state, "binpack"), [9, 10, 0]);
    assert_eq!(by_policy(&state, "spread"), [10, 9, 0]);
    assert_eq!(by_policy(&state, "nonsense"), [0, 0, 0]);
    let mut odd = share("odd", 50);
    odd["metadata"]["annotations"] = json!({"tessera.dev/policy": "nonsense"});
    let refused = filter(&state, &odd, &["empty"]).failed_and_unresolvable_nodes;
    assert!(refused["empty"].starts_with("tessera.dev/policy: unknown policy \"nonsense\""), "{refused:?}");
}

#[test]
fn only_the_best_nodes_pass_filter_unless_the_pod_has_preferences() {
    let mut state = State::new(SchedulerSettings::default());
    for name in ["empty", "begun", "other"] {
        set_node(&mut state, &node(name, 2, "GiB"));
    }
    bind(&mut state, &share("first", 50), "begun");
    let names = ["empty", "begun", "other", "nobody"];
    let mut pod = share("second", 50);
    let answer = filter(&state, &pod, &names);
    assert_eq!(answer.node_names.unwrap(), ["begun"]);
    assert_eq!(answer.failed_nodes.len(), 1, "those outranked have not failed");
    assert_eq!(filter(&state, &pod, &["empty", "other"]).node_names.unwrap(), ["empty", "other"]);
    pod["spec"]["topologySpreadConstraints"] = json!([{"whenUnsatisfiable": "ScheduleAnyway"}]);
    assert_eq!(filter(&state, &pod, &names).node_names.unwrap(), ["empty", "begun", "other"]);
    assert_eq!(grades(&state, &pod, &names, &VerdictCache::default()), [9, 10, 9, 0]);
}

#[test]
fn prefer_no_schedule_taints_are_left_to_kube_scheduler() {
    let mut state = State::new(SchedulerSettings::default());
    let mut best = node("best", 2, "GiB");
    best["spec"]["taints"] = json!([{"key": "spot", "effect": "PreferNoSchedule"}]);
    set_node(&mut state, &best);
    for name in ["empty", "other"] {
        set_node(&mut state, &node(name, 2, "GiB"));
    }
    bind(&mut state, &share("first", 50), "best");
    let names = ["empty", "best", "other"];
    let mut pod = share("second", 50);
    assert_eq!(filter(&state, &pod, &names).node_names.unwrap(), names, "the best one is shunned");
    assert_eq!(
        grades(&state, &pod, &names, &VerdictCache::default()),
        [0, 1, 0],
        "and still graded as the best"
    );
    pod["spec"]["tolerations"] = json!([{"key": "spot", "operator": "Exists"}]);
    assert_eq!(filter(&state, &pod, &names).node_names.unwrap(), ["best"], "it does not mind");
    pod["spec"]["tolerations"] = Value::Null;
    assert_eq!(filter(&state, &pod, &["best"]).node_names.unwrap(), ["best"], "there is no other");
    for name in ["empty", "other"] {
        let mut tainted = node(name, 2, "GiB");
        tainted["spec"]["taints"] = best["spec"]["taints"].clone();
        set_node(&mut state, &tainted);
    }
    assert_eq!(filter(&state, &pod, &names).node_names.unwrap(), ["best"], "they all are");
    set_node(&mut state, &node("other", 2, "GiB"));
    assert_eq!(filter(&state, &pod, &names).node_names.unwrap(), names);
    state
        .handle(StateEvent::Node(WatchEvent::Gone(serde_json::from_value(node("other", 2, "GiB")).unwrap())));
    assert_eq!(filter(&state, &pod, &["empty", "best"]).node_names.unwrap(), ["best"]);
}

#[test]
fn a_node_that_changes_only_its_dialects_is_checked_again() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let memory = VerdictCache::default();
    let pod = pod("p", &[("aliyun.com/gpu-mem", "8")]);
    assert_eq!(filter_with(&state, &pod, &["n"], &memory).node_names.unwrap(), ["n"]);
    let mut other = node("n", 1, "GiB");
    offer(&mut other, "aliyun.com/gpu-mem", 0, 0);
    set_node(&mut state, &other);
    let refused = filter_with(&state, &pod, &["n"], &memory).failed_and_unresolvable_nodes;
    assert_eq!(refused["n"], "node does not offer this kind of GPU resource");
}

/// The agent withdraws the devices of all other dialects while pods hold the GPUs. kube-scheduler says "Insufficient",
/// and so does every view, until the devices are back.
#[test]
fn a_full_node_is_full_and_does_not_lack_the_resource() {
    let mut full = node("n", 2, "GiB");
    offer(&mut full, "aliyun.com/gpu-mem", 32, 0);
    let mut state = state(&[full.clone()]);
    let memory = VerdictCache::default();
    let pod = pod("p", &[("aliyun.com/gpu-mem", "8")]);
    let refused = |state: &State| {
        let answer = filter_with(state, &pod, &["n"], &memory);
        let all = answer.failed_nodes.into_iter().chain(answer.failed_and_unresolvable_nodes);
        all.map(|(_, reason)| reason).collect::<Vec<String>>()
    };
    // The kubelet would reject the pod although the GPUs are free.
    assert_eq!(refused(&state), ["node offers none of this GPU resource at the moment"]);
    let holder = set_holder(&mut state);
    assert_eq!(refused(&state), ["no GPU with 8192 MiB left"]);
    let explained = serde_json::to_value(explained(&state, &pod)).unwrap();
    assert_eq!(explained["nodes"][0]["reason"], "no GPU with 8192 MiB left", "{explained}");
    assert_eq!(explained["relief"][0]["pods"], json!(["team/holder"]));
    let view = state.inspect_share(None);
    assert_eq!((view.nodes.len(), view.nodes[0].total, view.nodes[0].used), (1, 32, 32));
    let shown = ListQuery { dialect: "gpushare".into(), ..ListQuery::default() };
    assert_eq!(nodes::nodes(&state, &shown).total, 1);
    state.handle(StateEvent::Pod(WatchEvent::Gone(parse(&holder))));
    offer(&mut full, "aliyun.com/gpu-mem", 32, 32);
    set_node(&mut state, &full);
    assert_eq!(refused(&state), [""; 0]);
}

/// Binds a pod that holds both GPUs of the node whole.
fn set_holder(state: &mut State) -> Value {
    let pod = whole("holder", 2);
    bind(state, &pod, "n")
}

fn explained(state: &State, pod: &Value) -> PodExplanation {
    let pod = parse(pod);
    let mut explainer = Explainer::new(state, &pod, true).unwrap();
    explainer.judge(state, &"n".into());
    explainer.find_relief(state, &"n".into());
    explainer.finish()
}

#[test]
fn a_node_takes_no_pods_while_its_agent_is_replaced() {
    let with_agent = |certificate: &str, unavailable: &str| {
        let mut node = node("n", 1, "GiB");
        let annotations = &mut node["metadata"]["annotations"];
        annotations["tessera.dev/agent"] = "https://10.0.0.5:5678".into();
        annotations["tessera.dev/agent-certificate"] = certificate.into();
        annotations["tessera.dev/agent-unavailable"] = unavailable.into();
        node
    };
    let mut state = state(&[with_agent("sha256:old", "")]);
    let cache = VerdictCache::default();
    let pod = pod("p", &[("aliyun.com/gpu-mem", "8")]);
    set_pod(&mut state, &pod);
    assert_eq!(filter_with(&state, &pod, &["n"], &cache).node_names.unwrap(), ["n"]);
    let reason = "the agent of the node is being replaced, or was stopped";
    for certificate in ["sha256:old", "sha256:new"] {
        set_node(&mut state, &with_agent(certificate, certificate));
        let refused = filter_with(&state, &pod, &["n"], &cache).failed_and_unresolvable_nodes;
        assert_eq!(refused["n"], reason);
        let refused = state.begin_bind(&bind_args(&pod, "n"), at(0)).unwrap_err().to_string();
        assert_eq!(refused, format!("node n: {reason}"));
    }
    // An agent of an earlier release does not clear the announcement of the agent before it.
    set_node(&mut state, &with_agent("sha256:earlier-release", "sha256:new"));
    assert_eq!(filter_with(&state, &pod, &["n"], &cache).node_names.unwrap(), ["n"]);
    state.begin_bind(&bind_args(&pod, "n"), at(1)).unwrap();
}

#[test]
fn pods_created_during_a_forecast_make_the_next_forecast_due() {
    let mut state = state(&[node("n", 2, "GiB")]);
    let first = due_forecast(&mut state).unwrap();
    assert!(due_forecast(&mut state).is_none(), "it is being made already");
    for number in 0..20 {
        set_pod(&mut state, &share(&format!("meanwhile-{number}"), 30));
    }
    state.adopt_forecast(first);
    assert!(due_forecast(&mut state).is_some());
}

/// A scheduler that was restarted expects the pods that the cluster holds, those on nodes and those that wait.
#[test]
fn a_restarted_scheduler_expects_the_same_pods() {
    let nodes = [node("n", 4, "GiB")];
    let mut before = state(&nodes);
    let waiting = share("waits", 70);
    let mut placed = Vec::new();
    for number in 0..6 {
        placed.push(bind(&mut before, &share(&format!("placed-{number}"), 30), "n"));
    }
    set_pod(&mut before, &waiting);
    let expected = |state: &mut State| {
        let capacity = state.free_capacity_if_due().unwrap();
        state.begin_forecast(&capacity)
    };
    let mut empty = state(&nodes);
    let learned = expected(&mut before);
    assert_ne!(learned, expected(&mut empty));
    for seen in [&placed[..], std::slice::from_ref(&waiting)] {
        let mut partly = state(&nodes);
        seen.iter().for_each(|pod| set_pod(&mut partly, pod));
        assert_ne!(learned, expected(&mut partly), "pods on nodes and pods that wait both count");
    }
    let mut after = state(&nodes);
    placed.iter().chain([&waiting]).for_each(|pod| set_pod(&mut after, pod));
    assert_eq!(learned, expected(&mut after));
}

/// The answer names the reason for each node, so a long annotation must not be repeated with it.
#[test]
fn a_long_annotation_does_not_make_a_long_answer() {
    let state = state(&[node("a", 1, "GiB"), node("b", 1, "GiB")]);
    let mut odd = whole("odd", 1);
    odd["metadata"]["annotations"] = json!({ "tessera.dev/policy": "x".repeat(100_000) });
    let answer = filter(&state, &odd, &["a", "b"]);
    for node in ["a", "b"] {
        let reason = &answer.failed_and_unresolvable_nodes[node];
        assert!(reason.starts_with("tessera.dev/policy: ") && reason.len() < 1_000, "{reason}");
    }
}

/// The agent would refuse the pod on its node, where it fails for good. Here it waits, and its event names the fix.
#[test]
fn a_ceiling_that_is_no_number_is_refused_on_every_node() {
    let mut state = state(&[node("a", 1, "GiB")]);
    let mut pod = share("p", 30);
    pod["metadata"]["annotations"] = json!({ "tencent.com/vcuda-core-limit": "abc" });
    let reason = "tencent.com/vcuda-core-limit: found \"abc\"; write a percentage of one GPU, such as 80";
    let answer = filter(&state, &pod, &["a"]);
    assert_eq!(answer.failed_and_unresolvable_nodes["a"], reason);
    set_pod(&mut state, &pod);
    assert_eq!(state.begin_bind(&bind_args(&pod, "a"), at(0)).unwrap_err().to_string(), reason);
    pod["metadata"]["annotations"] = json!({ "tencent.com/vcuda-core-limit": "80" });
    assert_eq!(filter(&state, &pod, &["a"]).node_names.unwrap(), ["a"]);
}

/// The agent of such a node refuses every share, so the pod would fail for good.
#[test]
fn pods_with_shares_wait_for_a_node_that_serves_them() {
    let mut whole_only = node("whole-only", 2, "GiB");
    let inventory = &mut whole_only["metadata"]["annotations"]["tessera.dev/inventory"];
    *inventory = inventory.as_str().unwrap().replacen('{', r#"{"wholeGpusOnly":true,"#, 1).into();
    let mut state = state(&[whole_only, node("both", 2, "GiB")]);
    let nodes = ["whole-only", "both"];
    let memory = pod("memory", &[("aliyun.com/gpu-mem", "2")]);
    for pod in [share("share", 30), memory, parts("parts", 2, 10)] {
        let answer = filter(&state, &pod, &nodes);
        assert_eq!(answer.node_names.unwrap(), ["both"]);
        assert_eq!(answer.failed_and_unresolvable_nodes["whole-only"], "node serves whole GPUs only");
    }
    assert_eq!(filter(&state, &whole("whole", 1), &nodes[..1]).node_names.unwrap(), ["whole-only"]);
    let late = share("late", 30);
    set_pod(&mut state, &late);
    let refused = state.begin_bind(&bind_args(&late, "whole-only"), at(0)).unwrap_err().to_string();
    assert!(refused.contains("node serves whole GPUs only"), "{refused}");
}

/// HAMi's annotations count for pods of every dialect, and none is ignored.
#[test]
fn annotations_that_cannot_be_followed_reject_pods_of_every_dialect() {
    let state = state(&[node("n", 2, "GiB")]);
    let memory = pod("p", &[("aliyun.com/gpu-mem", "2")]);
    let aliyun = pod("p", &[("aliyun.com/gpu", "1")]);
    let dialects = [share("p", 10), whole("p", 1), parts("p", 2, 10), memory, aliyun];
    for (key, value, expected) in [
        ("nvidia.com/use-gputype", "", "nvidia.com/use-gputype: found \"\""),
        ("nvidia.com/numa-bind", "1", "write true or false"),
        ("hami.io/node-scheduler-policy", "mutex", "write binpack or spread"),
        ("hami.io/gpu-scheduler-policy", "numa,", "found \"\"; write binpack"),
        ("hami.io/device-scoring-weights", "slot=1,core=1", "write slot=1,core=1,memory=3"),
        ("nvidia.com/vgpu-mode", "mps", "write hami-core"),
        ("nvidia.com/use-gpuindexes", "0", "write their UUIDs in tessera.dev/use-gpu-uuids"),
        ("tessera.dev/gpu-memory-limit", "all", "tessera.dev/gpu-memory-limit: found \"all\""),
        ("nvidia.com/use-gputype", "A100", "that the annotations allow"),
        ("nvidia.com/nouse-gpuuuid", "GPU-n-0,GPU-n-1", "that the annotations allow"),
    ] {
        for pod in &dialects {
            let answer = filter(&state, &annotated(pod.clone(), &[(key, value)]), &["n"]);
            let said = serde_json::to_string(&answer).unwrap().replace("\\\"", "\"");
            assert!(answer.node_names.unwrap_or_default().is_empty(), "{key}: {value}");
            assert!(said.contains(expected), "{key}: {value}: {said}");
        }
    }
}

#[test]
fn a_pod_that_waits_learns_of_all_its_bad_annotations() {
    let state = state(&[node("n", 2, "GiB")]);
    let bad = [("tessera.dev/policy", "dynamic"), ("tessera.dev/traffic", "much")];
    let answer = filter(&state, &annotated(whole("p", 1), &bad), &["n"]);
    let said = &answer.failed_and_unresolvable_nodes["n"];
    assert!(bad.iter().all(|(key, _)| said.contains(&format!("{key}: "))), "{said}");
}

/// A GPU that was cordoned after filter gets no pod by bind. A pod that is bound already keeps its GPU.
#[test]
fn a_cordon_between_filter_and_bind_counts() {
    let mut cluster = state(&[node("n", 2, "GiB")]);
    let running = bind(
        &mut cluster,
        &annotated(parts("running", 1, 10), &[("nvidia.com/use-gpuuuid", "GPU-n-0")]),
        "n",
    );
    let late = parts("late", 2, 10);
    set_pod(&mut cluster, &late);
    assert_eq!(filter(&cluster, &late, &["n"]).node_names.unwrap(), ["n"]);
    let mut cordoned = node("n", 2, "GiB");
    cordoned["metadata"]["annotations"]["hami.io/device-cordon"] = "GPU-n-0".into();
    set_node(&mut cluster, &cordoned);
    let refused = cluster.begin_bind(&bind_args(&late, "n"), at(0)).unwrap_err().to_string();
    assert!(refused.contains("fewer than 2 GPUs with 10% and 10% of the memory left"), "{refused}");
    let uid = tessera_core::units::PodUid::from(running["metadata"]["uid"].as_str().unwrap());
    assert_eq!(cluster.ledger().grant(&uid).unwrap().gpus().to_string(), "0");
    set_node(&mut cluster, &node("n", 2, "GiB"));
    assert!(cluster.begin_bind(&bind_args(&late, "n"), at(0)).is_ok());
}

/// A GPU has ten devices of nvidia.com/gpu, so the eleventh pod with a part of it gets another GPU or waits.
#[test]
fn a_gpu_gets_no_more_pods_than_it_has_slots() {
    let mut cluster = state(&[node("n", 2, "GiB")]);
    let mut counts = [0; 2];
    for number in 0..20 {
        let pod = parts(&format!("small-{number}"), 1, 2);
        set_pod(&mut cluster, &pod);
        assert_eq!(filter(&cluster, &pod, &["n"]).node_names.unwrap(), ["n"], "pod {number}");
        bind(&mut cluster, &pod, "n");
        let uid = tessera_core::units::PodUid(format!("uid-small-{number}"));
        let gpu = cluster.ledger().grant(&uid).unwrap().gpus().lowest().unwrap();
        counts[usize::from(gpu.0)] += 1;
    }
    assert_eq!(counts, [10, 10]);
    let late = parts("late", 1, 2);
    set_pod(&mut cluster, &late);
    let reason = "no GPU with a free slot of nvidia.com/gpu";
    assert_eq!(filter(&cluster, &late, &["n"]).failed_nodes["n"], reason);
    let refused = cluster.begin_bind(&bind_args(&late, "n"), at(0)).unwrap_err().to_string();
    assert!(refused.contains(reason), "{refused}");
    // Other dialects have devices of their own.
    assert_eq!(filter(&cluster, &share("other", 2), &["n"]).node_names.unwrap(), ["n"]);
}

/// With `--static-strict` a pod gets only sets of the table and parts of them, also after the table has changed.
#[test]
fn a_strict_table_refuses_sets_that_it_does_not_list() {
    for static_strict in [true, false] {
        let settings = SchedulerSettings {
            policy: DefaultPolicy("static".parse().unwrap()),
            static_strict,
            ..SchedulerSettings::default()
        };
        let mut state = State::new(settings);
        let mut typed = node("n", 4, "GiB");
        typed["metadata"]["annotations"]["NODE_TYPE"] = "hgx-4".into();
        set_node(&mut state, &typed);
        bind(&mut state, &whole("one", 1), "n");
        let check = |state: &State, count: u64| {
            let answer = filter(state, &whole("more", count), &["n"]);
            let refused = static_strict.then(|| format!("no free set of {count} GPUs in the static table"));
            assert_eq!(answer.failed_nodes.get("n"), refused.as_ref(), "{count} GPUs, {static_strict}");
            assert_eq!(answer.node_names.unwrap_or_default().len(), usize::from(!static_strict));
        };
        // The shipped table has no set of three GPUs without GPU 0.
        check(&state, 3);
        let pairs = static_table::parse(r#"{"hgx-4": {"2": [[0, 1]]}}"#).unwrap();
        state.handle(StateEvent::Table(pairs));
        check(&state, 2);
    }
}
