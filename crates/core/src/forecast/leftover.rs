//! The outlook of a single GPU: how much of its free part will stay unused.
//!
//! The outlook is an expectation over two futures.
//!
//! - In the **learned future** pods arrive as they did so far, until none fits. What remains then is
//!   the waste. A time without arrivals delays the use of every free part alike, so it is no reason to
//!   prefer one. Only the longer wait of a part that suits fewer pods than an idle GPU counts.
//! - In the **whole-GPU future** only pods with whole GPUs arrive from now on. They cannot use the
//!   free part of a partly used GPU, and they can use an idle GPU entirely.
//!
//! For a share, an idle GPU costs almost exactly one GPU more than a partly used one in the
//! whole-GPU future. So an idle GPU is taken only where the learned future gains more than the
//! weight of the whole-GPU future. No history brings this weight to zero, and it grows with the free
//! parts of partly used GPUs: the more of them wait to be used, the more likely is it that pods with
//! whole GPUs arrive first.

use super::milli;
use crate::gpu::GpuKind;
use crate::workload::{Demand, ExpectedClass};

/// The outlook of a GPU with some percentage free.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Leftover {
    /// The part that stays unused, in GPUs.
    pub(super) waste: f64,
    /// The CPU that the arriving pods need, in thousandths of a CPU.
    pub(super) cpu: f64,
    /// The main memory that the arriving pods need, in MiB.
    pub(super) memory: f64,
}

/// The outlook by the free percentage of a GPU.
pub(super) type Leftovers = [Leftover; 101];

/// The probability of the whole-GPU future.
#[derive(Clone, Copy, Debug)]
pub(super) struct WholeGpuFuture(f64);

/// Weight of the event that no pod arrives for a free part that suits no pod, relative to 1 for the
/// arrival of any pod with one GPU. A part that suits some pods gets the weight of the others.
///
/// It is small because free parts wait long. It keeps a part that only a rare class can use from
/// counting as used.
const NO_ARRIVAL_WEIGHT: f64 = 0.04;

/// Factor on the CPU and memory of arriving pods. It is below 1 because most pods request less than
/// the mean.
pub(super) const HOST_NEED_FACTOR: f64 = 0.9;

/// Probability of the whole-GPU future where no GPU is partly used. With the usual stock of free
/// parts it is twice as large; it grows with the square of the stock.
const MIN_PROBABILITY: f64 = 0.03;

/// The usual stock of free parts, in GPUs, and as a part of the GPUs in use. Pods of several sizes
/// need that much to be combined well. A larger stock is what must not grow without bound.
const USUAL_STOCK_GPUS: f64 = 2.0;
const USUAL_STOCK_PART: f64 = 0.01;

/// How much less of the free part is lost in the whole-GPU future, relative to the free part: a GPU
/// that is little used is more likely to become idle again. So shares fill the fullest GPU first.
const RECOVERY: f64 = 0.1;

impl WholeGpuFuture {
    /// Returns the probability where `in_use` GPUs are in use and the free parts of partly used GPUs
    /// add up to `stock` GPUs.
    pub(super) fn new(stock: f64, in_use: f64) -> Self {
        let usual = USUAL_STOCK_GPUS + USUAL_STOCK_PART * in_use;
        Self((MIN_PROBABILITY * (1.0 + (stock / usual).powi(2))).min(1.0))
    }

    /// Returns the expectation over both futures.
    pub(super) fn blend(self, mut learned: Leftovers) -> Leftovers {
        for (percent, leftover) in learned.iter_mut().enumerate() {
            let free = part_of_gpu(percent);
            let lost = if percent < 100 { free * (1.0 - RECOVERY * free) } else { 0.0 };
            leftover.waste = (1.0 - self.0) * leftover.waste + self.0 * lost;
        }
        learned
    }
}

impl Default for WholeGpuFuture {
    fn default() -> Self {
        Self::new(0.0, 0.0)
    }
}

/// Computes the outlook in the learned future.
///
/// Pods with one GPU or with shares arrive one after the other with the expected probabilities. Each takes its part
/// if it fits, until no further pod arrives.
pub(super) fn learned(classes: &[ExpectedClass<'_>], kind: &GpuKind) -> Leftovers {
    // Probability, CPU and memory of the arriving pods, by the percentage they take.
    let mut takers = [(0.0, 0.0, 0.0); 101];
    for ExpectedClass { class, share, memory, .. } in classes {
        let percent = class.percent_of(kind);
        // A share of several GPUs arrives at each of them, with its part of the pod's host resources.
        let gpus = match class.demand {
            Demand::Whole(1) => 1.0,
            Demand::Whole(_) => continue,
            Demand::Share(share) => f64::from(share.count),
        };
        if class.accepts(&kind.model) && (1..=100).contains(&percent) {
            let taker = &mut takers[percent];
            *taker = (taker.0 + share * gpus, taker.1 + share * milli(class.cpu), taker.2 + share * memory);
        }
    }
    let any: f64 = takers.iter().map(|(chance, ..)| chance).sum();
    let mut suited = 0.0;
    let mut leftovers = [Leftover::default(); 101];
    for left in 1..=100 {
        suited += takers[left].0;
        let unsuited_part = if any > 0.0 { (1.0 - suited / any).max(0.0) } else { 1.0 };
        let no_arrival = NO_ARRIVAL_WEIGHT * unsuited_part;
        let mut chances = no_arrival;
        let mut sum = Leftover { waste: no_arrival * part_of_gpu(left), ..Leftover::default() };
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

pub(super) fn part_of_gpu(percent: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "at most 100")]
    let percent = percent as f64;
    percent / 100.0
}
