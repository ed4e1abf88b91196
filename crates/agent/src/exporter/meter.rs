//! The accounts of all cards, kept as samples come.

use std::collections::BTreeMap;

use tessera_core::gpu::GpuUuid;
use tessera_node::{gpus::CardSample, processes::Process};

use super::{Book, ContainerKey, Holder, Split, split_time};
use crate::machine::PodView;

/// What was spent so far. Only ever grows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Seconds in which kernels ran.
    pub busy: f64,
    /// Joules.
    pub energy: f64,
}

/// What the library in a container reports of its share of a card.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Throttle {
    /// Seconds spent waiting for the share, so far.
    pub seconds: f64,
    /// How often it had to wait.
    pub waits: u64,
    /// Bytes it asked for and was refused.
    pub denied_bytes: u64,
    /// Seconds its windows on the card have been open, so far.
    pub open: f64,
    /// How many windows it has had.
    pub windows: u64,
}

/// By container and card.
pub type Throttles = BTreeMap<(ContainerKey, GpuUuid), Throttle>;

/// One look at a card and at the processes on it.
#[derive(Clone, Debug)]
pub struct Observation {
    /// When, in seconds since 1970.
    pub at: f64,
    /// How long it took, in seconds.
    pub took: f64,
    /// What the card said.
    pub sample: CardSample,
    /// Who its processes are; those that nobody could find are left out.
    pub who: BTreeMap<u32, Process>,
}

/// The accounts of one card.
#[derive(Debug, Default)]
pub struct CardMeter {
    /// The last look, if it went well.
    pub latest: Option<Observation>,
    /// The card as a whole.
    pub total: Tally,
    /// Those whose processes were on it.
    pub holders: BTreeMap<Holder, Tally>,
    /// Energy of times in which nobody computed.
    pub idle_energy: f64,
    /// Whether busy time was ever measured.
    pub measured: bool,
    /// Parts of the last interval that was measured, and each process's own.
    pub now: Option<(Split<f64>, BTreeMap<u32, f64>)>,
    /// Looks so far.
    pub passes: u64,
    /// Looks that failed.
    pub failures: u64,
    /// When a look last went well, in seconds since 1970.
    pub last_success: Option<f64>,
    /// Errors of the driver: how often, and when last.
    pub xids: BTreeMap<u64, (u64, f64)>,
    /// The card's own count of millijoules at the end of the last interval.
    energy_before: Option<u64>,
}

/// The accounts of a node.
#[derive(Debug, Default)]
pub struct Meter {
    book: Book,
    cards: BTreeMap<GpuUuid, CardMeter>,
    throttles: Throttles,
    /// When that was reported, in seconds since 1970.
    throttles_at: f64,
    /// The part of the time before in which each waited.
    waiting: BTreeMap<(ContainerKey, GpuUuid), f64>,
}

impl Meter {
    /// All pods of the node, as they are now. Accounts of those that are gone or over go with them.
    pub fn learn(&mut self, pods: &[PodView]) {
        self.book.learn(pods);
        let book = &self.book;
        let stays = |holder: &Holder, has_process: bool| match holder {
            Holder::Container(key) => book.is_alive(&key.uid) || has_process,
            Holder::Host | Holder::Unknown => true,
        };
        for card in self.cards.values_mut() {
            let present: Vec<Holder> = card.present(book);
            card.holders.retain(|holder, _| stays(holder, present.contains(holder)));
        }
        self.throttles.retain(|(key, _), _| book.is_alive(&key.uid));
        self.waiting.retain(|(key, _), _| book.is_alive(&key.uid));
    }

    /// Only these cards are there now.
    pub fn keep(&mut self, cards: &[GpuUuid]) {
        self.cards.retain(|uuid, _| cards.contains(uuid));
    }

    /// Takes a look at a card into the accounts.
    pub fn observe(&mut self, gpu: &GpuUuid, observation: Observation) {
        let Self { book, cards, .. } = self;
        cards.entry(gpu.clone()).or_default().observe(book, observation);
    }

    /// A look at a card failed: what it showed before is not shown any more.
    pub fn missed(&mut self, gpu: &GpuUuid) {
        let card = self.cards.entry(gpu.clone()).or_default();
        card.passes += 1;
        card.failures += 1;
        card.latest = None;
        card.now = None;
    }

    /// The driver reported an error.
    pub fn xid(&mut self, gpu: &GpuUuid, number: u64, at: f64) {
        let (count, last) = self.cards.entry(gpu.clone()).or_default().xids.entry(number).or_default();
        *count += 1;
        *last = at;
    }

    /// What the libraries in containers report, all of it: takes the place of what was known. `at` in seconds since 1970.
    pub fn report(&mut self, throttles: Throttles, at: f64) {
        let passed = at - self.throttles_at;
        let part = |(key, now): (&(ContainerKey, GpuUuid), &Throttle)| {
            let waited = now.seconds - self.throttles.get(key)?.seconds;
            (passed > 0.0).then(|| (key.clone(), (waited / passed).clamp(0.0, 1.0)))
        };
        self.waiting = throttles.iter().filter_map(part).collect();
        (self.throttles, self.throttles_at) = (throttles, at);
    }

    /// What the library of a container reports of a card, and the part of the last interval in which it waited.
    #[must_use]
    pub fn throttle(&self, key: &ContainerKey, gpu: &GpuUuid) -> (Option<Throttle>, Option<f64>) {
        let key = (key.clone(), gpu.clone());
        (self.throttles.get(&key).copied(), self.waiting.get(&key).copied())
    }

    /// The accounts of a card.
    #[must_use]
    pub fn card(&self, gpu: &GpuUuid) -> Option<&CardMeter> {
        self.cards.get(gpu)
    }

    /// To whom a process is counted.
    #[must_use]
    pub fn holder(&self, process: Option<&Process>) -> Holder {
        self.book.holder(process.map(|process| &process.owner))
    }
}

impl CardMeter {
    fn observe(&mut self, book: &Book, observation: Observation) {
        self.passes += 1;
        self.last_success = Some(observation.at);
        let sample = &observation.sample;
        let holder = |pid: u32| book.holder(observation.who.get(&pid).map(|process| &process.owner));
        let work = &sample.work;
        let busy: Option<Vec<(Holder, f64)>> =
            work.processes.as_ref().map(|all| all.iter().map(|(pid, time)| (holder(*pid), *time)).collect());
        let given = busy.as_ref().map(|all| all.iter().map(|(holder, time)| (holder, *time)));
        if self.energy_before.is_none() {
            self.energy_before = sample.energy;
        }
        // Too early for news: this time comes with the next look.
        if work.seconds() > 0.0 {
            let split = split_time(work.card, given);
            self.add_busy(split.as_ref(), work.seconds());
            self.add_energy(split.as_ref(), sample.energy);
            let own = work.processes.iter().flatten().copied().collect();
            self.now = split.map(|split| (split, own));
        }
        self.latest = Some(observation);
    }

    fn add_busy(&mut self, split: Option<&Split<f64>>, seconds: f64) {
        let Some(split) = split else { return };
        self.measured = true;
        self.total.busy += split.whole * seconds;
        for (holder, part) in parts(split) {
            self.holders.entry(holder).or_default().busy += part * seconds;
        }
    }

    /// The energy of an interval goes to those who were busy in it, by how much they were; where nobody was, to idleness; where that is
    /// not known, to nobody known.
    fn add_energy(&mut self, split: Option<&Split<f64>>, now: Option<u64>) {
        let before = std::mem::replace(&mut self.energy_before, now);
        // The driver was loaded anew: it counts from zero.
        let Some(millijoules) = now.zip(before).and_then(|(now, before)| now.checked_sub(before)) else {
            return;
        };
        let joules = f64::from(u32::try_from(millijoules).unwrap_or(u32::MAX)) / 1e3;
        self.total.energy += joules;
        match split {
            Some(split) if split.whole > 0.0 => {
                for (holder, part) in parts(split) {
                    self.holders.entry(holder).or_default().energy += joules * part / split.whole;
                }
            }
            Some(_) => self.idle_energy += joules,
            None => self.holders.entry(Holder::Unknown).or_default().energy += joules,
        }
    }

    /// Whether the card tells its energy.
    #[must_use]
    pub fn has_energy(&self) -> bool {
        self.energy_before.is_some()
    }

    /// Those with a process on the card now.
    fn present(&self, book: &Book) -> Vec<Holder> {
        let latest = self.latest.iter();
        let pids = latest.flat_map(|look| {
            look.sample
                .processes
                .iter()
                .flatten()
                .map(|process| look.who.get(&process.pid).map(|who| &who.owner))
        });
        pids.map(|owner| book.holder(owner)).collect()
    }
}

/// Whatever is more than nothing.
fn parts(split: &Split<f64>) -> impl Iterator<Item = (Holder, f64)> {
    let containers = split.containers.iter().map(|(key, part)| (Holder::Container(key.clone()), *part));
    let others = [(Holder::Host, split.host), (Holder::Unknown, split.unknown + split.rest)];
    containers.chain(others).filter(|(_, part)| *part > 0.0)
}

#[cfg(test)]
mod tests;
