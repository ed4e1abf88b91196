//! The accounts of all GPUs, kept as samples come.

mod card;
mod library;

use std::collections::BTreeMap;

use tessera_core::gpu::GpuUuid;
use tessera_node::{gpus::GpuSample, processes::ProcessInfo};

use self::library::Library;
pub use self::{
    card::GpuMeter,
    library::{ShareReport, ShareReports},
};
use super::{Consumer, ContainerIndex, ContainerKey};
use crate::controller::PodView;

/// What was spent so far. Only ever grows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Seconds in which kernels ran.
    pub busy: f64,
    /// Joules.
    pub energy: f64,
    /// When kernels last ran, in seconds since 1970, as finely as looks are taken.
    pub last_busy: Option<f64>,
}

/// One look at a GPU and at the processes on it.
#[derive(Clone, Debug)]
pub struct Observation {
    /// When, in seconds since 1970.
    pub at: f64,
    /// How long it took, in seconds.
    pub took: f64,
    /// What the GPU said.
    pub sample: GpuSample,
    /// Who its processes are; those that nobody could find are left out.
    pub who: BTreeMap<u32, ProcessInfo>,
}

/// The accounts of a node.
#[derive(Debug, Default)]
pub struct Meter {
    book: ContainerIndex,
    cards: BTreeMap<GpuUuid, GpuMeter>,
    library: Library,
}

impl Meter {
    /// All pods of the node, as they are now. Accounts of those that are gone or over go with them.
    pub fn learn(&mut self, pods: &[PodView]) {
        let Self { book, cards, library } = self;
        book.learn(pods);
        for card in cards.values_mut() {
            let present = card.present(book);
            card.holders.retain(|holder, _| match holder {
                Consumer::Container(key) => book.is_alive(&key.uid) || present.contains(holder),
                Consumer::Host | Consumer::Unknown => true,
            });
        }
        library.keep(|key| book.is_alive(&key.uid));
    }

    /// Only these GPUs are there now. The counts of the others are kept: one that comes back goes on where it was.
    pub fn keep(&mut self, cards: &[GpuUuid]) {
        let gone = self.cards.iter_mut().filter(|(uuid, _)| !cards.contains(uuid));
        gone.for_each(|(_, card)| card.hide());
    }

    /// Takes a look at a GPU into the accounts. Where containers share it by windows, whose the time was is settled at the next look:
    /// what they had is reported a little later than what the GPU did.
    pub fn observe(&mut self, gpu: &GpuUuid, observation: Observation) {
        let card = self.cards.entry(gpu.clone()).or_default();
        let settle = |card: &mut GpuMeter| {
            let Some(interval) = card.unsettled.take() else { return };
            let (from, to) = interval.span();
            card.settle(interval, &self.library.windows(gpu, from, to));
        };
        settle(card);
        card.observe(&self.book, observation);
        if !self.library.has_windows(gpu) {
            settle(card);
        }
    }

    /// A look at a GPU failed: what it showed before is not shown any more.
    pub fn missed(&mut self, gpu: &GpuUuid) {
        self.cards.entry(gpu.clone()).or_default().miss();
    }

    /// The driver reported an error.
    pub fn xid(&mut self, gpu: &GpuUuid, number: u64, at: f64) {
        let (count, last) = self.cards.entry(gpu.clone()).or_default().xids.entry(number).or_default();
        *count += 1;
        *last = at;
    }

    /// What the libraries in containers report at a moment, and the arbiter of the windows until another, in seconds since 1970.
    pub fn report(&mut self, throttles: ShareReports, at: f64, windows_at: f64) {
        self.library.take(throttles, at, windows_at);
    }

    /// What the library of a container reports of a GPU, and the part of the last interval in which it waited.
    #[must_use]
    pub fn throttle(&self, key: &ContainerKey, gpu: &GpuUuid) -> (Option<ShareReport>, Option<f64>) {
        self.library.share(key, gpu)
    }

    /// The accounts of a GPU.
    #[must_use]
    pub fn card(&self, gpu: &GpuUuid) -> Option<&GpuMeter> {
        self.cards.get(gpu)
    }

    /// To whom a process is counted.
    #[must_use]
    pub fn holder(&self, process: Option<&ProcessInfo>) -> Consumer {
        self.book.holder(process.map(|process| &process.owner))
    }
}

#[cfg(test)]
mod tests;
