//! Preempt: which pods have to go, within quotas and disruption budgets.

use serde_json::{Value, json};
use tessera_scheduler::state::{State, StateEvent, WatchEvent};
use tessera_scheduler::verb::preempt::preempt;
use tessera_wire::foreign::extender::PreemptionArgs;

use crate::fixtures::*;

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

/// A part of each of two GPUs needs room on two GPUs, however much one of them has.
#[test]
fn preempt_makes_room_on_as_many_gpus_as_a_pod_has_parts() {
    let mut state = state(&[node("n", 3, "GiB")]);
    let prioritised = |mut pod: Value, priority: i32| {
        pod["spec"]["priority"] = priority.into();
        pod
    };
    bind(&mut state, &prioritised(parts("pair", 2, 70), 1), "n");
    bind(&mut state, &prioritised(parts("high", 1, 80), 100), "n");
    bind(&mut state, &prioritised(parts("small", 1, 30), 0), "n");
    let ask = |newcomer: Value| {
        let args = json!({"Pod": newcomer, "NodeNameToMetaVictims": {"n": {"Pods": []}}});
        let args: PreemptionArgs = serde_json::from_value(args).unwrap();
        serde_json::to_value(preempt(&state, &args)).unwrap()["NodeNameToMetaVictims"]["n"]["Pods"].clone()
    };
    let pair = json!([{"UID": "uid-pair"}]);
    assert_eq!(ask(prioritised(parts("new", 2, 60), 50)), pair);
    assert_eq!(ask(prioritised(parts("new", 3, 60), 50)), Value::Null, "one GPU stays with the high pod");
    // The annotations of the newcomer count: only GPUs of the pair are left.
    let bound = annotated(parts("new", 1, 60), &[("nvidia.com/use-gpuuuid", "GPU-n-0")]);
    let victims = ask(prioritised(bound, 50));
    assert!(victims == pair || victims == json!([{"UID": "uid-pair"}, {"UID": "uid-small"}]), "{victims}");
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
    state.handle(StateEvent::Quota(tessera_wire::foreign::quota::parse(limits, "the ConfigMap").unwrap()));
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
    state.handle(StateEvent::Budget(WatchEvent::Set(serde_json::from_value(budget.clone()).unwrap())));
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
    state.handle(StateEvent::Budget(WatchEvent::Gone(serde_json::from_value(budget).unwrap())));
    assert_eq!(ask(&state, json!({"Pods": []})), 0);
}

#[test]
fn pods_of_a_gang_on_a_node_are_evicted_together_unless_the_gang_has_a_pod_of_higher_priority() {
    let prioritised = |mut pod: Value, priority: i32| {
        pod["spec"]["priority"] = priority.into();
        pod
    };
    let member = |number: usize, priority: i32| {
        let mut pod = prioritised(whole(&format!("train-{number}"), 1), priority);
        pod["metadata"]["annotations"] = json!({ "tessera.dev/gang": "train/3" });
        pod
    };
    let victims = |elsewhere: i32| {
        let mut state = state(&[node("n", 2, "GiB"), node("m", 2, "GiB")]);
        // The pods are bound already, as a new leader finds them.
        for (pod, node) in [(member(0, 0), "n"), (member(1, 0), "n"), (member(2, elsewhere), "m")] {
            let mut pod = pod;
            pod["spec"]["nodeName"] = node.into();
            set_pod(&mut state, &pod);
        }
        let newcomer = prioritised(whole("newcomer", 1), 10);
        let args =
            json!({"Pod": newcomer, "NodeNameToMetaVictims": {"n": {"Pods": [{"UID": "uid-train-0"}]}}});
        let answer = preempt(&state, &serde_json::from_value::<PreemptionArgs>(args).unwrap());
        serde_json::to_value(answer).unwrap()["NodeNameToMetaVictims"]["n"]["Pods"].clone()
    };
    assert_eq!(victims(0), json!([{"UID": "uid-train-0"}, {"UID": "uid-train-1"}]));
    assert_eq!(victims(50), Value::Null, "the gang has a pod that may not be evicted");
}
