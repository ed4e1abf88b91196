//! Evictions for pods that wait for claims, which kube-scheduler does not preempt for.

use serde_json::{Value, json};
use tessera_scheduler::state::{EvictionReply, RoomPlan, SchedulerSettings, State, StateEvent, WatchEvent};
use tessera_scheduler::verb::preempt::preempt;
use tessera_wire::foreign::dra::ResourceClaim;
use tessera_wire::foreign::extender::PreemptionArgs;

use crate::claims::{allocated, class, pod_with, show, waiting};
use crate::fixtures::*;

fn evicting(nodes: &[&str]) -> State {
    let objects: Vec<Value> = nodes.iter().map(|name| node(name, 1, "GiB")).collect();
    let settings = SchedulerSettings { dra: true, evict: true, ..SchedulerSettings::default() };
    let mut state = state_with(&objects, settings);
    state.handle(StateEvent::Class(WatchEvent::Set(serde_json::from_value(class()).unwrap())));
    nodes.iter().for_each(|node| offer_claims(&mut state, node));
    state
}

fn offer_claims(state: &mut State, node: &str) {
    let slice = json!({
        "metadata": {"name": format!("{node}-gpu.tessera.dev")},
        "spec": {"driver": "gpu.tessera.dev", "nodeName": node},
    });
    state.handle(StateEvent::Slice(WatchEvent::Set(serde_json::from_value(slice).unwrap())));
}

/// Runs pods with a claim on a node.
fn run(state: &mut State, claim: &str, percent: u64, node: &str, pods: &[(&str, i32)]) {
    let names: Vec<&str> = pods.iter().map(|(name, _)| *name).collect();
    show(state, &allocated(claim, percent, node, &[0], &names));
    for (name, priority) in pods {
        set_pod(state, &on_node(name, claim, node, *priority));
    }
}

fn on_node(name: &str, claim: &str, node: &str, priority: i32) -> Value {
    let mut pod = pod_with(name, claim);
    pod["spec"]["nodeName"] = node.into();
    pod["spec"]["priority"] = priority.into();
    pod
}

/// Creates a claim and a pod for which kube-scheduler finds no devices.
fn wait_for(state: &mut State, name: &str, claim: &Value, priority: i32) -> Value {
    show(state, claim);
    let mut pod = pod_with(name, claim["metadata"]["name"].as_str().unwrap());
    pod["spec"]["priority"] = priority.into();
    pod["status"]["conditions"] = json!([{ "type": "PodScheduled", "status": "False",
        "message": "0/1 nodes are available: 1 cannot allocate all claims." }]);
    set_pod(state, &pod);
    pod
}

fn planned(state: &State) -> Option<RoomPlan> {
    let claimant = state.next_claimant(at(1))?;
    state.plan_evictions(&claimant, at(1))
}

fn victims(state: &State) -> Vec<String> {
    planned(state).map(|plan| plan.victims.into_iter().map(|pod| pod.0).collect()).unwrap_or_default()
}

fn read(claim: &Value) -> ResourceClaim {
    serde_json::from_value(claim.clone()).unwrap()
}

#[test]
fn a_pod_with_a_claim_displaces_one_of_lower_priority_and_gets_its_gpu() {
    let mut state = evicting(&["a", "b"]);
    run(&mut state, "first", 100, "a", &[("first", 5)]);
    run(&mut state, "second", 100, "b", &[("second", 1)]);
    let high = wait_for(&mut state, "high", &waiting("high", 1, 60), 10);
    let plan = planned(&state).unwrap();
    assert_eq!(plan.victims.iter().map(|pod| pod.0.as_str()).collect::<Vec<_>>(), ["uid-second"]);
    let notice = state.adopt_evictions(plan, at(1)).unwrap();
    assert_eq!(notice.message, "evicting 1 pod of lower priority for pod team/high: team/second");
    let order = state.next_eviction(at(1)).unwrap();
    assert_eq!((order.namespace.as_str(), order.name.as_str()), ("team", "second"));
    state.record_eviction(&order.uid, EvictionReply::Accepted, at(1));
    // The pod ends before its claim is released.
    state.handle(StateEvent::Pod(WatchEvent::Gone(parse(&on_node("second", "second", "b", 1)))));
    show(&mut state, &waiting("second", 1, 100));
    // Another pod does not take the GPU, and the waiting one is sent to it.
    let thief = wait_for(&mut state, "thief", &waiting("thief", 1, 60), 7);
    assert_eq!(passed(&filter(&state, &thief, &["a", "b"])), [""; 0]);
    let question = question(&high, &["a", "b"]);
    assert_eq!(state.reserved_node(&question), Some("b"));
    // kube-scheduler allocates, and bind books the GPU that was kept.
    let mut claim = allocated("high", 60, "b", &[0], &["high"]);
    claim["status"]["reservedFor"][0]["uid"] = high["metadata"]["uid"].clone();
    show(&mut state, &claim);
    let args = bind_args(&high, "b");
    let plans = state.book_claims(&args, &parse(&high), &[read(&claim)], at(2)).unwrap();
    assert_eq!(plans.len(), 1);
    assert_eq!(state.ledger().reservations().count(), 0);
    assert!(!state.has_evictions());
    assert!(state.ledger().overbooked().is_empty());
}

/// kube-scheduler does not see that the GPU is taken, so it proposes no victims.
#[test]
fn pods_of_device_plugins_are_displaced_too() {
    let mut state = evicting(&["a"]);
    let mut low = whole("low", 1);
    low["spec"]["priority"] = 1.into();
    bind(&mut state, &low, "a");
    let high = wait_for(&mut state, "high", &waiting("high", 1, 60), 10);
    assert_eq!(victims(&state), ["uid-low"]);
    let args: PreemptionArgs =
        serde_json::from_value(json!({"Pod": high, "NodeNameToMetaVictims": {"a": {"Pods": []}}})).unwrap();
    assert!(preempt(&state, &args).node_name_to_meta_victims.is_empty());
}

#[test]
fn pods_that_share_a_claim_are_displaced_together_or_spared() {
    let mut state = evicting(&["a"]);
    run(&mut state, "shared", 100, "a", &[("one", 1), ("two", 2)]);
    wait_for(&mut state, "high", &waiting("high", 1, 60), 10);
    assert_eq!(victims(&state), ["uid-one", "uid-two"]);
    set_pod(&mut state, &on_node("two", "shared", "a", 10));
    assert_eq!(victims(&state), [""; 0], "one of them has no lower priority");
}

#[test]
fn nothing_is_evicted_in_vain() {
    let scene = || {
        let mut state = evicting(&["a"]);
        run(&mut state, "low", 100, "a", &[("low", 1)]);
        state
    };
    let mut state = scene();
    wait_for(&mut state, "high", &waiting("high", 1, 60), 10);
    assert_eq!(victims(&state), ["uid-low"]);
    // The claim may need another GPU than the one that would become free.
    for (field, value) in [
        ("selectors", json!([{"cel": {"expression": "device.attributes['gpu.tessera.dev'].index == 3"}}])),
        ("deviceClassName", json!("other")),
        ("allocationMode", json!("All")),
        ("adminAccess", json!(true)),
    ] {
        let mut state = scene();
        let mut claim = waiting("high", 1, 60);
        claim["spec"]["devices"]["requests"][0]["exactly"][field] = value;
        wait_for(&mut state, "high", &claim, 10);
        assert_eq!(state.next_claimant(at(1)), None, "{field}");
    }
    // The node offers no GPUs to claims.
    let mut state = scene();
    state.handle(StateEvent::Slice(WatchEvent::Listing));
    wait_for(&mut state, "high", &waiting("high", 1, 60), 10);
    assert_eq!(victims(&state), [""; 0]);
    // The claim of the other pod is reserved for something that is no pod, or for a pod of the same priority.
    let mut state = scene();
    let mut kept = allocated("low", 100, "a", &[0], &["low"]);
    kept["status"]["reservedFor"].as_array_mut().unwrap().push(json!({"resource": "jobs", "uid": "j"}));
    show(&mut state, &kept);
    wait_for(&mut state, "high", &waiting("high", 1, 60), 10);
    assert_eq!(victims(&state), [""; 0]);
    let mut state = scene();
    wait_for(&mut state, "equal", &waiting("equal", 1, 60), 1);
    assert_eq!(victims(&state), [""; 0]);
}
