//! A missing peer is logged once, and again only after a change.

use std::time::Duration;

use tessera_node::device_plugin::RegistrationMode;
use tessera_wire::kubelet::device_id::Resource;

use super::world::{found, settings};
use crate::controller::{Action, Agent, AgentSettings, Event, EventTime, ShellError};

const NO_NODE: &str = "the cluster has no node of this name: its GPUs are not announced and no pod can be served; \
                       set --node-name or NODE_NAME to a name that kubectl get nodes shows node=node-1";
const NO_KUBELET: &str = "no kubelet has connected for 30 s: no pod gets GPUs here; --kubelet-root names the \
                          kubelet's root directory (its own --root-dir), which a pod must mount under the same path \
                          detail=/var/lib/kubelet/plugins_registry";

/// Returns the warnings that these events cause, each with its second.
fn warnings(agent: &mut Agent, events: impl IntoIterator<Item = (u64, Event)>) -> Vec<(u64, String)> {
    let mut warnings = Vec::new();
    for (second, event) in events {
        let now = EventTime { elapsed: Duration::from_secs(second), unix_nanos: 17 };
        warnings.extend(agent.handle(now, event).into_iter().filter_map(|action| match action {
            Action::Warn(warning) => Some((second, warning.to_string())),
            _ => None,
        }));
    }
    warnings
}

fn ticks(seconds: std::ops::Range<u64>) -> impl Iterator<Item = (u64, Event)> {
    seconds.map(|second| (second, Event::Tick))
}

/// Returns an agent that has found its GPUs, and whose kubelet lists its podresources or fails to.
fn agent_with_gpus(list: Result<(), &str>) -> Agent {
    let mut agent = Agent::new(settings());
    let listed = list.map(|()| Vec::new()).map_err(|error| ShellError::PodResources(error.to_owned()));
    warnings(
        &mut agent,
        [(0, Event::Gpus(Ok(found()))), (0, Event::Pods(Vec::new())), (0, Event::PodResourcesListed(listed))],
    );
    agent
}

fn open_all_streams(agent: &mut Agent, second: u64) {
    let resources: Vec<Resource> = agent.settings.resources().collect();
    warnings(agent, resources.into_iter().map(|resource| (second, Event::StreamOpened(resource))));
}

#[test]
fn a_missing_node_is_logged_once_and_again_when_it_is_missing_again() {
    let mut agent = agent_with_gpus(Ok(()));
    let missing = |second| (second, Event::NodeMissing);
    let there = |second| (second, Event::Node(Box::default()));
    assert_eq!(warnings(&mut agent, [missing(1), missing(2), missing(300)]), [(1, NO_NODE.to_owned())]);
    assert_eq!(agent.readiness().unwrap_err().to_string(), "the cluster has no node named node-1");
    assert_eq!(warnings(&mut agent, [there(301), there(302)]), []);
    assert_ne!(agent.readiness().unwrap_err().to_string(), "the cluster has no node named node-1");
    assert_eq!(warnings(&mut agent, [missing(303), missing(304)]), [(303, NO_NODE.to_owned())]);
}

#[test]
fn a_missing_node_is_not_patched() {
    let mut agent = agent_with_gpus(Ok(()));
    let at = |second| EventTime { elapsed: Duration::from_secs(second), unix_nanos: 17 };
    let writes =
        |actions: Vec<Action>| actions.iter().filter(|action| matches!(action, Action::PatchNode(_))).count();
    assert_eq!(writes(agent.handle(at(1), Event::Node(Box::default()))), 1);
    agent.handle(at(2), Event::NodeMissing);
    assert_eq!(
        writes(agent.handle(at(3), Event::NodePatched(Err(ShellError::ApiServer("not found".into()))))),
        0
    );
    assert_eq!((4..60).map(|second| writes(agent.handle(at(second), Event::Tick))).sum::<usize>(), 0);
    assert_eq!(writes(agent.handle(at(61), Event::Node(Box::default()))), 1, "the new node gets everything");
}

#[test]
fn a_missing_kubelet_is_logged_once_with_the_remedy() {
    let mut agent = agent_with_gpus(Err("no such socket"));
    assert_eq!(warnings(&mut agent, ticks(1..600)), [(31, NO_KUBELET.to_owned())]);
}

#[test]
fn the_warning_names_the_configured_socket() {
    let mut agent = Agent::new(AgentSettings {
        registration: RegistrationMode::KubeletSocket("/k/device-plugins".into()),
        ..settings()
    });
    warnings(&mut agent, [(0, Event::Gpus(Ok(found())))]);
    let warnings = warnings(&mut agent, ticks(1..600));
    let [(31, text)] = warnings.as_slice() else { panic!("{warnings:?}") };
    assert!(text.ends_with("detail=/k/device-plugins/kubelet.sock"), "{text}");
}

#[test]
fn a_kubelet_that_connects_in_time_causes_no_warning() {
    let mut agent = agent_with_gpus(Ok(()));
    assert_eq!(warnings(&mut agent, ticks(1..25)), []);
    open_all_streams(&mut agent, 25);
    assert_eq!(warnings(&mut agent, ticks(26..600)), []);
}

#[test]
fn without_gpus_no_kubelet_is_expected() {
    let mut agent = Agent::new(settings());
    assert_eq!(warnings(&mut agent, ticks(1..600)), []);
}

#[test]
fn resources_without_a_device_stream_are_named() {
    let mut agent = agent_with_gpus(Ok(()));
    let some = [Resource::NvidiaGpu, Resource::AliyunGpu, Resource::GpuMemory];
    warnings(&mut agent, some.map(|resource| (1, Event::StreamOpened(resource))));
    let expected = "the kubelet has not asked for the devices of some resources for 30 s: it rejects pods that request \
                    them; its log says why, and --registration kubelet-socket is the other way to reach it \
                    detail=tencent.com/vcuda-core, tencent.com/vcuda-memory";
    assert_eq!(warnings(&mut agent, ticks(2..600)), [(32, expected.to_owned())]);
}

#[test]
fn a_kubelet_that_stops_listing_is_logged_each_time() {
    let mut agent = agent_with_gpus(Ok(()));
    open_all_streams(&mut agent, 1);
    let silent = |second| {
        (second, Event::PodResourcesListed(Err(ShellError::PodResources("it does not answer".to_owned()))))
    };
    let expected = "the kubelet has not listed its pod resources for 30 s: pods that request GPUs are refused \
                    error=it does not answer";
    assert_eq!(warnings(&mut agent, [silent(10)]), []);
    assert_eq!(warnings(&mut agent, ticks(11..100)), [(41, expected.to_owned())]);
    assert_eq!(warnings(&mut agent, [(100, Event::PodResourcesListed(Ok(Vec::new())))]), []);
    assert_eq!(warnings(&mut agent, ticks(101..200)), []);
    assert_eq!(warnings(&mut agent, [silent(200)]), []);
    assert_eq!(warnings(&mut agent, ticks(201..300)), [(231, expected.to_owned())]);
}

#[test]
fn a_socket_error_is_logged_once_per_reason() {
    let mut agent = agent_with_gpus(Ok(()));
    let failed =
        |second, reason: &str| (second, Event::PluginSocketFailed(Resource::NvidiaGpu, reason.to_owned()));
    let logged =
        warnings(&mut agent, [failed(1, "no directory"), failed(2, "no directory"), failed(3, "no rights")]);
    let expected = [(1, "no directory"), (3, "no rights")];
    let warning = |(second, error): (u64, &str)| {
        let message = "cannot create the socket of a device plugin, will try again";
        (second, format!("{message} detail=nvidia.com/gpu error={error}"))
    };
    assert_eq!(logged, expected.map(warning));
    warnings(&mut agent, [(4, Event::StreamOpened(Resource::NvidiaGpu))]);
    assert_eq!(warnings(&mut agent, [failed(5, "no rights")]).len(), 1, "the socket worked in between");
}
