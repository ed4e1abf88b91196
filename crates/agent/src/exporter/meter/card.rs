//! The accounts of one GPU.

use std::{collections::BTreeMap, time::Duration};

use tessera_node::gpus::BusyTime;

use super::{
    super::{Consumer, ContainerIndex, ContainerKey, TimeSplit, split_time},
    Observation, Tally,
};

/// What one GPU did so far, and for whom. Counts only ever grow.
#[derive(Debug, Default)]
pub struct GpuMeter {
    /// The last look, if it went well.
    pub latest: Option<Observation>,
    /// The GPU as a whole.
    pub total: Tally,
    /// Those whose processes were on it.
    pub holders: BTreeMap<Consumer, Tally>,
    /// Energy of times in which nobody computed.
    pub idle_energy: f64,
    /// Whether busy time was ever measured.
    pub measured: bool,
    /// Whose the last interval was that is settled.
    pub now: Option<TimeSplit>,
    /// Looks so far.
    pub passes: u64,
    /// Looks that failed.
    pub failures: u64,
    /// When a look last went well, in seconds since 1970.
    pub last_success: Option<f64>,
    /// Seconds in which each of its parts was busy, by name, if it is cut up.
    pub instances: BTreeMap<String, f64>,
    /// Errors of the driver: how often, and when last.
    pub xids: BTreeMap<u64, (u64, f64)>,
    /// The GPU's own count of millijoules when it last told.
    energy_before: Option<u64>,
    /// Whose energy it was since then.
    unpaid: Unpaid,
    /// The time before the last look, if it is not settled yet whose it was.
    pub(super) unsettled: Option<Interval>,
}

/// What a look told of the time before it.
#[derive(Debug)]
pub(super) struct Interval {
    work: BusyTime,
    /// Whose the processes are.
    holders: Vec<Consumer>,
    /// What the GPU drew at its end, if it told.
    watts: Option<f64>,
    /// What the GPU's energy counter had grown by, if it was read.
    joules: f64,
}

/// Energy counters are not read at every look: what was drawn between two readings is kept by what the GPU drew at each look, until
/// the next reading says how much it really was.
#[derive(Debug, Default)]
struct Unpaid {
    /// About how many joules.
    holders: BTreeMap<Consumer, f64>,
    /// While nobody computed.
    idle: f64,
}

impl Unpaid {
    /// The energy of an interval goes to those who were busy in it, by how much they were; where nobody was, to idleness; where that is
    /// not known, to nobody known.
    fn add(&mut self, split: Option<&TimeSplit>, about: f64) {
        match split {
            Some(split) if split.all.whole > 0.0 => {
                for (holder, part) in split.parts() {
                    *self.holders.entry(holder).or_default() += about * part / split.all.whole;
                }
            }
            Some(_) => self.idle += about,
            None => *self.holders.entry(Consumer::Unknown).or_default() += about,
        }
    }
}

impl Interval {
    /// Begin and end, in seconds since 1970.
    pub(super) fn span(&self) -> (f64, f64) {
        let seconds = |micros: u64| Duration::from_micros(micros).as_secs_f64();
        (seconds(self.work.from), seconds(self.work.to))
    }
}

impl GpuMeter {
    /// Takes a look. Whose the time before it was is left to be settled.
    pub(super) fn observe(&mut self, book: &ContainerIndex, observation: Observation) {
        self.passes += 1;
        self.last_success = Some(observation.at);
        let sample = &observation.sample;
        if self.energy_before.is_none() {
            self.energy_before = sample.energy;
        }
        for part in &sample.instances {
            let busy = part.counted.and_then(|counted| counted.graphics);
            if let Some(busy) = busy {
                *self.instances.entry(part.uuid.clone()).or_default() += busy * sample.work.seconds();
            }
        }
        // Too early for news: this time, and its energy, come with the next look.
        if sample.work.seconds() > 0.0 {
            let work = sample.work.clone();
            let owner = |pid: &u32| observation.who.get(pid).map(|process| &process.owner);
            let pids = work.processes.iter().flatten().map(|(pid, _)| pid);
            let holders = pids.map(|pid| book.holder(owner(pid))).collect();
            let watts = sample.sensors.power.map(|milliwatts| f64::from(milliwatts) / 1e3);
            let joules = self.joules(sample.energy);
            self.unsettled = Some(Interval { work, holders, watts, joules });
        }
        self.latest = Some(observation);
    }

    /// A look failed.
    pub(super) fn miss(&mut self) {
        self.passes += 1;
        self.failures += 1;
        self.hide();
    }

    /// What it showed before is not shown any more.
    pub(super) fn hide(&mut self) {
        (self.latest, self.now) = (None, None);
    }

    /// Joules since the GPU last told.
    fn joules(&mut self, now: Option<u64>) -> f64 {
        let Some(now) = now else { return 0.0 };
        let before = self.energy_before.replace(now).unwrap_or(now);
        // Where it is less than before, the driver was loaded anew and counts from zero.
        Duration::from_millis(now.saturating_sub(before)).as_secs_f64()
    }

    /// Whose the time before the last look was. `windows`: the part of it in which containers had the GPU by the arbiter's books.
    pub(super) fn settle(&mut self, interval: Interval, windows: &BTreeMap<ContainerKey, f64>) {
        let (_, end) = interval.span();
        let Interval { work, holders, watts, joules } = interval;
        let processes = work
            .processes
            .as_ref()
            .map(|all| all.iter().zip(holders).map(|((pid, part), holder)| (*pid, holder, *part)).collect());
        let split = split_time(work.card, processes, windows);
        if let Some(split) = &split {
            self.measured = true;
            self.total.busy += split.all.whole * work.seconds();
            for (holder, part) in split.parts() {
                let tally = self.holders.entry(holder).or_default();
                tally.busy += part * work.seconds();
                tally.last_busy = Some(end);
            }
        }
        self.unpaid.add(split.as_ref(), watts.unwrap_or(1.0) * work.seconds());
        if joules > 0.0 {
            self.pay(joules);
        }
        self.now = split;
    }

    /// So much was it really, since the counter was last read.
    fn pay(&mut self, joules: f64) {
        self.total.energy += joules;
        let Unpaid { holders, idle } = std::mem::take(&mut self.unpaid);
        let sum = holders.values().sum::<f64>() + idle;
        if sum <= 0.0 {
            self.idle_energy += joules;
            return;
        }
        for (holder, about) in holders {
            self.holders.entry(holder).or_default().energy += joules * about / sum;
        }
        self.idle_energy += joules * idle / sum;
    }

    /// Whether the GPU has told what it used: a counter must have been read twice.
    #[must_use]
    pub fn has_energy(&self) -> bool {
        self.total.energy > 0.0
    }

    /// Those with a process on the GPU now.
    pub(super) fn present(&self, book: &ContainerIndex) -> Vec<Consumer> {
        let looks = self.latest.iter();
        let owners = looks.flat_map(|look| {
            let pids = look.sample.processes.iter().flatten().map(|process| process.pid);
            pids.map(|pid| look.who.get(&pid).map(|who| &who.owner))
        });
        owners.map(|owner| book.holder(owner)).collect()
    }
}
