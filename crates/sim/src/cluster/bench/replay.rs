//! One run: pods arrive, wait, run and end; the scheduler may restart.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use tessera_core::workload::Workload;

use super::generate::Scenario;
use super::measures::{Measure, Measures, mean};
use super::usage::{Usage, as_f64};
use crate::cluster::chooser::{NodeChooser, fits};
use crate::cluster::peers::ClusterFragmentation;
use crate::cluster::pod::PodSize;
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
    /// Arrivals that the policy has seen.
    seen: usize,
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
            chooser: NodeChooser::new(policy, known, &nodes, measure, scenario.seed)
                .sampling(scenario.sample, scenario.seed),
            usage: Usage::new(&nodes),
            nodes,
            waiting: BTreeMap::new(),
            ends: BinaryHeap::new(),
            waits_minutes: Vec::new(),
            granted_percent: 0,
            seen: 0,
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
                self.restart(arrival);
            }
            self.see(arrival);
            self.refresh();
            if !self.start(arrival) {
                self.waiting.entry(known.shape).or_default().push_back(arrival);
            }
        }
        if let Some(measured) = self.scenario.measured {
            self.end_pods(measured.to_seconds);
        }
    }

    /// Lets the policy see a pod that is about to be placed. Pods that are created at the same time
    /// are all seen before the first of them is placed.
    fn see(&mut self, arrival: usize) {
        let arrivals = &self.scenario.arrivals;
        let is_created = |next: usize| {
            let burst = self.scenario.bursts.then(|| arrivals.get(next)).flatten();
            next <= arrival || burst.is_some_and(|next| next.at_seconds == arrivals[arrival].at_seconds)
        };
        while is_created(self.seen) {
            self.chooser.see(self.scenario.pod(self.seen));
            self.seen += 1;
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

    fn restart(&mut self, next: usize) {
        let waiting = self.waiting.values().flatten().copied().chain(next..self.seen);
        let mut present: Vec<usize> = self.nodes.iter().flat_map(SimNode::arrivals).chain(waiting).collect();
        present.sort_unstable();
        self.chooser.restart(present.into_iter().map(|arrival| self.scenario.pod(arrival)), &self.nodes);
    }

    fn refresh(&mut self) {
        self.chooser.refresh(&self.nodes, self.usage.capacity());
    }

    fn changed(&mut self, node: usize) {
        self.chooser.touch(node);
        self.usage.update(node, &self.nodes[node].state);
    }

    fn pass_time(&mut self, now: u64) {
        if let Some(measured) = self.scenario.measured {
            self.usage.pass_time(now.saturating_sub(self.now.max(measured.from_seconds)));
        }
        self.now = now;
    }

    fn measures(mut self) -> Measures {
        let still_waiting: Vec<usize> = self.waiting.values().flatten().copied().collect();
        // The waiting time of a job that has not started counts up to the end of the run.
        still_waiting.iter().for_each(|arrival| self.record_wait(*arrival));
        let mut measures = Measures::default();
        self.usage.enter(&mut measures);
        let pods = (0..self.scenario.arrivals.len()).map(|arrival| self.scenario.pod(arrival));
        let requested_percent: u64 = pods.map(|pod| u64::from(pod.percent)).sum();
        let granted = as_f64(self.granted_percent) / as_f64(requested_percent.max(1));
        measures.set(Measure::Granted, 100.0 * granted);
        measures.set(Measure::NotPlaced, as_f64(still_waiting.len() as u64));
        if self.scenario.measured.is_some() {
            self.waits_minutes.sort_by(f64::total_cmp);
            let count = self.waits_minutes.len();
            let position = (count * 95 / 100).min(count.saturating_sub(1));
            measures.set(Measure::WaitMean, mean(&self.waits_minutes));
            measures.set(Measure::WaitP95, self.waits_minutes.get(position).copied().unwrap_or(0.0));
        }
        measures
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::bench::BenchWorkload;

    #[test]
    fn a_burst_is_seen_before_its_first_pod_is_placed() {
        let seen_at_first = |workload: &str| {
            let scenario = BenchWorkload::named(workload).unwrap().scenario(4, 3).unwrap();
            let mut run = Replay::new(&scenario, "tessera".parse().unwrap(), WorkloadKnowledge::Learned);
            run.see(0);
            run.seen
        };
        // The first of two phases requests 40 % of 32 GPUs in quarters.
        assert_eq!(seen_at_first("burst-quarters-then-8"), 51);
        assert_eq!(seen_at_first("quarters-then-8"), 1);
        assert_eq!(seen_at_first("churn-80"), 1);
    }

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
                assert_eq!(Usage::new(&run.nodes).capacity(), run.usage.capacity(), "{workload}, {policy}");
            }
        }
    }
}
