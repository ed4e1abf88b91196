//! Binds, watch events, failures and restarts in any order never grant a GPU twice. A scheduler
//! that reads the cluster again reaches the same ledger.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_core::grant::PodGrant;
use tessera_core::ledger::NodeGrant;
use tessera_core::units::{NodeName, PodUid};
use tessera_scheduler::state::{
    BindOrder, BindOutcome, BindStep, ListGeneration, State, StateEvent, WatchEvent,
};
use tessera_scheduler::verb::verdict_cache::VerdictCache;

use crate::fixtures::*;

const NODES: [&str; 3] = ["a", "b", "c"];
const GPUS_PER_NODE: usize = 2;

/// Percentages above this one mean a part of each GPU of a node.
const PARTS: u64 = 1000;

/// Nodes in the requests. Node `d` does not exist.
const ASKED: [&str; 4] = ["a", "b", "c", "d"];

/// A step of the simulation.
#[derive(Debug, Clone)]
enum Step {
    /// A user creates a pod with this many percent of a GPU. 100 and more mean whole GPUs, 1000 and more a part of each
    /// GPU of a node.
    Create(u64),
    /// Another scheduler places a pod on a node without a grant.
    Bypass(u64, usize),
    /// Filter passes a pod to a node alone and reserves GPUs there.
    Filter(usize, usize),
    /// kube-scheduler binds a pod to a node.
    Bind(usize, usize),
    /// The API server handles a binding in flight, with this outcome.
    Arrive(usize, Answer),
    /// The watch delivers some events, each of them twice if the flag is set.
    Deliver(usize, bool),
    /// A pod ends.
    End(usize),
    /// A pod is deleted.
    Delete(usize),
    /// Time passes.
    Pass(u64),
    /// The scheduler reads a pod from the API server; the answer is in flight.
    Ask(usize),
    /// The answer to such a read arrives, possibly late.
    Answer(usize),
    /// The watch breaks and lists the pods again.
    Relist,
    /// The scheduler stops, and another replica reads the cluster.
    Restart,
    /// The scheduler makes a new forecast from the pods seen so far.
    Forecast,
}

#[derive(Debug, Clone, Copy)]
enum Answer {
    Told,
    /// The API server handled the binding, but the answer is lost.
    Lost,
    /// The request is lost, so there is neither a binding nor an answer.
    Vanished,
    Refused,
}

fn step() -> impl Strategy<Value = Step> {
    let answer = prop_oneof![
        4 => Just(Answer::Told), 1 => Just(Answer::Lost), 1 => Just(Answer::Vanished), 1 => Just(Answer::Refused),
    ];
    prop_oneof![
        4 => prop_oneof![
            (1..10u64).prop_map(|tenths| tenths * 10),
            Just(100),
            Just(200),
            (1..10u64).prop_map(|tenths| PARTS + tenths * 10),
        ].prop_map(Step::Create),
        1 => (1..20u64, any::<usize>()).prop_map(|(tenths, node)| Step::Bypass(tenths * 10, node)),
        3 => (any::<usize>(), any::<usize>()).prop_map(|(pod, node)| Step::Filter(pod, node)),
        6 => (any::<usize>(), any::<usize>()).prop_map(|(pod, node)| Step::Bind(pod, node)),
        5 => (any::<usize>(), answer).prop_map(|(which, answer)| Step::Arrive(which, answer)),
        5 => (1..6usize, any::<bool>()).prop_map(|(count, twice)| Step::Deliver(count, twice)),
        2 => any::<usize>().prop_map(Step::End),
        2 => any::<usize>().prop_map(Step::Delete),
        1 => (1..120u64).prop_map(Step::Pass),
        1 => any::<usize>().prop_map(Step::Ask),
        1 => any::<usize>().prop_map(Step::Answer),
        1 => Just(Step::Relist),
        1 => Just(Step::Restart),
        1 => Just(Step::Forecast),
    ]
}

/// The actual cluster, and a scheduler that learns about it through events.
struct World {
    state: State,
    /// The pods as the API server stores them, by UID.
    pods: BTreeMap<String, Value>,
    /// Events that the watch has not delivered yet.
    pending: VecDeque<StateEvent>,
    /// Bindings in flight: pod, node, annotations.
    sent: Vec<(Value, String, BTreeMap<String, String>)>,
    /// Answers to reads of pods that are in flight.
    answers: Vec<(Value, ListGeneration)>,
    now: u64,
    made: usize,
    memory: VerdictCache,
}

fn fresh() -> State {
    state(&NODES.map(|name| node(name, GPUS_PER_NODE, "GiB")))
}

impl World {
    fn new() -> Self {
        let (pods, pending, sent, answers) = (BTreeMap::new(), VecDeque::new(), Vec::new(), Vec::new());
        Self {
            state: fresh(),
            pods,
            pending,
            sent,
            answers,
            now: 0,
            made: 0,
            memory: VerdictCache::default(),
        }
    }

    fn make(&mut self, percent: u64) -> Value {
        self.made += 1;
        let name = format!("p{:04}", self.made);
        match percent {
            0..100 => share(&name, percent),
            100..PARTS => whole(&name, percent / 100),
            _ => parts(&name, GPUS_PER_NODE as u64, percent - PARTS),
        }
    }

    fn nth(&self, number: usize) -> Option<Value> {
        let count = self.pods.len();
        self.pods.values().nth(number.checked_rem(count)?).cloned()
    }

    fn tell(&mut self, pod: Value) {
        self.pending.push_back(StateEvent::Pod(WatchEvent::Set(parse(&pod))));
        self.pods.insert(pod["metadata"]["uid"].as_str().unwrap().to_owned(), pod);
    }

    fn list(&self) -> impl Iterator<Item = StateEvent> + use<> {
        let pods: Vec<StateEvent> =
            self.pods.values().map(|pod| StateEvent::Pod(WatchEvent::Set(parse(pod)))).collect();
        [StateEvent::Pod(WatchEvent::Listing)]
            .into_iter()
            .chain(pods)
            .chain([StateEvent::Pod(WatchEvent::Listed)])
    }

    /// Resolves uncertain bindings by reading their pods from the API server.
    fn resolve_uncertain(&mut self) {
        for doubt in self.state.uncertain_bindings(at(self.now)) {
            let found = self.pods.values().find(|pod| pod["metadata"]["name"] == doubt.name.as_str());
            self.state.resolve_uncertain(&doubt, found.map(parse), at(self.now));
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Create(percent) => {
                let pod = self.make(percent);
                self.tell(pod);
            }
            Step::Bypass(percent, node) => {
                let mut pod = self.make(percent);
                pod["spec"]["nodeName"] = NODES[node % NODES.len()].into();
                self.tell(pod);
            }
            Step::Filter(pod, node) => {
                let Some(pod) = self.nth(pod) else { return };
                let pod = parse(&pod);
                self.state.release_passed(&PodUid(pod.metadata.uid.clone()));
                self.state.reserve_passed(&pod, NODES[node % NODES.len()], at(self.now));
            }
            Step::Bind(pod, node) => {
                let Some(pod) = self.nth(pod) else { return };
                let node = NODES[node % NODES.len()];
                let args = bind_args(&pod, node);
                let begun = match self.state.begin_bind(&args, at(self.now)) {
                    Ok(BindStep::Fetch) => self.state.begin_bind_with(
                        parse(&pod),
                        self.state.list_generation(),
                        &args,
                        at(self.now),
                    ),
                    Ok(BindStep::Send(order)) => Ok(Some(order)),
                    Ok(BindStep::Done) => Ok(None),
                    Err(refusal) => Err(refusal),
                };
                if let Ok(Some(BindOrder { annotations, .. })) = begun {
                    assert!(!annotations.is_empty(), "a pod with GPUs and no grant");
                    self.sent.push((pod, node.to_owned(), annotations));
                }
            }
            Step::Arrive(which, answer) => {
                if !self.sent.is_empty() {
                    let sent = self.sent.remove(which % self.sent.len());
                    self.arrive(sent, answer);
                }
            }
            Step::Deliver(count, twice) => {
                for _ in 0..count {
                    let Some(event) = self.pending.pop_front() else { return };
                    if twice {
                        self.state.handle(event.clone());
                    }
                    self.state.handle(event);
                }
            }
            Step::End(number) => {
                let Some(mut pod) = self.nth(number).filter(|pod| !pod["spec"]["nodeName"].is_null()) else {
                    return;
                };
                pod["status"]["phase"] = "Succeeded".into();
                self.tell(pod);
            }
            Step::Delete(number) => {
                let Some(pod) = self.nth(number) else { return };
                self.pods.remove(pod["metadata"]["uid"].as_str().unwrap());
                self.pending.push_back(StateEvent::Pod(WatchEvent::Gone(parse(&pod))));
            }
            // No binding is in flight for longer than the timeout of the API server.
            Step::Pass(seconds) => {
                let seconds = if self.sent.is_empty() { seconds } else { 1 };
                self.now += seconds;
                self.resolve_uncertain();
                self.state.expire_gangs(at(self.now));
            }
            Step::Ask(number) => {
                self.answers.extend(self.nth(number).map(|pod| (pod, self.state.list_generation())));
            }
            Step::Answer(number) => {
                if !self.answers.is_empty() {
                    let (answer, asked) = self.answers.remove(number % self.answers.len());
                    self.state.apply_read(parse(&answer), asked);
                }
            }
            Step::Relist => {
                // A watch reports the start of a list before it requests the list.
                let mut list = self.list();
                list.by_ref().take(1).for_each(|listing| self.state.handle(listing));
                self.pending.clear();
                self.pending.extend(list);
            }
            Step::Forecast => {
                if let Some(forecast) = due_forecast(&mut self.state) {
                    let mut shapes = self.memory.shapes_for(&forecast);
                    shapes
                        .iter_mut()
                        .for_each(|shape| shape.refresh(&self.state, 0..self.state.ledger().positions()));
                    self.state.adopt_forecast(forecast);
                    self.memory.insert(shapes);
                }
            }
            Step::Restart => {
                // A binding in flight arrives before another replica leads, or never.
                for sent in std::mem::take(&mut self.sent) {
                    self.arrive(sent, Answer::Lost);
                }
                self.pending.clear();
                self.answers.clear();
                self.state = fresh();
                self.list().for_each(|event| self.state.handle(event));
            }
        }
    }

    fn arrive(
        &mut self,
        (pod, node, annotations): (Value, String, BTreeMap<String, String>),
        answer: Answer,
    ) {
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        let handled = match (answer, self.pods.get(&uid)) {
            (Answer::Vanished | Answer::Refused, _) | (_, None) => None,
            (_, Some(pod)) if !pod["spec"]["nodeName"].is_null() => None,
            (_, Some(pod)) => Some(pod.clone()),
        };
        let outcome = match (&handled, answer) {
            (_, Answer::Lost | Answer::Vanished) => BindOutcome::Unknown,
            (Some(_), _) => BindOutcome::Bound,
            // An earlier attempt bound the pod, as a read from the API server shows.
            (None, Answer::Told)
                if self.pods.get(&uid).is_some_and(|pod| pod["spec"]["nodeName"] == node.as_str()) =>
            {
                let seen = self.pods[&uid].clone();
                self.state.apply_read(parse(&seen), self.state.list_generation());
                BindOutcome::Bound
            }
            (None, _) => BindOutcome::Refused,
        };
        if let Some(mut bound) = handled {
            bound["spec"]["nodeName"] = node.into();
            bound["metadata"]["annotations"] = json!(annotations);
            self.tell(bound);
        }
        self.state.end_bind(&PodUid(uid), outcome, at(self.now));
    }

    /// Checks that cached verdicts do not change any answer.
    fn check_memory(&self) -> Result<(), TestCaseError> {
        let bound =
            [("nvidia.com/use-gpuuuid", "GPU-a-1,GPU-b-0"), ("hami.io/gpu-scheduler-policy", "mutex,spread")];
        let pods = [
            share("q", 10),
            share("q", 60),
            whole("q", 1),
            whole("q", 2),
            parts("q", 2, 40),
            annotated(parts("q", 1, 40), &bound),
        ];
        let bypassing = pod("q", &[("aliyun.com/gpu-mem", "9")]);
        for pod in pods.iter().chain([&bypassing]) {
            let fresh = VerdictCache::default();
            prop_assert_eq!(
                filter_with(&self.state, pod, &ASKED, &self.memory),
                filter_with(&self.state, pod, &ASKED, &fresh)
            );
            let remembered = grades(&self.state, pod, &ASKED, &self.memory);
            prop_assert_eq!(remembered, grades(&self.state, pod, &ASKED, &VerdictCache::default()));
        }
        Ok(())
    }

    /// Checks that no GPU is overbooked, in the actual cluster and in the ledger.
    fn check(&self) -> Result<(), TestCaseError> {
        let mut truth = fresh();
        self.list().for_each(|event| truth.handle(event));
        prop_assert!(
            truth.ledger().overbooked().is_empty(),
            "really overbooked: {:?}",
            truth.ledger().overbooked()
        );
        prop_assert!(self.state.ledger().overbooked().is_empty(), "booked too much");
        for pod in self.pods.keys().map(|uid| PodUid(uid.clone())) {
            let is_booked = self.state.ledger().grant(&pod).is_some();
            prop_assert!(!is_booked || !self.state.is_passed(&pod), "{pod} is booked and reserved");
        }
        for (_, grant) in book(&self.state) {
            for container in &grant.containers {
                prop_assert_eq!(container.gpus().len(), container.holds.len(), "two parts on one GPU");
            }
        }
        Ok(())
    }
}

/// Returns every grant that counts on a node, and whether it is a booking in doubt.
fn book(state: &State) -> Vec<(bool, PodGrant)> {
    let entry = |counted: NodeGrant<'_>| (matches!(counted, NodeGrant::InDoubt(_)), counted.grant().clone());
    let nodes = NODES.map(NodeName::from);
    nodes.iter().flat_map(|node| state.ledger().counted_on(node).map(entry).collect::<Vec<_>>()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_gpu_is_granted_twice_and_a_replay_gives_the_same_ledger(steps in prop::collection::vec(step(), 1..80)) {
        let mut world = World::new();
        for step in steps {
            world.take(step.clone());
            world.check_memory()?;
            world.check().map_err(|error| TestCaseError::fail(format!("after {step:?}: {error}")))?;
        }
        // After all answers and events have arrived, the ledger equals the actual cluster.
        for sent in std::mem::take(&mut world.sent) {
            world.arrive(sent, Answer::Told);
        }
        world.take(Step::Deliver(usize::MAX, false));
        while !world.answers.is_empty() {
            world.take(Step::Answer(0));
        }
        world.now += 1000;
        world.resolve_uncertain();
        world.state.expire_gangs(at(world.now));
        prop_assert_eq!(world.state.ledger().reservations().count(), 0);
        let mut replayed = fresh();
        world.list().for_each(|event| replayed.handle(event));
        prop_assert_eq!(book(&world.state), book(&replayed));
        prop_assert_eq!(world.state.quota().1, replayed.quota().1);
    }
}
