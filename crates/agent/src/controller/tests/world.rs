//! A simulated node: the agent, a kubelet, and the pods of an API server, all as plain values.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde_json::json;
use tessera_core::{
    gpu::{Gpu, Health},
    grant::{ContainerGrant, Hold},
    request::ContainerRole,
    topology::Topology,
    units::{GpuIndex, MiB, PodUid},
};
use tessera_node::{
    device_plugin::{Allocation, PreferenceRequest, RegistrationMode},
    gpus::DiscoveredGpus,
    pod_resources::{ContainerDevices, PodDevices},
};
use tessera_wire::{
    foreign::{
        dialect::{Dialect, MemoryUnit},
        objects::{Container, Pod},
    },
    kubelet::{container_response::InjectionSettings, device_id::Resource},
    tessera::grant,
};

use crate::controller::{
    Action, Agent, AgentSettings, CallAnswer, CallId, ContainerLimits, Event, EventTime, InstalledLibrary,
    Isolation, ShellError, WithoutLibrary, WriteError,
};

pub(super) const GPU_COUNT: u8 = 4;
pub(super) const MEMORY_MIB: u64 = 16_384;

/// A container in the kubelet's checkpoint: its name, whether it is listed, its devices.
type Held = (String, bool, BTreeMap<String, BTreeSet<String>>);

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
    answers: BTreeMap<CallId, CallAnswer>,
    elapsed: Duration,
    calls: u64,
    dice: u64,
    unhealthy: BTreeSet<GpuIndex>,
}

pub(super) fn settings() -> AgentSettings {
    AgentSettings {
        node: "node-a".into(),
        dialects: Dialect::ALL.to_vec(),
        memory_unit: MemoryUnit::GiB,
        policy: "tessera".parse().unwrap(),
        injection: InjectionSettings::default(),
        registration: RegistrationMode::PluginsRegistry("/var/lib/kubelet/plugins_registry".into()),
        isolation: Isolation {
            library: Ok(InstalledLibrary { folder: "/grants/.library".into(), by_cdi: false }),
            without_library: WithoutLibrary::Refuse,
            allow_opt_out: false,
            meaning: tessera_limits::limits::ShareMeaning::Time,
            kill_escaped: false,
        },
        grants: "/grants".into(),
        instance_type: None,
        labels: BTreeMap::new(),
        quiet_time: Duration::from_secs(300),
        ignored_xids: BTreeSet::new(),
        advertise: Some("http://10.0.0.5:5678".into()),
    }
}

pub(super) fn found() -> DiscoveredGpus {
    let gpu = |index: u8| Gpu {
        index: GpuIndex(index),
        uuid: format!("GPU-{index:08x}-0000-4000-8000-000000000000").as_str().into(),
        minor: u32::from(index),
        model: "T4".into(),
        memory: MiB(MEMORY_MIB),
        numa: None,
        health: Health::Healthy,
    };
    DiscoveredGpus {
        gpus: (0..GPU_COUNT).map(gpu).collect(),
        topology: Topology::unknown(usize::from(GPU_COUNT)),
        pci: Vec::new(),
        driver: None,
    }
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
    let of = |(container, limits): &(&str, Vec<(&str, String)>)| {
        let limits: BTreeMap<&str, String> = limits.iter().cloned().collect();
        let policy = if container.starts_with("side") { "Always" } else { "" };
        json!({ "name": container, "restartPolicy": policy, "resources": { "limits": limits } })
    };
    let early =
        |(name, _): &&(&str, Vec<(&str, String)>)| name.starts_with("init") || name.starts_with("side");
    let inits: Vec<_> = containers.iter().filter(early).map(of).collect();
    let mains: Vec<_> = containers.iter().filter(|container| !early(container)).map(of).collect();
    serde_json::from_value(json!({
        "metadata": { "name": name, "namespace": "team", "uid": uid },
        "spec": { "nodeName": "node-a", "initContainers": inits, "containers": mains },
        "status": { "phase": "Pending" },
    }))
    .unwrap()
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
            answers: BTreeMap::new(),
            elapsed: Duration::ZERO,
            calls: 0,
            dice: 7,
            unhealthy: BTreeSet::new(),
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
            Action::PatchNode(_) => {
                self.node_patches += 1;
                Some(Event::NodePatched(Ok(())))
            }
            Action::SetUnhealthy(_) => Some(Event::UnhealthySet(Ok(()))),
            Action::PublishDevices(_, devices) => {
                let unhealthy = devices.iter().filter(|device| !device.healthy);
                self.unhealthy = unhealthy
                    .filter_map(|device| u8::from_str_radix(device.id.get(4..12)?, 16).ok())
                    .map(GpuIndex)
                    .chain(self.unhealthy.iter().copied())
                    .collect();
                None
            }
            Action::Warn(warning) => {
                self.warnings.push(warning.to_string());
                None
            }
        }
    }

    pub(super) fn listed(&self) -> Vec<PodDevices> {
        let entry = |(pod, containers): &(Pod, Vec<Held>)| PodDevices {
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            containers: containers
                .iter()
                .filter(|(_, listed, _)| *listed)
                .map(|(name, _, ids)| ContainerDevices { name: name.clone(), ids: ids.clone() })
                .collect(),
        };
        self.kubelet.values().map(entry).collect()
    }

    /// Creates a pod that is bound to this node, with annotations that grant these GPUs.
    pub(super) fn bind(&mut self, mut pod: Pod, grants: &[(&str, &[u8])]) -> Pod {
        if !grants.is_empty() {
            let claims = pod.spec.claims(MemoryUnit::GiB).unwrap();
            let granted: Vec<ContainerGrant> = claims
                .iter()
                .filter_map(|claim| {
                    let (_, gpus) = grants.iter().find(|(container, _)| *container == claim.container)?;
                    Some(ContainerGrant {
                        container: claim.container.clone(),
                        role: claim.role,
                        holds: gpus.iter().map(|gpu| (GpuIndex(*gpu), Hold::of(claim.request))).collect(),
                    })
                })
                .collect();
            let node = self.agent.inventory.gpus().unwrap().node.clone();
            pod.metadata.annotations =
                grant::annotations(&pod.spec, &granted, &node, MemoryUnit::GiB, 1).unwrap();
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

    fn call(&mut self, event: impl FnOnce(CallId) -> Event) -> CallAnswer {
        self.calls += 1;
        let call = CallId(self.calls);
        self.event(event(call));
        // The agent retries undecided calls until they time out.
        for _ in 0..100 {
            if let Some(answer) = self.answers.remove(&call) {
                return answer;
            }
            self.elapsed += Duration::from_millis(50);
            self.event(Event::Tick);
        }
        panic!("never answered");
    }

    /// Admits a pod as a kubelet does. Returns what its containers were given.
    pub(super) fn admit(&mut self, pod: &Pod) -> Result<BTreeMap<String, Allocation>, String> {
        let uid = pod.metadata.uid.clone();
        let held = |(container, role): (&Container, ContainerRole)| {
            (container.name.clone(), role != ContainerRole::Init, BTreeMap::new())
        };
        let containers = pod.spec.containers_with_roles().map(held).collect();
        self.kubelet.insert(uid.clone(), (pod.clone(), containers));
        let outcome = self.allocate_all(pod);
        match &outcome {
            Ok(_) => self.set_status(&uid, "Pending", true),
            Err(_) => {
                self.kubelet.remove(&uid);
                self.set_status(&uid, "Failed", true);
            }
        }
        outcome
    }

    /// Allocates one resource for the first container of a pod, and then rejects the pod, as a
    /// kubelet does that runs short of another resource.
    pub(super) fn admit_only(&mut self, pod: &Pod, resource: &str) {
        let resource = Resource::named(resource).unwrap();
        let (container, _) = pod.spec.containers_with_roles().next().unwrap();
        let empty = (container.name.clone(), true, BTreeMap::new());
        self.kubelet.insert(pod.metadata.uid.clone(), (pod.clone(), vec![empty]));
        let ids = self.choose(resource, resource.asked_by(container), &BTreeSet::new()).unwrap();
        let answer = self.call(|call| Event::Allocate(call, resource, ids));
        assert!(matches!(answer, CallAnswer::Allocated(Ok(_))), "{answer:?}");
        self.kubelet.remove(&pod.metadata.uid);
    }

    fn allocate_all(&mut self, pod: &Pod) -> Result<BTreeMap<String, Allocation>, String> {
        let mut given: BTreeMap<String, Allocation> = BTreeMap::new();
        let mut reusable: BTreeMap<Resource, BTreeSet<String>> = BTreeMap::new();
        for (container, role) in pod.spec.containers_with_roles() {
            let mut resources: Vec<Resource> =
                Resource::ALL.into_iter().filter(|resource| resource.asked_by(container) > 0).collect();
            if self.roll(2) == 1 {
                resources.reverse();
            }
            for resource in resources {
                let reuse = reusable.entry(resource).or_default();
                let ids = self.choose(resource, resource.asked_by(container), reuse)?;
                let allocated = match self.call(|call| Event::Allocate(call, resource, ids.clone())) {
                    CallAnswer::Allocated(answer) => *answer.map_err(|error| error.to_string())?,
                    other => panic!("{other:?}"),
                };
                match role {
                    ContainerRole::Init => reuse.extend(ids.clone()),
                    ContainerRole::Sidecar | ContainerRole::Main => reuse.retain(|id| !ids.contains(id)),
                }
                let entry = given.entry(container.name.clone()).or_default();
                entry.envs.extend(allocated.envs);
                entry.mounts.extend(allocated.mounts);
                let (_, containers) = self.kubelet.get_mut(&pod.metadata.uid).unwrap();
                let held = containers.iter_mut().find(|(name, ..)| *name == container.name).unwrap();
                held.2.insert(resource.name().to_owned(), ids);
            }
        }
        Ok(given)
    }

    fn choose(
        &mut self,
        resource: Resource,
        count: usize,
        reusable: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, String> {
        let mut chosen: BTreeSet<String> = reusable.iter().take(count).cloned().collect();
        if chosen.len() == count {
            return Ok(chosen);
        }
        let containers = self.kubelet.values().flat_map(|(_, containers)| containers);
        let held: BTreeSet<&String> =
            containers.filter_map(|(_, _, ids)| ids.get(resource.name())).flatten().collect();
        let ids = &self.agent.inventory.gpus().unwrap().ids;
        let all = ids.all(resource).filter(|(_, gpu)| !self.unhealthy.contains(gpu)).map(|(id, _)| id);
        let available: Vec<String> = all.filter(|id| !held.contains(id)).collect();
        if available.len() + chosen.len() < count {
            return Err(format!("requested number of devices unavailable for {resource}"));
        }
        let wish = PreferenceRequest {
            available: available.iter().chain(&chosen).cloned().collect(),
            required: chosen.iter().cloned().collect(),
            count,
        };
        let preferred = match self.call(|call| Event::Prefer(call, resource, wish)) {
            CallAnswer::Preferred(answer) => answer.map_err(|error| error.to_string())?,
            other => panic!("{other:?}"),
        };
        assert_eq!(preferred.iter().collect::<BTreeSet<_>>().len(), count, "wrong count: {preferred:?}");
        chosen.extend(preferred);
        Ok(chosen)
    }

    /// Starts all containers of a pod.
    pub(super) fn start(&mut self, uid: &str) -> Result<(), String> {
        let containers = self.kubelet.get(uid).map(|(_, containers)| containers.clone()).unwrap_or_default();
        for (_, _, ids) in containers {
            for (name, ids) in ids {
                let resource = Resource::named(&name).unwrap();
                match self.call(|call| Event::PreStart(call, resource, ids)) {
                    CallAnswer::Started(answer) => answer.map_err(|error| error.to_string())?,
                    other => panic!("{other:?}"),
                }
            }
        }
        self.set_status(uid, "Running", true);
        Ok(())
    }

    pub(super) fn run(
        &mut self,
        pod: Pod,
        grants: &[(&str, &[u8])],
    ) -> Result<BTreeMap<String, Allocation>, String> {
        let pod = self.bind(pod, grants);
        let given = self.admit(&pod)?;
        self.start(&pod.metadata.uid)?;
        Ok(given)
    }

    pub(super) fn remove(&mut self, uid: &str) {
        self.kubelet.remove(uid);
        self.pods.remove(uid);
        self.event(Event::PodDeleted(PodUid(uid.to_owned())));
    }

    /// Returns the GPUs of a container, by the kubelet's checkpoint.
    pub(super) fn gpus_of(&self, uid: &str, container: &str) -> BTreeSet<u8> {
        let gpus = self.agent.inventory.gpus().unwrap();
        let (_, containers) = &self.kubelet[uid];
        let (_, _, ids) = containers.iter().find(|(name, ..)| name == container).unwrap();
        let of = |(name, ids): (&String, &BTreeSet<String>)| gpus.of_ids(Resource::named(name).unwrap(), ids);
        ids.iter().flat_map(of).map(|gpu| gpu.0).collect()
    }

    /// Asserts that no GPU is overbooked, and that annotations, limits and view match the kubelet.
    pub(super) fn check(&mut self) {
        self.event(Event::Tick);
        self.elapsed += Duration::from_secs(11);
        self.event(Event::Tick);
        let view = self.agent.view();
        assert_eq!(view.overbooked, Vec::<u8>::new());
        let node = self.agent.inventory.gpus().unwrap().node.clone();
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
            for (key, value) in grant::assigned(&pod.spec, MemoryUnit::GiB).unwrap() {
                assert_eq!(pod.metadata.annotations.get(&key), Some(&value), "{uid} {key}");
            }
        }
        for (uid, _) in self.limits.keys() {
            assert!(self.pods.contains_key(uid), "the grant directory of {uid} was not removed");
        }
    }
}
