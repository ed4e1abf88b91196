//! One run: pods arrive, wait, run and end; the scheduler may restart.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::node::NodeState;
use tessera_core::placement::{Policy, place};
use tessera_core::workload::Workload;

use super::generate::Scenario;
use super::measures::{Measure, Measures, mean};
use super::shapes;
use crate::cluster::chooser::{NodeChooser, fits};
use crate::cluster::peers::ClusterFragmentation;
use crate::cluster::pod::{PodSize, SimPod};
use crate::cluster::sim_node::SimNode;
use crate::cluster::{FillPolicy, WorkloadKnowledge};

/// Runs one policy on a scenario.
#[must_use]
pub fn replay(scenario: &Scenario, policy: FillPolicy, target: WorkloadKnowledge) -> Measures {
    let mut run = Replay::new(scenario, policy, target);
    run.play();
    run.measures()
}

struct Replay<'a> {
    scenario: &'a Scenario,
    chooser: NodeChooser,
    nodes: Vec<SimNode>,
    usage: Usage,
    /// The waiting arrivals by shape, oldest first.
    waiting: BTreeMap<usize, VecDeque<usize>>,
    /// Time of the end, arrival and node of each running pod that ends.
    ends: BinaryHeap<Reverse<(u64, usize, usize)>>,
    /// Waiting time of each large job that arrived in the measured time.
    waits_minutes: Vec<f64>,
    granted_percent: u64,
    rejected: u32,
    /// Allocated GPUs, summed up over the measured time.
    allocated_seconds: f64,
    now: u64,
}

impl<'a> Replay<'a> {
    fn new(scenario: &'a Scenario, policy: FillPolicy, target: WorkloadKnowledge) -> Self {
        let nodes: Vec<SimNode> = scenario.nodes.iter().map(SimNode::empty).collect();
        let pods = || (0..scenario.arrivals.len()).map(|arrival| scenario.pod(arrival));
        let known =
            (target == WorkloadKnowledge::Trace).then(|| Workload::of(pods().map(|pod| &pod.request)));
        let measure = || ClusterFragmentation::new(pods(), nodes.iter().map(|node| &node.state));
        Self {
            scenario,
            chooser: NodeChooser::new(policy, known, &nodes, measure, scenario.seed),
            usage: Usage::new(&nodes),
            nodes,
            waiting: BTreeMap::new(),
            ends: BinaryHeap::new(),
            waits_minutes: Vec::new(),
            granted_percent: 0,
            rejected: 0,
            allocated_seconds: 0.0,
            now: 0,
        }
    }
}

impl Replay<'_> {
    fn play(&mut self) {
        let mut restarts = self.scenario.restarts.iter().peekable();
        for (arrival, known) in self.scenario.arrivals.iter().enumerate() {
            self.end_pods(known.at_seconds);
            while restarts.next_if(|before| **before == arrival).is_some() {
                self.restart();
            }
            let pod = self.scenario.pod(arrival);
            self.chooser.see(pod);
            self.refresh();
            if !self.start(arrival) {
                if self.scenario.measured.is_some() {
                    self.waiting.entry(known.shape).or_default().push_back(arrival);
                } else {
                    self.rejected += 1;
                }
            }
        }
        if let Some(measured) = self.scenario.measured {
            self.end_pods(measured.to_seconds);
        }
    }

    /// Ends pods until `until`. Waiting pods start as soon as there is room.
    fn end_pods(&mut self, until: u64) {
        while let Some(Reverse((at, arrival, node))) =
            self.ends.peek().copied().filter(|end| end.0.0 <= until)
        {
            self.ends.pop();
            self.pass_time(at);
            self.nodes[node].remove(arrival);
            self.changed(node);
            self.refresh();
            self.start_waiting(node);
        }
        self.pass_time(until);
    }

    /// Starts waiting pods, oldest first, after room has appeared on a node.
    ///
    /// A pod that does not fit does not hold up younger pods, as in Kubernetes. Waiting pods fit on
    /// no other node: otherwise they would have started earlier.
    fn start_waiting(&mut self, node: usize) {
        let mut tried: Vec<usize> = Vec::new();
        loop {
            let fresh = self.waiting.iter().filter(|(shape, _)| !tried.contains(shape));
            let oldest = fresh.filter_map(|(shape, queue)| Some((*queue.front()?, *shape))).min();
            let Some((arrival, shape)) = oldest else { return };
            let room = fits(&self.nodes[node].state, &self.scenario.shapes[shape]);
            if room && self.start(arrival) {
                self.waiting.entry(shape).or_default().pop_front();
            } else {
                tried.push(shape);
            }
        }
    }

    /// Starts a pod if it fits.
    fn start(&mut self, arrival: usize) -> bool {
        let pod = self.scenario.pod(arrival);
        let Some((node, placement)) = self.chooser.choose(pod, &self.nodes) else { return false };
        self.nodes[node].add(arrival, pod, &placement);
        self.changed(node);
        self.granted_percent += u64::from(pod.percent);
        if let Some(lifetime) = self.scenario.arrivals[arrival].lifetime_seconds {
            self.ends.push(Reverse((self.now + lifetime, arrival, node)));
        }
        self.record_wait(arrival);
        true
    }

    fn record_wait(&mut self, arrival: usize) {
        let at = self.scenario.arrivals[arrival].at_seconds;
        let is_large = matches!(self.scenario.pod(arrival).size, PodSize::Four | PodSize::Eight);
        if is_large && self.scenario.measured.is_some_and(|measured| at >= measured.from_seconds) {
            self.waits_minutes.push(as_f64(self.now - at) / 60.0);
        }
    }

    fn restart(&mut self) {
        let waiting = self.waiting.values().flatten().copied();
        let mut present: Vec<usize> = self.nodes.iter().flat_map(SimNode::arrivals).chain(waiting).collect();
        present.sort_unstable();
        self.chooser.restart(present.into_iter().map(|arrival| self.scenario.pod(arrival)), &self.nodes);
    }

    fn refresh(&mut self) {
        self.chooser.refresh(&self.nodes, self.usage.idle(), self.usage.all);
    }

    fn changed(&mut self, node: usize) {
        self.chooser.touch(node);
        self.usage.update(node, &self.nodes[node].state);
    }

    fn pass_time(&mut self, now: u64) {
        if let Some(measured) = self.scenario.measured {
            let passed = now.saturating_sub(self.now.max(measured.from_seconds));
            self.allocated_seconds += as_f64(passed) * (self.usage.all - self.usage.idle());
        }
        self.now = now;
    }

    fn measures(mut self) -> Measures {
        let still_waiting: Vec<usize> = self.waiting.values().flatten().copied().collect();
        // The waiting time of a job that has not started counts up to the end of the run.
        still_waiting.iter().for_each(|arrival| self.record_wait(*arrival));
        let mut measures = Measures::default();
        let mut set = |measure, value| measures.set(measure, value);
        set(Measure::OpenedPeak, count(self.usage.opened_peak));
        set(Measure::Opened, count(self.usage.opened));
        set(Measure::OneGpuFits, count(fitting(&self.nodes, &shapes::whole(1))));
        set(Measure::EightGpuFits, count(fitting(&self.nodes, &shapes::whole(8))));
        set(Measure::WholeGranted, count(self.usage.whole));
        let allocated = match self.scenario.measured {
            None => self.usage.all - self.usage.idle(),
            Some(measured) => self.allocated_seconds / as_f64(measured.to_seconds - measured.from_seconds),
        };
        set(Measure::Allocated, 100.0 * allocated / self.usage.all);
        let pods = (0..self.scenario.arrivals.len()).map(|arrival| self.scenario.pod(arrival));
        let requested: u64 = pods.map(|pod| u64::from(pod.percent)).sum();
        set(Measure::Granted, 100.0 * as_f64(self.granted_percent) / as_f64(requested.max(1)));
        set(Measure::NotPlaced, f64::from(self.rejected) + count(still_waiting.len()));
        if self.scenario.measured.is_some() {
            set(Measure::WaitMean, mean(&self.waits_minutes));
            self.waits_minutes.sort_by(f64::total_cmp);
            let position =
                (self.waits_minutes.len() * 95 / 100).min(self.waits_minutes.len().saturating_sub(1));
            set(Measure::WaitP95, self.waits_minutes.get(position).copied().unwrap_or(0.0));
        }
        measures
    }
}

/// The use of the GPUs, kept up to date node by node.
struct Usage {
    nodes: Vec<NodeUsage>,
    /// GPUs of the cluster.
    all: f64,
    opened: usize,
    opened_peak: usize,
    whole: usize,
    /// Free percentages of all GPUs.
    idle_percent: u64,
}

#[derive(Clone, Copy, Default)]
struct NodeUsage {
    opened: usize,
    whole: usize,
    idle_percent: u64,
}

impl Usage {
    fn new(nodes: &[SimNode]) -> Self {
        let all = nodes.iter().map(|node| node.state.node().gpus().len()).sum();
        let mut usage = Self {
            nodes: vec![NodeUsage::default(); nodes.len()],
            all: count(all),
            opened: 0,
            opened_peak: 0,
            whole: 0,
            idle_percent: 0,
        };
        nodes.iter().enumerate().for_each(|(node, known)| usage.update(node, &known.state));
        usage
    }

    fn update(&mut self, node: usize, state: &NodeState) {
        let mut now = NodeUsage::default();
        for gpu in state.node().gpus() {
            let used = state.used(gpu.index);
            now.whole += usize::from(used.whole);
            now.opened += usize::from(!used.whole && !used.is_none());
            now.idle_percent += u64::from(state.percent_left(gpu.index));
        }
        let before = std::mem::replace(&mut self.nodes[node], now);
        self.opened = self.opened + now.opened - before.opened;
        self.whole = self.whole + now.whole - before.whole;
        self.idle_percent = self.idle_percent + now.idle_percent - before.idle_percent;
        self.opened_peak = self.opened_peak.max(self.opened);
    }

    /// Returns the free capacity in GPUs.
    fn idle(&self) -> f64 {
        as_f64(self.idle_percent) / 100.0
    }
}

/// Returns how many more pods of one kind fit.
fn fitting(nodes: &[SimNode], pod: &SimPod) -> usize {
    let on_node = |node: &SimNode| {
        let mut state = node.state.clone();
        let mut placed = 0;
        while let Ok(placement) = place(&state, &pod.request, &Policy::Simple, GpuSet::EMPTY) {
            let grant = PodGrant {
                pod: "probe".into(),
                node: state.node().name.clone(),
                cpu: pod.request.cpu,
                memory: pod.request.memory,
                containers: placement.grants(&pod.request),
            };
            state.add(&grant);
            placed += 1;
        }
        placed
    };
    nodes.iter().map(on_node).sum()
}

#[expect(clippy::cast_precision_loss, reason = "a run has fewer than 2^52 pods and GPUs")]
fn count(number: usize) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::bench::BenchWorkload;

    #[test]
    fn no_policy_overbooks_a_gpu_or_leaves_a_pod_waiting_that_fits() {
        for workload in
            ["mib-percent", "memory-45", "kinds-mixed", "churn-95", "day-night", "restart-churn-80"]
        {
            let scenario = BenchWorkload::named(workload).unwrap().scenario(4, 3).unwrap();
            for policy in FillPolicy::COMPARED.into_iter().chain(["binpack", "spread"]) {
                let mut run = Replay::new(&scenario, policy.parse().unwrap(), WorkloadKnowledge::Learned);
                run.play();
                for SimNode { state, .. } in &run.nodes {
                    for gpu in state.node().gpus() {
                        assert!(!state.used(gpu.index).exceeds(gpu.memory), "{workload}, {policy}");
                    }
                    for (shape, _) in run.waiting.iter().filter(|(_, queue)| !queue.is_empty()) {
                        assert!(!fits(state, &scenario.shapes[*shape]), "{workload}, {policy}");
                    }
                }
                let usage = Usage::new(&run.nodes);
                assert_eq!((usage.opened, usage.whole), (run.usage.opened, run.usage.whole));
                assert_eq!(usage.idle_percent, run.usage.idle_percent);
            }
        }
    }
}
