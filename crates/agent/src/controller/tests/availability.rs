//! The announcements of an agent that starts or ends, and when it ends.

use std::time::Duration;

use tessera_core::units::PodUid;
use tessera_wire::foreign::objects::{Amount, Node, Pod};
use tessera_wire::tessera::agent_address::{UNAVAILABLE_KEY, is_agent_unavailable};

use super::world::{found, pod, settings, share};
use crate::controller::{Action, Agent, AgentSettings, CallId, Event, EventTime, ShellError};

/// An agent, and the node's object as its writes leave it.
struct Stage {
    agent: Agent,
    node: Node,
    now: u64,
    is_api_up: bool,
    has_stopped: bool,
}

impl Stage {
    /// Starts an agent on a node with these annotations of an earlier one.
    fn new(node: Node, settings: AgentSettings) -> Self {
        let agent = Agent::new(settings);
        let mut stage = Self { agent, node, now: 0, is_api_up: true, has_stopped: false };
        stage.event(Event::Gpus(Ok(found())));
        stage.event(Event::Pods(Vec::new()));
        stage.event(Event::Node(Box::new(stage.node.clone())));
        stage
    }

    fn serving() -> Self {
        let mut stage = Self::new(Node::default(), settings());
        stage.connect();
        stage.pass(5);
        stage
    }

    /// Lets the kubelet list its pods and open all streams.
    fn connect(&mut self) {
        self.event(Event::PodResourcesListed(Ok(Vec::new())));
        for resource in self.agent.settings.resources().collect::<Vec<_>>() {
            self.event(Event::StreamOpened(resource));
        }
    }

    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += 1;
            self.event(Event::Tick);
        }
    }

    fn event(&mut self, event: Event) {
        let now = EventTime { elapsed: Duration::from_secs(self.now), unix_nanos: 17 };
        for action in self.agent.handle(now, event) {
            match action {
                Action::PatchNode(_) if !self.is_api_up => {
                    self.event(Event::NodePatched(Err(ShellError::ApiServer("away".into()))));
                }
                Action::PatchNode(patch) => {
                    self.node.metadata.annotations.extend(patch.annotations);
                    self.node.metadata.labels.extend(patch.labels);
                    for (resource, amount) in patch.status {
                        self.node.status.capacity.insert(resource.clone(), Amount(amount.clone()));
                        self.node.status.allocatable.insert(resource, Amount(amount));
                    }
                    self.event(Event::NodePatched(Ok(())));
                    self.event(Event::Node(Box::new(self.node.clone())));
                }
                Action::Stop => {
                    assert!(!std::mem::replace(&mut self.has_stopped, true), "stopped twice");
                }
                _ => {}
            }
        }
    }

    fn apply(&mut self, pod: &Pod) {
        self.event(Event::PodApplied(Box::new(pod.clone())));
    }

    /// Asserts whether schedulers may bind pods, and whether the agent has ended.
    fn check(&self, is_available: bool, has_stopped: bool) {
        assert_eq!(is_agent_unavailable(&self.node), !is_available, "{:?}", self.node.metadata.annotations);
        assert_eq!(self.has_stopped, has_stopped);
    }
}

fn small_pod(uid: &str) -> Pod {
    pod("small", uid, &[("main", share(10, 2))])
}

#[test]
fn an_agent_announces_its_end_and_serves_pods_that_were_bound_before() {
    let mut stage = Stage::serving();
    stage.check(true, false);
    stage.event(Event::StopRequested);
    stage.check(false, false);
    let mut late = small_pod("late");
    stage.apply(&late);
    stage.pass(5);
    stage.check(false, false);
    late.status.start_time = Some("2026-11-15T05:00:00Z".to_owned());
    stage.apply(&late);
    stage.check(false, true);
}

#[test]
fn pods_that_need_no_device_of_the_agent_do_not_delay_its_end() {
    let ended = |stage: &mut Stage| {
        stage.event(Event::StopRequested);
        stage.pass(1);
        stage.check(false, false);
        stage.pass(1);
        stage.check(false, true);
    };
    let mut stage = Stage::serving();
    stage.apply(&pod("plain", "plain", &[("main", Vec::new())]));
    let mut failed = small_pod("failed");
    failed.status.phase = "Failed".into();
    stage.apply(&failed);
    let mut deleted = small_pod("deleted");
    deleted.metadata.deletion_timestamp = Some("2026-11-15T05:00:00Z".to_owned());
    stage.apply(&deleted);
    stage.apply(&small_pod("gone"));
    stage.event(Event::PodDeleted(PodUid("gone".into())));
    ended(&mut stage);
}

#[test]
fn a_call_of_the_kubelet_is_answered_before_the_end() {
    let mut stage = Stage::serving();
    stage.event(Event::StopRequested);
    stage.pass(1);
    let resource = stage.agent.settings.resources().next().unwrap();
    stage.event(Event::Allocate(CallId(1), resource, ["nothing".to_owned()].into()));
    stage.pass(2);
    stage.check(false, false);
    stage.pass(5);
    stage.check(false, true);
}

#[test]
fn an_agent_does_not_wait_forever() {
    let mut stage = Stage::serving();
    stage.apply(&small_pod("stuck"));
    stage.event(Event::StopRequested);
    stage.pass(19);
    stage.check(false, false);
    stage.pass(1);
    stage.check(false, true);
}

#[test]
fn an_agent_that_cannot_announce_its_end_ends_at_once() {
    let mut stage = Stage::serving();
    stage.is_api_up = false;
    stage.event(Event::StopRequested);
    stage.check(true, true);
    let mut stage = Stage::new(Node::default(), settings());
    stage.event(Event::StopRequested);
    stage.check(true, true);
    let mut stage = Stage::new(Node::default(), AgentSettings { advertise: None, ..settings() });
    stage.connect();
    stage.pass(5);
    stage.event(Event::StopRequested);
    stage.check(true, true);
}

#[test]
fn the_next_agent_serves_when_the_kubelet_knows_its_devices() {
    let mut earlier = Stage::serving();
    earlier.event(Event::StopRequested);
    for is_same_address in [false, true] {
        let mut next = settings();
        if let Some(address) = next.advertise.as_mut().filter(|_| !is_same_address) {
            address.url = "http://10.0.0.6:5678".into();
        }
        let mut stage = Stage::new(earlier.node.clone(), next);
        stage.check(false, false);
        stage.pass(100);
        stage.check(false, false);
        stage.connect();
        stage.check(false, false);
        stage.pass(1);
        stage.check(true, false);
        assert_eq!(stage.node.metadata.annotations[UNAVAILABLE_KEY], "");
    }
}

#[test]
fn a_resource_that_the_kubelet_does_not_ask_for_delays_the_others_for_a_while() {
    let mut earlier = Stage::serving();
    earlier.event(Event::StopRequested);
    let mut stage = Stage::new(earlier.node.clone(), settings());
    stage.event(Event::PodResourcesListed(Ok(Vec::new())));
    let first = stage.agent.settings.resources().next().unwrap();
    stage.event(Event::StreamOpened(first));
    stage.pass(29);
    stage.check(false, false);
    stage.pass(1);
    stage.check(true, false);
}
