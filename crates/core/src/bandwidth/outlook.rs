//! The outlook of a set of GPUs: how well later jobs can be served from it.

use super::mask::{bits, index};
use super::rates::Bandwidth;
use crate::gpu_set::GpuSet;

/// The outlook of every set on a host of at most [`Outlook::MAX_GPUS`] GPUs, by mask.
///
/// The size of the next job is unknown, so every size from two GPUs to the whole host has the same
/// weight. A job is rated by its bandwidth relative to the best of its size on the idle host.
#[derive(Debug)]
pub(crate) struct Outlook {
    bandwidth: Vec<Bandwidth>,
    /// The best relative bandwidth inside each set by size, `sizes` values per set.
    best_inside: Vec<f32>,
    sizes: usize,
    next_job: Vec<f32>,
    queue: Vec<f32>,
}

impl Outlook {
    /// Upper bound for precomputed hosts: 65,536 sets take 5 MB and a tenth of a second, once per
    /// topology.
    pub(super) const MAX_GPUS: usize = 16;

    pub(super) fn of(count: usize, bandwidth: Vec<Bandwidth>, best: &[Bandwidth]) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "a share needs no more digits")]
        let share = |(set, bandwidth): (usize, &Bandwidth)| {
            if set.count_ones() < 2 {
                0.0
            } else {
                bandwidth.share_of(best[set.count_ones() as usize]) as f32
            }
        };
        let shares: Vec<f32> = bandwidth.iter().enumerate().map(share).collect();
        #[expect(clippy::cast_precision_loss, reason = "at most 16 sizes")]
        let sizes = count.saturating_sub(1).max(1) as f32;
        let best = best_inside(&shares);
        Self {
            next_job: best.iter().map(|inside| inside.iter().sum::<f32>() / sizes).collect(),
            best_inside: best.iter().flat_map(|inside| &inside[..=count]).copied().collect(),
            sizes: count + 1,
            queue: queue(&shares, sizes),
            bandwidth,
        }
    }

    /// Returns the bandwidth of a set.
    pub(crate) fn bandwidth(&self, gpus: GpuSet) -> Bandwidth {
        self.bandwidth[index(gpus.mask())]
    }

    /// Returns the relative bandwidth of the best set of `size` GPUs within these; 0 where there
    /// are fewer GPUs.
    pub(crate) fn best_share_within(&self, gpus: GpuSet, size: usize) -> f64 {
        let inside = &self.best_inside[index(gpus.mask()) * self.sizes..][..self.sizes];
        inside.get(size).copied().map_or(0.0, f64::from)
    }

    /// Rates how well the next job is served from these GPUs: the mean over all sizes of the best
    /// set among them, 0 for a size that does not fit.
    pub(crate) fn next_job(&self, gpus: GpuSet) -> f32 {
        self.next_job[index(gpus.mask())]
    }

    /// Rates how well a queue of jobs is served from these GPUs. Each job gets the set that is best
    /// for it and for the jobs after it, until one does not fit.
    pub(crate) fn queue(&self, gpus: GpuSet) -> f32 {
        self.queue[index(gpus.mask())]
    }
}

/// One entry per size of a set.
type BySize = [f32; Outlook::MAX_GPUS + 1];

/// Computes the best relative bandwidth of every size inside each set.
fn best_inside(shares: &[f32]) -> Vec<BySize> {
    let mut best: Vec<BySize> = vec![BySize::default(); shares.len()];
    for set in 1..shares.len() {
        let mut inside = BySize::default();
        for gpu in bits(set as u64) {
            let without = &best[set & !(1 << gpu)];
            inside.iter_mut().zip(without).for_each(|(best, other)| *best = best.max(*other));
        }
        inside[set.count_ones() as usize] = shares[set];
        best[set] = inside;
    }
    best
}

/// Computes for each set the mean, over all sizes, of what the first job of that size and the later
/// jobs get.
fn queue(shares: &[f32], sizes: f32) -> Vec<f32> {
    #[expect(clippy::cast_possible_truncation, reason = "at most 16")]
    let size_of: Vec<u8> = (0..shares.len()).map(|set| set.count_ones() as u8).collect();
    let mut queue = vec![0.0; shares.len()];
    for all in 1..shares.len() {
        let mut best = BySize::default();
        // This loop visits all subsets.
        let mut first = all;
        while first != 0 {
            let served = shares[first] + queue[all ^ first];
            let of_size = &mut best[usize::from(size_of[first])];
            *of_size = of_size.max(served);
            first = (first - 1) & all;
        }
        queue[all] = best[2..].iter().sum::<f32>() / sizes;
    }
    queue
}
