//! What kinds of pods come, as far as those seen tell.

use std::collections::BTreeMap;

use crate::gpu::{GpuKind, Model};
use crate::grant::Hold;
use crate::node::Node;
use crate::request::{ContainerRole, PodRequest, Request};
use crate::units::{MiB, MilliCpu, Percent};

/// Kinds of pods and how often each comes. Older sightings weigh less.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    classes: BTreeMap<PodClass, Seen>,
    /// All weights together.
    total: f64,
    /// What the newest sighting weighs: it grows, instead of all others shrinking.
    newest: f64,
}

/// What tells one kind of pod from another where GPUs are placed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodClass {
    /// CPU of the whole pod.
    pub cpu: MilliCpu,
    /// Its GPUs.
    pub demand: Demand,
    /// GPU models it accepts; empty for any.
    pub models: Vec<Model>,
}

/// What a kind of pod asks of the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Demand {
    /// A part of one GPU.
    Share {
        /// Of its compute.
        compute_percent: Percent,
        /// Of its memory.
        memory: MiB,
    },
    /// Whole GPUs.
    Whole(u8),
}

/// A kind of pod and how likely the next one is of it.
#[derive(Clone, Debug)]
pub struct ExpectedClass<'a> {
    /// The kind.
    pub class: &'a PodClass,
    /// Probability among pods that ask for GPUs.
    pub share: f64,
    /// Mean main memory, MiB.
    pub memory: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Seen {
    weight: f64,
    /// Main memory, weighted.
    memory: f64,
}

/// After so many pods with GPUs a sighting counts half. A cluster of a thousand nodes starts that many in hours to
/// days: long enough to know the rare large pods, short enough to follow a change of users.
const HALF_LIFE: f64 = 5_000.0;

/// What the guess of the start weighs, in pods: gone after a few dozen arrivals.
const START_WEIGHT: f64 = 16.0;

/// More kinds than this are not told apart: the rarest go first. The trace of a large cluster has about a hundred.
const MOST_CLASSES: usize = 512;

/// Weights are scaled back long before they could overflow.
const MOST_WEIGHT: f64 = 1e12;

// === impl Workload ===

impl Default for Workload {
    fn default() -> Self {
        Self { classes: BTreeMap::new(), total: 0.0, newest: 1.0 }
    }
}

impl Workload {
    /// Exactly these pods, none older than another.
    #[must_use]
    pub fn of<'a>(pods: impl IntoIterator<Item = &'a PodRequest>) -> Self {
        let mut workload = Self::default();
        pods.into_iter().for_each(|pod| workload.count(pod, 1.0));
        workload
    }

    /// A guess for a cluster nobody has used yet: mostly single GPUs and shares of them, few sets, each with its part
    /// of the host. What is seen soon outweighs it.
    #[must_use]
    pub fn guess<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Self {
        const PARTS: [(u32, f64); 3] = [(25, 0.15), (50, 0.2), (75, 0.1)];
        const WHOLES: [(u8, f64); 4] = [(1, 0.5), (2, 0.02), (4, 0.02), (8, 0.01)];
        let host = Host::typical(nodes);
        let mut workload = Self::default();
        let mut count = |request, gpus: f64, part: f64| {
            let pod = PodRequest {
                cpu: MilliCpu(whole_number(host.cpu * gpus)),
                memory: MiB(whole_number(host.memory * gpus)),
                ..PodRequest::of_mains([request])
            };
            workload.count(&pod, START_WEIGHT * part);
        };
        for (compute_percent, part) in PARTS {
            let request = Request::Share { compute_percent: Percent(compute_percent), memory: MiB::ZERO };
            count(request, f64::from(compute_percent) / 100.0, part);
        }
        for (gpus, part) in WHOLES.into_iter().filter(|(gpus, _)| usize::from(*gpus) <= host.most_gpus) {
            count(Request::Whole(gpus), f64::from(gpus), part);
        }
        workload
    }

    /// Counts one arrival.
    pub fn see(&mut self, pod: &PodRequest) {
        if pod.wants_gpu() {
            self.newest *= (1.0 / HALF_LIFE).exp2();
            self.count(pod, 1.0);
        }
        if self.newest > MOST_WEIGHT {
            self.rescale();
        }
        if self.classes.len() > 2 * MOST_CLASSES {
            self.forget_rarest();
        }
    }

    /// How many pods the sightings amount to.
    #[must_use]
    pub fn pods(&self) -> f64 {
        self.total / self.newest
    }

    /// All kinds with their probabilities, which add up to 1; none where nothing was seen.
    pub fn classes(&self) -> impl Iterator<Item = ExpectedClass<'_>> {
        self.classes.iter().map(|(class, seen)| ExpectedClass {
            class,
            share: seen.weight / self.total,
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
            seen.memory /= self.newest;
        }
        self.total /= self.newest;
        self.newest = 1.0;
    }

    fn forget_rarest(&mut self) {
        let mut weights: Vec<f64> = self.classes.values().map(|seen| seen.weight).collect();
        weights.sort_by(|a, b| b.total_cmp(a));
        let least = weights.get(MOST_CLASSES).copied().unwrap_or_default();
        self.classes.retain(|_, seen| seen.weight > least);
        self.total = self.classes.values().map(|seen| seen.weight).sum();
    }
}

// === impl PodClass ===

impl PodClass {
    /// The kind of a pod: of its whole GPUs where it asks for any, else of its largest part; `None` without either.
    #[must_use]
    pub fn of(pod: &PodRequest) -> Option<Self> {
        let lasting = pod.containers.iter().filter(|container| container.role != ContainerRole::Init);
        let demands = || lasting.clone().filter_map(|container| container.request).map(Demand::of);
        let wholes = demands().fold(0u8, |sum, demand| match demand {
            Demand::Whole(gpus) => sum.saturating_add(gpus),
            Demand::Share { .. } => sum,
        });
        let demand = if wholes > 0 { Demand::Whole(wholes) } else { demands().max()? };
        let mut models = pod.models.clone();
        models.sort();
        Some(Self { cpu: pod.cpu, demand, models })
    }

    /// Whether GPUs of `model` will do.
    #[must_use]
    pub fn accepts(&self, model: &Model) -> bool {
        self.models.is_empty() || self.models.contains(model)
    }

    /// How many GPUs it takes.
    #[must_use]
    pub fn gpu_count(&self) -> usize {
        match self.demand {
            Demand::Share { .. } => 1,
            Demand::Whole(gpus) => usize::from(gpus),
        }
    }

    /// What it takes of each of its GPUs where they are of this kind, in percent of what is scarcer there; above 100
    /// where such a GPU is too small.
    #[must_use]
    pub fn percent_of(&self, kind: &GpuKind) -> usize {
        match self.demand {
            Demand::Whole(_) => 100,
            Demand::Share { compute_percent, memory } => {
                let memory = memory.0.saturating_mul(100).div_ceil(kind.memory.0.max(1));
                usize::try_from(memory.max(u64::from(compute_percent.0))).unwrap_or(usize::MAX)
            }
        }
    }
}

// === impl Demand ===

impl Demand {
    fn of(request: Request) -> Self {
        match (request, Hold::of(request)) {
            (Request::Whole(gpus), _) => Self::Whole(gpus),
            (_, Hold::Share { compute_percent, memory }) => Self::Share { compute_percent, memory },
            (_, Hold::Whole) => Self::Whole(1),
        }
    }
}

/// What a pod gets of the host for each of its GPUs, on a typical node.
struct Host {
    cpu: f64,
    memory: f64,
    most_gpus: usize,
}

impl Host {
    /// Of the nodes with GPUs, the one at the first quarter in CPU, and in memory, per GPU; pods ask for somewhat less.
    fn typical<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Self {
        const ASKED: f64 = 0.75;
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
            amounts.get(amounts.len() / 4).map_or(0.0, |amount| ASKED * *amount as f64)
        };
        Self { cpu: quartile(cpus), memory: quartile(memories), most_gpus: most_gpus.max(1) }
    }
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

    fn share(compute_percent: u32) -> PodRequest {
        PodRequest::of_mains([Request::Share { compute_percent: Percent(compute_percent), memory: MiB(10) }])
    }

    #[test]
    fn probabilities_add_up_and_the_newest_weighs_most() {
        let mut workload = Workload::of([&share(10), &share(10), &share(20)]);
        let shares: Vec<f64> = workload.classes().map(|expected| expected.share).collect();
        assert_eq!(shares, [2.0 / 3.0, 1.0 / 3.0]);
        for _ in 0..20_000 {
            workload.see(&share(30));
        }
        let last = workload.classes().last().unwrap();
        assert_eq!(last.class.demand, Demand::Share { compute_percent: Percent(30), memory: MiB(10) });
        assert!(last.share > 0.9999);
        let half_life_in_pods = HALF_LIFE / std::f64::consts::LN_2;
        assert!((workload.pods() / half_life_in_pods - 1.0).abs() < 0.1, "{}", workload.pods());
    }

    #[test]
    fn a_long_life_overflows_nothing_and_keeps_to_the_commonest_kinds() {
        let mut workload = Workload::default();
        for number in 0..400_000u64 {
            let mut pod = share(50);
            // Every other pod is of a kind never seen before.
            pod.cpu = MilliCpu(if number % 2 == 0 { number } else { 1 });
            workload.see(&pod);
        }
        assert!(workload.classes.len() <= 2 * MOST_CLASSES + 1);
        assert!(workload.total.is_finite() && workload.newest <= MOST_WEIGHT * 2.0);
        let common = workload.classes().find(|expected| expected.class.cpu == MilliCpu(1)).unwrap();
        assert!(common.share > 0.4, "{}", common.share);
        assert!((workload.classes().map(|expected| expected.share).sum::<f64>() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_kind_of_a_pod() {
        let class = |requests: &[Request]| PodClass::of(&PodRequest::of_mains(requests.iter().copied()));
        let part = |compute_percent, memory| Demand::Share {
            compute_percent: Percent(compute_percent),
            memory: MiB(memory),
        };
        assert_eq!(class(&[]), None);
        assert_eq!(class(&[Request::Whole(2), Request::Whole(1)]).unwrap().demand, Demand::Whole(3));
        let shares =
            [Request::Memory(MiB(9)), Request::Share { compute_percent: Percent(5), memory: MiB(1) }];
        assert_eq!(class(&shares).unwrap().demand, part(5, 1));
        let kind = GpuKind::new("T4".into(), MiB(1000));
        assert_eq!(class(&[Request::Memory(MiB(251))]).unwrap().percent_of(&kind), 26);
        assert_eq!(class(&[Request::Memory(MiB(5000))]).unwrap().percent_of(&kind), 500);
    }
}
