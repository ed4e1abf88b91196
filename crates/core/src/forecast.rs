//! The forecast: how much of the free GPUs the expected pods will not be able to use.

mod free_capacity;

pub use self::free_capacity::FreeCapacity;
use crate::fragmentation::Fragmentation;
use crate::gpu::GpuKind;
use crate::node::Node;
use crate::units::{MiB, MilliCpu};
use crate::workload::{Demand, ExpectedClass, PodClass, Workload};

/// The expected waste by kind of GPU, for one workload and one state of the cluster.
///
/// A forecast stays useful until the workload or the cluster has changed much; a [`Learner`] tells
/// when.
#[derive(Clone, Debug, Default)]
pub struct Forecast {
    kinds: Vec<(GpuKind, KindForecast)>,
    /// The forecast for kinds of GPUs that were added after the forecast was made.
    unknown: KindForecast,
    /// The expected CPU request per GPU, in thousandths of a CPU; never zero.
    cpu_per_gpu: f64,
    /// The expected main memory request per GPU, in MiB.
    memory_per_gpu: f64,
}

#[derive(Clone, Debug)]
struct KindForecast {
    /// The outlook of a GPU, by its free percentage.
    leftovers: [Leftover; 101],
    /// The fragmentation measure, in which classes of pods weigh more where fewer GPUs can serve
    /// them.
    scarcity: Fragmentation,
}

/// The outlook of a GPU with some percentage free, if single-GPU pods arrive as expected until none
/// fits.
#[derive(Clone, Copy, Debug, Default)]
struct Leftover {
    /// The part that stays unused, in GPUs.
    waste: f64,
    /// The CPU that the arriving pods need, in thousandths of a CPU.
    cpu: f64,
    /// The main memory that the arriving pods need, in MiB.
    memory: f64,
}

/// Learns the workload from arriving pods and tells when a new forecast is due.
#[derive(Clone, Debug)]
pub struct Learner {
    workload: Workload,
    /// The number of arrivals since the last forecast.
    arrivals: f64,
    /// The free capacity at the last forecast, in GPUs.
    idle: f64,
}

/// Weight of the case that no further pod arrives for a free part of a GPU, relative to 1 for all
/// classes of pods.
///
/// It is small because free parts wait long. It keeps a part that only a rare class can use from
/// counting as used.
const NO_ARRIVAL_WEIGHT: f64 = 0.04;

/// Factor on the mean CPU and memory request per GPU. It is below 1 because most pods request less
/// than the mean.
const HOST_NEED_FACTOR: f64 = 0.9;

/// Weight of the scarcity measure. It keeps whole nodes for the pods that need them; the expected
/// waste decides most cases.
const SCARCITY_WEIGHT: f64 = 0.1;

/// Lower bound for the GPUs that can serve a class when its scarcity is computed. Without it the
/// last few GPUs would outweigh everything else.
const MIN_SERVING_GPUS: f64 = 8.0;

/// A forecast is due when the arrivals since the last one reach this part of the workload's weight.
const DUE_ARRIVALS: f64 = 0.25;

/// A forecast is due when the free capacity has changed by this part of all GPUs.
const DUE_CAPACITY_CHANGE: f64 = 0.1;

// === impl Forecast ===

impl Forecast {
    /// Makes a forecast from the free capacity. On a large cluster this takes many milliseconds.
    #[must_use]
    pub fn new(workload: &Workload, remains: &FreeCapacity) -> Self {
        let classes: Vec<ExpectedClass<'_>> = workload.classes().collect();
        let gpus: f64 = classes.iter().map(|expected| expected.share * gpus_taken(expected.class)).sum();
        let per_gpu = |need: fn(&ExpectedClass<'_>) -> f64| {
            let mean: f64 = classes.iter().map(|expected| expected.share * need(expected)).sum();
            if gpus > 0.0 { (HOST_NEED_FACTOR * mean / gpus).max(1.0) } else { 1.0 }
        };
        let scarcity = scarcity(&classes, remains);
        let forecast = |kind: &GpuKind| KindForecast {
            leftovers: leftovers(&classes, kind),
            scarcity: Fragmentation::new(scarcity.iter().copied(), kind),
        };
        let mut kinds: Vec<(GpuKind, KindForecast)> = Vec::new();
        for (kind, _) in remains.nodes.iter().flat_map(|node| node.kinds.iter()) {
            if !kinds.iter().any(|(known, _)| known == kind) {
                kinds.push((kind.clone(), forecast(kind)));
            }
        }
        Self {
            kinds,
            unknown: KindForecast::default(),
            cpu_per_gpu: per_gpu(|expected| milli(expected.class.cpu)),
            memory_per_gpu: per_gpu(|expected| expected.memory),
        }
    }

    /// Returns the GPUs of a node that are expected to stay unused; `left` returns the free
    /// percentage of each.
    ///
    /// The sum has three parts: free parts that suit no expected pod, GPUs for which CPU or memory
    /// is missing, and lost capacity for scarce classes of pods.
    pub(crate) fn lost(&self, node: &Node, cpu: MilliCpu, memory: MiB, left: impl Fn(usize) -> u8) -> f64 {
        let (mut lost, mut cpu_need, mut memory_need) = (0.0, 0.0, 0.0);
        for (kind, gpus) in node.kinds() {
            let forecast = self.of(kind);
            let left = gpus.iter().map(|gpu| left(gpu.position()));
            for percent in left.clone() {
                let leftover = &forecast.leftovers[usize::from(percent.min(100))];
                lost += leftover.waste;
                cpu_need += leftover.cpu;
                memory_need += leftover.memory;
            }
            lost += SCARCITY_WEIGHT * forecast.scarcity.of(cpu, left);
        }
        let cpu_short = (cpu_need - milli(cpu)) / self.cpu_per_gpu();
        let memory_short = (memory_need - mebibytes(memory)) / self.memory_per_gpu.max(1.0);
        lost + cpu_short.max(memory_short).max(0.0)
    }

    /// Returns the expected CPU request per GPU, in thousandths of a CPU.
    pub(crate) fn cpu_per_gpu(&self) -> f64 {
        self.cpu_per_gpu.max(1.0)
    }

    fn of(&self, kind: &GpuKind) -> &KindForecast {
        self.kinds.iter().find(|(known, _)| known == kind).map_or(&self.unknown, |(_, forecast)| forecast)
    }
}

impl Default for KindForecast {
    fn default() -> Self {
        Self { leftovers: [Leftover::default(); 101], scarcity: Fragmentation::default() }
    }
}

/// Computes the outlook for each free percentage of a GPU.
///
/// Single-GPU pods arrive one after the other with the expected probabilities. Each takes its part
/// if it fits, until no further pod arrives.
fn leftovers(classes: &[ExpectedClass<'_>], kind: &GpuKind) -> [Leftover; 101] {
    // Probability, CPU and memory of the arriving pods, by the percentage they take.
    let mut takers = [(0.0, 0.0, 0.0); 101];
    for ExpectedClass { class, share, memory } in classes {
        let percent = class.percent_of(kind);
        if class.gpu_count() == 1 && class.accepts(&kind.model) && (1..=100).contains(&percent) {
            let taker = &mut takers[percent];
            *taker = (taker.0 + share, taker.1 + share * milli(class.cpu), taker.2 + share * memory);
        }
    }
    let mut leftovers = [Leftover::default(); 101];
    for left in 1..=100 {
        let mut chances = NO_ARRIVAL_WEIGHT;
        let mut sum = Leftover { waste: NO_ARRIVAL_WEIGHT * percent_of_gpu(left), ..Leftover::default() };
        for (taken, (chance, cpu, memory)) in takers.iter().enumerate().take(left + 1).skip(1) {
            let rest = &leftovers[left - taken];
            chances += chance;
            sum.waste += chance * rest.waste;
            sum.cpu += HOST_NEED_FACTOR * cpu + chance * rest.cpu;
            sum.memory += HOST_NEED_FACTOR * memory + chance * rest.memory;
        }
        leftovers[left] =
            Leftover { waste: sum.waste / chances, cpu: sum.cpu / chances, memory: sum.memory / chances };
    }
    leftovers
}

/// Weighs each class of pods by the GPUs it takes and by how few of the free GPUs can serve it now.
fn scarcity<'a>(classes: &[ExpectedClass<'a>], remains: &FreeCapacity) -> Vec<(&'a PodClass, f64)> {
    let idle = remains.gpus_left();
    let weigh = |expected: &ExpectedClass<'a>| {
        let class = expected.class;
        let scarcity = idle / remains.gpus_serving(class).max(MIN_SERVING_GPUS);
        #[expect(clippy::cast_precision_loss, reason = "at most 64 GPUs")]
        let gpus = class.gpu_count() as f64;
        (class, expected.share * scarcity * scarcity * gpus)
    };
    classes.iter().map(weigh).collect()
}

/// Returns the number of GPUs that a pod takes; a share counts as a fraction.
fn gpus_taken(class: &PodClass) -> f64 {
    match class.demand {
        Demand::Whole(gpus) => f64::from(gpus),
        Demand::Share { compute_percent, .. } => f64::from(compute_percent.0.max(1)) / 100.0,
    }
}

fn percent_of_gpu(percent: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "at most 100")]
    let percent = percent as f64;
    percent / 100.0
}

#[expect(clippy::cast_precision_loss, reason = "no host has 2^52 MiB")]
fn mebibytes(memory: MiB) -> f64 {
    memory.0 as f64
}

#[expect(clippy::cast_precision_loss, reason = "no host has 2^52 thousandths of a CPU")]
fn milli(cpu: MilliCpu) -> f64 {
    cpu.0 as f64
}

// === impl Learner ===

impl Learner {
    /// Creates a learner that starts from a known or assumed workload.
    #[must_use]
    pub fn new(workload: Workload) -> Self {
        Self { workload, arrivals: f64::INFINITY, idle: 0.0 }
    }

    /// Counts the arrival of a pod.
    pub fn see(&mut self, pod: &crate::request::PodRequest) {
        if pod.wants_gpu() {
            self.workload.see(pod);
            self.arrivals += 1.0;
        }
    }

    /// Returns the workload that was learned so far.
    #[must_use]
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Returns whether the workload contains any pod, counted or assumed.
    #[must_use]
    pub fn has_seen_any(&self) -> bool {
        self.workload.pods() > 0.0
    }

    /// Returns whether a new forecast is due, with `idle` of `all` GPUs free.
    #[must_use]
    pub fn is_due(&self, idle: f64, all: f64) -> bool {
        self.arrivals >= DUE_ARRIVALS * self.workload.pods() && self.arrivals > 0.0
            || (idle - self.idle).abs() >= DUE_CAPACITY_CHANGE * all
    }

    /// Returns the workload for a forecast from this free capacity, and counts arrivals from zero
    /// again.
    pub fn begin_forecast(&mut self, remains: &FreeCapacity) -> &Workload {
        self.arrivals = 0.0;
        self.idle = remains.gpus_left();
        &self.workload
    }

    /// Makes a forecast from this free capacity.
    pub fn forecast(&mut self, remains: &FreeCapacity) -> Forecast {
        Forecast::new(self.begin_forecast(remains), remains)
    }
}
