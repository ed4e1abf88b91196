//! Everything there is to tell at one moment, put together: what the pages are written from.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{
    gpu::Gpu,
    grant::Hold,
    units::{MiB, Percent},
};
use tessera_node::gpus::{CardMemory, Instance, Sensors};
use tessera_wire::dialect::Dialect;

use super::{CardMeter, ContainerKey, Holder, Meter, Split, Tally, Throttle, split_memory};
use crate::machine::{ContainerView, Escape, View};

/// A node at one moment.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// Its name.
    pub node: String,
    /// Its address, where it is known.
    pub host_ip: String,
    /// The driver's version, where there is one.
    pub driver: Option<String>,
    /// Its cards by index.
    pub cards: Vec<CardPicture>,
    /// Containers with a grant or a process on a card, by namespace, pod and name.
    pub containers: Vec<ContainerPicture>,
    /// Processes on cards, by card and number.
    pub processes: Vec<ProcessPicture>,
    /// What could be asked.
    pub sources: Sources,
}

/// Which sources answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// The cards were found.
    pub gpus: bool,
    /// The kubelet has told its books.
    pub kubelet: bool,
    /// The API server has told the pods.
    pub pods: bool,
    /// Processes of the whole machine can be seen.
    pub processes: bool,
}

/// One card.
#[derive(Clone, Debug)]
pub struct CardPicture {
    /// Which.
    pub gpu: Gpu,
    /// Its PCI address.
    pub pci: String,
    /// Compute that nobody holds.
    pub free_cores: Percent,
    /// Memory that nobody holds.
    pub free_memory: MiB,
    /// Whether it carries more than it has.
    pub overbooked: bool,
    /// The last look at it; `None` where it failed or is too long ago.
    pub look: Option<Look>,
    /// What it spent so far.
    pub total: Tally,
    /// Of that, the machine itself.
    pub host: Tally,
    /// Of that, nobody known.
    pub unknown: Tally,
    /// Energy while nobody computed.
    pub idle_energy: f64,
    /// Whether its busy time is measured at all.
    pub measured: bool,
    /// Whether it tells its energy.
    pub has_energy: bool,
    /// Seconds in which each of its parts was busy, by name, if it is cut up.
    pub instances: BTreeMap<String, f64>,
    /// Looks so far.
    pub passes: u64,
    /// Looks that failed.
    pub failures: u64,
    /// When a look last went well, in seconds since 1970.
    pub last_success: Option<f64>,
    /// Errors of the driver: how often, and when last.
    pub xids: BTreeMap<u64, (u64, f64)>,
}

/// What a look at a card showed.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// How long it took, in seconds.
    pub took: f64,
    /// The card's memory.
    pub memory: Option<CardMemory>,
    /// Whose the used memory is; `None` where the processes are not known.
    pub used: Option<Split<u64>>,
    /// Whose the time of the last interval was.
    pub busy: Option<Split<f64>>,
    /// Millijoules since the driver was loaded.
    pub energy: Option<u64>,
    /// All else.
    pub sensors: Sensors,
    /// Its parts, if it is cut up.
    pub instances: Vec<Instance>,
    /// The processes on it.
    pub pids: BTreeSet<u32>,
}

/// One container.
#[derive(Clone, Debug)]
pub struct ContainerPicture {
    /// Which.
    pub key: ContainerKey,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The annotation `clusterName`, which gpu-manager shows.
    pub cluster: String,
    /// The vocabulary it asked in.
    pub dialect: Option<Dialect>,
    /// Its cards by index.
    pub shares: Vec<SharePicture>,
    /// How something in it used what it was not given, and how often.
    pub escapes: Vec<(Escape, u64)>,
}

/// What a container holds and uses of a card.
#[derive(Clone, Debug, Default)]
pub struct SharePicture {
    /// The card's place in [`Picture::cards`].
    pub card: usize,
    /// What it holds; `None` for a card it was not given.
    pub hold: Option<Hold>,
    /// Bytes its processes use; `None` where that is not known.
    pub used: Option<u64>,
    /// The part of the last interval in which its kernels ran; `None` where that is not known.
    pub busy: Option<f64>,
    /// What it spent so far.
    pub total: Tally,
    /// Its processes.
    pub pids: Vec<u32>,
    /// Whether these run on a card that the container was not given.
    pub escaped: bool,
    /// What its library reports.
    pub throttle: Option<Throttle>,
    /// The part of the last interval in which it waited for its share.
    pub throttled: Option<f64>,
}

/// A process on a card.
#[derive(Clone, Debug)]
pub struct ProcessPicture {
    /// The card's place in [`Picture::cards`].
    pub card: usize,
    /// Its number.
    pub pid: u32,
    /// Its name, as it chose itself.
    pub command: String,
    /// Whose it is.
    pub owner: Owned,
    /// Bytes it uses, where the driver tells.
    pub bytes: Option<u64>,
    /// The part of the last interval in which its kernels ran.
    pub busy: Option<f64>,
    /// The part of the card it runs on, if that is cut up.
    pub instance: Option<u32>,
}

/// Whose a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owned {
    /// The container at this place in [`Picture::containers`].
    Container(usize),
    /// A container that belongs to no pod.
    OutsideContainer,
    /// The machine's own.
    Host,
    /// Nobody can tell.
    Unknown,
}

impl Picture {
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
        let mut containers: BTreeMap<ContainerKey, ContainerPicture> =
            view.containers.iter().map(held).collect();
        let mut found = Vec::new();
        for (place, gpu) in state.node().gpus().iter().enumerate() {
            let nothing = CardMeter::default();
            let account = meter.card(&gpu.uuid).unwrap_or(&nothing);
            let fresh = account.last_success.is_some_and(|at| at >= fresh_since);
            let look = fresh.then(|| Look::of(account, meter)).flatten();
            let room = state.room(gpu.index);
            let card = CardPicture {
                pci: view.pci.get(place).cloned().unwrap_or_default(),
                free_cores: room.cores,
                free_memory: room.memory,
                overbooked: view.overbooked.contains(&gpu.index.0),
                ..CardPicture::of(gpu, account, look)
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

    /// Which containers are on which parts of cards that are cut up.
    #[must_use]
    pub fn on_instances(&self) -> Vec<(&ContainerPicture, &CardPicture, &Instance)> {
        let places = |process: &ProcessPicture| match (process.owner, process.instance) {
            (Owned::Container(container), Some(part)) => Some((container, process.card, part)),
            _ => None,
        };
        let all: BTreeSet<(usize, usize, u32)> = self.processes.iter().filter_map(places).collect();
        let found = |(container, card, number): (usize, usize, u32)| {
            let card = self.cards.get(card)?;
            let parts = &card.look.as_ref()?.instances;
            let part = parts.iter().find(|part| part.gpu_instance == Some(number))?;
            Some((self.containers.get(container)?, card, part))
        };
        all.into_iter().filter_map(found).collect()
    }
}

/// What the agent's books say of a container.
fn held(held: &ContainerView) -> (ContainerKey, ContainerPicture) {
    let key = ContainerKey { uid: held.uid.clone(), container: held.container.clone() };
    let share = |(card, hold): &(u8, Hold)| SharePicture {
        card: usize::from(*card),
        hold: Some(*hold),
        ..SharePicture::default()
    };
    let container = ContainerPicture {
        key: key.clone(),
        namespace: held.namespace.clone(),
        pod: held.pod.clone(),
        cluster: held.cluster.clone(),
        dialect: held.dialect,
        shares: held.cards.iter().map(share).collect(),
        escapes: Vec::new(),
    };
    (key, container)
}

/// The processes, each with its container.
fn owned(found: Vec<(Holder, ProcessPicture)>, containers: &[ContainerPicture]) -> Vec<ProcessPicture> {
    let places: BTreeMap<&ContainerKey, usize> =
        containers.iter().enumerate().map(|(place, container)| (&container.key, place)).collect();
    let owner = |holder: Holder, owner: Owned| match holder {
        Holder::Container(key) => places.get(&key).copied().map_or(Owned::Unknown, Owned::Container),
        Holder::Host | Holder::Unknown => owner,
    };
    let process = |(holder, process): (Holder, ProcessPicture)| ProcessPicture {
        owner: owner(holder, process.owner),
        ..process
    };
    found.into_iter().map(process).collect()
}

impl CardPicture {
    /// A card, as far as it was measured.
    fn of(gpu: &Gpu, account: &CardMeter, look: Option<Look>) -> Self {
        let of = |holder| account.holders.get(&holder).copied().unwrap_or_default();
        Self {
            gpu: gpu.clone(),
            pci: String::new(),
            free_cores: Percent::ZERO,
            free_memory: MiB::ZERO,
            overbooked: false,
            look,
            total: account.total,
            host: of(Holder::Host),
            unknown: of(Holder::Unknown),
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

impl ContainerPicture {
    /// Adds what its library reports, and whether it is where it was not given anything.
    fn judge(&mut self, view: &View, meter: &Meter, cards: &[CardPicture]) {
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

/// The processes on a card, with their holders.
fn processes_on(
    place: usize,
    card: &CardPicture,
    account: &CardMeter,
    meter: &Meter,
) -> Vec<(Holder, ProcessPicture)> {
    let (Some(_), Some(latest)) = (&card.look, &account.latest) else { return Vec::new() };
    let process = |process: &tessera_node::gpus::ProcessMemory| {
        let who = latest.who.get(&process.pid);
        let holder = meter.holder(who);
        let owner = match (&holder, who.map(|who| &who.owner)) {
            (Holder::Host, Some(tessera_wire::cgroup::Owner::Container(_))) => Owned::OutsideContainer,
            (Holder::Host, _) => Owned::Host,
            _ => Owned::Unknown,
        };
        let busy =
            account.now.as_ref().map(|split| split.processes.get(&process.pid).copied().unwrap_or(0.0));
        let picture = ProcessPicture {
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
    let mut all: Vec<(Holder, ProcessPicture)> =
        latest.sample.processes.iter().flatten().map(process).collect();
    // On several parts of a card it is still one process.
    all.dedup_by(|(_, later), (_, earlier)| {
        let same = later.pid == earlier.pid;
        if same {
            earlier.bytes = earlier.bytes.zip(later.bytes).map(|(a, b)| a.saturating_add(b));
        }
        same
    });
    all
}

/// Adds to the containers what they use of a card. Those that nobody granted anything come in by their processes.
fn join(
    containers: &mut BTreeMap<ContainerKey, ContainerPicture>,
    place: usize,
    card: &CardPicture,
    account: &CardMeter,
    view: &View,
    processes: &[(Holder, ProcessPicture)],
) {
    let mut pids: BTreeMap<&ContainerKey, Vec<u32>> = BTreeMap::new();
    for (holder, process) in processes {
        if let Holder::Container(key) = holder {
            pids.entry(key).or_default().push(process.pid);
        }
    }
    for key in pids.keys() {
        let Some(pod) = view.pods.iter().find(|pod| pod.uid == key.uid) else { continue };
        let container = containers.entry((*key).clone()).or_insert_with(|| ContainerPicture {
            key: (*key).clone(),
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            cluster: String::new(),
            dialect: None,
            shares: Vec::new(),
            escapes: Vec::new(),
        });
        if !container.shares.iter().any(|share| share.card == place) {
            container.shares.push(SharePicture { card: place, ..SharePicture::default() });
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
            share.total = account.holders.get(&Holder::Container(key.clone())).copied().unwrap_or_default();
            share.pids = pids.get(key).cloned().unwrap_or_default();
        }
    }
}

impl Look {
    fn of(account: &CardMeter, meter: &Meter) -> Option<Self> {
        let latest = account.latest.as_ref()?;
        let sample = &latest.sample;
        let holders: Option<Vec<(Holder, Option<u64>)>> = sample.processes.as_ref().map(|all| {
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

    /// Bytes in use: what the parts add up to, where they are known.
    #[must_use]
    pub fn used_bytes(&self) -> Option<u64> {
        let parts = self.used.as_ref().map(|split| split.whole);
        parts.or_else(|| self.memory.map(|memory| memory.used))
    }
}

/// What a container may use of a card: percent of its compute, and bytes.
#[must_use]
pub(super) fn granted(hold: Hold, card: &CardPicture) -> (Percent, u64) {
    match hold {
        Hold::Whole => (Percent::WHOLE, card.gpu.memory.0 << 20),
        Hold::Part { cores, memory } => (cores, memory.0 << 20),
    }
}
