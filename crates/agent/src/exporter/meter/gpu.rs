//! Accumulated usage of one GPU.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tessera_node::gpus::BusyTime;

use super::{
    super::{Consumer, ContainerIndex, ContainerKey, TimeSplit, split_time},
    Observation, Tally,
    share_reports::WindowPart,
};

/// Usage of one GPU so far, in total and by consumer. Counters only grow.
#[derive(Debug, Default)]
pub struct GpuMeter {
    /// Last sample, if it succeeded.
    pub latest: Option<Observation>,
    /// Usage of the whole GPU.
    pub total: Tally,
    /// Usage by consumer.
    pub consumers: BTreeMap<Consumer, Tally>,
    /// Energy in joules of intervals without any kernel.
    pub idle_energy: f64,
    /// True once busy time has been measured.
    pub measured: bool,
    /// Division of the last settled interval.
    pub latest_split: Option<TimeSplit>,
    /// Time for which the driver has reported the busy time of processes.
    pub measured_time: Duration,
    /// Busy time by the driver's samples and time in windows of each container, in that time.
    pub times: BTreeMap<ContainerKey, ContainerTimes>,
    /// Containers that were known when the interval of `latest_split` began. Time of the others may have been counted to
    /// no container.
    pub measured_containers: Arc<BTreeSet<ContainerKey>>,
    /// Number of samples.
    pub samples: u64,
    /// Number of failed samples.
    pub failures: u64,
    /// Time of the last successful sample in seconds since 1970.
    pub last_success: Option<f64>,
    /// Busy seconds of each MIG instance, by UUID.
    pub instances: BTreeMap<String, f64>,
    /// XID errors by number: count, and time of the last one in seconds since 1970.
    pub xids: BTreeMap<u64, (u64, f64)>,
    /// Last reading of the GPU's energy counter in millijoules.
    energy_before: Option<u64>,
    /// Estimated energy by consumer since that reading.
    estimate: EnergyEstimate,
    /// Containers that were known at the last sample.
    known_containers: Arc<BTreeSet<ContainerKey>>,
    /// Interval before the last sample, if it is not divided yet.
    pub(super) unsettled: Option<UnsettledInterval>,
}

/// GPU time of a container so far, by the driver and by the arbiter. It is not scaled to what the GPU was
/// busy, so that the two can be compared.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ContainerTimes {
    /// Busy time by the driver's samples.
    pub busy: Duration,
    /// Time in windows.
    pub window: Duration,
    /// Number of windows, of which those at the ends of an interval count in part.
    pub windows: f64,
}

/// Measurements of an interval that is not divided among the consumers yet.
#[derive(Debug)]
pub(super) struct UnsettledInterval {
    work: BusyTime,
    /// Consumers of the processes in `work`, in the same order.
    consumers: Vec<Consumer>,
    /// Power drawn at the end of the interval, if reported.
    watts: Option<f64>,
    /// Growth of the GPU's energy counter, or 0 if it was not read.
    joules: f64,
    /// Containers that were known when the interval began.
    known: Arc<BTreeSet<ContainerKey>>,
}

/// Energy by consumer since the last reading of the energy counter, estimated from the power drawn.
/// The counter is not read with every sample. The next reading scales the estimate to the measured
/// energy.
#[derive(Debug, Default)]
struct EnergyEstimate {
    /// Joules by consumer.
    consumers: BTreeMap<Consumer, f64>,
    /// Joules of intervals without any kernel.
    idle: f64,
}

impl EnergyEstimate {
    /// Adds the energy of an interval to its consumers in proportion to their busy time. Energy of
    /// an interval without kernels counts as idle, and of an interval without measurements as
    /// unknown.
    fn add(&mut self, split: Option<&TimeSplit>, estimate: f64) {
        match split {
            Some(split) if split.all.whole > 0.0 => {
                for (consumer, part) in split.parts() {
                    *self.consumers.entry(consumer).or_default() += estimate * part / split.all.whole;
                }
            }
            Some(_) => self.idle += estimate,
            None => *self.consumers.entry(Consumer::Unknown).or_default() += estimate,
        }
    }
}

impl UnsettledInterval {
    /// Returns the start and the end of the interval in seconds since 1970.
    pub(super) fn span(&self) -> (f64, f64) {
        let seconds = |micros: u64| Duration::from_micros(micros).as_secs_f64();
        (seconds(self.work.from), seconds(self.work.to))
    }
}

impl GpuMeter {
    /// Adds a sample. The interval before it is left to be divided by [`Self::settle`].
    pub(super) fn observe(&mut self, index: &ContainerIndex, observation: Observation) {
        self.samples += 1;
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
        // Without a new driver sample, this interval and its energy are counted with the next one.
        let known = std::mem::replace(&mut self.known_containers, index.known());
        if sample.work.seconds() > 0.0 {
            let work = sample.work.clone();
            let owner = |pid: &u32| observation.processes.get(pid).map(|process| &process.owner);
            let pids = work.processes.iter().flatten().map(|(pid, _)| pid);
            let consumers = pids.map(|pid| index.consumer(owner(pid))).collect();
            let watts = sample.sensors.power.map(|milliwatts| f64::from(milliwatts) / 1e3);
            let joules = self.joules(sample.energy);
            self.unsettled = Some(UnsettledInterval { work, consumers, watts, joules, known });
        } else if self.samples > 1 {
            // The interval goes on. Before the first sample there was none.
            self.known_containers = known;
        }
        self.latest = Some(observation);
    }

    /// Records a failed sample.
    pub(super) fn record_failure(&mut self) {
        self.samples += 1;
        self.failures += 1;
        self.hide();
    }

    /// Drops the last sample, so that no gauges are shown.
    pub(super) fn hide(&mut self) {
        (self.latest, self.latest_split) = (None, None);
    }

    /// Returns the joules since the last reading of the energy counter.
    fn joules(&mut self, now: Option<u64>) -> f64 {
        let Some(now) = now else { return 0.0 };
        let before = self.energy_before.replace(now).unwrap_or(now);
        // A smaller value means that the driver was reloaded and counts from zero again.
        Duration::from_millis(now.saturating_sub(before)).as_secs_f64()
    }

    /// Adds an interval to the GPU times of containers.
    fn add_times(&mut self, interval: &UnsettledInterval, windows: &BTreeMap<ContainerKey, WindowPart>) {
        let UnsettledInterval { work, consumers, .. } = interval;
        let Some(processes) = &work.processes else { return };
        let length = Duration::from_secs_f64(work.seconds());
        self.measured_time += length;
        for ((_, part), consumer) in processes.iter().zip(consumers) {
            if let Consumer::Container(key) = consumer {
                self.times.entry(key.clone()).or_default().busy += length.mul_f64(*part);
            }
        }
        for (key, window) in windows {
            let times = self.times.entry(key.clone()).or_default();
            times.window += length.mul_f64(window.open);
            times.windows += window.count;
        }
    }

    /// Divides an interval among its consumers. `windows` is the part of the interval in which each
    /// container had an open window, as recorded by the arbiter.
    pub(super) fn settle(
        &mut self,
        interval: UnsettledInterval,
        windows: &BTreeMap<ContainerKey, WindowPart>,
    ) {
        self.add_times(&interval, windows);
        let (_, end) = interval.span();
        let UnsettledInterval { work, consumers, watts, joules, known } = interval;
        let processes = work.processes.as_ref().map(|all| {
            all.iter().zip(consumers).map(|((pid, part), consumer)| (*pid, consumer, *part)).collect()
        });
        let fractions = windows.iter().map(|(key, window)| (key.clone(), window.busy)).collect();
        let split = split_time(work.gpu, processes, &fractions);
        if let Some(split) = &split {
            self.measured = true;
            self.total.busy += split.all.whole * work.seconds();
            for (consumer, part) in split.parts() {
                let tally = self.consumers.entry(consumer).or_default();
                tally.busy += part * work.seconds();
                tally.last_busy = Some(end);
            }
        }
        self.estimate.add(split.as_ref(), watts.unwrap_or(1.0) * work.seconds());
        if joules > 0.0 {
            self.distribute_energy(joules);
        }
        (self.latest_split, self.measured_containers) = (split, known);
    }

    /// Distributes the energy measured since the last reading in proportion to the estimate.
    fn distribute_energy(&mut self, joules: f64) {
        self.total.energy += joules;
        let EnergyEstimate { consumers, idle } = std::mem::take(&mut self.estimate);
        let sum = consumers.values().sum::<f64>() + idle;
        if sum <= 0.0 {
            self.idle_energy += joules;
            return;
        }
        for (consumer, estimate) in consumers {
            self.consumers.entry(consumer).or_default().energy += joules * estimate / sum;
        }
        self.idle_energy += joules * idle / sum;
    }

    /// Returns whether energy was measured. This needs two readings of the energy counter.
    #[must_use]
    pub fn has_energy(&self) -> bool {
        self.total.energy > 0.0
    }

    /// Returns the consumers that have a process on the GPU now.
    pub(super) fn present(&self, index: &ContainerIndex) -> Vec<Consumer> {
        let owners = self.latest.iter().flat_map(|latest| {
            let pids = latest.sample.processes.iter().flatten().map(|process| process.pid);
            pids.map(|pid| latest.processes.get(&pid).map(|process| &process.owner))
        });
        owners.map(|owner| index.consumer(owner)).collect()
    }
}
