//! The use of the GPUs during a run.

use tessera_core::forecast::CapacitySummary;
use tessera_core::node::NodeState;

use super::measures::{Measure, Measures};
use super::shapes;
use crate::cluster::pod::SimPod;
use crate::cluster::sim_node::SimNode;

/// The use of all GPUs, kept up to date node by node.
#[derive(Debug)]
pub(super) struct Usage {
    nodes: Vec<Counts>,
    all: Counts,
    /// The free percentages of the partly used GPUs, by node and of all nodes.
    partly_used: Vec<u64>,
    all_partly_used: u64,
    gpus: u64,
    opened_peak: u64,
    /// The counts of all nodes, summed up over time.
    over_time: [f64; COUNTED.len()],
    seconds: u64,
    /// The pods with one and with eight GPUs that are counted as long as they fit.
    probes: [SimPod; 2],
}

/// The counts of one node or of all nodes, by [`COUNTED`].
type Counts = [u64; COUNTED.len()];

/// The measures that are counted on each node. The last one is counted in percent of one GPU.
const COUNTED: [Measure; 5] =
    [Measure::Opened, Measure::OneGpuFits, Measure::EightGpuFits, Measure::WholeGranted, Measure::Allocated];

impl Usage {
    pub(super) fn new(nodes: &[SimNode]) -> Self {
        let gpus: usize = nodes.iter().map(|node| node.state.node().gpus().len()).sum();
        let mut usage = Self {
            nodes: vec![Counts::default(); nodes.len()],
            all: Counts::default(),
            partly_used: vec![0; nodes.len()],
            all_partly_used: 0,
            gpus: gpus as u64,
            opened_peak: 0,
            over_time: [0.0; COUNTED.len()],
            seconds: 0,
            probes: [shapes::whole(1), shapes::whole(8)],
        };
        nodes.iter().enumerate().for_each(|(node, known)| usage.update(node, &known.state));
        usage
    }

    /// Counts a node again after a change.
    pub(super) fn update(&mut self, node: usize, state: &NodeState) {
        let now = self.count(state);
        let before = std::mem::replace(&mut self.nodes[node], now);
        for (sum, (now, before)) in self.all.iter_mut().zip(now.into_iter().zip(before)) {
            *sum = *sum + now - before;
        }
        self.opened_peak = self.opened_peak.max(self.all[0]);
        let used = state.node().gpus().iter().filter(|gpu| !state.used(gpu.index).is_none());
        let left = used.map(|gpu| u64::from(state.percent_left(gpu.index))).sum();
        let before = std::mem::replace(&mut self.partly_used[node], left);
        self.all_partly_used = self.all_partly_used + left - before;
    }

    fn count(&self, state: &NodeState) -> Counts {
        let (mut opened, mut whole, mut used_percent) = (0, 0, 0);
        for gpu in state.node().gpus() {
            let used = state.used(gpu.index);
            whole += u64::from(used.whole);
            opened += u64::from(!used.whole && !used.is_none());
            used_percent += 100 - u64::from(state.percent_left(gpu.index));
        }
        let [one, eight] = &self.probes;
        [opened, fitting(state, one), fitting(state, eight), whole, used_percent]
    }

    /// Adds the present use to the sums over time.
    pub(super) fn pass_time(&mut self, seconds: u64) {
        self.seconds += seconds;
        for (sum, now) in self.over_time.iter_mut().zip(self.all) {
            *sum += as_f64(seconds) * as_f64(now);
        }
    }

    /// Returns the GPUs of the cluster.
    fn gpus(&self) -> f64 {
        as_f64(self.gpus)
    }

    /// Returns how much is free.
    pub(super) fn capacity(&self) -> CapacitySummary {
        let [.., used_percent] = self.all;
        CapacitySummary {
            all_gpus: self.gpus(),
            free: as_f64(self.gpus * 100 - used_percent) / 100.0,
            free_on_partly_used: as_f64(self.all_partly_used) / 100.0,
        }
    }

    /// Enters the means over time, or the present values if no time has passed.
    pub(super) fn enter(&self, measures: &mut Measures) {
        measures.set(Measure::OpenedPeak, as_f64(self.opened_peak));
        for (position, measure) in COUNTED.into_iter().enumerate() {
            let value = match self.seconds {
                0 => as_f64(self.all[position]),
                seconds => self.over_time[position] / as_f64(seconds),
            };
            let unit = if measure == Measure::Allocated { self.gpus() } else { 1.0 };
            measures.set(measure, value / unit);
        }
    }
}

/// Returns how many pods with whole GPUs, all like this one, would fit on a node.
fn fitting(state: &NodeState, pod: &SimPod) -> u64 {
    let idle = state.idle().len() as u64;
    let by_gpus = idle.checked_div(u64::from(pod.percent) / 100);
    let by_cpu = state.cpu_left().0.checked_div(pod.request.cpu.0);
    let by_memory = state.memory_left().0.checked_div(pod.request.memory.0);
    [by_gpus, by_cpu, by_memory].into_iter().flatten().min().unwrap_or(0)
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
pub(super) fn as_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use tessera_core::gpu_set::GpuSet;
    use tessera_core::placement::{Policy, place};

    use super::*;
    use crate::cluster::bench::BenchWorkload;

    #[test]
    fn as_many_pods_fit_as_can_be_placed() {
        let scenario = BenchWorkload::named("alike-25").unwrap().scenario(1, 1).unwrap();
        let mut node = SimNode::empty(&scenario.nodes()[0]);
        for arrival in 0..11 {
            for probe in [1, 3, 8].map(shapes::whole) {
                let mut copy = node.clone();
                let mut placed = 0;
                while let Ok(placement) = place(&copy.state, &probe.request, &Policy::Simple, GpuSet::EMPTY) {
                    placed += 1;
                    copy.add(100 + arrival, &probe, &placement);
                }
                assert_eq!(fitting(&node.state, &probe), placed, "{arrival} shares, {}", probe.name);
            }
            let share = scenario.pod(0);
            let placement = place(&node.state, &share.request, &Policy::Binpack, GpuSet::EMPTY).unwrap();
            node.add(arrival, share, &placement);
        }
    }
}
