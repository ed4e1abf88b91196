//! Builds a snapshot from the agent's view and the measurements.

use std::collections::BTreeMap;

use tessera_core::{
    gpu::{Gpu, Health},
    grant::Hold,
};
use tessera_node::gpus::ProcessMemory;
use tessera_wire::foreign::cgroup::CgroupOwner;

use super::{
    super::{Consumer, ContainerKey, GpuMeter, MemorySplit, Meter, split_memory},
    ClaimSnapshot, ContainerSnapshot, GpuReading, GpuSnapshot, ProcessOwner, ProcessSnapshot, Room,
    ShareSnapshot, Snapshot, Sources, UnknownUse,
};
use crate::controller::{ClaimView, ClaimedGpu, ContainerView, View};

impl Snapshot {
    /// Joins the agent's view with the measurements. Samples older than `fresh_since`, in seconds
    /// since 1970, are ignored. `processes` is true if all processes of the host are visible.
    #[must_use]
    pub fn new(view: &View, meter: &Meter, fresh_since: f64, processes: bool) -> Self {
        let mut snapshot = Self {
            driver: view.driver.clone(),
            sources: Sources {
                gpus: view.node.is_some(),
                kubelet: view.listed,
                pods: view.pods_known,
                processes,
            },
            ..Self::default()
        };
        let Some(state) = &view.node else { return snapshot };
        snapshot.node = state.node().name.to_string();
        let mut containers: BTreeMap<ContainerKey, ContainerSnapshot> =
            view.containers.iter().map(granted_container).collect();
        let mut found = Vec::new();
        for (place, info) in state.node().gpus().iter().enumerate() {
            let unmeasured = GpuMeter::default();
            let gpu_meter = meter.gpu(&info.uuid).unwrap_or(&unmeasured);
            let is_fresh = gpu_meter.last_success.is_some_and(|at| at >= fresh_since);
            let reading = is_fresh.then(|| GpuReading::of(gpu_meter, meter, processes)).flatten();
            let room = state.room(info.index);
            let is_known = snapshot.sources.kubelet && snapshot.sources.pods;
            let gpu = GpuSnapshot {
                pci: view.pci.get(place).cloned().unwrap_or_default(),
                room: is_known.then(|| Room {
                    compute: room.compute_percent,
                    memory: room.memory,
                    overbooked: view.overbooked.contains(&info.index.0),
                }),
                ..GpuSnapshot::of(with_cordon(info, view), gpu_meter, reading)
            };
            let on_gpu = processes_on(place, &gpu, gpu_meter, meter);
            let unknown = unknown_use(&gpu, snapshot.sources);
            add_usage(&mut containers, place, &gpu, (meter, gpu_meter), view, &on_gpu, unknown);
            found.extend(on_gpu);
            snapshot.gpus.push(gpu);
        }
        snapshot.containers =
            containers.into_values().filter(|container| !container.shares.is_empty()).collect();
        snapshot
            .containers
            .sort_by(|a, b| (&a.namespace, &a.pod, &a.key).cmp(&(&b.namespace, &b.pod, &b.key)));
        for container in &mut snapshot.containers {
            container.add_reports(view, meter, &snapshot.gpus);
        }
        snapshot.processes = with_owners(found, &snapshot.containers);
        snapshot.claims =
            view.claims.iter().flat_map(|claim| claim_on_gpus(claim, meter, &snapshot.gpus)).collect();
        snapshot
    }
}

/// Returns a container with its grants.
fn granted_container(held: &ContainerView) -> (ContainerKey, ContainerSnapshot) {
    let key = ContainerKey { uid: held.uid.clone(), container: held.container.clone() };
    let limit =
        |index: u8| held.memory_limits.iter().find(|(gpu, _)| *gpu == index).map(|(_, limit)| limit.0);
    let share = |(gpu, hold): &(u8, Hold)| ShareSnapshot {
        gpu: usize::from(*gpu),
        hold: Some(*hold),
        memory_limit: limit(*gpu),
        ..ShareSnapshot::default()
    };
    let container = ContainerSnapshot {
        key: key.clone(),
        namespace: held.namespace.clone(),
        pod: held.pod.clone(),
        cluster: held.cluster.clone(),
        user: held.user.clone(),
        dialect: held.dialect,
        shares: held.gpus.iter().map(share).collect(),
        escapes: Vec::new(),
    };
    (key, container)
}

/// Returns the state of a claim on each of its GPUs.
fn claim_on_gpus(claim: &ClaimView, meter: &Meter, gpus: &[GpuSnapshot]) -> Vec<ClaimSnapshot> {
    let on_gpu = |held: &ClaimedGpu| {
        let gpu = gpus.get(usize::from(held.gpu))?;
        let grant = ContainerKey { uid: claim.uid.clone(), container: held.directory.clone() };
        let users = claim.users.iter().filter(|(.., used)| used.contains(&held.gpu));
        Some(ClaimSnapshot {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            gpu: usize::from(held.gpu),
            hold: held.hold,
            users: users.map(|(pod, container, _)| (pod.clone(), container.clone())).collect(),
            report: meter.share(&grant, &gpu.info.uuid).0,
        })
    };
    claim.gpus.iter().filter_map(on_gpu).collect()
}

/// Returns the processes with their owners.
fn with_owners(
    found: Vec<(Consumer, ProcessSnapshot)>,
    containers: &[ContainerSnapshot],
) -> Vec<ProcessSnapshot> {
    let places: BTreeMap<&ContainerKey, usize> =
        containers.iter().enumerate().map(|(place, container)| (&container.key, place)).collect();
    let owner = |consumer: Consumer, owner: ProcessOwner| match consumer {
        Consumer::Container(key) => {
            places.get(&key).copied().map_or(ProcessOwner::Unknown, ProcessOwner::Container)
        }
        Consumer::Host | Consumer::Unknown => owner,
    };
    let process = |(consumer, process): (Consumer, ProcessSnapshot)| ProcessSnapshot {
        owner: owner(consumer, process.owner),
        ..process
    };
    found.into_iter().map(process).collect()
}

/// Returns the GPU with its cordon. A cordoned GPU works and may not be granted.
fn with_cordon(info: &Gpu, view: &View) -> Gpu {
    let is_cordoned = info.health.is_healthy() && view.cordoned.contains(&info.index.0);
    Gpu { health: if is_cordoned { Health::Cordoned } else { info.health }, ..info.clone() }
}

impl GpuSnapshot {
    /// Returns the state of a GPU as far as it was measured.
    fn of(info: Gpu, gpu_meter: &GpuMeter, reading: Option<GpuReading>) -> Self {
        let of = |consumer| gpu_meter.consumers.get(&consumer).copied().unwrap_or_default();
        Self {
            info,
            pci: String::new(),
            room: None,
            reading,
            total: gpu_meter.total,
            host: of(Consumer::Host),
            unknown: of(Consumer::Unknown),
            idle_energy: gpu_meter.idle_energy,
            measured: gpu_meter.measured,
            has_energy: gpu_meter.has_energy(),
            instances: gpu_meter.instances.clone(),
            samples: gpu_meter.samples,
            failures: gpu_meter.failures,
            last_success: gpu_meter.last_success,
            xids: gpu_meter.xids.clone(),
        }
    }
}

impl ContainerSnapshot {
    /// Adds the reports of the library and the arbiter, and marks processes outside the grant.
    fn add_reports(&mut self, view: &View, meter: &Meter, gpus: &[GpuSnapshot]) {
        let ContainerKey { uid, container: own } = &self.key;
        let escapes = view.escapes.iter().filter(|(pod, container, ..)| pod == uid && container == own);
        self.escapes = escapes.map(|(.., escape, count)| (*escape, *count)).collect();
        for share in &mut self.shares {
            let Some(gpu) = gpus.get(share.gpu) else { continue };
            let escaped = view
                .escaped
                .iter()
                .filter(|(pod, container, uuid, _)| pod == uid && container == own && *uuid == gpu.info.uuid);
            share.escaped_processes = escaped.map(|(.., count)| *count).sum();
            (share.report, share.throttled) = meter.share(&self.key, &gpu.info.uuid);
        }
    }
}

/// Returns the processes on a GPU with their consumers.
fn processes_on(
    place: usize,
    gpu: &GpuSnapshot,
    gpu_meter: &GpuMeter,
    meter: &Meter,
) -> Vec<(Consumer, ProcessSnapshot)> {
    let (Some(_), Some(latest)) = (&gpu.reading, &gpu_meter.latest) else { return Vec::new() };
    let process = |process: &ProcessMemory| {
        let info = latest.processes.get(&process.pid);
        let consumer = meter.consumer(info);
        let owner = match (&consumer, info.map(|info| &info.owner)) {
            (Consumer::Host, Some(CgroupOwner::Container(_))) => ProcessOwner::OutsideContainer,
            (Consumer::Host, _) => ProcessOwner::Host,
            _ => ProcessOwner::Unknown,
        };
        let busy = gpu_meter.latest_split.as_ref().and_then(|split| split.processes.as_ref());
        let busy = busy.map(|processes| processes.get(&process.pid).copied().unwrap_or(0.0));
        let snapshot = ProcessSnapshot {
            gpu: place,
            pid: process.pid,
            command: info.map(|info| info.command.clone()).unwrap_or_default(),
            owner,
            bytes: process.bytes,
            busy,
            instance: process.instance,
        };
        (consumer, snapshot)
    };
    let mut all: Vec<(Consumer, ProcessSnapshot)> =
        latest.sample.processes.iter().flatten().map(process).collect();
    // A process on several MIG instances of a GPU is still one process.
    all.dedup_by(|(_, later), (_, earlier)| {
        let same = later.pid == earlier.pid;
        if same {
            earlier.bytes = earlier.bytes.zip(later.bytes).map(|(a, b)| a.saturating_add(b));
        }
        same
    });
    all
}

/// Returns why containers without a visible process on the GPU may still use it, or `None` if they
/// do not use it as far as its processes are listed.
fn unknown_use(gpu: &GpuSnapshot, sources: Sources) -> Option<UnknownUse> {
    match &gpu.reading {
        None => Some(UnknownUse::GpuNotSampled),
        Some(_) if !sources.processes => Some(UnknownUse::ProcessesHidden),
        Some(_) if !sources.pods => Some(UnknownUse::PodsUnknown),
        Some(_) => None,
    }
}

/// Returns the bytes that a container uses on a GPU, or the reason why they are unknown.
fn used_bytes(
    reading: Option<&GpuReading>,
    key: &ContainerKey,
    unknown: Option<UnknownUse>,
) -> Result<u64, UnknownUse> {
    let Some(reading) = reading else { return Err(unknown.unwrap_or(UnknownUse::GpuNotSampled)) };
    match (&reading.used, unknown) {
        (_, Some(unknown)) => Err(unknown),
        (Some(split), None) => match split.containers.get(key) {
            Some(bytes) => bytes.ok_or(UnknownUse::MemoryNotReported),
            None => Ok(0),
        },
        (None, None) if reading.pids.is_none() => Err(UnknownUse::ProcessesNotListed),
        (None, None) => Err(UnknownUse::MemoryNotReported),
    }
}

/// Returns the fraction of the last interval in which a container's kernels ran, or the reason why it is unknown.
/// `is_measured` is true if kernels of the container in that interval would have been counted to it.
fn busy_part(
    reading: Option<&GpuReading>,
    key: &ContainerKey,
    unknown: Option<UnknownUse>,
    is_measured: bool,
) -> Result<f64, UnknownUse> {
    let split = reading.and_then(|reading| reading.busy.as_ref());
    let own = split.and_then(|split| split.all.containers.get(key).copied());
    let is_by_process = split.is_some_and(|split| split.processes.is_some());
    match (own, unknown) {
        (Some(part), _) => Ok(part),
        (None, Some(unknown)) => Err(unknown),
        (None, None) if is_by_process && is_measured => Ok(0.0),
        (None, None) if is_by_process => Err(UnknownUse::NotMeasuredYet),
        (None, None) => Err(UnknownUse::TimeNotReported),
    }
}

/// Returns whether the last interval says how long a container used the GPU: the container was known when the interval
/// began, or it has not started, so that nothing of its pod is counted to a container without a name.
fn is_measured(meter: &Meter, gpu_meter: &GpuMeter, key: &ContainerKey) -> bool {
    let counted = gpu_meter.latest_split.as_ref().map(|split| &split.all.containers);
    let has_unnamed = || counted.is_some_and(|parts| parts.contains_key(&ContainerKey::unnamed(&key.uid)));
    gpu_meter.measured_containers.contains(key) || (!meter.knows(key) && !has_unnamed())
}

/// Adds the usage of a GPU to its containers. Containers without a grant are added by their
/// processes.
fn add_usage(
    containers: &mut BTreeMap<ContainerKey, ContainerSnapshot>,
    place: usize,
    gpu: &GpuSnapshot,
    (meter, gpu_meter): (&Meter, &GpuMeter),
    view: &View,
    processes: &[(Consumer, ProcessSnapshot)],
    unknown: Option<UnknownUse>,
) {
    let mut pids: BTreeMap<&ContainerKey, Vec<u32>> = BTreeMap::new();
    for (consumer, process) in processes {
        if let Consumer::Container(key) = consumer {
            pids.entry(key).or_default().push(process.pid);
        }
    }
    for key in pids.keys() {
        let Some(pod) = view.pods.iter().find(|pod| pod.uid == key.uid) else { continue };
        let container = containers.entry((*key).clone()).or_insert_with(|| ContainerSnapshot {
            key: (*key).clone(),
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            cluster: String::new(),
            user: String::new(),
            dialect: None,
            shares: Vec::new(),
            escapes: Vec::new(),
        });
        if !container.shares.iter().any(|share| share.gpu == place) {
            container.shares.push(ShareSnapshot { gpu: place, ..ShareSnapshot::default() });
            container.shares.sort_by_key(|share| share.gpu);
        }
    }
    let reading = gpu.reading.as_ref();
    for (key, container) in containers {
        for share in container.shares.iter_mut().filter(|share| share.gpu == place) {
            let own = pids.get(key).cloned();
            // A container without a process uses nothing, but only if its processes would be seen.
            let unknown = unknown.filter(|_| own.is_none());
            let are_listed = unknown.is_none() && reading.is_some_and(|reading| reading.pids.is_some());
            share.pids = own.or_else(|| are_listed.then(Vec::new));
            let used = used_bytes(reading, key, unknown);
            let busy = busy_part(reading, key, unknown, is_measured(meter, gpu_meter, key));
            (share.unknown_memory, share.unknown_time) = (used.err(), busy.err());
            (share.used, share.busy) = (used.ok(), busy.ok());
            let total = gpu_meter.consumers.get(&Consumer::Container(key.clone())).copied();
            share.total = share.busy.map(|_| total.unwrap_or_default());
        }
    }
}

impl GpuReading {
    /// Returns the values of the last sample. `visible` is true if all processes of the host are visible.
    fn of(gpu_meter: &GpuMeter, meter: &Meter, visible: bool) -> Option<Self> {
        let latest = gpu_meter.latest.as_ref()?;
        let sample = &latest.sample;
        let consumers: Option<Vec<(Consumer, Option<u64>)>> = sample.processes.as_ref().map(|all| {
            let consumer = |pid| meter.consumer(latest.processes.get(pid));
            all.iter().map(|process| (consumer(&process.pid), process.bytes)).collect()
        });
        let used = sample.memory.and_then(|memory| match &consumers {
            // The driver leaves out processes that are not visible.
            _ if !visible => Some(MemorySplit::unattributed(memory.used)),
            Some(all) => {
                Some(split_memory(memory.used, all.iter().map(|(consumer, bytes)| (consumer, *bytes))))
            }
            None => None,
        });
        let pids = sample.processes.as_ref().filter(|_| visible);
        Some(Self {
            duration_seconds: latest.duration_seconds,
            memory: sample.memory,
            used,
            busy: gpu_meter.latest_split.clone(),
            energy: sample.energy,
            sensors: sample.sensors.clone(),
            instances: sample.instances.clone(),
            pids: pids.map(|all| all.iter().map(|process| process.pid).collect()),
        })
    }
}
