//! Who is not there is told once, and again only after a change.

use std::time::Duration;

use tessera_node::device_plugin::RegistrationMode;
use tessera_wire::kubelet::device_id::Resource;

use super::world::{found, settings};
use crate::controller::{Action, Agent, Event, EventTime};

const NO_NODE: &str = "the cluster has no node named node-a: its GPUs are not announced and no pod can be served. \
                       Give the name that kubectl get nodes shows, by --node-name or NODE_NAME";
const NO_KUBELET: &str = "no kubelet has come to /var/lib/kubelet/plugins_registry for 30 s: no pod gets GPUs here. \
                          --kubelet-root names the kubelet's root directory (its own --root-dir); in a pod that \
                          directory must be mounted under the same name";

/// What is said when these things happen, a second apart or later, with when it is said.
fn said(agent: &mut Agent, happenings: impl IntoIterator<Item = (u64, Event)>) -> Vec<(u64, String)> {
    let mut said = Vec::new();
    for (second, event) in happenings {
        let now = EventTime { elapsed: Duration::from_secs(second), unix_nanos: 17 };
        said.extend(agent.handle(now, event).into_iter().filter_map(|action| match action {
            Action::Warn(what) => Some((second, what)),
            _ => None,
        }));
    }
    said
}

fn ticks(seconds: std::ops::Range<u64>) -> impl Iterator<Item = (u64, Event)> {
    seconds.map(|second| (second, Event::Tick))
}

/// An agent that has found its GPUs, and whose kubelet answers so when asked for its books.
fn agent_with_gpus(list: Result<(), &str>) -> Agent {
    let mut agent = Agent::new(settings());
    let listed = list.map(|()| Vec::new()).map_err(str::to_owned);
    said(
        &mut agent,
        [(0, Event::Gpus(Ok(found()))), (0, Event::Pods(Vec::new())), (0, Event::PodResourcesListed(listed))],
    );
    agent
}

fn open_all_streams(agent: &mut Agent, second: u64) {
    let resources: Vec<Resource> = agent.resources().collect();
    said(agent, resources.into_iter().map(|resource| (second, Event::StreamOpened(resource))));
}

#[test]
fn a_node_that_does_not_exist_is_told_once_and_again_when_it_is_gone_again() {
    let mut agent = agent_with_gpus(Ok(()));
    let missing = |second| (second, Event::NodeMissing);
    let there = |second| (second, Event::Node(Box::default()));
    assert_eq!(said(&mut agent, [missing(1), missing(2), missing(300)]), [(1, NO_NODE.to_owned())]);
    assert_eq!(agent.readiness().unwrap_err(), "the cluster has no node named node-a");
    assert_eq!(said(&mut agent, [there(301), there(302)]), []);
    assert_ne!(agent.readiness().unwrap_err(), "the cluster has no node named node-a");
    assert_eq!(said(&mut agent, [missing(303), missing(304)]), [(303, NO_NODE.to_owned())]);
}

#[test]
fn nothing_is_written_to_a_node_that_does_not_exist() {
    let mut agent = agent_with_gpus(Ok(()));
    let at = |second| EventTime { elapsed: Duration::from_secs(second), unix_nanos: 17 };
    let writes =
        |actions: Vec<Action>| actions.iter().filter(|action| matches!(action, Action::PatchNode(_))).count();
    assert_eq!(writes(agent.handle(at(1), Event::Node(Box::default()))), 1);
    agent.handle(at(2), Event::NodeMissing);
    assert_eq!(writes(agent.handle(at(3), Event::NodePatched(Err("not found".into())))), 0);
    assert_eq!((4..60).map(|second| writes(agent.handle(at(second), Event::Tick))).sum::<usize>(), 0);
    assert_eq!(writes(agent.handle(at(61), Event::Node(Box::default()))), 1, "the new one gets it all");
}

#[test]
fn a_kubelet_that_is_not_there_is_told_once_with_the_remedy() {
    let mut agent = agent_with_gpus(Err("no such socket"));
    assert_eq!(said(&mut agent, ticks(1..600)), [(31, NO_KUBELET.to_owned())]);
}

#[test]
fn the_way_to_the_kubelet_is_named_as_it_is_set() {
    let mut agent = Agent::new(crate::controller::AgentSettings {
        registration: RegistrationMode::KubeletSocket("/k/device-plugins".into()),
        ..settings()
    });
    said(&mut agent, [(0, Event::Gpus(Ok(found())))]);
    let told = said(&mut agent, ticks(1..600));
    let [(31, what)] = told.as_slice() else { panic!("{told:?}") };
    assert!(what.starts_with("no kubelet has answered at /k/device-plugins/kubelet.sock for 30 s"), "{what}");
}

#[test]
fn a_kubelet_that_comes_in_time_is_not_spoken_of() {
    let mut agent = agent_with_gpus(Ok(()));
    assert_eq!(said(&mut agent, ticks(1..25)), []);
    open_all_streams(&mut agent, 25);
    assert_eq!(said(&mut agent, ticks(26..600)), []);
}

#[test]
fn without_gpus_no_kubelet_is_waited_for() {
    let mut agent = Agent::new(settings());
    assert_eq!(said(&mut agent, ticks(1..600)), []);
}

#[test]
fn devices_that_a_kubelet_does_not_ask_for_are_named() {
    let mut agent = agent_with_gpus(Ok(()));
    let some = [Resource::NvidiaGpu, Resource::AliyunGpu, Resource::GpuMemory];
    said(&mut agent, some.map(|resource| (1, Event::StreamOpened(resource))));
    let expected = "the kubelet has not asked for the devices of tencent.com/vcuda-core, tencent.com/vcuda-memory for \
                    30 s: pods that want them are turned away. Its log tells why; --registration kubelet-socket is the \
                    other way to reach it";
    assert_eq!(said(&mut agent, ticks(2..600)), [(32, expected.to_owned())]);
}

#[test]
fn a_kubelet_that_falls_silent_is_told_each_time_it_does() {
    let mut agent = agent_with_gpus(Ok(()));
    open_all_streams(&mut agent, 1);
    let silent = |second| (second, Event::PodResourcesListed(Err("it does not answer".to_owned())));
    let expected = "the kubelet has not told its pod resources for 30 s: pods that want GPUs are turned away. it does \
                    not answer";
    assert_eq!(said(&mut agent, [silent(10)]), []);
    assert_eq!(said(&mut agent, ticks(11..100)), [(41, expected.to_owned())]);
    assert_eq!(said(&mut agent, [(100, Event::PodResourcesListed(Ok(Vec::new())))]), []);
    assert_eq!(said(&mut agent, ticks(101..200)), []);
    assert_eq!(said(&mut agent, [silent(200)]), []);
    assert_eq!(said(&mut agent, ticks(201..300)), [(231, expected.to_owned())]);
}

#[test]
fn a_socket_that_cannot_be_made_is_told_once_for_each_reason() {
    let mut agent = agent_with_gpus(Ok(()));
    let failed =
        |second, reason: &str| (second, Event::PluginSocketFailed(Resource::NvidiaGpu, reason.to_owned()));
    let told =
        said(&mut agent, [failed(1, "no directory"), failed(2, "no directory"), failed(3, "no rights")]);
    let expected = [(1, "no directory; will try again"), (3, "no rights; will try again")];
    assert_eq!(told, expected.map(|(second, what)| (second, what.to_owned())));
    said(&mut agent, [(4, Event::StreamOpened(Resource::NvidiaGpu))]);
    assert_eq!(said(&mut agent, [failed(5, "no rights")]).len(), 1, "it was there in between");
}
