//! Guarantees of namespaces: borrowers give GPUs back, no namespace falls below its guarantee, and no pod is evicted in
//! return.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_scheduler::state::{
    Claim, EvictionReply, RoomPlan, SchedulerSettings, State, StateEvent, Timestamp,
};
use tessera_scheduler::verb::explain::explain;
use tessera_scheduler::verb::preempt::preempt;
use tessera_wire::foreign::extender::PreemptionArgs;

use crate::fixtures::*;

const NODES: [&str; 2] = ["a", "b"];

/// Guarantees of the namespaces in GPUs. They fill the cluster of eight GPUs. The last namespace has none.
const GUARANTEES: [(&str, Option<usize>); 4] =
    [("one", Some(3)), ("two", Some(3)), ("three", Some(2)), ("free", None)];

fn cluster() -> State {
    let nodes = NODES.map(|name| node(name, 4, "GiB"));
    let mut state = state_with(&nodes, SchedulerSettings { evict: true, ..SchedulerSettings::default() });
    let guaranteed = |(namespace, gpus): (&str, Option<usize>)| {
        Some((namespace.to_owned(), json!({ "guaranteed": { "percent": gpus? * 100 } })))
    };
    let quota: serde_json::Map<String, Value> = GUARANTEES.into_iter().filter_map(guaranteed).collect();
    let quota =
        tessera_wire::foreign::quota::parse(&Value::from(quota).to_string(), "the ConfigMap").unwrap();
    state.handle(StateEvent::Quota(quota));
    state
}

/// Returns a pod with one GPU that was created at this time.
fn pod_of(namespace: &str, name: &str, minute: u64) -> Value {
    let mut pod = whole(name, 1);
    pod["metadata"]["namespace"] = namespace.into();
    pod["metadata"]["annotations"] = json!({});
    pod["metadata"]["creationTimestamp"] =
        format!("2026-01-01T{:02}:{:02}:00Z", minute / 60, minute % 60).into();
    pod
}

fn with_priority(mut pod: Value, priority: i32) -> Value {
    pod["spec"]["priority"] = priority.into();
    pod
}

/// Returns the time of so many minutes after the pods' first day began.
fn minute(minute: u64) -> Timestamp {
    let unix = 1_767_225_600 + minute * 60;
    Timestamp { steady: Duration::from_secs(minute * 60), unix_nanos: u128::from(unix) * 1_000_000_000 }
}

/// Reports that kube-scheduler finds no node for a pod.
fn refuse(state: &mut State, pod: &Value) {
    let mut pod = pod.clone();
    pod["status"]["conditions"] = json!([{ "type": "PodScheduled", "status": "False",
        "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu." }]);
    set_pod(state, &pod);
}

/// Returns the node that filter passes for a pod, as the server does.
fn offered(state: &mut State, pod: &Value) -> Option<String> {
    let args = question(pod, &NODES);
    if let Some(node) = state.reserved_node(&args) {
        return Some(node.to_owned());
    }
    passed(&ask(state, pod, &NODES, 0)).first().cloned()
}

fn plan_at(state: &State, now: Timestamp) -> Option<RoomPlan> {
    let claimant = state.next_claimant(now)?;
    state.plan_evictions(&claimant, now)
}

fn victims(plan: &RoomPlan) -> Vec<&str> {
    plan.victims.iter().map(|pod| pod.0.as_str()).collect()
}

/// Fills the cluster with pods of these namespaces, one pod each minute. Returns the bound pods by name.
fn fill(state: &mut State, namespaces: &[&str]) -> BTreeMap<String, Value> {
    let mut pods = BTreeMap::new();
    for (number, namespace) in (0..).zip(namespaces) {
        let pod = pod_of(namespace, &format!("{namespace}-{number}"), number);
        let node = offered(state, &pod).unwrap();
        set_pod(state, &pod);
        let bound = bind_member(state, &pod, &node, 0);
        pods.insert(format!("{namespace}-{number}"), bound);
    }
    pods
}

#[test]
fn a_borrower_gives_a_gpu_back_and_does_not_take_it_again() {
    let mut state = cluster();
    let pods = fill(&mut state, &["two"; 8]);
    let owner = pod_of("one", "owner", 100);
    refuse(&mut state, &owner);
    let plan = plan_at(&state, minute(101)).unwrap();
    assert_eq!((victims(&plan), plan.claim), (vec!["uid-two-7"], Claim::Guarantee), "the newest goes first");
    let notice = state.adopt_evictions(plan, minute(101)).unwrap();
    assert_eq!(
        notice.message,
        "evicting 1 pod of namespaces that use more than their guarantees for pod one/owner: two/two-7"
    );
    let said = explain(&state, "one", "owner").unwrap().unwrap();
    let said = serde_json::to_string(&said).unwrap();
    assert!(
        said.contains("namespace one gets back GPUs that it is guaranteed: 1 pod still to end"),
        "{said}"
    );
    let order = state.next_eviction(minute(101)).unwrap();
    assert!(
        order.why.starts_with("pod one/owner gets GPUs that its namespace is guaranteed"),
        "{}",
        order.why
    );
    state.record_eviction(&order.uid, EvictionReply::Accepted, minute(101));
    end(&mut state, &pods["two-7"]);
    // The evicted pod is created again. It gets nothing, and nothing is evicted for it.
    let again = pod_of("two", "again", 102);
    refuse(&mut state, &again);
    assert_eq!(offered(&mut state, &again), None);
    let said = serde_json::to_string(&explain(&state, "two", "again").unwrap().unwrap()).unwrap();
    assert!(said.contains("it borrows, so the pod waits for free GPUs"), "{said}");
    let node = offered(&mut state, &owner).unwrap();
    bind_member(&mut state, &owner, &node, 0);
    assert_eq!(state.update_evictions(minute(102)), None);
    assert_eq!((state.has_evictions(), state.next_claimant(minute(103))), (false, None));
}

#[test]
fn namespaces_without_a_guarantee_or_within_it_are_spared() {
    let mut state = cluster();
    fill(&mut state, &["free", "free", "two", "two", "two", "three", "three", "free"]);
    let owner = with_priority(pod_of("one", "owner", 100), 100);
    refuse(&mut state, &owner);
    assert_eq!(plan_at(&state, minute(101)), None);
    // kube-scheduler may not preempt below the guarantee either, whatever the priority is.
    let everything: Vec<Value> =
        ["two-2", "two-3", "two-4"].map(|name| json!({ "UID": format!("uid-{name}") })).to_vec();
    let args = json!({ "Pod": owner, "NodeNameToMetaVictims": { "a": { "Pods": everything }, "b": { "Pods": [] } } });
    let args: PreemptionArgs = serde_json::from_value(args).unwrap();
    let chosen = preempt(&state, &args).node_name_to_meta_victims;
    let chosen = serde_json::to_string(&chosen).unwrap();
    assert!(
        chosen.contains("uid-free-") && !chosen.contains("uid-two-") && !chosen.contains("uid-three-"),
        "{chosen}"
    );
}

#[test]
fn the_borrower_with_the_largest_use_goes_first_then_the_lowest_priority() {
    let mut state = cluster();
    // Both borrow one GPU beyond their guarantees; the pods of `three` have run for longer.
    fill(&mut state, &["three", "three", "three", "two", "two", "two", "two"]);
    let last = with_priority(pod_of("three", "three-low", 7), -1);
    set_pod(&mut state, &last);
    let node = offered(&mut state, &last).unwrap();
    bind_member(&mut state, &last, &node, 0);
    let owner = pod_of("one", "owner", 30);
    refuse(&mut state, &owner);
    let plan = plan_at(&state, minute(31)).unwrap();
    assert_eq!(victims(&plan), ["uid-three-low"]);
    // Without evictions nothing is planned.
    let nodes = NODES.map(node_named);
    let off = crate::fixtures::state(&nodes);
    assert_eq!(off.next_claimant(minute(31)), None);
}

fn node_named(name: &str) -> Value {
    node(name, 4, "GiB")
}

#[test]
fn a_gang_within_the_guarantee_gets_all_its_gpus_back() {
    let mut state = cluster();
    fill(&mut state, &["two"; 8]);
    let mut pods = [0, 1].map(|number| member("train", 2, number, 1));
    for pod in &mut pods {
        pod["metadata"]["namespace"] = "one".into();
        refuse(&mut state, pod);
    }
    state.expire_gangs(minute(1));
    let plan = plan_at(&state, minute(1)).unwrap();
    assert_eq!((victims(&plan).len(), plan.claim), (2, Claim::Guarantee));
    // A gang that would exceed the guarantee borrows, and has no pods evicted for it.
    let mut state = cluster();
    fill(&mut state, &["two"; 8]);
    for number in 0..4 {
        let mut pod = member("train", 4, number, 1);
        pod["metadata"]["namespace"] = "one".into();
        refuse(&mut state, &pod);
    }
    state.expire_gangs(minute(1));
    assert_eq!(plan_at(&state, minute(1)), None);
}

/// A step of the simulation.
#[derive(Clone, Copy, Debug)]
enum Step {
    Create(usize),
    Bind,
    Evict,
    End(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4usize).prop_map(Step::Create),
        4 => Just(Step::Bind),
        3 => Just(Step::Evict),
        2 => any::<usize>().prop_map(Step::End),
    ]
}

struct World {
    state: State,
    /// Waiting and bound pods by name.
    pods: BTreeMap<String, Value>,
    created: u64,
    /// Minutes that have passed since the newest pod was created.
    waited: u64,
    evicted: usize,
}

impl World {
    fn create(&mut self, namespace: &str) {
        self.created += 1;
        let pod = pod_of(namespace, &format!("{namespace}-{}", self.created), self.created);
        refuse(&mut self.state, &pod);
        self.pods.insert(format!("{namespace}-{}", self.created), pod);
    }

    fn now(&self) -> Timestamp {
        minute(self.created + self.waited)
    }

    fn names(&self, is_bound: bool) -> Vec<String> {
        let pods = self.pods.iter().filter(|(_, pod)| pod["spec"]["nodeName"].is_string() == is_bound);
        pods.map(|(name, _)| name.clone()).collect()
    }

    fn bind_all(&mut self) -> bool {
        let mut is_bound = false;
        for name in self.names(false) {
            let pod = self.pods[&name].clone();
            if let Some(node) = offered(&mut self.state, &pod) {
                self.pods.insert(name, bind_member(&mut self.state, &pod, &node, 0));
                is_bound = true;
            }
        }
        is_bound
    }

    fn held(&self, namespace: &str) -> usize {
        let is_of =
            |pod: &&Value| pod["metadata"]["namespace"] == namespace && pod["spec"]["nodeName"].is_string();
        self.pods.values().filter(is_of).count()
    }

    /// Makes and carries out the next plan. Each evicted pod is created again.
    fn evict(&mut self) -> bool {
        self.state.update_evictions(self.now());
        let Some(claimant) = self.state.next_claimant(self.now()) else { return false };
        let Some(plan) = self.state.plan_evictions(&claimant, self.now()) else { return false };
        self.state.adopt_evictions(plan, self.now());
        while let Some(order) = self.state.next_eviction(self.now()) {
            self.state.record_eviction(&order.uid, EvictionReply::Accepted, self.now());
            let pod = self.pods.remove(&order.name).unwrap();
            end(&mut self.state, &pod);
            self.evicted += 1;
            let (_, guaranteed) = GUARANTEES.iter().find(|(name, _)| *name == order.namespace).unwrap();
            let guaranteed = guaranteed.unwrap();
            assert!(self.held(&order.namespace) >= guaranteed, "{} is below its guarantee", order.namespace);
            self.create(&order.namespace);
        }
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn borrowing_ends_with_every_namespace_at_its_guarantee(steps in prop::collection::vec(step(), 0..60)) {
        let mut world = World { state: cluster(), pods: BTreeMap::new(), created: 0, waited: 0, evicted: 0 };
        for step in steps {
            match step {
                Step::Create(namespace) => world.create(GUARANTEES[namespace].0),
                Step::Bind => drop(world.bind_all()),
                Step::Evict => drop(world.evict()),
                Step::End(number) => {
                    let bound = world.names(true);
                    if let Some(name) = number.checked_rem(bound.len()).map(|number| bound[number].clone()) {
                        let pod = world.pods.remove(&name).unwrap();
                        end(&mut world.state, &pod);
                    }
                }
            }
            prop_assert!(world.state.ledger().overbooked().is_empty());
        }
        // Nothing else arrives. The evictions end, because none is repaid by another one.
        let before = world.evicted;
        let mut is_quiet = false;
        for round in 0.. {
            let is_bound = world.bind_all();
            if world.evict() || is_bound || world.bind_all() {
                is_quiet = false;
            } else if is_quiet {
                break;
            } else {
                // A pod that did not use its freed GPUs in time gets no other plan for ten minutes.
                world.waited += 11;
                is_quiet = true;
            }
            prop_assert!(round < 50, "evictions go on and on");
        }
        prop_assert!(world.evicted - before <= 8, "more evictions than GPUs");
        if world.held("free") == 0 {
            for (namespace, guaranteed) in GUARANTEES {
                let waits = world.names(false).iter().any(|name| name.starts_with(&format!("{namespace}-")));
                let below = guaranteed.is_some_and(|guaranteed| world.held(namespace) < guaranteed);
                prop_assert!(!(waits && below), "a pod of {namespace} within its guarantee gets no room");
            }
        }
    }
}
