//! Puts a picture together from what the agent knows and what was measured.

use std::collections::BTreeMap;

use tessera_core::{
    gpu::Gpu,
    grant::Hold,
    units::{MiB, Percent},
};
use tessera_node::gpus::ProcessMemory;
use tessera_wire::foreign::cgroup::CgroupOwner;

use super::{
    super::{Consumer, ContainerKey, GpuMeter, Meter, split_memory},
    ContainerSnapshot, GpuReading, GpuSnapshot, ProcessOwner, ProcessSnapshot, ShareSnapshot, Snapshot,
    Sources,
};
use crate::controller::{ContainerView, View};

impl Snapshot {
    /// Puts together what the agent knows with what was measured. Looks that went well before `fresh_since` (seconds since 1970) say
    /// nothing about now.
    #[must_use]
    pub fn new(view: &View, meter: &Meter, fresh_since: f64, processes: bool) -> Self {
        let mut picture = Self {
            driver: view.driver.clone(),
            sources: Sources {
                gpus: view.node.is_some(),
                kubelet: view.listed,
                pods: view.pods_known,
                processes,
            },
            ..Self::default()
        };
        let Some(state) = &view.node else { return picture };
        picture.node = state.node().name.to_string();
        let mut containers: BTreeMap<ContainerKey, ContainerSnapshot> =
            view.containers.iter().map(held).collect();
        let mut found = Vec::new();
        for (place, gpu) in state.node().gpus().iter().enumerate() {
            let nothing = GpuMeter::default();
            let account = meter.card(&gpu.uuid).unwrap_or(&nothing);
            let fresh = account.last_success.is_some_and(|at| at >= fresh_since);
            let look = fresh.then(|| GpuReading::of(account, meter)).flatten();
            let room = state.room(gpu.index);
            let card = GpuSnapshot {
                pci: view.pci.get(place).cloned().unwrap_or_default(),
                free_cores: room.compute_percent,
                free_memory: room.memory,
                overbooked: view.overbooked.contains(&gpu.index.0),
                ..GpuSnapshot::of(gpu, account, look)
            };
            let processes = processes_on(place, &card, account, meter);
            join(&mut containers, place, &card, account, view, &processes);
            found.extend(processes);
            picture.cards.push(card);
        }
        picture.containers =
            containers.into_values().filter(|container| !container.shares.is_empty()).collect();
        picture
            .containers
            .sort_by(|a, b| (&a.namespace, &a.pod, &a.key).cmp(&(&b.namespace, &b.pod, &b.key)));
        for container in &mut picture.containers {
            container.judge(view, meter, &picture.cards);
        }
        picture.processes = owned(found, &picture.containers);
        picture
    }
}

/// What the agent's books say of a container.
fn held(held: &ContainerView) -> (ContainerKey, ContainerSnapshot) {
    let key = ContainerKey { uid: held.uid.clone(), container: held.container.clone() };
    let share = |(card, hold): &(u8, Hold)| ShareSnapshot {
        card: usize::from(*card),
        hold: Some(*hold),
        ..ShareSnapshot::default()
    };
    let container = ContainerSnapshot {
        key: key.clone(),
        namespace: held.namespace.clone(),
        pod: held.pod.clone(),
        cluster: held.cluster.clone(),
        dialect: held.dialect,
        shares: held.gpus.iter().map(share).collect(),
        escapes: Vec::new(),
    };
    (key, container)
}

/// The processes, each with its container.
fn owned(found: Vec<(Consumer, ProcessSnapshot)>, containers: &[ContainerSnapshot]) -> Vec<ProcessSnapshot> {
    let places: BTreeMap<&ContainerKey, usize> =
        containers.iter().enumerate().map(|(place, container)| (&container.key, place)).collect();
    let owner = |holder: Consumer, owner: ProcessOwner| match holder {
        Consumer::Container(key) => {
            places.get(&key).copied().map_or(ProcessOwner::Unknown, ProcessOwner::Container)
        }
        Consumer::Host | Consumer::Unknown => owner,
    };
    let process = |(holder, process): (Consumer, ProcessSnapshot)| ProcessSnapshot {
        owner: owner(holder, process.owner),
        ..process
    };
    found.into_iter().map(process).collect()
}

impl GpuSnapshot {
    /// A GPU, as far as it was measured.
    fn of(gpu: &Gpu, account: &GpuMeter, look: Option<GpuReading>) -> Self {
        let of = |holder| account.holders.get(&holder).copied().unwrap_or_default();
        Self {
            gpu: gpu.clone(),
            pci: String::new(),
            free_cores: Percent::ZERO,
            free_memory: MiB::ZERO,
            overbooked: false,
            look,
            total: account.total,
            host: of(Consumer::Host),
            unknown: of(Consumer::Unknown),
            idle_energy: account.idle_energy,
            measured: account.measured,
            has_energy: account.has_energy(),
            instances: account.instances.clone(),
            passes: account.passes,
            failures: account.failures,
            last_success: account.last_success,
            xids: account.xids.clone(),
        }
    }
}

impl ContainerSnapshot {
    /// Adds what its library reports, and whether it is where it was not given anything.
    fn judge(&mut self, view: &View, meter: &Meter, cards: &[GpuSnapshot]) {
        let ContainerKey { uid, container: own } = &self.key;
        let escapes = view.escapes.iter().filter(|(pod, container, ..)| pod == uid && container == own);
        self.escapes = escapes.map(|(.., escape, count)| (*escape, *count)).collect();
        let name = (self.namespace.clone(), self.pod.clone(), own.clone());
        // Without the kubelet's books nobody knows what was given.
        let is_ours = view.listed && !view.served_by_others.contains(&name);
        for share in &mut self.shares {
            share.escaped = is_ours && share.hold.is_none() && !share.pids.is_empty();
            let Some(card) = cards.get(share.card) else { continue };
            (share.throttle, share.throttled) = meter.throttle(&self.key, &card.gpu.uuid);
        }
    }
}

/// The processes on a GPU, with their holders.
fn processes_on(
    place: usize,
    card: &GpuSnapshot,
    account: &GpuMeter,
    meter: &Meter,
) -> Vec<(Consumer, ProcessSnapshot)> {
    let (Some(_), Some(latest)) = (&card.look, &account.latest) else { return Vec::new() };
    let process = |process: &ProcessMemory| {
        let who = latest.who.get(&process.pid);
        let holder = meter.holder(who);
        let owner = match (&holder, who.map(|who| &who.owner)) {
            (Consumer::Host, Some(CgroupOwner::Container(_))) => ProcessOwner::OutsideContainer,
            (Consumer::Host, _) => ProcessOwner::Host,
            _ => ProcessOwner::Unknown,
        };
        let busy =
            account.now.as_ref().map(|split| split.processes.get(&process.pid).copied().unwrap_or(0.0));
        let picture = ProcessSnapshot {
            card: place,
            pid: process.pid,
            command: who.map(|who| who.command.clone()).unwrap_or_default(),
            owner,
            bytes: process.bytes,
            busy,
            instance: process.instance,
        };
        (holder, picture)
    };
    let mut all: Vec<(Consumer, ProcessSnapshot)> =
        latest.sample.processes.iter().flatten().map(process).collect();
    // On several parts of a GPU it is still one process.
    all.dedup_by(|(_, later), (_, earlier)| {
        let same = later.pid == earlier.pid;
        if same {
            earlier.bytes = earlier.bytes.zip(later.bytes).map(|(a, b)| a.saturating_add(b));
        }
        same
    });
    all
}

/// Adds to the containers what they use of a GPU. Those that nobody granted anything come in by their processes.
fn join(
    containers: &mut BTreeMap<ContainerKey, ContainerSnapshot>,
    place: usize,
    card: &GpuSnapshot,
    account: &GpuMeter,
    view: &View,
    processes: &[(Consumer, ProcessSnapshot)],
) {
    let mut pids: BTreeMap<&ContainerKey, Vec<u32>> = BTreeMap::new();
    for (holder, process) in processes {
        if let Consumer::Container(key) = holder {
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
            dialect: None,
            shares: Vec::new(),
            escapes: Vec::new(),
        });
        if !container.shares.iter().any(|share| share.card == place) {
            container.shares.push(ShareSnapshot { card: place, ..ShareSnapshot::default() });
            container.shares.sort_by_key(|share| share.card);
        }
    }
    let used = card.look.as_ref().and_then(|look| look.used.as_ref());
    let busy = card.look.as_ref().and_then(|look| look.busy.as_ref());
    for (key, container) in containers {
        for share in container.shares.iter_mut().filter(|share| share.card == place) {
            // A container without a process uses nothing, and that is known.
            share.used = used.map(|split| split.containers.get(key).copied().unwrap_or(0));
            share.busy = busy.map(|split| split.containers.get(key).copied().unwrap_or(0.0));
            share.total = account.holders.get(&Consumer::Container(key.clone())).copied().unwrap_or_default();
            share.pids = pids.get(key).cloned().unwrap_or_default();
        }
    }
}

impl GpuReading {
    fn of(account: &GpuMeter, meter: &Meter) -> Option<Self> {
        let latest = account.latest.as_ref()?;
        let sample = &latest.sample;
        let holders: Option<Vec<(Consumer, Option<u64>)>> = sample.processes.as_ref().map(|all| {
            all.iter().map(|process| (meter.holder(latest.who.get(&process.pid)), process.bytes)).collect()
        });
        let used = sample.memory.zip(holders).map(|(memory, holders)| {
            split_memory(memory.used, holders.iter().map(|(holder, bytes)| (holder, *bytes)))
        });
        Some(Self {
            took: latest.took,
            memory: sample.memory,
            used,
            busy: account.now.as_ref().map(|split| split.all.clone()),
            energy: sample.energy,
            sensors: sample.sensors.clone(),
            instances: sample.instances.clone(),
            pids: sample.processes.iter().flatten().map(|process| process.pid).collect(),
        })
    }
}
