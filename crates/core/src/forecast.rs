//! The forecast: how much of the free GPUs the expected pods will not be able to use.

mod free_capacity;
mod leftover;

pub use self::free_capacity::{CapacitySummary, FreeCapacity};
use self::leftover::{HOST_NEED_FACTOR, Leftover, Leftovers, WholeGpuFuture, learned, part_of_gpu};
use crate::fragmentation::Fragmentation;
use crate::gpu::GpuKind;
use crate::node::Node;
use crate::units::{MiB, MilliCpu};
use crate::workload::{Demand, ExpectedClass, PodClass, Workload};

/// The expected waste by kind of GPU, for one workload and one state of the cluster.
///
/// A forecast stays useful until the workload or the cluster has changed much; a [`Learner`] tells
/// when.
#[derive(Clone, Debug)]
pub struct Forecast {
    kinds: Vec<(GpuKind, KindForecast)>,
    /// The forecast for kinds of GPUs that were added after the forecast was made.
    unknown: KindForecast,
    /// The expected CPU request per GPU, in thousandths of a CPU; infinite where no pod is expected,
    /// so that CPU does not matter.
    cpu_per_gpu: f64,
    /// The expected main memory request per GPU, in MiB; infinite where no pod is expected.
    memory_per_gpu: f64,
}

#[derive(Clone, Debug)]
struct KindForecast {
    leftovers: Leftovers,
    /// The fragmentation measure for pods with special demands, in which classes weigh more where
    /// fewer GPUs can serve them.
    scarcity: Fragmentation,
}

/// Learns the workload from arriving pods and tells when a new forecast is due.
#[derive(Clone, Debug)]
pub struct Learner {
    /// The arrivals seen.
    learned: Workload,
    /// The workload that is expected beside the arrivals seen. It never loses its weight.
    assumed: Workload,
    /// The number of arrivals since the last forecast.
    arrivals: f64,
    /// The free capacity at the last forecast.
    capacity: CapacitySummary,
}

/// Weight of the scarcity measure. It keeps whole nodes for the pods that need them; the expected
/// waste decides most cases.
const SCARCITY_WEIGHT: f64 = 0.1;

/// Value of a free GPU where every pod wants whole GPUs, in GPUs.
const WHOLE_GPU_VALUE: f64 = 1.5;

/// Lower bound for the GPUs that can serve a class when its scarcity is computed. Without it the
/// last few GPUs would outweigh everything else.
const MIN_SERVING_GPUS: f64 = 8.0;

/// A forecast is due when the arrivals since the last one reach this part of the workload's weight.
const DUE_ARRIVALS: f64 = 0.25;

/// A forecast is due when the free capacity has changed by this part of all GPUs.
const DUE_CAPACITY_CHANGE: f64 = 0.1;

/// A forecast is due when the free parts of partly used GPUs have changed by this many GPUs plus this
/// part of the GPUs in use: a fraction of the usual stock.
const DUE_STOCK_CHANGE_GPUS: f64 = 0.5;
const DUE_STOCK_CHANGE_PART: f64 = 0.003;

// === impl Forecast ===

impl Forecast {
    /// Makes a forecast from the free capacity. On a large cluster this takes many milliseconds.
    #[must_use]
    pub fn new(workload: &Workload, remains: &FreeCapacity) -> Self {
        let classes: Vec<ExpectedClass<'_>> = workload.classes().collect();
        let gpus: f64 = classes.iter().map(|expected| expected.share * gpus_taken(expected.class)).sum();
        let per_gpu = |need: fn(&ExpectedClass<'_>) -> f64| {
            let mean: f64 = classes.iter().map(|expected| expected.share * need(expected)).sum();
            if gpus > 0.0 { (HOST_NEED_FACTOR * mean / gpus).max(1.0) } else { f64::INFINITY }
        };
        let all_kinds = remains.kinds();
        let scarcity = scarcity(&classes, &all_kinds, remains);
        let forecast = |kind: &&GpuKind| {
            let scarcity = Fragmentation::new(scarcity.iter().copied(), kind);
            ((*kind).clone(), KindForecast { leftovers: learned(&classes, kind), scarcity })
        };
        let mut kinds: Vec<(GpuKind, KindForecast)> = all_kinds.iter().map(forecast).collect();
        let whole_gpus = whole_gpu_future(&kinds, remains);
        let value = free_value(&classes);
        for (_, forecast) in &mut kinds {
            forecast.leftovers = whole_gpus.blend(forecast.leftovers);
            for (percent, leftover) in forecast.leftovers.iter_mut().enumerate() {
                leftover.waste -= value * part_of_gpu(percent);
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
    /// The sum has these parts: free parts that suit no expected pod, less the value of what is free;
    /// lost capacity for scarce classes of pods; and GPUs for which CPU or memory is missing. Only
    /// differences of the sum have a meaning.
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
        let cpu_short = (cpu_need - milli(cpu)) / self.cpu_per_gpu;
        let memory_short = (memory_need - mebibytes(memory)) / self.memory_per_gpu;
        lost + cpu_short.max(memory_short).max(0.0)
    }

    fn of(&self, kind: &GpuKind) -> &KindForecast {
        self.kinds.iter().find(|(known, _)| known == kind).map_or(&self.unknown, |(_, forecast)| forecast)
    }
}

impl Default for Forecast {
    /// Expects no pod.
    fn default() -> Self {
        Self::new(&Workload::default(), &FreeCapacity::default())
    }
}

impl Default for KindForecast {
    fn default() -> Self {
        // Without expectations the whole-GPU future decides: shares fill partly used GPUs.
        let leftovers = WholeGpuFuture::default().blend([Leftover::default(); 101]);
        Self { leftovers, scarcity: Fragmentation::default() }
    }
}

/// Returns the value of a free GPU of any kind, in GPUs.
///
/// It matters only in clusters with several sizes of GPUs. A share of some MiB takes less of a large
/// GPU than of a small one, and it should take the least where pods with whole GPUs want the rest.
///
/// Only pods that were seen count: some of them run on small GPUs. An assumed pod may be one that needs a large
/// GPU, so it is no reason to use up the large ones first.
fn free_value(classes: &[ExpectedClass<'_>]) -> f64 {
    let wholes = classes.iter().filter(|expected| matches!(expected.class.demand, Demand::Whole(_)));
    WHOLE_GPU_VALUE * wholes.map(|expected| expected.seen).sum::<f64>()
}

/// Returns the probability of the whole-GPU future from what the learned future will use of the
/// partly used GPUs.
fn whole_gpu_future(learned: &[(GpuKind, KindForecast)], remains: &FreeCapacity) -> WholeGpuFuture {
    let usable = |kind: &GpuKind, percent: u8| {
        let leftovers = learned.iter().find(|(known, _)| known == kind).map(|(_, known)| &known.leftovers);
        let percent = usize::from(percent);
        part_of_gpu(percent) - leftovers.map_or(0.0, |leftovers| leftovers[percent].waste)
    };
    let stock: f64 = remains.partly_used().map(|(kind, percent)| usable(kind, percent)).sum();
    let CapacitySummary { all_gpus, free, .. } = remains.summary();
    WholeGpuFuture::new(stock, all_gpus - free)
}

/// Weighs each class of pods by the GPUs it takes and by how few of the free GPUs can serve it now.
///
/// Only classes with special demands count: several GPUs on one node, or a kind of GPU. All others
/// are what the leftovers of single GPUs are about.
fn scarcity<'a>(
    classes: &[ExpectedClass<'a>],
    kinds: &[&GpuKind],
    remains: &FreeCapacity,
) -> Vec<(&'a PodClass, f64)> {
    let is_special = |class: &PodClass| {
        class.gpu_count() > 1
            || kinds.iter().any(|kind| !class.accepts(&kind.model) || class.percent_of(kind) > 100)
    };
    let idle = remains.summary().free;
    let weigh = |expected: &ExpectedClass<'a>| {
        let class = expected.class;
        let scarcity = idle / remains.gpus_serving(class).max(MIN_SERVING_GPUS);
        #[expect(clippy::cast_precision_loss, reason = "at most 64 GPUs")]
        let gpus = class.gpu_count() as f64;
        (class, expected.share * scarcity * scarcity * gpus)
    };
    classes.iter().filter(|expected| is_special(expected.class)).map(weigh).collect()
}

/// Returns the number of GPUs that a pod takes; a share counts as a fraction.
fn gpus_taken(class: &PodClass) -> f64 {
    match class.demand {
        Demand::Whole(gpus) => f64::from(gpus),
        Demand::Share(share) => f64::from(share.count) * f64::from(share.compute_percent.0.max(1)) / 100.0,
    }
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
    /// Creates a learner that has seen no pod and expects the assumed workload.
    #[must_use]
    pub fn new(assumed: Workload) -> Self {
        Self {
            learned: Workload::default(),
            assumed,
            arrivals: f64::INFINITY,
            capacity: CapacitySummary::default(),
        }
    }

    /// Counts the arrival of a pod.
    pub fn see(&mut self, pod: &crate::request::PodRequest) {
        if pod.wants_gpu() {
            self.learned.see(pod);
            self.arrivals += 1.0;
        }
    }

    /// Replaces the workload that is expected beside the arrivals seen.
    pub fn assume(&mut self, assumed: Workload) {
        self.assumed = assumed;
    }

    /// Returns the expected workload: the arrivals seen and the assumed workload.
    #[must_use]
    pub fn workload(&self) -> Workload {
        self.learned.with(&self.assumed)
    }

    /// Returns whether a new forecast is due, with this capacity free.
    #[must_use]
    pub fn is_due(&self, now: CapacitySummary) -> bool {
        let weight = self.learned.pods() + self.assumed.pods();
        let stock_change = DUE_STOCK_CHANGE_GPUS + DUE_STOCK_CHANGE_PART * (now.all_gpus - now.free);
        self.arrivals >= DUE_ARRIVALS * weight && self.arrivals > 0.0
            || (now.free - self.capacity.free).abs() >= DUE_CAPACITY_CHANGE * now.all_gpus
            || (now.free_on_partly_used - self.capacity.free_on_partly_used).abs() >= stock_change
    }

    /// Returns the workload for a forecast from this free capacity, and counts changes from zero
    /// again.
    pub fn begin_forecast(&mut self, capacity: CapacitySummary) -> Workload {
        self.arrivals = 0.0;
        self.capacity = capacity;
        self.workload()
    }

    /// Makes a forecast from this free capacity.
    pub fn forecast(&mut self, remains: &FreeCapacity) -> Forecast {
        Forecast::new(&self.begin_forecast(remains.summary()), remains)
    }
}
