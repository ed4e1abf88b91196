//! What will become of the GPUs that are left: how much of them the pods to come will not be able to use.

mod free_capacity;

pub use self::free_capacity::FreeCapacity;
use crate::fragmentation::Fragmentation;
use crate::gpu::GpuKind;
use crate::node::Node;
use crate::units::{MiB, MilliCpu};
use crate::workload::{Demand, ExpectedClass, PodClass, Workload};

/// What a workload makes of leftovers, on the cluster as it stands. Valid until either has changed much.
#[derive(Clone, Debug, Default)]
pub struct Forecast {
    kinds: Vec<(GpuKind, KindForecast)>,
    /// For kinds nobody has: a GPU added since.
    unknown: KindForecast,
    /// CPU a pod is expected to need for each GPU it takes, milli; never zero.
    cpu_per_gpu: f64,
    /// Likewise main memory, MiB.
    memory_per_gpu: f64,
}

#[derive(Clone, Debug)]
struct KindForecast {
    /// By percent left of a GPU.
    leftovers: [Leftover; 101],
    /// Against the kinds of pods weighted by how scarce their nodes are.
    scarcity: Fragmentation,
}

/// What becomes of a GPU with so much left, if pods of one GPU come as expected until none fits.
#[derive(Clone, Copy, Debug, Default)]
struct Leftover {
    /// Stays unused, in GPUs.
    waste: f64,
    /// CPU that those who use the rest will need, milli.
    cpu: f64,
    /// Likewise main memory, MiB.
    memory: f64,
}

/// When a forecast is due, and from what. Fed with the pods that arrive.
#[derive(Clone, Debug)]
pub struct Learner {
    workload: Workload,
    /// Arrivals since the last forecast.
    arrivals: f64,
    /// Idle GPUs at the last forecast.
    idle: f64,
}

/// The chance that no further pod comes for a leftover, beside the next pod's kinds (which add up to 1). Small: a
/// leftover waits long, but a remnant that only a rare kind could use is not counted as used.
const NOBODY_COMES: f64 = 0.04;

/// Part of the mean CPU and memory per GPU that leftovers are held against: needing less than the mean is common.
const HOST_NEED: f64 = 0.9;

/// Weight of the nodes of scarce kinds. It keeps whole nodes for those who need them; most is told by the waste.
const SCARCITY: f64 = 0.1;

/// A kind is as scarce as if at least so many GPUs could serve it; the last ones would else outweigh all.
const FEWEST_PLACES: f64 = 8.0;

/// A forecast is due when arrivals reach this part of what the workload weighs, ...
const NEWS: f64 = 0.25;

/// ... or when this part of all GPUs was taken or given back.
const SHIFT: f64 = 0.1;

// === impl Forecast ===

impl Forecast {
    /// Looks ahead from what is left. Takes many milliseconds on a large cluster.
    #[must_use]
    pub fn new(workload: &Workload, remains: &FreeCapacity) -> Self {
        let classes: Vec<ExpectedClass<'_>> = workload.classes().collect();
        let gpus: f64 = classes.iter().map(|expected| expected.share * gpus_taken(expected.class)).sum();
        let per_gpu = |need: fn(&ExpectedClass<'_>) -> f64| {
            let mean: f64 = classes.iter().map(|expected| expected.share * need(expected)).sum();
            if gpus > 0.0 { (HOST_NEED * mean / gpus).max(1.0) } else { 1.0 }
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

    /// GPUs of a node that are expected to stay unused, where `left` tells the percent left of each: remnants that fit
    /// nobody, GPUs that CPU or memory is missing for, and nodes of scarce kinds that are spoilt.
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
            lost += SCARCITY * forecast.scarcity.of(cpu, left);
        }
        let cpu_short = (cpu_need - milli(cpu)) / self.cpu_per_gpu();
        let memory_short = (memory_need - mebibytes(memory)) / self.memory_per_gpu.max(1.0);
        lost + cpu_short.max(memory_short).max(0.0)
    }

    /// CPU a pod is expected to need for each GPU it takes, milli.
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

/// For each percent left of a GPU: pods of one GPU come one after the other, as likely as expected, each taking its
/// part if it fits, until nobody comes.
fn leftovers(classes: &[ExpectedClass<'_>], kind: &GpuKind) -> [Leftover; 101] {
    // Probability, CPU and memory by percent taken.
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
        let mut chances = NOBODY_COMES;
        let mut sum = Leftover { waste: NOBODY_COMES * percent_of_gpu(left), ..Leftover::default() };
        for (taken, (chance, cpu, memory)) in takers.iter().enumerate().take(left + 1).skip(1) {
            let rest = &leftovers[left - taken];
            chances += chance;
            sum.waste += chance * rest.waste;
            sum.cpu += HOST_NEED * cpu + chance * rest.cpu;
            sum.memory += HOST_NEED * memory + chance * rest.memory;
        }
        leftovers[left] =
            Leftover { waste: sum.waste / chances, cpu: sum.cpu / chances, memory: sum.memory / chances };
    }
    leftovers
}

/// The kinds of pods, each weighing the more GPUs it takes and the fewer of the idle ones could serve it now.
fn scarcity<'a>(classes: &[ExpectedClass<'a>], remains: &FreeCapacity) -> Vec<(&'a PodClass, f64)> {
    let idle = remains.gpus_left();
    let weigh = |expected: &ExpectedClass<'a>| {
        let class = expected.class;
        let scarcity = idle / remains.gpus_serving(class).max(FEWEST_PLACES);
        #[expect(clippy::cast_precision_loss, reason = "at most 64 GPUs")]
        let gpus = class.gpu_count() as f64;
        (class, expected.share * scarcity * scarcity * gpus)
    };
    classes.iter().map(weigh).collect()
}

/// How many GPUs, or parts of one, a pod takes.
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
    /// Starts from a guess about a cluster, or from what is known of its pods.
    #[must_use]
    pub fn new(workload: Workload) -> Self {
        Self { workload, arrivals: f64::INFINITY, idle: 0.0 }
    }

    /// Counts one arrival.
    pub fn see(&mut self, pod: &crate::request::PodRequest) {
        if pod.wants_gpu() {
            self.workload.see(pod);
            self.arrivals += 1.0;
        }
    }

    /// The pods seen so far.
    #[must_use]
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Whether it knows anything yet, be it a guess.
    #[must_use]
    pub fn has_seen_any(&self) -> bool {
        self.workload.pods() > 0.0
    }

    /// Whether the last forecast is out of date, with `idle` of `all` GPUs left.
    #[must_use]
    pub fn is_due(&self, idle: f64, all: f64) -> bool {
        self.arrivals >= NEWS * self.workload.pods() && self.arrivals > 0.0
            || (idle - self.idle).abs() >= SHIFT * all
    }

    /// The pods to expect, for a forecast from what is left. It counts as made: what arrives from now on is news to it.
    pub fn begin_forecast(&mut self, remains: &FreeCapacity) -> &Workload {
        self.arrivals = 0.0;
        self.idle = remains.gpus_left();
        &self.workload
    }

    /// Looks ahead from what is left.
    pub fn forecast(&mut self, remains: &FreeCapacity) -> Forecast {
        Forecast::new(self.begin_forecast(remains), remains)
    }
}
