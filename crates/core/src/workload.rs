//! The workload: which classes of pods arrive, and how often.

use std::collections::BTreeMap;

use crate::gpu::{GpuKind, Model};
use crate::node::Node;
use crate::request::{ContainerRole, PodRequest, Request, Share};
use crate::units::{MiB, MilliCpu};

/// The classes of pods and their frequencies. Older arrivals weigh less.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    classes: BTreeMap<PodClass, Seen>,
    /// The sum of all weights.
    total: f64,
    /// The weight of the newest arrival. It grows, so that the older weights need not shrink.
    newest: f64,
}

/// The properties of a pod that matter for the placement of GPUs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodClass {
    /// The CPU request of the whole pod.
    pub cpu: MilliCpu,
    /// The GPU request.
    pub demand: Demand,
    /// The accepted GPU models; empty for any.
    pub models: Vec<Model>,
}

/// The GPU request of a class of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Demand {
    /// The same share of each of one or several GPUs.
    Share(Share),
    /// Whole GPUs.
    Whole(u8),
}

/// A class of pods and the probability that the next pod belongs to it.
#[derive(Clone, Debug)]
pub struct ExpectedClass<'a> {
    /// The class that is expected.
    pub class: &'a PodClass,
    /// The probability among pods that request GPUs.
    pub share: f64,
    /// The part of the probability that comes from pods that were seen. The rest is assumed.
    pub seen: f64,
    /// The mean main memory request, in MiB.
    pub memory: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Seen {
    weight: f64,
    /// The part of the weight that is assumed.
    assumed: f64,
    /// The weighted sum of main memory, in MiB.
    memory: f64,
}

/// The number of GPU pods after which an arrival counts half.
///
/// A cluster of a thousand nodes starts that many in hours to days: long enough to learn the rare
/// large pods, short enough to follow a change of users.
const HALF_LIFE_PODS: f64 = 5_000.0;

/// Upper bound for the classes; the rarest are dropped first. The trace of a large cluster has
/// about a hundred.
const MAX_CLASSES: usize = 512;

/// Upper bound for a weight, at which all weights are scaled down. It is far below the range of
/// `f64`.
const MAX_WEIGHT: f64 = 1e12;

// === impl Workload ===

impl Default for Workload {
    fn default() -> Self {
        Self { classes: BTreeMap::new(), total: 0.0, newest: 1.0 }
    }
}

impl Workload {
    /// Counts exactly these pods, all with the same weight.
    #[must_use]
    pub fn of<'a>(pods: impl IntoIterator<Item = &'a PodRequest>) -> Self {
        let mut workload = Self::default();
        pods.into_iter().for_each(|pod| workload.count(pod, 1.0));
        workload
    }

    /// Returns the workload that is always expected beside the one learned: pods with whole GPUs,
    /// mostly single ones, few large sets.
    ///
    /// It contains no shares. A free part of a GPU counts as useful only once pods have been seen
    /// that fit, so a scheduler that has seen no pod packs shares tightly. Each pod requests its part
    /// of a typical host. Real arrivals soon outweigh the assumption, but it never vanishes: large
    /// pods stay possible whatever was seen.
    #[must_use]
    pub fn guess<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Self {
        const WHOLES: [(u8, f64); 4] = [(1, 8.0), (2, 0.32), (4, 0.32), (8, 0.16)];
        let host = Host::typical(nodes);
        let mut workload = Self::default();
        for (gpus, weight) in WHOLES.into_iter().filter(|(gpus, _)| usize::from(*gpus) <= host.most_gpus) {
            let pod = PodRequest {
                cpu: MilliCpu(whole_number(host.cpu * f64::from(gpus))),
                memory: MiB(whole_number(host.memory * f64::from(gpus))),
                ..PodRequest::of_mains([Request::Whole(gpus)])
            };
            workload.count(&pod, weight);
        }
        workload.classes.values_mut().for_each(|class| class.assumed = class.weight);
        workload
    }

    /// Counts the arrival of a pod.
    pub fn see(&mut self, pod: &PodRequest) {
        if pod.wants_gpu() {
            self.newest *= (1.0 / HALF_LIFE_PODS).exp2();
            self.count(pod, 1.0);
        }
        if self.newest > MAX_WEIGHT {
            self.rescale();
        }
        if self.classes.len() > 2 * MAX_CLASSES {
            self.forget_rarest();
        }
    }

    /// Returns this workload and another one together. The other one counts as if all its pods had
    /// just arrived.
    #[must_use]
    pub fn with(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        let scale = self.newest / other.newest;
        for (class, seen) in &other.classes {
            let known = sum.classes.entry(class.clone()).or_default();
            known.weight += scale * seen.weight;
            known.assumed += scale * seen.assumed;
            known.memory += scale * seen.memory;
        }
        sum.total += scale * other.total;
        sum
    }

    /// Returns the total weight, in pods of the newest weight.
    #[must_use]
    pub fn pods(&self) -> f64 {
        self.total / self.newest
    }

    /// Returns all classes with their probabilities, which add up to 1.
    pub fn classes(&self) -> impl Iterator<Item = ExpectedClass<'_>> {
        self.classes.iter().map(|(class, seen)| ExpectedClass {
            class,
            share: seen.weight / self.total,
            seen: (seen.weight - seen.assumed) / self.total,
            memory: seen.memory / seen.weight,
        })
    }

    fn count(&mut self, pod: &PodRequest, weight: f64) {
        let Some(class) = PodClass::of(pod) else { return };
        let weight = weight * self.newest;
        let seen = self.classes.entry(class).or_default();
        seen.weight += weight;
        #[expect(clippy::cast_precision_loss, reason = "no host has 2^52 MiB")]
        let memory = pod.memory.0 as f64;
        seen.memory += weight * memory;
        self.total += weight;
    }

    fn rescale(&mut self) {
        for seen in self.classes.values_mut() {
            seen.weight /= self.newest;
            seen.assumed /= self.newest;
            seen.memory /= self.newest;
        }
        self.total /= self.newest;
        self.newest = 1.0;
    }

    fn forget_rarest(&mut self) {
        let mut weights: Vec<f64> = self.classes.values().map(|seen| seen.weight).collect();
        weights.sort_by(|a, b| b.total_cmp(a));
        let least = weights.get(MAX_CLASSES).copied().unwrap_or_default();
        self.classes.retain(|_, seen| seen.weight > least);
        self.total = self.classes.values().map(|seen| seen.weight).sum();
    }
}

// === impl PodClass ===

impl PodClass {
    /// Returns the class of a pod, or `None` for a pod without GPUs.
    ///
    /// The sum of its whole GPUs counts where it requests any, else its largest share.
    #[must_use]
    pub fn of(pod: &PodRequest) -> Option<Self> {
        let lasting = pod.containers.iter().filter(|container| container.role != ContainerRole::Init);
        let demands = || lasting.clone().filter_map(|container| container.request).map(Demand::of);
        let wholes = demands().fold(0u8, |sum, demand| match demand {
            Demand::Whole(gpus) => sum.saturating_add(gpus),
            Demand::Share(_) => sum,
        });
        let demand = if wholes > 0 { Demand::Whole(wholes) } else { demands().max()? };
        let mut models = pod.models.clone();
        models.sort();
        Some(Self { cpu: pod.cpu, demand, models })
    }

    /// Returns whether the class accepts GPUs of `model`.
    #[must_use]
    pub fn accepts(&self, model: &Model) -> bool {
        self.models.is_empty() || self.models.contains(model)
    }

    /// Returns the number of GPUs that a pod of the class occupies.
    #[must_use]
    pub fn gpu_count(&self) -> usize {
        match self.demand {
            Demand::Share(share) => usize::from(share.count),
            Demand::Whole(gpus) => usize::from(gpus),
        }
    }

    /// Returns the percentage of each GPU of this kind that a pod takes, counted by the scarcer of
    /// compute and memory.
    ///
    /// The result is above 100 where such a GPU is too small.
    #[must_use]
    pub fn percent_of(&self, kind: &GpuKind) -> usize {
        match self.demand {
            Demand::Whole(_) => 100,
            Demand::Share(Share { compute_percent, memory, .. }) => {
                let memory = percent_of_memory(memory.on(kind.memory), kind.memory);
                usize::try_from(memory.max(u64::from(compute_percent.0))).unwrap_or(usize::MAX)
            }
        }
    }
}

// === impl Demand ===

impl Demand {
    fn of(request: Request) -> Self {
        match request {
            Request::Whole(gpus) => Self::Whole(gpus),
            Request::Share(share) => Self::Share(share),
        }
    }
}

/// The host resources per GPU on a typical node.
struct Host {
    cpu: f64,
    memory: f64,
    most_gpus: usize,
}

impl Host {
    /// Returns the first quartile of CPU and of memory per GPU over all nodes, reduced because pods
    /// request less.
    fn typical<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Self {
        const REQUESTED_PART: f64 = 0.75;
        let (mut cpus, mut memories, mut most_gpus) = (Vec::new(), Vec::new(), 0);
        for node in nodes {
            let gpus = node.gpus().len() as u64;
            cpus.extend(node.cpu.0.checked_div(gpus));
            memories.extend(node.memory.0.checked_div(gpus));
            most_gpus = most_gpus.max(node.gpus().len());
        }
        let quartile = |mut amounts: Vec<u64>| {
            amounts.sort_unstable();
            #[expect(clippy::cast_precision_loss, reason = "no host has 2^52 MiB")]
            amounts.get(amounts.len() / 4).map_or(0.0, |amount| REQUESTED_PART * *amount as f64)
        };
        Self { cpu: quartile(cpus), memory: quartile(memories), most_gpus: most_gpus.max(1) }
    }
}

/// Returns the percentage of a GPU's memory that a share takes.
///
/// It is rounded so that as many such shares fit on an idle GPU as truly do: a third of the memory counts
/// as 33 %, and a tenth and a bit as 11 %.
fn percent_of_memory(share: MiB, gpu: MiB) -> u64 {
    let rounded_up = share.0.saturating_mul(100).div_ceil(gpu.0.max(1));
    let fitting = gpu.0.checked_div(share.0).filter(|fitting| *fitting > 0);
    fitting.map_or(rounded_up, |fitting| rounded_up.min((100 / fitting).max(1)))
}

fn whole_number(amount: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates, and is never negative"
    )]
    let number = amount as u64;
    number
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Percent;

    fn share(compute_percent: u32) -> PodRequest {
        PodRequest::of_mains([Request::share(Percent(compute_percent), MiB(10))])
    }

    #[test]
    fn probabilities_add_up_and_the_newest_pod_weighs_most() {
        let mut workload = Workload::of([&share(10), &share(10), &share(20)]);
        let shares: Vec<f64> = workload.classes().map(|expected| expected.share).collect();
        assert_eq!(shares, [2.0 / 3.0, 1.0 / 3.0]);
        for _ in 0..20_000 {
            workload.see(&share(30));
        }
        let last = workload.classes().last().unwrap();
        assert_eq!(last.class.demand, Demand::of(Request::share(Percent(30), MiB(10))));
        assert!(last.share > 0.9999);
        let half_life_in_pods = HALF_LIFE_PODS / std::f64::consts::LN_2;
        assert!((workload.pods() / half_life_in_pods - 1.0).abs() < 0.1, "{}", workload.pods());
    }

    #[test]
    fn many_arrivals_overflow_nothing_and_keep_the_commonest_classes() {
        let mut workload = Workload::default();
        for number in 0..400_000u64 {
            let mut pod = share(50);
            // Every other pod belongs to a new class.
            pod.cpu = MilliCpu(if number % 2 == 0 { number } else { 1 });
            workload.see(&pod);
        }
        assert!(workload.classes.len() <= 2 * MAX_CLASSES + 1);
        assert!(workload.total.is_finite() && workload.newest <= MAX_WEIGHT * 2.0);
        let common = workload.classes().find(|expected| expected.class.cpu == MilliCpu(1)).unwrap();
        assert!(common.share > 0.4, "{}", common.share);
        assert!((workload.classes().map(|expected| expected.share).sum::<f64>() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn classifies_a_pod_by_whole_gpus_or_its_largest_share() {
        let class = |requests: &[Request]| PodClass::of(&PodRequest::of_mains(requests.iter().copied()));
        let part = |percent, memory| Demand::of(Request::share(Percent(percent), MiB(memory)));
        assert_eq!(class(&[]), None);
        assert_eq!(class(&[Request::Whole(2), Request::Whole(1)]).unwrap().demand, Demand::Whole(3));
        let shares = [Request::memory(MiB(9)), Request::share(Percent(5), MiB(1))];
        assert_eq!(class(&shares).unwrap().demand, part(5, 1));
        let kind = GpuKind::new("T4".into(), MiB(1000));
        assert_eq!(class(&[Request::memory(MiB(251))]).unwrap().percent_of(&kind), 26);
        assert_eq!(class(&[Request::memory(MiB(333))]).unwrap().percent_of(&kind), 33);
        assert_eq!(class(&[Request::memory(MiB(334))]).unwrap().percent_of(&kind), 34);
        assert_eq!(class(&[Request::memory(MiB(1))]).unwrap().percent_of(&kind), 1);
        assert_eq!(class(&[Request::memory(MiB(0))]).unwrap().percent_of(&kind), 0);
        assert_eq!(class(&[Request::memory(MiB(5000))]).unwrap().percent_of(&kind), 500);
    }
}
