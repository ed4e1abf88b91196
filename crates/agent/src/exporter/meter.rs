//! Accumulated usage of all GPUs of a node, updated as samples arrive.

mod gpu;
mod share_reports;

use std::collections::BTreeMap;

use tessera_core::gpu::GpuUuid;
use tessera_node::{gpus::GpuSample, processes::ProcessInfo};

use self::share_reports::ShareHistory;
pub use self::{
    gpu::GpuMeter,
    share_reports::{ShareReport, ShareReports},
};
use super::{Consumer, ContainerIndex, ContainerKey};
use crate::controller::{ContainerTime, PodView, TimeTotals};

/// Usage accumulated so far. All values only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Seconds in which kernels ran.
    pub busy: f64,
    /// Energy in joules.
    pub energy: f64,
    /// End of the last sampling interval in which kernels ran, in seconds since 1970.
    pub last_busy: Option<f64>,
}

/// One sample of a GPU together with the owners of its processes.
#[derive(Clone, Debug)]
pub struct Observation {
    /// Time of the sample in seconds since 1970.
    pub at: f64,
    /// Duration of the sample in seconds.
    pub duration_seconds: f64,
    /// Values reported by the driver.
    pub sample: GpuSample,
    /// Processes on the GPU by PID. Processes that could not be read are missing.
    pub processes: BTreeMap<u32, ProcessInfo>,
}

/// Accumulated usage of a node.
#[derive(Debug, Default)]
pub struct Meter {
    index: ContainerIndex,
    gpus: BTreeMap<GpuUuid, GpuMeter>,
    shares: ShareHistory,
}

impl Meter {
    /// Replaces the pods of the node. The usage of pods that ended or no longer exist is dropped.
    pub fn set_pods(&mut self, pods: &[PodView]) {
        let Self { index, gpus, shares } = self;
        index.set_pods(pods);
        for gpu in gpus.values_mut() {
            let present = gpu.present(index);
            gpu.consumers.retain(|consumer, _| match consumer {
                Consumer::Container(key) => index.is_alive(&key.uid) || present.contains(consumer),
                Consumer::Host | Consumer::Unknown => true,
            });
            gpu.times.retain(|key, _| index.is_alive(&key.uid));
        }
        shares.retain(|key| index.is_alive(&key.uid));
    }

    /// Hides the last sample of every GPU that is not in `present`. The accumulated usage is kept, so
    /// that a GPU that returns continues its counters.
    pub fn hide_missing(&mut self, present: &[GpuUuid]) {
        let missing = self.gpus.iter_mut().filter(|(uuid, _)| !present.contains(uuid));
        missing.for_each(|(_, gpu)| gpu.hide());
    }

    /// Adds a sample of a GPU. If containers share the GPU by windows, the interval is divided at the
    /// next sample, because the arbiter reports windows slightly later than the driver reports work.
    pub fn observe(&mut self, uuid: &GpuUuid, observation: Observation) {
        let gpu = self.gpus.entry(uuid.clone()).or_default();
        let settle = |gpu: &mut GpuMeter| {
            let Some(interval) = gpu.unsettled.take() else { return };
            let (from, to) = interval.span();
            gpu.settle(interval, &self.shares.windows(uuid, from, to));
        };
        settle(gpu);
        gpu.observe(&self.index, observation);
        if !self.shares.has_windows(uuid) {
            settle(gpu);
        }
    }

    /// Records a failed sample and hides the values of the last one.
    pub fn record_failure(&mut self, uuid: &GpuUuid) {
        self.gpus.entry(uuid.clone()).or_default().record_failure();
    }

    /// Counts an XID error that the driver reported at `at`, in seconds since 1970.
    pub fn record_xid(&mut self, uuid: &GpuUuid, number: u64, at: f64) {
        let (count, last) = self.gpus.entry(uuid.clone()).or_default().xids.entry(number).or_default();
        *count += 1;
        *last = at;
    }

    /// Adds the reports of all shares. `at` is the time of the libraries' values and `windows_at` that
    /// of the arbiter's, in seconds since 1970.
    pub fn report(&mut self, reports: ShareReports, at: f64, windows_at: f64) {
        self.shares.add(reports, at, windows_at);
    }

    /// Returns the totals of a container's share of a GPU, and the fraction of the last interval in
    /// which the container was throttled.
    #[must_use]
    pub fn share(&self, key: &ContainerKey, uuid: &GpuUuid) -> (Option<ShareReport>, Option<f64>) {
        self.shares.share(key, uuid)
    }

    /// Returns the usage of a GPU.
    #[must_use]
    pub fn gpu(&self, uuid: &GpuUuid) -> Option<&GpuMeter> {
        self.gpus.get(uuid)
    }

    /// Returns the GPU times of all containers so far.
    #[must_use]
    pub fn container_times(&self) -> Vec<ContainerTime> {
        let mut all = Vec::new();
        for (uuid, gpu) in &self.gpus {
            for (key, times) in &gpu.times {
                #[allow(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a count of windows"
                )]
                let windows = times.windows.ceil() as u64;
                all.push(ContainerTime {
                    container: (key.uid.clone(), key.container.clone()),
                    gpu: uuid.clone(),
                    totals: TimeTotals {
                        measured: gpu.measured_time,
                        busy: times.busy,
                        window: times.window,
                        windows,
                    },
                });
            }
        }
        all
    }

    /// Returns whether the processes of a container are recognized.
    #[must_use]
    pub fn knows(&self, key: &ContainerKey) -> bool {
        self.index.known().contains(key)
    }

    /// Returns the consumer to which a process is counted.
    #[must_use]
    pub fn consumer(&self, process: Option<&ProcessInfo>) -> Consumer {
        self.index.consumer(process.map(|process| &process.owner))
    }
}

#[cfg(test)]
mod tests;
