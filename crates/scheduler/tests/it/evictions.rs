//! Evictions for gangs that wait: who goes, what is kept, and that no more pods go than needed.

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_core::units::{NodeName, PodUid};
use tessera_scheduler::state::{EvictionReply, RoomPlan, SchedulerSettings, State, StateEvent, WatchEvent};
use tessera_scheduler::verb::preempt::preempt;
use tessera_wire::foreign::extender::PreemptionArgs;

use crate::fixtures::*;

const NODES: [&str; 3] = ["a", "b", "c"];

fn evicting(nodes: &[&str]) -> State {
    let nodes: Vec<Value> = nodes.iter().map(|name| node(name, 8, "GiB")).collect();
    state_with(&nodes, SchedulerSettings { evict: true, ..SchedulerSettings::default() })
}

fn prioritised(mut pod: Value, priority: i32) -> Value {
    pod["spec"]["priority"] = priority.into();
    pod
}

/// Returns both pods of a gang with eight GPUs each.
fn gang(name: &str, priority: i32) -> [Value; 2] {
    [0, 1].map(|number| prioritised(member(name, 2, number, 8), priority))
}

/// Creates both pods of a gang and lets kube-scheduler bind them.
fn run_gang(state: &mut State, pods: &[Value; 2]) -> [Value; 2] {
    pods.iter().for_each(|pod| set_pod(state, pod));
    pods.each_ref().map(|pod| {
        let nodes = passed(&ask(state, pod, &NODES, 0));
        bind_member(state, pod, &nodes[0], 0)
    })
}

/// Creates the pods of a gang that does not fit.
fn wait(state: &mut State, pods: &[Value; 2]) {
    pods.iter().for_each(|pod| set_pod(state, pod));
    assert_eq!(passed(&ask(state, &pods[0], &NODES, 0)), [""; 0]);
}

fn planned(state: &State, now: u64) -> Option<RoomPlan> {
    let claimant = state.next_claimant(at(now))?;
    state.plan_evictions(&claimant, at(now))
}

fn victims(plan: Option<RoomPlan>) -> Option<Vec<String>> {
    let mut victims: Vec<String> = plan?.victims.into_iter().map(|pod| pod.0).collect();
    victims.sort();
    Some(victims)
}

/// Carries out the plan as far as possible, with an API server that accepts every eviction.
fn evict_all(state: &mut State, now: u64) -> Vec<String> {
    let mut evicted = Vec::new();
    while let Some(order) = state.next_eviction(at(now)) {
        state.record_eviction(&order.uid, EvictionReply::Accepted, at(now));
        evicted.push(order.name);
    }
    evicted
}

fn ending(pod: &Value) -> Value {
    let mut pod = pod.clone();
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z".into();
    pod
}

fn marked(mut pod: Value) -> Value {
    pod["metadata"]["annotations"]["tessera.dev/do-not-evict"] = "true".into();
    pod
}

#[test]
fn a_gang_of_high_priority_displaces_a_lower_one_as_a_whole() {
    let mut state = evicting(&NODES);
    let low = run_gang(&mut state, &gang("low", 1));
    bind(&mut state, &prioritised(whole("keeps", 1), 100), "c");
    let high = gang("high", 10);
    wait(&mut state, &high);
    let plan = planned(&state, 1).unwrap();
    assert_eq!(victims(Some(plan.clone())), Some(vec!["uid-low-0".to_owned(), "uid-low-1".to_owned()]));
    let notice = state.adopt_evictions(plan, at(1)).unwrap();
    assert_eq!(
        notice.message,
        "evicting 2 pods of lower priority for gang team/high: team/low-0, team/low-1"
    );
    assert_eq!(notice.pods.len(), 2);
    assert!(state.next_claimant(at(2)).is_none(), "one plan at a time");
    assert_eq!(evict_all(&mut state, 2), ["low-0", "low-1"]);
    // The first victim ends, and nothing takes its GPUs.
    end(&mut state, &low[0]);
    let thief = whole("thief", 1);
    assert_eq!(passed(&ask(&mut state, &thief, &["a", "b"], 3)), [""; 0]);
    let said = state.waits_for_reservation(&question(&thief, &["a", "b"])).unwrap();
    assert!(said.contains("reserved for gang team/high, for which pods are evicted"), "{said}");
    assert_eq!(passed(&ask(&mut state, &high[0], &NODES, 3)), [""; 0]);
    assert_eq!(passed(&ask(&mut state, &thief, &["a", "b"], 3)), [""; 0], "they are kept again");
    end(&mut state, &low[1]);
    assert_eq!(passed(&ask(&mut state, &thief, &["a", "b"], 4)), [""; 0]);
    for pod in &high {
        let node = passed(&ask(&mut state, pod, &NODES, 4));
        bind_member(&mut state, pod, &node[0], 4);
    }
    assert_eq!(state.update_evictions(at(5)), None);
    assert!(!state.has_evictions());
    assert_eq!(state.ledger().reservations().count(), 0);
}

#[test]
fn nothing_is_planned_without_the_setting_or_for_pods_that_never_preempt() {
    let mut state = state(&NODES.map(|name| node(name, 8, "GiB")));
    run_gang(&mut state, &gang("low", 1));
    bind(&mut state, &whole("other", 1), "c");
    wait(&mut state, &gang("high", 10));
    assert_eq!(state.next_claimant(at(1)), None);

    let mut state = evicting(&["a", "b"]);
    run_gang(&mut state, &gang("low", 1));
    let polite = gang("high", 10).map(|mut pod| {
        pod["spec"]["preemptionPolicy"] = "Never".into();
        pod
    });
    wait(&mut state, &polite);
    assert_eq!(planned(&state, 1), None);
}

#[test]
fn marked_pods_equal_priorities_and_budgets_are_respected() {
    let of_low = |change: fn(Value) -> Value| {
        let mut state = evicting(&["a", "b"]);
        let [first, second] = gang("low", 1);
        run_gang(&mut state, &[first, change(second)]);
        wait(&mut state, &gang("high", 10));
        victims(planned(&state, 1))
    };
    assert_eq!(of_low(|pod| pod).map(|victims| victims.len()), Some(2));
    assert_eq!(of_low(marked), None);
    assert_eq!(of_low(|pod| prioritised(pod, 10)), None, "the highest priority of the gang counts");

    let mut state = evicting(&["a", "b"]);
    let low = gang("low", 1).map(|mut pod| {
        pod["metadata"]["labels"] = json!({ "app": "low" });
        pod
    });
    run_gang(&mut state, &low);
    wait(&mut state, &gang("high", 10));
    let mut budget = |allowed: i64| {
        let budget = json!({
            "metadata": { "name": "low", "namespace": "team" },
            "spec": { "selector": { "matchLabels": { "app": "low" } } },
            "status": { "disruptionsAllowed": allowed },
        });
        state.handle(StateEvent::Budget(WatchEvent::Set(serde_json::from_value(budget).unwrap())));
        victims(planned(&state, 1)).map(|victims| victims.len())
    };
    assert_eq!(budget(1), None);
    assert_eq!(budget(2), Some(2));
}

/// A new leader knows from the report on a pod that its gang waits, although nothing makes kube-scheduler try it again.
#[test]
fn a_gang_that_a_former_leader_refused_gets_room() {
    let mut state = evicting(&["a", "b"]);
    run_gang(&mut state, &gang("low", 1));
    let reports = [
        "gang team/high waits for its pods: 1 of 2 exist",
        "gang team/high waits for GPUs for all of its 2 pods",
    ];
    for (mut pod, message) in gang("high", 10).into_iter().zip(reports) {
        assert_eq!(state.next_claimant(at(1)), None);
        pod["status"]["conditions"] =
            json!([{ "type": "PodScheduled", "status": "False", "message": format!("2 {message}.") }]);
        set_pod(&mut state, &pod);
        state.expire_gangs(at(1));
    }
    assert_eq!(victims(planned(&state, 1)).map(|victims| victims.len()), Some(2));
}

/// kube-scheduler asks the extender about no node that is full by its own count.
#[test]
fn a_gang_that_filter_never_sees_gets_room_too() {
    let mut state = evicting(&["a", "b"]);
    let low = run_gang(&mut state, &gang("low", 1));
    let high = gang("high", 10).map(|mut pod| {
        pod["status"]["conditions"] = json!([{ "type": "PodScheduled", "status": "False",
            "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu." }]);
        pod
    });
    high.iter().for_each(|pod| set_pod(&mut state, pod));
    assert_eq!(state.next_claimant(at(0)), None);
    state.expire_gangs(at(1));
    let plan = planned(&state, 1).unwrap();
    assert_eq!(plan.victims.len(), 2);
    // kube-scheduler evicts no pods for one pod of the gang.
    let args =
        json!({ "Pod": high[0], "NodeNameToMetaVictims": { "a": { "Pods": [{ "UID": "uid-low-0" }] } } });
    let args: PreemptionArgs = serde_json::from_value(args).unwrap();
    assert!(preempt(&state, &args).node_name_to_meta_victims.is_empty());
    state.adopt_evictions(plan, at(1));
    low.iter().for_each(|pod| end(&mut state, pod));
    for pod in &high {
        let node = passed(&ask(&mut state, pod, &NODES, 2));
        bind_member(&mut state, pod, &node[0], 2);
    }
    state.expire_gangs(at(3));
    assert_eq!((state.update_evictions(at(3)), state.next_claimant(at(3))), (None, None));
}

#[test]
fn as_few_pods_as_possible_go_and_those_of_the_lowest_priority_first() {
    let mut state = evicting(&NODES);
    for (name, node, priority) in [("p1", "a", 1), ("p2", "b", 2), ("p3", "c", 3)] {
        bind(&mut state, &prioritised(whole(name, 8), priority), node);
    }
    wait(&mut state, &gang("high", 10));
    assert_eq!(victims(planned(&state, 1)), Some(vec!["uid-p1".to_owned(), "uid-p2".to_owned()]));
}

#[test]
fn a_new_leader_counts_pods_that_end_already() {
    let mut state = evicting(&["a", "b"]);
    let low = run_gang(&mut state, &gang("low", 1));
    let mut restarted = evicting(&["a", "b"]);
    low.iter().for_each(|pod| set_pod(&mut restarted, &ending(pod)));
    let high = gang("high", 10);
    wait(&mut restarted, &high);
    let plan = planned(&restarted, 1).unwrap();
    assert_eq!(plan.victims, []);
    assert_eq!(restarted.adopt_evictions(plan, at(1)), None, "no pod is evicted");
    assert_eq!(evict_all(&mut restarted, 1), [""; 0]);
    low.iter().for_each(|pod| end(&mut restarted, pod));
    assert_eq!(passed(&ask(&mut restarted, &whole("thief", 1), &["a", "b"], 2)), [""; 0]);
    assert_eq!(passed(&ask(&mut restarted, &high[0], &["a", "b"], 2)).len(), 1);
}

#[test]
fn refused_evictions_are_tried_again_until_the_deadline() {
    let mut state = evicting(&["a", "b"]);
    run_gang(&mut state, &gang("low", 1));
    let high = gang("high", 10);
    wait(&mut state, &high);
    let plan = planned(&state, 1).unwrap();
    state.adopt_evictions(plan, at(1));
    let first = state.next_eviction(at(1)).unwrap();
    state.record_eviction(&first.uid, EvictionReply::TryAgain, at(1));
    let second = state.next_eviction(at(1)).unwrap();
    assert_ne!(first, second);
    state.record_eviction(&second.uid, EvictionReply::Accepted, at(1));
    assert_eq!(state.next_eviction(at(5)), None);
    assert_eq!(state.next_eviction(at(6)), Some(first));
    assert_eq!(state.update_evictions(at(600)), None);
    let notice = state.update_evictions(at(601)).unwrap();
    assert!(
        notice.message.contains("2 pods did not end in time: team/low-0, team/low-1"),
        "{}",
        notice.message
    );
    assert_eq!((state.next_eviction(at(601)), state.ledger().reservations().count()), (None, 0));
    assert_eq!(state.next_claimant(at(602)), None, "the others have their turn");
    assert!(state.next_claimant(at(1202)).is_some());
}

#[test]
fn evictions_end_once_the_gang_finds_room_elsewhere() {
    let mut state = evicting(&["a", "b"]);
    run_gang(&mut state, &gang("low", 1));
    let high = gang("high", 10);
    wait(&mut state, &high);
    let plan = planned(&state, 1).unwrap();
    state.adopt_evictions(plan, at(1));
    ["c", "d"].iter().for_each(|name| set_node(&mut state, &node(name, 8, "GiB")));
    assert_eq!(passed(&ask(&mut state, &high[0], &["a", "b", "c", "d"], 2)).len(), 1);
    assert_eq!((state.next_eviction(at(2)), state.has_evictions()), (None, false));
}

#[test]
fn the_rest_of_a_gang_follows_the_pods_that_kube_scheduler_preempts() {
    let mut state = evicting(&NODES);
    let low = run_gang(&mut state, &gang("low", 1));
    let mut preempted = low[0].clone();
    preempted["status"]["conditions"] =
        json!([{ "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler" }]);
    set_pod(&mut state, &preempted);
    end(&mut state, &preempted);
    let order = state.next_eviction(at(1)).unwrap();
    assert_eq!(
        (order.name.as_str(), order.why.as_str()),
        ("low-1", "kube-scheduler preempts another pod of gang team/low")
    );
    state.record_eviction(&order.uid, EvictionReply::Accepted, at(1));
    // The pods that replace them stay.
    let again = gang("low", 1).map(|mut pod| {
        pod["metadata"]["uid"] = format!("{}-again", pod["metadata"]["uid"].as_str().unwrap()).into();
        pod
    });
    end(&mut state, &low[1]);
    run_gang(&mut state, &again);
    assert_eq!(state.next_eviction(at(2)), None);
    state.update_evictions(at(2));
    assert!(!state.has_evictions());
    // A pod that its user deletes takes no others with it.
    end(&mut state, &again[0]);
    assert_eq!(state.next_eviction(at(3)), None);
}

/// Default of `--gang-timeout` and `--gang-hold-back` together, in seconds.
const PATIENCE: u64 = 120 + 600;

/// Returns a state in which one pod of a gang runs and the other one is gone for good.
fn half_bound(evict: bool, change: fn(Value) -> Value) -> (State, Value) {
    let nodes = NODES.map(|name| node(name, 8, "GiB"));
    let mut state = state_with(&nodes, SchedulerSettings { evict, ..SchedulerSettings::default() });
    let [first, second] = gang("train", 1);
    let [left, lost] = run_gang(&mut state, &[change(first), second]);
    // The kubelet has rejected it, or its user has deleted it.
    let mut failed = lost;
    failed["status"]["phase"] = "Failed".into();
    set_pod(&mut state, &failed);
    (state, left)
}

#[test]
fn a_gang_that_lost_a_pod_for_good_gives_its_gpus_back() {
    let (mut state, left) = half_bound(true, |pod| pod);
    assert_eq!(state.expire_gangs(at(10)), []);
    assert_eq!(state.expire_gangs(at(9 + PATIENCE)), []);
    assert_eq!(state.next_eviction(at(9 + PATIENCE)), None);
    let notices = state.expire_gangs(at(10 + PATIENCE));
    let said = "gang team/train: 1 of 2 pods have nodes, and the others have had none for 720 s";
    assert_eq!(notices.len(), 1);
    assert!(
        notices[0].message.starts_with(&format!("{said}; the pods with GPUs are evicted")),
        "{notices:?}"
    );
    let order = state.next_eviction(at(10 + PATIENCE)).unwrap();
    assert_eq!((order.name.as_str(), order.why.as_str()), ("train-0", said));
    assert_eq!(evict_all(&mut state, 10 + PATIENCE), ["train-0"]);
    end(&mut state, &left);
    state.update_evictions(at(11 + PATIENCE));
    assert!(!state.has_evictions());
    assert!(state.ledger().nodes().all(|node| node.idle().len() == 8));
}

/// kube-scheduler has a reason of its own to keep the second pod from every node, such as a volume.
#[test]
fn a_gang_whose_places_are_never_used_gives_its_gpus_back() {
    let mut state = evicting(&["a", "b"]);
    let pods = gang("train", 1);
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    let nodes = passed(&ask(&mut state, &pods[0], &NODES, 0));
    bind_member(&mut state, &pods[0], &nodes[0], 0);
    let mut evicted = Vec::new();
    for now in (0..=PATIENCE).step_by(60) {
        assert_eq!(evicted, [""; 0]);
        ask(&mut state, &pods[1], &NODES, now);
        state.expire_gangs(at(now));
        evicted = evict_all(&mut state, now);
    }
    assert_eq!(evicted, ["train-0"]);
}

#[test]
fn a_half_bound_gang_stays_without_evictions_with_a_mark_and_if_its_pods_come_back() {
    for (evict, change) in [(false, (|pod| pod) as fn(Value) -> Value), (true, marked as fn(Value) -> Value)]
    {
        let (mut state, _) = half_bound(evict, change);
        state.expire_gangs(at(0));
        let notices = state.expire_gangs(at(PATIENCE));
        assert!(notices[0].message.contains("the pods with GPUs keep them"), "{notices:?}");
        assert_eq!(state.expire_gangs(at(PATIENCE + 1)), [], "the event comes once in a while");
        assert_eq!(state.next_eviction(at(PATIENCE + 1)), None);
    }
    let (mut state, _) = half_bound(true, |pod| pod);
    state.expire_gangs(at(0));
    let mut again = gang("train", 1)[1].clone();
    again["metadata"]["uid"] = "uid-again".into();
    set_pod(&mut state, &again);
    let node = passed(&ask(&mut state, &again, &NODES, PATIENCE - 1));
    bind_member(&mut state, &again, &node[0], PATIENCE - 1);
    assert_eq!(state.expire_gangs(at(PATIENCE)), []);
    assert_eq!(state.next_eviction(at(PATIENCE)), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// A waiting gang of high priority starts if the pods of lower priority leave enough room, whatever small pods
    /// arrive meanwhile, and no pod of its priority goes.
    #[test]
    fn a_gang_gets_its_places_while_small_pods_arrive(
        running in prop::collection::vec((0..3usize, 1..=8u64, 0..3i32), 0..16),
    ) {
        let mut state = evicting(&NODES);
        let mut pods: Vec<Value> = Vec::new();
        for (number, (node, gpus, priority)) in running.into_iter().enumerate() {
            let pod = prioritised(whole(&format!("p{number}"), gpus), priority * 10);
            if passed(&filter(&state, &pod, &[NODES[node]])).len() == 1 {
                pods.push(bind(&mut state, &pod, NODES[node]));
            }
        }
        let strong = |name: &str| {
            let held = pods.iter().filter(|pod| pod["spec"]["nodeName"] == name);
            held.clone().any(|pod| pod["spec"]["priority"] == 20)
        };
        let possible = NODES.iter().filter(|name| !strong(name)).count() >= 2;
        let high = gang("high", 20);
        high.iter().for_each(|pod| set_pod(&mut state, pod));
        if passed(&ask(&mut state, &high[0], &NODES, 0)).is_empty() {
            let plan = planned(&state, 1);
            prop_assert_eq!(plan.is_some(), possible);
            let Some(plan) = plan else { return Ok(()) };
            state.adopt_evictions(plan, at(1));
            while let Some(order) = state.next_eviction(at(1)) {
                state.record_eviction(&order.uid, EvictionReply::Accepted, at(1));
                let place = pods.iter().position(|pod| pod["metadata"]["uid"] == order.uid.0.as_str()).unwrap();
                let pod = pods.remove(place);
                prop_assert!(pod["spec"]["priority"].as_i64().unwrap() < 20);
                end(&mut state, &pod);
                let thief = whole(&format!("thief-{}", order.name), 1);
                if let Some(node) = passed(&ask(&mut state, &thief, &NODES, 1)).first().cloned() {
                    pods.push(bind(&mut state, &thief, &node));
                }
            }
        }
        for pod in &high {
            let node = passed(&ask(&mut state, pod, &NODES, 2));
            prop_assert_eq!(node.len(), 1);
            bind_member(&mut state, pod, &node[0], 2);
        }
        prop_assert!(state.ledger().overbooked().is_empty());
        let uid = PodUid("uid-high-0".to_owned());
        prop_assert!(state.ledger().grant(&uid).is_some_and(|grant| grant.node != NodeName::from("")));
    }
}
