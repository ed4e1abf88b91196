//! Tests of each verb on small clusters.

use serde_json::{Value, json};
use tessera_core::units::PodUid;
use tessera_scheduler::state::{
    BindOrder, BindOutcome, BindStep, ClusterEvent, SchedulerSettings, State, UnhealthyGpus, WatchEvent,
};
use tessera_scheduler::verb::explain::{explain, what_if};
use tessera_scheduler::verb::preempt::preempt;
use tessera_scheduler::verb::verdict_cache::VerdictCache;
use tessera_wire::foreign::extender::PreemptionArgs;

use crate::fixtures::*;

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

#[test]
fn every_dialect_is_filtered_bound_and_booked_in_one_ledger() {
    let mut state = state(&[node("n", 2, "GiB")]);
    let keys =
        |pod: &Value| pod["metadata"]["annotations"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let vcuda = bind(&mut state, &share("vcuda", 30), "n");
    assert!(keys(&vcuda).contains(&"tencent.com/predicate-gpu-idx-0".to_owned()));
    let memory = bind(&mut state, &pod("memory", &[("aliyun.com/gpu-mem", "8")]), "n");
    assert_eq!(memory["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_POD"], "8");
    // Both pods share the first GPU, so the second GPU is still idle.
    let topology = bind(&mut state, &pod("topology", &[("aliyun.com/gpu", "1")]), "n");
    assert_eq!(topology["metadata"]["annotations"]["ALIYUN_COM_GPU_GROUP"], "1");
    let refused = filter(&state, &whole("nvidia", 1), &["n"]);
    assert_eq!(refused.failed_nodes["n"], "fewer than 1 idle GPU");
    let vcuda_whole = pod("vcuda-whole", &[("tencent.com/vcuda-core", "100")]);
    assert_eq!(filter(&state, &vcuda_whole, &["n"]).failed_nodes["n"], "fewer than 1 idle GPU");
    assert!(filter(&state, &share("other", 70), &["n"]).failed_nodes["n"].starts_with("no GPU with 70%"));
    assert_eq!(filter(&state, &share("small", 20), &["n"]).node_names.unwrap(), ["n"]);
}

#[test]
fn every_rejected_node_has_a_reason_and_unresolvable_ones_are_marked() {
    let mut small = node("small", 1, "GiB");
    small["status"]["allocatable"]["nvidia.com/gpu"] = "0".into();
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
fn a_bind_is_idempotent_and_no_gpu_is_granted_twice() {
    let mut state = state(&[node("n", 1, "GiB"), node("m", 1, "GiB")]);
    let (first, second) = (whole("first", 1), whole("second", 1));
    set_pod(&mut state, &first);
    set_pod(&mut state, &second);
    let step = state.begin_bind(&bind_args(&first, "n"), at(0)).unwrap();
    assert_eq!(state.begin_bind(&bind_args(&first, "n"), at(1)).unwrap(), step, "the same again");
    let busy = state.begin_bind(&bind_args(&first, "m"), at(1)).unwrap_err().to_string();
    assert_eq!(busy, "pod uid-first is being bound to node n by another call");
    let taken = state.begin_bind(&bind_args(&second, "n"), at(1)).unwrap_err().to_string();
    assert_eq!(taken, "node n: fewer than 1 idle GPU");
    // One of the two attempts is refused because the other succeeded.
    state.end_bind(&PodUid::from("uid-first"), BindOutcome::Bound, at(2));
    state.end_bind(&PodUid::from("uid-first"), BindOutcome::Refused, at(2));
    assert_eq!(state.begin_bind(&bind_args(&first, "n"), at(3)).unwrap(), BindStep::Done);
    assert!(state.begin_bind(&bind_args(&second, "n"), at(3)).is_err());
    assert_eq!(state.begin_bind(&bind_args(&whole("unseen", 1), "m"), at(3)).unwrap(), BindStep::Fetch);
}

#[test]
fn a_refused_binding_is_rolled_back_and_an_uncertain_one_keeps_its_gpu() {
    let mut state = state(&[node("n", 1, "GiB"), node("m", 1, "GiB")]);
    let (first, second) = (whole("first", 1), whole("second", 1));
    set_pod(&mut state, &first);
    set_pod(&mut state, &second);
    let uid = PodUid::from("uid-first");
    state.begin_bind(&bind_args(&first, "n"), at(0)).unwrap();
    state.end_bind(&uid, BindOutcome::Refused, at(0));
    assert_eq!(state.rolled_back(), 1);
    assert_eq!(filter(&state, &second, &["n"]).node_names.unwrap(), ["n"]);
    state.begin_bind(&bind_args(&first, "n"), at(1)).unwrap();
    state.end_bind(&uid, BindOutcome::Unknown, at(1));
    assert!(filter(&state, &second, &["n"]).node_names.unwrap().is_empty());
    // kube-scheduler may try another node meanwhile; then both GPUs stay reserved.
    state.begin_bind(&bind_args(&first, "m"), at(2)).unwrap();
    assert!(filter(&state, &second, &["n", "m"]).node_names.unwrap().is_empty());
    state.end_bind(&uid, BindOutcome::Refused, at(3));
    assert_eq!(filter(&state, &second, &["n", "m"]).node_names.unwrap(), ["m"]);
    assert!(state.uncertain_bindings(at(60)).is_empty());
    assert_eq!(filter(&state, &second, &["n", "m"]).node_names.unwrap(), ["m"]);
    for doubt in state.uncertain_bindings(at(100)) {
        state.resolve_uncertain(&doubt, Some(parse(&first)), at(100));
    }
    assert_eq!(filter(&state, &second, &["n", "m"]).node_names.unwrap(), ["n", "m"]);
}

#[test]
fn a_pod_holds_its_gpu_until_its_containers_have_ended() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let mut first = bind(&mut state, &whole("first", 1), "n");
    first["status"]["phase"] = "Running".into();
    first["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    set_pod(&mut state, &first);
    assert!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap().is_empty());
    first["status"]["phase"] = "Succeeded".into();
    set_pod(&mut state, &first);
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap(), ["n"]);
    // The deletion of the first pod, days later, does not release the GPU of the second pod.
    bind(&mut state, &whole("second", 1), "n");
    state.handle(ClusterEvent::Pod(WatchEvent::Gone(parse(&first))));
    assert!(filter(&state, &whole("third", 1), &["n"]).node_names.unwrap().is_empty());
}

#[test]
fn pods_that_bypass_the_scheduler_are_booked_on_their_node() {
    let mut state = state(&[node("n", 2, "GiB")]);
    let mut sneaked = whole("sneaked", 1);
    sneaked["spec"]["nodeName"] = "n".into();
    set_pod(&mut state, &sneaked);
    assert_eq!(filter(&state, &whole("p", 2), &["n"]).failed_nodes["n"], "fewer than 2 idle GPUs");
    // The agent publishes which GPU the pod really uses.
    sneaked["metadata"]["annotations"] =
        json!({"tessera.dev/grant": r#"{"main":[{"uuid":"GPU-n-1","index":1,"cores":100}]}"#});
    set_pod(&mut state, &sneaked);
    let used = state.ledger().node(&"n".into()).unwrap().idle().to_string();
    assert_eq!(used, "0");
}

#[test]
fn released_gpus_go_to_pods_that_bypassed_the_scheduler() {
    let uid = PodUid::from("uid-p");
    let placed = |pod: &Value, node: &str| {
        let mut pod = pod.clone();
        pod["spec"]["nodeName"] = node.into();
        pod
    };
    let check = |why: &str, leave: &dyn Fn(&mut State, &Value)| {
        let mut state = state(&[node("a", 1, "GiB"), node("b", 1, "GiB")]);
        let pod = whole("p", 1);
        set_pod(&mut state, &pod);
        state.begin_bind(&bind_args(&pod, "a"), at(0)).unwrap();
        state.end_bind(&uid, BindOutcome::Unknown, at(1));
        // The booking still holds the only GPU, so none can be set aside for the bypassing pod.
        set_pod(&mut state, &placed(&whole("bypasses", 1), "a"));
        leave(&mut state, &pod);
        assert!(filter(&state, &whole("next", 1), &["a"]).node_names.unwrap().is_empty(), "{why}");
    };
    check("placed by somebody else", &|state, pod| set_pod(state, &placed(pod, "b")));
    check("deleted", &|state, pod| state.handle(ClusterEvent::Pod(WatchEvent::Gone(parse(pod)))));
    check("bound elsewhere at the second try", &|state, pod| {
        state.begin_bind(&bind_args(pod, "b"), at(2)).unwrap();
        set_pod(state, &placed(pod, "b"));
    });
}

#[test]
fn nodes_can_be_added_changed_and_removed() {
    let mut state = state(&[node("n", 1, "GiB")]);
    bind(&mut state, &whole("first", 1), "n");
    set_node(&mut state, &node("n", 2, "GiB"));
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap(), ["n"]);
    state.handle(ClusterEvent::Node(WatchEvent::Gone(serde_json::from_value(node("n", 2, "GiB")).unwrap())));
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).failed_nodes["n"], "node is not known yet");
    set_node(&mut state, &node("n", 1, "GiB"));
    assert!(
        filter(&state, &whole("second", 1), &["n"]).node_names.unwrap().is_empty(),
        "its pod is still there"
    );
    // The list does not contain the pod, which was deleted while the watch was broken.
    state.handle(ClusterEvent::Pod(WatchEvent::Listing));
    state.handle(ClusterEvent::Pod(WatchEvent::Listed));
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap(), ["n"]);
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
    state.handle(ClusterEvent::Node(WatchEvent::Gone(
        serde_json::from_value(node("other", 2, "GiB")).unwrap(),
    )));
    assert_eq!(filter(&state, &pod, &["empty", "best"]).node_names.unwrap(), ["best"]);
}

#[test]
fn a_node_that_changes_only_its_dialects_is_checked_again() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let memory = VerdictCache::default();
    let pod = pod("p", &[("aliyun.com/gpu-mem", "8")]);
    assert_eq!(filter_with(&state, &pod, &["n"], &memory).node_names.unwrap(), ["n"]);
    let mut other = node("n", 1, "GiB");
    other["status"]["allocatable"]["aliyun.com/gpu-mem"] = "0".into();
    set_node(&mut state, &other);
    let refused = filter_with(&state, &pod, &["n"], &memory).failed_and_unresolvable_nodes;
    assert_eq!(refused["n"], "node does not offer this kind of GPU resource");
}

#[test]
fn a_late_read_does_not_restore_a_deleted_or_ended_pod() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let bound = bind(&mut state, &whole("first", 1), "n");
    state.handle(ClusterEvent::Pod(WatchEvent::Gone(parse(&bound))));
    state.apply_read(parse(&bound), state.list_generation());
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap(), ["n"]);
    let mut second = bind(&mut state, &whole("second", 1), "n");
    let running = second.clone();
    second["status"]["phase"] = "Succeeded".into();
    set_pod(&mut state, &second);
    state.apply_read(parse(&running), state.list_generation());
    assert_eq!(filter(&state, &whole("third", 1), &["n"]).node_names.unwrap(), ["n"]);
}

#[test]
fn a_read_that_is_older_than_a_list_adds_no_pod() {
    let mut bypasses = whole("p", 1);
    bypasses["spec"]["nodeName"] = "n".into();
    for steps in ["ask list answer", "list ask answer", "ask begin answer end", "begin ask answer end"] {
        let mut state = state(&[node("n", 1, "GiB")]);
        let mut asked = state.list_generation();
        for step in steps.split(' ') {
            match step {
                "ask" => asked = state.list_generation(),
                "answer" => state.apply_read(parse(&bypasses), asked),
                "begin" => state.handle(ClusterEvent::Pod(WatchEvent::Listing)),
                "end" => state.handle(ClusterEvent::Pod(WatchEvent::Listed)),
                _ => [WatchEvent::Listing, WatchEvent::Listed]
                    .into_iter()
                    .for_each(|list| state.handle(ClusterEvent::Pod(list))),
            }
        }
        let is_held = filter(&state, &whole("next", 1), &["n"]).node_names.unwrap().is_empty();
        assert_eq!(is_held, steps == "list ask answer", "{steps}: no list was later than the answer");
    }
}

#[test]
fn a_pod_with_gpus_is_never_bound_without_a_booking() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let pod = whole("p", 1);
    state.apply_read(parse(&pod), state.list_generation());
    state.handle(ClusterEvent::Pod(WatchEvent::Listing));
    state.handle(ClusterEvent::Pod(WatchEvent::Listed));
    // The list was older than the pod. A read of the pod may be older still.
    let args = bind_args(&pod, "n");
    assert_eq!(state.begin_bind(&args, at(0)).unwrap(), BindStep::Fetch);
    let refused = state.begin_bind_with(parse(&pod), state.list_generation(), &args, at(0)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "pod uid-p is not in the list of pods yet; kube-scheduler retries after the watch has shown it"
    );
    set_pod(&mut state, &pod);
    assert!(matches!(state.begin_bind(&args, at(1)), Ok(BindStep::Send(_))));
    // A pod without GPUs needs no booking.
    let plain = self::pod("plain", &[("cpu", "1")]);
    let order = state.begin_bind_with(parse(&plain), state.list_generation(), &bind_args(&plain, "n"), at(1));
    assert_eq!(order.unwrap(), Some(BindOrder::default()));
}

#[test]
fn a_pod_missing_in_the_list_is_dropped_with_its_booking() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let (pod, uid) = (whole("p", 1), PodUid::from("uid-p"));
    state.apply_read(parse(&pod), state.list_generation());
    state.begin_bind(&bind_args(&pod, "n"), at(0)).unwrap();
    state.handle(ClusterEvent::Pod(WatchEvent::Listing));
    state.handle(ClusterEvent::Pod(WatchEvent::Listed));
    assert!(state.is_waiting(&uid), "it may have been made after the list");
    state.end_bind(&uid, BindOutcome::Refused, at(1));
    assert!(!state.is_waiting(&uid));
    // The watch shows the pod after all.
    set_pod(&mut state, &pod);
    state.begin_bind(&bind_args(&pod, "n"), at(2)).unwrap();
    state.handle(ClusterEvent::Pod(WatchEvent::Listing));
    state.handle(ClusterEvent::Pod(WatchEvent::Listed));
    set_pod(&mut state, &pod);
    state.end_bind(&uid, BindOutcome::Refused, at(3));
    assert!(state.is_waiting(&uid));
}

#[test]
fn an_unreadable_quota_rejects_every_gpu_pod_with_the_remedy() {
    let mut state = state(&[node("n", 1, "GiB")]);
    state.handle(ClusterEvent::Quota(tessera_core::quota::Quota::all_unreadable(
        "mend the ConfigMap".to_owned(),
    )));
    let answer = filter(&state, &whole("p", 1), &["n"]);
    assert_eq!(answer.failed_and_unresolvable_nodes["n"], "ExceedsGPUQuota: mend the ConfigMap");
    assert_eq!(filter(&state, &pod("plain", &[]), &["n"]).node_names.unwrap(), ["n"]);
}

#[test]
fn unreadable_limits_of_a_namespace_affect_only_that_namespace() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let limits = |json: &str| {
        let home = "key gpu_quota of ConfigMap kube-system/gpuquota";
        ClusterEvent::Quota(tessera_wire::foreign::quota::parse(json, home).unwrap())
    };
    let of = |namespace: &str, gpus| {
        let mut pod = whole("p", gpus);
        pod["metadata"]["namespace"] = namespace.into();
        pod
    };
    state.handle(limits(r#"{"broken":{"quota":{"T4":"1"}},"limited":{"percent":0}}"#));
    let refused = filter(&state, &of("broken", 1), &["n"]).failed_and_unresolvable_nodes;
    let expected = "ExceedsGPUQuota: the limits of namespace broken in key gpu_quota of ConfigMap kube-system/gpuquota \
                    cannot be read: invalid type: string \"1\", expected u64; write {";
    assert!(refused["n"].starts_with(expected), "{refused:?}");
    assert!(state.describe_quota("broken").unwrap().starts_with("the limits of namespace broken in key"));
    let limited = filter(&state, &of("limited", 1), &["n"]);
    assert_eq!(limited.failed_nodes["n"], "ExceedsGPUQuota: GPU compute");
    assert_eq!(filter(&state, &of("free", 1), &["n"]).node_names.unwrap(), ["n"]);
    state.handle(limits(r#"{"broken":{"quota":{"T4":1}}}"#));
    assert_eq!(filter(&state, &of("broken", 1), &["n"]).node_names.unwrap(), ["n"], "mended");
}

#[test]
fn quota_counts_bookings() {
    let mut state = state(&[node("n", 4, "GiB")]);
    let limits =
        |json: &str| ClusterEvent::Quota(tessera_wire::foreign::quota::parse(json, "the ConfigMap").unwrap());
    state.handle(limits(r#"{"team":{"quota":{"T4":1},"pool":["public"]}}"#));
    set_pod(&mut state, &share("first", 60));
    state.begin_bind(&bind_args(&share("first", 60), "n"), at(0)).unwrap();
    let answer = filter(&state, &share("second", 50), &["n"]);
    assert_eq!(answer.failed_nodes["n"], "ExceedsGPUQuota: GPUs of this model");
    assert_eq!(filter(&state, &share("third", 40), &["n"]).node_names.unwrap(), ["n"]);
    set_pod(&mut state, &share("second", 50));
    let refused = state.begin_bind(&bind_args(&share("second", 50), "n"), at(0)).unwrap_err().to_string();
    assert_eq!(refused, "node n: ExceedsGPUQuota: GPUs of this model");
    state.end_bind(&PodUid::from("uid-first"), BindOutcome::Refused, at(0));
    assert_eq!(filter(&state, &share("second", 50), &["n"]).node_names.unwrap(), ["n"]);
    state.handle(limits(r#"{"team":{"quota":{"T4":1},"pool":["private"]}}"#));
    let answer = filter(&state, &share("second", 50), &["n"]);
    assert_eq!(answer.failed_and_unresolvable_nodes["n"], "ExceedsGPUQuota: not a pool of this namespace");
    state.handle(limits("{}"));
    assert_eq!(filter(&state, &share("second", 50), &["n"]).node_names.unwrap(), ["n"]);
}

#[test]
fn preempt_evicts_from_a_gpu_that_then_fits() {
    let mut state = state(&[node("n", 2, "GiB")]);
    let prioritised = |name: &str, compute_percent, priority: i32| {
        let mut pod = share(name, compute_percent);
        pod["spec"]["priority"] = priority.into();
        pod
    };
    bind(&mut state, &prioritised("low", 60, 1), "n");
    bind(&mut state, &prioritised("lower", 60, 0), "n");
    bind(&mut state, &prioritised("high", 40, 100), "n");
    let ask = |victims: Value| {
        let newcomer = prioritised("newcomer", 50, 50);
        let args = json!({"Pod": newcomer, "NodeNameToVictims": null,
                          "NodeNameToMetaVictims": {"n": victims, "nobody": {"Pods": []}}});
        let args: PreemptionArgs = serde_json::from_value(args).unwrap();
        serde_json::to_value(preempt(&state, &args)).unwrap()
    };
    let lower =
        json!({"NodeNameToMetaVictims": {"n": {"Pods": [{"UID": "uid-lower"}], "NumPDBViolations": 0}}});
    assert_eq!(ask(json!({"Pods": []})), lower);
    assert_eq!(ask(Value::Null), lower);
    // The node has enough free units in total, but not on a single GPU.
    assert_eq!(ask(json!({"Pods": [{"UID": "uid-nobody"}]})), lower);
    let low = ask(json!({"Pods": [{"UID": "uid-low"}], "NumPDBViolations": 1}));
    assert_eq!(
        low["NodeNameToMetaVictims"]["n"],
        json!({"Pods": [{"UID": "uid-low"}], "NumPDBViolations": 1})
    );
}

#[test]
fn a_pod_over_quota_evicts_only_pods_of_its_namespace() {
    let mut state = state(&[node("n", 2, "GiB")]);
    let prioritised = |name: &str, namespace: &str, compute_percent, priority: i32| {
        let mut pod = share(name, compute_percent);
        pod["metadata"]["namespace"] = namespace.into();
        pod["spec"]["priority"] = priority.into();
        pod
    };
    bind(&mut state, &prioritised("ours", "team", 60, 1), "n");
    bind(&mut state, &prioritised("theirs", "other", 60, 0), "n");
    let limits = r#"{"team":{"percent":100}}"#;
    state.handle(ClusterEvent::Quota(tessera_wire::foreign::quota::parse(limits, "the ConfigMap").unwrap()));
    let ask = |newcomer: Value, victims: Value| {
        let args = json!({"Pod": newcomer, "NodeNameToMetaVictims": {"n": {"Pods": victims}}});
        let args: PreemptionArgs = serde_json::from_value(args).unwrap();
        let answer = serde_json::to_value(preempt(&state, &args)).unwrap();
        (answer["NodeNameToMetaVictims"]["n"]["Pods"].clone(), state.is_over_quota(&args))
    };
    let urgent = prioritised("urgent", "team", 50, 9);
    assert_eq!(filter(&state, &urgent, &["n"]).failed_nodes["n"], "ExceedsGPUQuota: GPU compute");
    let ours = json!([{"UID": "uid-ours"}]);
    assert_eq!(ask(urgent.clone(), json!([])), (ours.clone(), true));
    assert_eq!(ask(urgent, json!([{"UID": "uid-theirs"}])), (ours, true));
    assert_eq!(ask(prioritised("equal", "team", 50, 1), json!([])), (Value::Null, true));
    assert_eq!(ask(prioritised("small", "team", 40, 0), json!([])), (Value::Null, false), "it fits");
    assert_eq!(state.describe_quota("team").unwrap(), "namespace team holds 60% of 100%");
}

#[test]
fn budget_violations_are_counted_for_victims_that_preempt_chooses() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let mut low = share("low", 60);
    low["metadata"]["labels"] = json!({"app": "web"});
    bind(&mut state, &low, "n");
    let budget = json!({"metadata": {"name": "b", "namespace": "team"},
                        "spec": {"selector": {"matchLabels": {"app": "web"}}}, "status": {"disruptionsAllowed": 0}});
    state.handle(ClusterEvent::Budget(WatchEvent::Set(serde_json::from_value(budget.clone()).unwrap())));
    let ask = |state: &State, proposed: Value| {
        let mut newcomer = share("newcomer", 50);
        newcomer["spec"]["priority"] = 9.into();
        let args = json!({"Pod": newcomer, "NodeNameToMetaVictims": {"n": proposed}});
        let answer = preempt(state, &serde_json::from_value(args).unwrap());
        answer.node_name_to_meta_victims["n"].budget_violations
    };
    assert_eq!(ask(&state, json!({"Pods": []})), 1);
    assert_eq!(
        ask(&state, json!({"Pods": [{"UID": "uid-low"}], "NumPDBViolations": 7})),
        7,
        "as it was told"
    );
    state.handle(ClusterEvent::Budget(WatchEvent::Gone(serde_json::from_value(budget).unwrap())));
    assert_eq!(ask(&state, json!({"Pods": []})), 0);
}

#[test]
fn gpus_on_the_unhealthy_list_of_gpushare_are_not_granted() {
    let mut state = state(&[node("n", 2, "GiB")]);
    let list = |gpus: &str| UnhealthyGpus {
        node: "n".into(),
        gpus: tessera_wire::foreign::unhealthy::parse(gpus).0,
    };
    let fits = |state: &State, count| filter(state, &whole("p", count), &["n"]).failed_nodes.is_empty();
    state.handle(ClusterEvent::Unhealthy(WatchEvent::Set(list("1"))));
    assert!(!fits(&state, 2) && fits(&state, 1));
    // An update of the node object does not make the GPU healthy again.
    set_node(&mut state, &node("n", 2, "GiB"));
    assert!(!fits(&state, 2));
    let mut grown = node("n", 3, "GiB");
    grown["metadata"]["labels"]["more"] = "gpus".into();
    set_node(&mut state, &grown);
    assert!(fits(&state, 2) && !fits(&state, 3));
    state.handle(ClusterEvent::Unhealthy(WatchEvent::Gone(list("1"))));
    assert!(fits(&state, 3));
    // A list may name a node that is not known yet, or be deleted while the watch is broken.
    state
        .handle(ClusterEvent::Unhealthy(WatchEvent::Set(UnhealthyGpus { node: "late".into(), ..list("0") })));
    set_node(&mut state, &node("late", 1, "GiB"));
    let late = |state: &State| filter(state, &whole("p", 1), &["late"]).node_names.unwrap().len();
    assert_eq!(late(&state), 0);
    state.handle(ClusterEvent::Unhealthy(WatchEvent::Listing));
    state.handle(ClusterEvent::Unhealthy(WatchEvent::Listed));
    assert_eq!(late(&state), 1);
}

#[test]
fn explain_and_what_if_give_a_reason_per_gpu() {
    let mut state = state(&[node("n", 2, "GiB"), json!({"metadata": {"name": "cpu"}})]);
    bind(&mut state, &share("first", 60), "n");
    set_pod(&mut state, &whole("waiting", 2));
    let explained = serde_json::to_value(explain(&state, "team", "waiting").unwrap().unwrap()).unwrap();
    assert_eq!(explained["summary"], "fits on 0 of 2 nodes");
    assert_eq!(explained["nodes"][0]["reason"], "no GPU");
    assert_eq!(explained["nodes"][1]["reason"], "fewer than 2 idle GPUs");
    assert_eq!(explained["nodes"][1]["gpuReasons"][0]["reason"], "shared: 60% and 9728 MiB are held");
    assert_eq!(explained["nodes"][1]["gpuReasons"][1]["reason"], Value::Null);
    let supposed = serde_json::to_value(what_if(&state, &parse(&whole("supposed", 1))).unwrap()).unwrap();
    assert_eq!(supposed["nodes"][1]["gpus"], json!([{"container": "main", "gpus": [1]}]));
    assert!(explain(&state, "team", "nobody").is_none());
}

#[test]
fn inspect_answers_in_the_format_of_the_originals() {
    let mut node = node("n", 2, "GiB");
    node["metadata"]["annotations"]["NODE_TYPE"] = "big".into();
    let mut state = state(&[node]);
    bind(&mut state, &pod("p", &[("aliyun.com/gpu-mem", "6")]), "n");
    assert_eq!(
        serde_json::to_value(state.inspect_share(None)).unwrap(),
        json!({"nodes": [{"name": "n", "totalGPU": 32, "usedGPU": 6, "unit": "GiB", "devs": [
            {"id": 0, "totalGPU": 16, "usedGPU": 6, "pods": [{"name": "p", "namespace": "team", "usedGPU": 6}]},
            {"id": 1, "totalGPU": 16, "usedGPU": 0, "pods": []},
        ]}]})
    );
    assert_eq!(
        serde_json::to_value(state.inspect_topology(Some("n"), false)).unwrap(),
        json!({"nodes": [{"name": "n", "totalGPU": 2, "usedGPU": 1}]})
    );
    let detailed = serde_json::to_value(state.inspect_topology(Some("n"), true)).unwrap();
    assert_eq!(detailed["nodes"][0]["type"], "big");
    assert_eq!(detailed["policy"], "tessera");
    assert!(state.inspect_topology(Some("nobody"), true).error.contains("nobody"));
}
