//! A simulated node: the agent, a kubelet, and the pods of an API server, all as plain values.

mod kubelet;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use tessera_core::{grant::Hold, request::ContainerRole, units::PodUid};
use tessera_node::gpus::DiscoveredGpus;
use tessera_wire::{
    foreign::{dialect::MemoryUnit, objects::Pod},
    kubelet::device_id::Resource,
    tessera::agent_address::AgentAddress,
    tessera::{
        grant,
        inventory::{self, Inventory},
    },
};

use self::kubelet::Held;
use super::fixtures;
use crate::controller::{
    Action, Agent, AgentSettings, CallAnswer, CallId, ContainerLimits, DutyCycle, Event, EventTime,
    InstanceOffer, ShellError, WriteError,
};

pub(super) const GPU_COUNT: u8 = 4;
pub(super) const MEMORY_MIB: u64 = 16_384;

pub(super) struct World {
    pub(super) agent: Agent,
    pub(super) pods: BTreeMap<String, Pod>,
    pub(super) kubelet: BTreeMap<String, (Pod, Vec<Held>)>,
    pub(super) limits: BTreeMap<(String, String), ContainerLimits>,
    pub(super) lists: usize,
    pub(super) node_patches: usize,
    pub(super) api_is_up: bool,
    pub(super) warnings: Vec<String>,
    pub(super) events: Vec<(&'static str, String)>,
    pub(super) settings: AgentSettings,
    pub(super) uncharged: BTreeMap<(String, usize), u64>,
    pub(super) killed: Vec<u32>,
    pub(super) throttled: Vec<(u32, DutyCycle)>,
    pub(super) resumed: Vec<u32>,
    answers: BTreeMap<CallId, CallAnswer>,
    elapsed: Duration,
    calls: u64,
    dice: u64,
    pub(super) offers: Vec<InstanceOffer>,
    /// Devices that the agent has published as unhealthy.
    pub(super) unhealthy: BTreeMap<Resource, BTreeSet<String>>,
    /// Devices that the kubelet offers, where another plugin has changed them.
    pub(super) offered_by_kubelet: BTreeMap<Resource, BTreeSet<String>>,
    /// Resources that the agent has published last as withheld.
    pub(super) withheld: Vec<String>,
}

pub(super) fn settings() -> AgentSettings {
    AgentSettings {
        advertise: Some(AgentAddress { url: "http://10.0.0.5:5678".into(), certificate: None }),
        ..fixtures::settings(Path::new("/grants"))
    }
}

pub(super) fn found() -> DiscoveredGpus {
    let Inventory { gpus, topology, .. } =
        fixtures::described_gpus(&fixtures::host(GPU_COUNT, "T4", MEMORY_MIB));
    DiscoveredGpus { gpus, topology, instances: Vec::new(), pci: Vec::new(), driver: None }
}

pub(super) fn share(compute_percent: u32, blocks: u64) -> Vec<(&'static str, String)> {
    vec![
        ("tencent.com/vcuda-core", compute_percent.to_string()),
        ("tencent.com/vcuda-memory", blocks.to_string()),
    ]
}

/// Returns a pod of these containers. Names that begin with `init` or `side` make init containers
/// or sidecars.
pub(super) fn pod(name: &str, uid: &str, containers: &[(&str, Vec<(&str, String)>)]) -> Pod {
    let role = |name: &str| match name {
        _ if name.starts_with("init") => ContainerRole::Init,
        _ if name.starts_with("side") => ContainerRole::Sidecar,
        _ => ContainerRole::Main,
    };
    let with_role =
        containers.iter().map(|(name, limits)| (*name, role(name), limits.iter().cloned().collect()));
    fixtures::pod(name, uid, &with_role.collect::<Vec<_>>())
}

impl World {
    pub(super) fn new() -> Self {
        let mut world = Self {
            agent: Agent::new(settings()),
            pods: BTreeMap::new(),
            kubelet: BTreeMap::new(),
            limits: BTreeMap::new(),
            lists: 0,
            node_patches: 0,
            api_is_up: true,
            warnings: Vec::new(),
            events: Vec::new(),
            settings: settings(),
            uncharged: BTreeMap::new(),
            killed: Vec::new(),
            throttled: Vec::new(),
            resumed: Vec::new(),
            answers: BTreeMap::new(),
            elapsed: Duration::ZERO,
            calls: 0,
            dice: 7,
            offers: Vec::new(),
            unhealthy: BTreeMap::new(),
            offered_by_kubelet: BTreeMap::new(),
            withheld: Vec::new(),
        };
        world.start_agent();
        world
    }

    fn start_agent(&mut self) {
        let pods = self.limits.keys().map(|(uid, _)| PodUid(uid.clone())).collect();
        self.event(Event::GrantsOnDisk(pods, self.limits.values().cloned().collect()));
        self.event(Event::Gpus(Ok(found())));
        self.event(Event::StreamOpened(Resource::VcudaCore));
        if self.api_is_up {
            self.event(Event::Pods(self.pods.values().cloned().collect()));
        }
    }

    /// Replaces the agent by a new one that has seen no event.
    pub(super) fn restart_agent(&mut self) {
        self.agent = Agent::new(self.settings.clone());
        self.start_agent();
    }

    pub(super) fn wait(&mut self, seconds: u64) {
        self.elapsed += Duration::from_secs(seconds);
    }

    pub(super) fn roll(&mut self, bound: usize) -> usize {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.dice >> 33).unwrap() % bound.max(1)
    }

    pub(super) fn seed(&mut self, seed: u64) {
        self.dice = seed;
    }

    /// Passes an event to the agent and carries out everything that follows from it.
    pub(super) fn event(&mut self, event: Event) {
        let mut queue = std::collections::VecDeque::from([event]);
        while let Some(event) = queue.pop_front() {
            self.elapsed += Duration::from_micros(100);
            let now = EventTime { elapsed: self.elapsed, unix_nanos: 17 };
            for action in self.agent.handle(now, event) {
                queue.extend(self.carry_out(action));
            }
        }
    }

    fn carry_out(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::ListPodResources => {
                self.lists += 1;
                Some(Event::PodResourcesListed(Ok(self.listed())))
            }
            Action::ReadOfferedDevices(resources) => {
                let offered = |of: &Resource| Some((*of, self.offered_by_kubelet.get(of)?.clone()));
                Some(Event::DevicesOffered(resources.iter().filter_map(offered).collect()))
            }
            Action::ReadPods => Some(Event::PodsRead(if self.api_is_up {
                Ok(self.pods.values().cloned().collect())
            } else {
                Err(ShellError::ApiServer("away".into()))
            })),
            Action::Answer(call, answer) => {
                assert!(self.answers.insert(call, answer).is_none(), "answered twice");
                None
            }
            Action::CreateGrants(call, limits) => {
                for one in limits {
                    self.limits.insert((one.pod.0.clone(), one.container.clone()), one);
                }
                Some(Event::GrantsCreated(call, Ok(())))
            }
            Action::UpdateGrant(limits) => {
                let known =
                    self.limits.insert((limits.pod.0.clone(), limits.container.clone()), *limits.clone());
                assert_ne!(known.as_ref(), Some(&*limits), "the update changes nothing");
                Some(Event::GrantUpdated(limits, Ok(())))
            }
            Action::SetUncharged { pod, gpu, bytes, .. } => {
                self.uncharged.insert((pod.0, gpu), bytes);
                None
            }
            Action::Kill { pid, .. } => {
                self.killed.push(pid);
                None
            }
            Action::Throttle { pid, cycle, .. } => {
                self.throttled.push((pid, cycle));
                None
            }
            Action::Resume { pid, .. } => {
                self.resumed.push(pid);
                None
            }
            Action::RecordPodEvent { reason, message, .. } => {
                self.events.push((reason, message));
                None
            }
            Action::RemoveGrants(uid) => {
                self.limits.retain(|(pod, _), _| *pod != uid.0);
                None
            }
            Action::PatchPod { uid, annotations, .. } if self.api_is_up => {
                let Some(pod) = self.pods.get_mut(&uid.0) else {
                    return Some(Event::PodPatched(uid, Err(WriteError::Gone)));
                };
                pod.metadata.annotations.extend(annotations);
                let pod = pod.clone();
                let now = EventTime { elapsed: self.elapsed, unix_nanos: 17 };
                let more = self.agent.handle(now, Event::PodPatched(uid, Ok(())));
                assert!(more.is_empty(), "{more:?}");
                Some(Event::PodApplied(Box::new(pod)))
            }
            Action::PatchPod { uid, .. } => {
                Some(Event::PodPatched(uid, Err(WriteError::Later("away".into()))))
            }
            Action::PatchNode(patch) => {
                self.node_patches += 1;
                if let Some(published) = patch.annotations.get(inventory::KEY) {
                    self.withheld = inventory::parse(published).unwrap().withheld;
                }
                Some(Event::NodePatched(Ok(())))
            }
            Action::SetUnhealthy(_) => Some(Event::UnhealthySet(Ok(()))),
            Action::PublishDevices(resource, devices) => {
                let unhealthy = devices.into_iter().filter(|device| !device.healthy).map(|device| device.id);
                self.unhealthy.insert(resource, unhealthy.collect());
                None
            }
            Action::PublishInstances(offers) => {
                self.offers = offers;
                None
            }
            Action::WriteSlice { .. }
            | Action::PublishHealth(_)
            | Action::ReadClaim(_)
            | Action::StoreClaim(_)
            | Action::RemoveClaim(..) => unreachable!("this world offers no claims"),
            Action::Stop => unreachable!("this world does not stop its agent"),
            Action::Warn(warning) => {
                self.warnings.push(warning.to_string());
                None
            }
        }
    }

    /// Creates a pod that is bound to this node, with annotations that grant these GPUs.
    pub(super) fn bind(&mut self, mut pod: Pod, grants: &[(&str, &[u8])]) -> Pod {
        if !grants.is_empty() {
            let node = self.agent.inventory.gpus().unwrap().node.clone();
            let gpus_of = |name: &str| {
                let (_, gpus) = grants.iter().find(|(container, _)| *container == name)?;
                Some(gpus.iter().copied())
            };
            fixtures::annotate(&mut pod, &node, gpus_of);
        }
        self.pods.insert(pod.metadata.uid.clone(), pod.clone());
        self.event(Event::PodApplied(Box::new(pod.clone())));
        pod
    }

    pub(super) fn set_status(&mut self, uid: &str, phase: &str, started: bool) {
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.status.phase = phase.into();
            pod.status.start_time = started.then(|| "2026-11-15T05:00:00Z".to_owned());
            let pod = pod.clone();
            self.event(Event::PodApplied(Box::new(pod)));
        }
    }

    /// Begins the deletion of a pod. Its containers still run.
    pub(super) fn terminate(&mut self, uid: &str) {
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.metadata.deletion_timestamp = Some("2026-11-15T05:00:00Z".to_owned());
            let pod = pod.clone();
            self.event(Event::PodApplied(Box::new(pod)));
        }
    }

    fn call(&mut self, event: impl FnOnce(CallId) -> Event) -> CallAnswer {
        self.calls += 1;
        let call = CallId(self.calls);
        self.event(event(call));
        // The agent retries undecided calls until they time out.
        for _ in 0..500 {
            if let Some(answer) = self.answers.remove(&call) {
                return answer;
            }
            self.elapsed += Duration::from_millis(50);
            self.event(Event::Tick);
        }
        panic!("never answered");
    }

    /// Asserts that no GPU is overbooked, and that annotations, limits and view match the kubelet.
    pub(super) fn check(&mut self) {
        self.event(Event::Tick);
        self.elapsed += Duration::from_secs(11);
        self.event(Event::Tick);
        let view = self.agent.view();
        assert_eq!(view.overbooked, Vec::<u8>::new());
        let node = self.agent.inventory.gpus().unwrap().node.clone();
        for (resource, withdrawn) in &self.unhealthy {
            let held = self.kubelet.values().flat_map(|(_, containers)| containers);
            let mut held = held.filter_map(|(_, _, ids)| ids.get(resource.name())).flatten();
            let is_lost = |id: &&String| {
                withdrawn.contains(*id)
                    && self.agent.inventory.gpus().is_some_and(|gpus| {
                        gpus.ids.read(*resource, id).is_some_and(|(gpu, _)| gpus.is_healthy(gpu))
                    })
            };
            assert_eq!(held.find(is_lost), None, "{resource}: a device in use is withdrawn");
        }
        for (uid, (_, containers)) in &self.kubelet {
            let Some(pod) = self.pods.get(uid).filter(|pod| pod.status.phase == "Running") else { continue };
            let annotated = grant::parse(&pod.spec, &pod.metadata.annotations, &node, MemoryUnit::GiB);
            let annotated = annotated.unwrap().unwrap_or_default();
            for (container, listed, ids) in containers.iter().filter(|(.., ids)| !ids.is_empty()) {
                let held = self.gpus_of(uid, container);
                let shown = view.containers.iter().find(|c| c.uid.0 == *uid && c.container == *container);
                if *listed {
                    let shown: BTreeSet<u8> = shown.unwrap().gpus.iter().map(|(gpu, _)| *gpu).collect();
                    assert_eq!(shown, held, "{uid} {container} {ids:?}");
                    let said = annotated.iter().find(|grant| grant.container == *container).unwrap();
                    assert_eq!(said.holds.iter().map(|(gpu, _)| gpu.0).collect::<BTreeSet<_>>(), held);
                    if said.holds.iter().all(|(_, hold)| *hold != Hold::Whole) {
                        let limits = &self.limits[&(uid.clone(), container.clone())];
                        assert_eq!(
                            limits.gpus.iter().map(|gpu| gpu.uuid.0[3]).collect::<BTreeSet<_>>(),
                            held
                        );
                    }
                }
            }
            for (key, value) in
                grant::assigned(&pod.spec, &pod.metadata.annotations, MemoryUnit::GiB).unwrap()
            {
                assert_eq!(pod.metadata.annotations.get(&key), Some(&value), "{uid} {key}");
            }
        }
        for (uid, _) in self.limits.keys() {
            assert!(self.pods.contains_key(uid), "the grant directory of {uid} was not removed");
        }
    }
}
