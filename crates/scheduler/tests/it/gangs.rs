//! Pods of a gang get their GPUs together or not at all, in any order of arrivals, binds, ends and restarts.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_core::units::{NodeName, PodUid};
use tessera_scheduler::state::{BindOutcome, State, StateEvent, WatchEvent};
use tessera_wire::foreign::pod_group::PodGroup;
use tessera_wire::tessera::gang::GangOrigin;

use crate::fixtures::*;

fn two_nodes() -> State {
    state(&[node("a", 8, "GiB"), node("b", 8, "GiB")])
}

const NODES: [&str; 2] = ["a", "b"];

#[test]
fn all_pods_of_a_gang_get_their_places_at_once() {
    let mut state = two_nodes();
    let (first, second) = (member("train", 2, 0, 8), member("train", 2, 1, 8));
    set_pod(&mut state, &first);
    let answer = ask(&mut state, &first, &NODES, 0);
    assert_eq!(reason(&answer), "gang team/train waits for its pods: 1 of 2 exist");
    assert!(state.begin_bind(&bind_args(&first, "a"), at(0)).is_err(), "no bind without a place");
    set_pod(&mut state, &second);
    let answer = ask(&mut state, &second, &NODES, 1);
    assert_eq!(passed(&answer).len(), 1);
    // No other pod gets the GPUs of the member that is not bound yet.
    let answer = ask(&mut state, &whole("other", 1), &NODES, 1);
    assert_eq!(passed(&answer), [""; 0]);
    let place_of_second = passed(&ask(&mut state, &second, &NODES, 1));
    let refused = state.begin_bind(&bind_args(&first, &place_of_second[0]), at(1));
    assert!(
        refused.unwrap_err().to_string().starts_with("the place of pod uid-train-0 in its gang is on node")
    );
    for pod in [&second, &first] {
        let node = passed(&ask(&mut state, pod, &NODES, 2));
        bind_member(&mut state, pod, &node[0], 2);
    }
    assert!(state.ledger().nodes().all(|node| node.idle().is_empty()));
    assert_eq!(state.ledger().reservations().count(), 0);
}

#[test]
fn a_pod_that_the_watch_has_not_shown_counts() {
    let mut state = two_nodes();
    let (first, second) = (member("train", 2, 0, 8), member("train", 2, 1, 8));
    assert_eq!(passed(&ask(&mut state, &first, &NODES, 0)), [""; 0]);
    assert_eq!(passed(&ask(&mut state, &second, &NODES, 0)).len(), 1);
    // Pods that the watch never shows are forgotten with their places.
    state.expire_gangs(at(31));
    assert_eq!(state.ledger().reservations().count(), 0);
}

#[test]
fn a_gang_that_does_not_fit_takes_nothing() {
    let mut state = two_nodes();
    bind(&mut state, &whole("running", 1), "a");
    let pods = [0, 1].map(|number| member("train", 2, number, 8));
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    for pod in &pods {
        let answer = ask(&mut state, pod, &NODES, 0);
        assert_eq!(reason(&answer), "gang team/train waits for GPUs for all of its 2 pods at the same time");
    }
    assert_eq!(passed(&ask(&mut state, &whole("other", 8), &NODES, 0)), ["b"]);
}

#[test]
fn a_gang_is_not_placed_beyond_the_quota_of_its_namespace() {
    let mut state = two_nodes();
    let limits =
        tessera_wire::foreign::quota::parse(r#"{"team":{"percent":1200}}"#, "the ConfigMap").unwrap();
    state.handle(StateEvent::Quota(limits));
    let pods = [0, 1].map(|number| member("train", 2, number, 8));
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    let said = reason(&ask(&mut state, &pods[0], &NODES, 0));
    assert!(said.starts_with("gang team/train as a whole: "), "{said}");
    assert_eq!(state.ledger().reservations().count(), 0);
}

#[test]
fn a_member_is_sent_only_to_nodes_that_kube_scheduler_offers() {
    let mut state = two_nodes();
    let pods = [0, 1].map(|number| member("train", 2, number, 8));
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    assert_eq!(passed(&ask(&mut state, &pods[0], &["b"], 0)), ["b"]);
    // Equal members exchange their places.
    assert_eq!(passed(&ask(&mut state, &pods[1], &["b"], 0)), ["b"]);
    assert_eq!(passed(&ask(&mut state, &pods[0], &NODES, 0)), ["a"]);
    bind_member(&mut state, &pods[0], "a", 0);
    let answer = ask(&mut state, &pods[1], &["a"], 0);
    assert_eq!(passed(&answer), [""; 0], "{answer:?}");
}

#[test]
fn unused_reservations_end_with_an_event_that_names_the_missing_pods() {
    let mut state = two_nodes();
    let pods = [0, 1].map(|number| member("train", 2, number, 8));
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    let node = passed(&ask(&mut state, &pods[0], &NODES, 0));
    bind_member(&mut state, &pods[0], &node[0], 0);
    assert!(state.expire_gangs(at(119)).is_empty());
    let notices = state.expire_gangs(at(120));
    assert_eq!(notices.len(), 1);
    assert!(notices[0].message.contains("Missing: train-1."), "{}", notices[0].message);
    assert_eq!((notices[0].pods.len(), state.unused_reservations()), (2, 1));
    assert_eq!(passed(&ask(&mut state, &whole("other", 8), &NODES, 121)).len(), 1, "the GPUs are free");
    // The gang has a pod on a node, so it tries again at once.
    assert_eq!(passed(&ask(&mut state, &pods[1], &NODES, 121)).len(), 1);
}

#[test]
fn a_gang_that_used_no_reservation_pauses() {
    let mut state = two_nodes();
    let pods = [0, 1].map(|number| member("train", 2, number, 8));
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    assert_eq!(passed(&ask(&mut state, &pods[0], &NODES, 0)).len(), 1);
    let notices = state.expire_gangs(at(120));
    assert!(notices[0].message.contains("Missing: train-0, train-1."), "{}", notices[0].message);
    let answer = ask(&mut state, &pods[1], &NODES, 121);
    assert!(answer.error.contains("was not complete in time"), "{answer:?}");
    assert_eq!(passed(&ask(&mut state, &pods[1], &NODES, 241)).len(), 1);
}

#[test]
fn a_gang_with_pods_that_never_come_is_reported_once() {
    let mut state = two_nodes();
    set_pod(&mut state, &member("train", 3, 0, 8));
    assert!(state.expire_gangs(at(0)).is_empty());
    let notices = state.expire_gangs(at(120));
    assert!(notices[0].message.contains("1 of 3 exist"), "{}", notices[0].message);
    assert!(state.expire_gangs(at(300)).is_empty());
}

#[test]
fn a_new_leader_keeps_the_gpus_of_a_started_gang() {
    let pods = [0, 1].map(|number| member("train", 2, number, 8));
    let mut state = two_nodes();
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    let node = passed(&ask(&mut state, &pods[1], &NODES, 0));
    let bound = bind_member(&mut state, &pods[1], &node[0], 0);
    let mut restarted = two_nodes();
    [&bound, &pods[0]].into_iter().for_each(|pod| set_pod(&mut restarted, pod));
    restarted.plan_started_gangs(at(0));
    assert_eq!(passed(&ask(&mut restarted, &whole("other", 1), &NODES, 0)), [""; 0]);
    let node = passed(&ask(&mut restarted, &pods[0], &NODES, 0));
    bind_member(&mut restarted, &pods[0], &node[0], 0);
    assert!(restarted.ledger().nodes().all(|node| node.idle().is_empty()));
}

#[test]
fn a_refused_binding_leaves_the_place_to_the_gang() {
    let mut state = two_nodes();
    let pods = [0, 1].map(|number| member("train", 2, number, 8));
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    let node = passed(&ask(&mut state, &pods[0], &NODES, 0));
    bind_member(&mut state, &pods[0], &node[0], 0);
    let node = passed(&ask(&mut state, &pods[1], &NODES, 0));
    state.begin_bind(&bind_args(&pods[1], &node[0]), at(0)).unwrap();
    state.end_bind(&"uid-train-1".into(), BindOutcome::Refused, at(0));
    assert_eq!(passed(&ask(&mut state, &whole("other", 1), &NODES, 0)), [""; 0]);
    assert_eq!(passed(&ask(&mut state, &pods[1], &NODES, 0)), node);
}

#[test]
fn a_required_level_keeps_a_gang_in_one_rack() {
    let racked = |name: &str, rack: &str| {
        let mut node = node(name, 8, "GiB");
        node["metadata"]["labels"]["example.com/rack"] = rack.into();
        node
    };
    let mut state = state(&[racked("a", "one"), racked("b", "two"), racked("c", "two")]);
    let names = ["a", "b", "c"];
    let pods = [0, 1, 2].map(|number| {
        let mut pod = member("train", 2, number, 8);
        pod["metadata"]["annotations"]["tessera.dev/gang-topology"] = "required=example.com/rack".into();
        pod
    });
    pods[..2].iter().for_each(|pod| set_pod(&mut state, pod));
    assert_ne!(passed(&ask(&mut state, &pods[0], &names, 0)), ["a"]);
    assert_ne!(passed(&ask(&mut state, &pods[1], &names, 0)), ["a"]);
    set_pod(&mut state, &pods[2]);
    let said = reason(&ask(&mut state, &pods[2], &names, 0));
    assert_eq!(
        said,
        "gang team/train has more pods than its size; this one waits until the others are bound"
    );
}

#[test]
fn a_malformed_gang_is_refused_with_the_remedy() {
    let mut state = two_nodes();
    let mut pod = member("train", 2, 0, 1);
    pod["metadata"]["annotations"]["tessera.dev/gang"] = "train".into();
    set_pod(&mut state, &pod);
    let said = reason(&ask(&mut state, &pod, &NODES, 0));
    assert!(said.starts_with("tessera.dev/gang: found \"train\"; write NAME/SIZE"), "{said}");
    pod["metadata"]["annotations"]["tessera.dev/gang"] = "2".into();
    let said = reason(&ask(&mut state, &pod, &NODES, 0));
    assert!(said.contains("belongs to no job"), "{said}");
}

#[test]
fn a_group_without_a_known_size_is_placed_like_other_pods() {
    let mut state = two_nodes();
    let mut pod = whole("worker", 8);
    pod["metadata"]["labels"] = json!({ "scheduling.x-k8s.io/pod-group": "train" });
    set_pod(&mut state, &pod);
    assert_eq!(passed(&ask(&mut state, &pod, &NODES, 0)), ["a", "b"]);
}

/// Returns a pod that names a PodGroup of the coscheduling plugin.
fn grouped(number: usize, gpus: u64) -> Value {
    let mut pod = whole(&format!("worker-{number}"), gpus);
    pod["metadata"]["labels"] = json!({ "scheduling.x-k8s.io/pod-group": "train" });
    pod["metadata"]["annotations"] = json!({});
    pod["metadata"]["creationTimestamp"] = format!("2026-01-01T00:00:{number:02}Z").into();
    pod
}

fn group_event(state: &mut State, event: WatchEvent<PodGroup>) {
    state.handle(StateEvent::PodGroup(GangOrigin::Coscheduling, event));
}

fn group_of(min_member: usize) -> PodGroup {
    PodGroup::new(GangOrigin::Coscheduling, "team", "train", &json!({ "minMember": min_member }))
}

#[test]
fn a_pod_group_object_states_the_size_of_a_gang() {
    let mut state = two_nodes();
    let pods = [0, 1, 2].map(|number| grouped(number, 4));
    set_pod(&mut state, &pods[0]);
    group_event(&mut state, WatchEvent::Listing);
    group_event(&mut state, WatchEvent::Listed);
    let said = reason(&ask(&mut state, &pods[0], &NODES, 0));
    assert_eq!(said, "gang team/train waits for its PodGroup, which does not exist");

    group_event(&mut state, WatchEvent::Set(group_of(2)));
    let said = reason(&ask(&mut state, &pods[0], &NODES, 0));
    assert_eq!(said, "gang team/train waits for its pods: 1 of 2 exist");
    pods[1..].iter().for_each(|pod| set_pod(&mut state, pod));
    // The gang is complete with the first two pods, and the third follows them.
    let said = reason(&ask(&mut state, &pods[2], &NODES, 0));
    assert!(said.contains("has more pods than its size"), "{said}");
    for pod in &pods {
        let node = passed(&ask(&mut state, pod, &NODES, 0));
        bind_member(&mut state, pod, &node[0], 0);
    }
}

#[test]
fn a_pod_group_that_grows_takes_the_reservation_back() {
    let mut state = two_nodes();
    group_event(&mut state, WatchEvent::Set(group_of(2)));
    group_event(&mut state, WatchEvent::Listed);
    let pods = [0, 1].map(|number| grouped(number, 8));
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    assert_eq!(passed(&ask(&mut state, &pods[0], &NODES, 0)).len(), 1);
    group_event(&mut state, WatchEvent::Set(group_of(3)));
    assert_eq!(state.ledger().reservations().count(), 0);
    let said = reason(&ask(&mut state, &pods[1], &NODES, 0));
    assert_eq!(said, "gang team/train waits for its pods: 2 of 3 exist");
}

#[test]
fn a_list_without_a_pod_group_and_an_api_that_is_gone_are_noticed() {
    let mut state = two_nodes();
    let pod = grouped(0, 8);
    set_pod(&mut state, &pod);
    group_event(&mut state, WatchEvent::Set(group_of(2)));
    group_event(&mut state, WatchEvent::Listed);
    assert!(reason(&ask(&mut state, &pod, &NODES, 0)).contains("1 of 2 exist"));
    group_event(&mut state, WatchEvent::Listing);
    assert!(reason(&ask(&mut state, &pod, &NODES, 0)).contains("1 of 2 exist"), "the list has only begun");
    group_event(&mut state, WatchEvent::Listed);
    assert!(reason(&ask(&mut state, &pod, &NODES, 0)).contains("PodGroup, which does not exist"));
    state.handle(StateEvent::PodGroupsWithdrawn(GangOrigin::Coscheduling));
    assert_eq!(passed(&ask(&mut state, &pod, &NODES, 0)), ["a", "b"]);
}

#[test]
fn gpus_that_become_free_are_held_back_for_the_first_waiting_gang_for_a_while() {
    let mut state = two_nodes();
    let small: Vec<Value> = (0..16).map(|number| whole(&format!("small-{number}"), 1)).collect();
    let running: Vec<Value> =
        (small.iter().enumerate()).map(|(number, pod)| bind(&mut state, pod, NODES[number / 8])).collect();
    let pods = [0, 1].map(|number| member("train", 2, number, 8));
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    reason(&ask(&mut state, &pods[0], &NODES, 0));
    state.expire_gangs(at(1));
    for pod in &running {
        end(&mut state, pod);
        let answer = ask(&mut state, &whole("late", 1), &NODES, 2);
        assert_eq!(passed(&answer), [""; 0], "a small pod takes GPUs of the gang");
    }
    assert_eq!(passed(&ask(&mut state, &pods[0], &NODES, 3)).len(), 1);
    assert_eq!(passed(&ask(&mut state, &pods[1], &NODES, 3)).len(), 1);

    // A gang that gets no room in time holds nothing back for as long, and then again.
    let mut state = two_nodes();
    bind(&mut state, &whole("running", 1), "a");
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    reason(&ask(&mut state, &pods[0], &NODES, 0));
    state.expire_gangs(at(1));
    let late = whole("late", 1);
    assert_eq!(passed(&ask(&mut state, &late, &NODES, 2)), [""; 0]);
    let said = state.waits_for_reservation(&question(&late, &NODES)).unwrap();
    assert!(said.starts_with("suitable GPUs are reserved for gang team/train"), "{said}");
    assert!(state.yields_hold_back(1) && !state.yields_hold_back(0));
    state.expire_gangs(at(601));
    assert_eq!(passed(&ask(&mut state, &whole("late", 1), &NODES, 602)).len(), 2);
    reason(&ask(&mut state, &pods[0], &NODES, 603));
    state.expire_gangs(at(604));
    assert_eq!(passed(&ask(&mut state, &whole("late", 1), &NODES, 605)).len(), 2);
    state.expire_gangs(at(1201));
    assert_eq!(passed(&ask(&mut state, &whole("late", 1), &NODES, 1202)), [""; 0]);
}

#[test]
fn a_hold_back_of_the_same_gpus_changes_no_node() {
    let mut state = two_nodes();
    bind(&mut state, &whole("running", 1), "a");
    let pods = [0, 1].map(|number| member("train", 2, number, 8));
    pods.iter().for_each(|pod| set_pod(&mut state, pod));
    reason(&ask(&mut state, &pods[0], &NODES, 0));
    state.expire_gangs(at(1));
    assert_eq!(state.ledger().reservations().count(), 1);
    let held = state.ledger().last_change();
    state.expire_gangs(at(2));
    let late = whole("late", 1);
    set_pod(&mut state, &late);
    end(&mut state, &late);
    assert_eq!(state.ledger().last_change(), held);
}

#[test]
fn waiting_gangs_hold_back_gpus_in_turns() {
    let mut state = two_nodes();
    bind(&mut state, &whole("running-a", 1), "a");
    bind(&mut state, &whole("running-b", 1), "b");
    for gang in ["one", "two"] {
        let pods = [0, 1].map(|number| member(gang, 2, number, 8));
        pods.iter().for_each(|pod| set_pod(&mut state, pod));
        reason(&ask(&mut state, &pods[0], &NODES, 0));
    }
    let late = whole("late", 1);
    let mut owner_at = |seconds: u64| {
        state.expire_gangs(at(seconds));
        let said = state.waits_for_reservation(&question(&late, &NODES)).unwrap_or_default();
        said.split_whitespace().find(|word| word.starts_with("team/")).map(|gang| gang.to_owned())
    };
    assert_eq!(owner_at(1).as_deref(), Some("team/one,"));
    assert_eq!(owner_at(601).as_deref(), Some("team/two,"));
    assert_eq!(owner_at(1201).as_deref(), Some("team/one,"));
    assert_eq!(owner_at(1801).as_deref(), Some("team/two,"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Small pods take every GPU that is free, and each runs for a while. The gang starts nevertheless: pods that run for
    /// longer than a hold-back only delay it until a later one.
    #[test]
    fn a_gang_starts_below_a_stream_of_small_pods(
        first in prop::collection::vec(1..1500u64, 16),
        later in prop::collection::vec(1..500u64, 1..40),
    ) {
        let mut state = two_nodes();
        let mut ends: Vec<(u64, Value)> = Vec::new();
        let (mut made, mut now) = (0, 0);
        let pods = [0, 1].map(|number| member("train", 2, number, 8));
        pods.iter().for_each(|pod| set_pod(&mut state, pod));
        let is_bound = loop {
            while let Some((_, pod)) = ends.pop_if(|(end, _)| *end <= now) {
                end(&mut state, &pod);
            }
            // A stream of small pods takes what is free.
            loop {
                let pod = whole(&format!("small-{made}"), 1);
                let Some(node) = passed(&filter(&state, &pod, &NODES)).first().cloned() else { break };
                let time = first.get(made).copied().unwrap_or_else(|| later[made % later.len()]);
                ends.push((now + time, bind(&mut state, &pod, &node)));
                ends.sort_by_key(|(end, _)| std::cmp::Reverse(*end));
                made += 1;
            }
            let nodes = passed(&ask(&mut state, &pods[0], &NODES, now));
            if !nodes.is_empty() {
                break true;
            }
            if now > 6000 {
                break false;
            }
            state.expire_gangs(at(now));
            now += 20;
        };
        prop_assert!(is_bound, "the gang starves");
    }
}

/// A step of the simulation.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A user creates the next pod of a gang.
    Create(usize),
    /// kube-scheduler tries a pod and binds it if filter passes a node.
    Try(usize),
    /// A gang whose members all run ends.
    End(usize),
    /// A pod without a gang comes, and ends before the next step.
    Other,
    /// Another replica reads the cluster.
    Restart,
    /// Time passes.
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4usize).prop_map(Step::Create),
        8 => any::<usize>().prop_map(Step::Try),
        1 => (0..4usize).prop_map(Step::End),
        1 => Just(Step::Other),
        1 => Just(Step::Restart),
        1 => (1..200u64).prop_map(Step::Pass),
    ]
}

/// Size and GPUs of each gang. Two of them never fit at the same time.
const GANGS: [(usize, u64); 4] = [(2, 8), (2, 8), (3, 4), (4, 3)];

struct World {
    state: State,
    pods: BTreeMap<String, Value>,
    created: [usize; 4],
    ended: [bool; 4],
    now: u64,
}

impl World {
    fn new() -> Self {
        Self { state: two_nodes(), pods: BTreeMap::new(), created: [0; 4], ended: [false; 4], now: 0 }
    }

    fn of(&self, gang: usize) -> Vec<String> {
        let prefix = format!("g{gang}-");
        self.pods.keys().filter(|name| name.starts_with(&prefix)).cloned().collect()
    }

    fn is_bound(&self, name: &str) -> bool {
        self.pods[name]["spec"]["nodeName"].is_string()
    }

    fn try_pod(&mut self, name: &str) {
        let pod = self.pods[name].clone();
        if self.is_bound(name) {
            return;
        }
        if let Some(node) = passed(&ask(&mut self.state, &pod, &NODES, self.now)).first() {
            let bound = bind_member(&mut self.state, &pod, node, self.now);
            self.pods.insert(name.to_owned(), bound);
        }
    }

    fn end_gang(&mut self, gang: usize) {
        let names = self.of(gang);
        if self.created[gang] == GANGS[gang].0 && names.iter().all(|name| self.is_bound(name)) {
            for name in names {
                let pod = self.pods.remove(&name).unwrap();
                let gone = WatchEvent::Gone(parse(&pod));
                self.state.handle(StateEvent::Pod(gone));
            }
            self.ended[gang] = true;
        }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Create(gang) => {
                let (size, gpus) = GANGS[gang];
                if self.created[gang] < size {
                    let pod = member(&format!("g{gang}"), size, self.created[gang], gpus);
                    self.created[gang] += 1;
                    set_pod(&mut self.state, &pod);
                    self.pods.insert(pod["metadata"]["name"].as_str().unwrap().to_owned(), pod);
                }
            }
            Step::Try(number) => {
                let waiting: Vec<String> =
                    self.pods.keys().filter(|name| !self.is_bound(name)).cloned().collect();
                if let Some(name) = number.checked_rem(waiting.len()).map(|number| &waiting[number]) {
                    self.try_pod(name);
                }
            }
            Step::End(gang) => self.end_gang(gang),
            Step::Other => drop(ask(&mut self.state, &whole("other", 1), &NODES, self.now)),
            Step::Restart => {
                self.state = two_nodes();
                self.pods.values().for_each(|pod| set_pod(&mut self.state, pod));
                self.state.plan_started_gangs(at(self.now));
            }
            Step::Pass(seconds) => {
                self.now += seconds;
                self.state.expire_gangs(at(self.now));
            }
        }
    }

    /// Checks that no GPU is granted twice, and that a gang has all its GPUs or none before a deadline passes.
    fn check(&self, is_in_time: bool) {
        assert!(self.state.ledger().overbooked().is_empty());
        for (gang, (size, _)) in GANGS.iter().enumerate() {
            let names = self.of(gang);
            let held = names.iter().filter(|name| {
                let uid = PodUid(format!("uid-{name}"));
                self.state.ledger().grant(&uid).is_some() || self.state.ledger().place(&uid).is_some()
            });
            let held = held.count();
            assert!(!is_in_time || held == 0 || held == *size, "gang {gang} holds the GPUs of {held} pods");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn gangs_never_hold_a_part_and_all_of_them_run(steps in prop::collection::vec(step(), 0..60)) {
        let mut world = World::new();
        let mut is_in_time = true;
        for step in steps {
            is_in_time &= !matches!(step, Step::Pass(_));
            world.apply(step);
            world.check(is_in_time);
        }
        // Once all pods exist and gangs end, every gang runs.
        for gang in 0..GANGS.len() {
            (0..4).for_each(|_| world.apply(Step::Create(gang)));
        }
        for _ in 0..16 {
            world.apply(Step::Pass(130));
            let names: Vec<String> = world.pods.keys().cloned().collect();
            names.iter().for_each(|name| world.try_pod(name));
            (0..GANGS.len()).for_each(|gang| world.end_gang(gang));
        }
        prop_assert_eq!(world.ended, [true; 4], "{:?}", world.pods.keys());
        prop_assert_eq!(world.state.ledger().node(&NodeName::from("a")).unwrap().idle().len(), 8);
    }
}
