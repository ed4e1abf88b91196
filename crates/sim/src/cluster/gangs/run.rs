//! One run: jobs arrive, wait, run and end.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};

use tessera_core::gang::{GangClass, GangNode, TopologyWish, nodes_to_empty, plan};
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::node::NodeState;
use tessera_core::placement::{Policy, place, score};
use tessera_core::units::PodUid;

use super::jobs::{Job, jobs};
use super::{GangExperiment, GangMeasures, GangMode, JobShape};

/// Time for which the first waiting job holds back GPUs, the default of Tessera's scheduler.
const HOLD_BACK_SECONDS: u64 = 600;

/// The policy that chooses the GPUs of a pod.
const POLICY: Policy = Policy::Binpack;

/// Runs the jobs of a seed.
#[must_use]
pub fn simulate(experiment: &GangExperiment, mode: GangMode, seed: u64) -> GangMeasures {
    let jobs = jobs(experiment, seed);
    let mut events: BinaryHeap<Reverse<(u64, Event)>> =
        jobs.iter().enumerate().map(|(job, it)| Reverse((it.at_seconds, Event::Arrive(job)))).collect();
    let mut run = Run::new(experiment, mode, &jobs);
    while let Some(Reverse((now, event))) = events.pop() {
        run.advance(now);
        match event {
            Event::Arrive(job) => run.waiting.push(job),
            Event::End(job) => run.end(job),
            Event::HoldBackEnds => {
                if run.held.as_ref().is_some_and(|held| held.until <= now) {
                    run.end_hold_back();
                }
            }
        }
        // Events of the same second are one change.
        if events.peek().is_some_and(|Reverse((next, _))| *next == now) {
            continue;
        }
        run.schedule();
        events.extend(
            run.started.drain(..).map(|job| Reverse((now + jobs[job].running_seconds, Event::End(job)))),
        );
        if let Some(held) = run.held.as_ref().filter(|held| held.until == now + HOLD_BACK_SECONDS) {
            events.push(Reverse((held.until, Event::HoldBackEnds)));
        }
    }
    run.measures()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    End(usize),
    HoldBackEnds,
    Arrive(usize),
}

/// The progress of a job.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// The nodes of the pods that have GPUs.
    places: Vec<usize>,
    started_at: Option<u64>,
    is_in_one_rack: bool,
    has_held_back: bool,
}

/// The nodes that are kept free for the first waiting job.
#[derive(Clone, Debug)]
struct HoldBack {
    job: usize,
    until: u64,
    nodes: BTreeSet<usize>,
}

struct Run<'a> {
    experiment: &'a GangExperiment,
    mode: GangMode,
    jobs: &'a [Job],
    states: Vec<NodeState>,
    /// The grants on each node.
    grants: Vec<Vec<PodGrant>>,
    racks: Vec<(String, String)>,
    progress: Vec<Progress>,
    /// Jobs that lack pods, the earliest first.
    waiting: Vec<usize>,
    /// Jobs that have started since the last event.
    started: Vec<usize>,
    held: Option<HoldBack>,
    /// The first shape that equals each shape. A trace has many equal ones.
    kinds: Vec<usize>,
    /// Nodes that got free GPUs, in the order of time.
    freed: Vec<usize>,
    /// Kinds of jobs that did not fit, with the length of `freed` at that time. GPUs only become fewer otherwise.
    failed: HashMap<usize, usize>,
    /// GPUs that no pod uses.
    idle_gpus: usize,
    /// GPUs held now, in percent of one GPU.
    holding: Holding,
    now: u64,
    gpu_seconds: GpuSeconds,
}

/// GPUs of all jobs, in percent of one GPU.
#[derive(Clone, Copy, Debug, Default)]
struct Holding {
    running: u64,
    incomplete: u64,
}

/// Sums of GPU time while jobs arrive, in percent of one GPU times seconds.
#[derive(Clone, Copy, Debug, Default)]
struct GpuSeconds {
    running: u64,
    incomplete: u64,
    held_back: u64,
}

impl<'a> Run<'a> {
    fn new(experiment: &'a GangExperiment, mode: GangMode, jobs: &'a [Job]) -> Self {
        let states: Vec<NodeState> =
            experiment.nodes.iter().map(|node| NodeState::empty(std::sync::Arc::clone(node))).collect();
        let racks =
            (0..states.len()).map(|node| (GangExperiment::rack(node), GangExperiment::block(node))).collect();
        let idle_gpus = states.iter().map(|state| state.idle().len()).sum();
        Self {
            experiment,
            mode,
            jobs,
            kinds: kinds(&experiment.shapes),
            freed: Vec::new(),
            failed: HashMap::new(),
            idle_gpus,
            holding: Holding::default(),
            grants: vec![Vec::new(); states.len()],
            states,
            racks,
            progress: vec![Progress::default(); jobs.len()],
            waiting: Vec::new(),
            started: Vec::new(),
            held: None,
            now: 0,
            gpu_seconds: GpuSeconds::default(),
        }
    }

    fn shape(&self, job: usize) -> &'a JobShape {
        &self.experiment.shapes[self.jobs[job].shape]
    }

    /// Adds the GPU time since the last event, up to the time when the last job may arrive.
    fn advance(&mut self, now: u64) {
        let end = u64::from(self.experiment.hours) * 3600;
        let seconds = now.min(end).saturating_sub(self.now.min(end));
        self.now = now;
        let held = self.held.iter().flat_map(|held| &held.nodes);
        let idle: usize = held.map(|node| self.states[*node].idle().len()).sum();
        self.gpu_seconds.held_back += 100 * idle as u64 * seconds;
        self.gpu_seconds.running += self.holding.running * seconds;
        self.gpu_seconds.incomplete += self.holding.incomplete * seconds;
    }

    fn percent_of(&self, job: usize) -> u64 {
        self.progress[job].places.len() as u64 * u64::from(self.shape(job).pod_percent)
    }

    /// Frees the GPUs of a job.
    fn end(&mut self, job: usize) {
        self.holding.running -= self.percent_of(job);
        let mut nodes = std::mem::take(&mut self.progress[job].places);
        nodes.sort_unstable();
        nodes.dedup();
        let name = pod_name(job);
        for node in nodes {
            self.grants[node].retain(|grant| grant.pod != name);
            self.idle_gpus -= self.states[node].idle().len();
            self.states[node] = NodeState::empty(self.states[node].shared_node());
            self.grants[node].iter().for_each(|grant| self.states[node].add(grant));
            self.idle_gpus += self.states[node].idle().len();
            self.freed.push(node);
        }
    }

    /// Lets all jobs use the nodes that were kept free for one job.
    fn end_hold_back(&mut self) {
        self.freed.extend(self.held.take().into_iter().flat_map(|held| held.nodes));
    }

    /// Tries all waiting jobs, the earliest first. A kind of job that did not fit is tried again when a node got free
    /// GPUs.
    fn schedule(&mut self) {
        let mut failed_now: HashSet<usize> = HashSet::new();
        for job in self.waiting.clone() {
            let shape = self.jobs[job].shape;
            if failed_now.contains(&shape) && !self.is_holder(job) {
                continue;
            }
            let kind = self.kinds[shape];
            let has_failed = self.failed.get(&kind) == Some(&self.freed.len());
            // A job that may hold back GPUs says which ones.
            let may_hold_back = self.mode == GangMode::Jointly
                && self.shape(job).pod_count > 1
                && self.held.is_none()
                && !self.progress[job].has_held_back;
            if has_failed && !self.is_holder(job) && !may_hold_back {
                failed_now.insert(shape);
                continue;
            }
            let is_placed = match self.mode {
                GangMode::PodByPod => self.place_pods(job),
                GangMode::Jointly if self.shape(job).pod_count == 1 => self.place_pods(job),
                GangMode::Jointly => self.place_jointly(job),
            };
            if !is_placed {
                self.failed.insert(kind, self.freed.len());
                failed_now.insert(shape);
            }
        }
        let (progress, jobs, experiment) = (&self.progress, self.jobs, self.experiment);
        self.waiting
            .retain(|job| progress[*job].places.len() < experiment.shapes[jobs[*job].shape].pod_count);
    }

    fn is_holder(&self, job: usize) -> bool {
        self.held.as_ref().is_some_and(|held| held.job == job)
    }

    /// Returns whether a node is kept free for another job.
    fn is_held_back(&self, node: usize, job: usize) -> bool {
        self.held.as_ref().is_some_and(|held| held.job != job && held.nodes.contains(&node))
    }

    /// Places the missing pods of a job one by one. Returns whether all have GPUs.
    fn place_pods(&mut self, job: usize) -> bool {
        let shape = self.shape(job);
        let candidates = self.candidates(job);
        while self.progress[job].places.len() < shape.pod_count {
            let may_use = |node: &usize| !self.is_held_back(*node, job);
            let fitting = candidates.iter().copied().filter(may_use).filter_map(|node| {
                score(&self.states[node], &shape.request, &POLICY).ok().map(|score| (node, score))
            });
            let best = fitting.reduce(|best, next| if next.1 > best.1 { next } else { best });
            let Some((node, _)) = best else { return false };
            let Ok(placement) = place(&self.states[node], &shape.request, &POLICY, GpuSet::EMPTY) else {
                return false;
            };
            let containers = placement.grants(self.states[node].node(), &shape.request);
            self.add(job, node, containers);
        }
        self.start(job);
        true
    }

    /// Returns the nodes on which a pod of a job may fit: those that got free GPUs since its kind did not fit.
    fn candidates(&self, job: usize) -> Vec<usize> {
        let failed = self.failed.get(&self.kinds[self.jobs[job].shape]);
        let freed = failed.map(|since| &self.freed[*since..]).filter(|freed| freed.len() < self.states.len());
        let Some(freed) = freed else { return (0..self.states.len()).collect() };
        let mut nodes = freed.to_vec();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Places all pods of a job, or none and lets the job hold back GPUs.
    fn place_jointly(&mut self, job: usize) -> bool {
        let shape = self.shape(job);
        let may_fit = self.idle_gpus * 100 >= shape.pod_count * shape.pod_percent as usize;
        let classes = [GangClass { count: shape.pod_count, policy: &POLICY }];
        let planned =
            if may_fit { plan(&classes, &self.gang_nodes(job, shape), &TopologyWish::Any) } else { None };
        if let Some(planned) = planned {
            for place in planned.places {
                self.add(job, place.node, place.containers);
            }
            if self.is_holder(job) {
                self.end_hold_back();
            }
            self.start(job);
            return true;
        }
        if self.held.is_none() && !self.progress[job].has_held_back {
            self.progress[job].has_held_back = true;
            let nodes = nodes_to_empty(&classes, &self.gang_nodes(job, shape), &TopologyWish::Any);
            let until = self.now + HOLD_BACK_SECONDS;
            if !nodes.is_empty() {
                self.held = Some(HoldBack { job, until, nodes: nodes.into_iter().collect() });
            }
        }
        false
    }

    /// Returns the nodes as a job meets them. Nodes that are kept for another job take none of its pods.
    fn gang_nodes<'s>(&'s self, job: usize, shape: &'s JobShape) -> Vec<GangNode<'s>> {
        let nodes = self.states.iter().enumerate().map(|(node, state)| GangNode {
            state,
            domains: vec![Some(self.racks[node].0.as_str()), Some(self.racks[node].1.as_str())],
            wished: None,
            requests: vec![Some(&shape.request).filter(|_| !self.is_held_back(node, job))],
            has_member: false,
        });
        nodes.collect()
    }

    fn add(&mut self, job: usize, node: usize, containers: Vec<tessera_core::grant::ContainerGrant>) {
        let request = &self.shape(job).request;
        let name = self.states[node].node().name.clone();
        let (cpu, memory) = (request.cpu, request.memory);
        let grant = PodGrant { pod: pod_name(job), node: name, cpu, memory, containers };
        self.idle_gpus -= self.states[node].idle().len();
        self.states[node].add(&grant);
        self.idle_gpus += self.states[node].idle().len();
        self.grants[node].push(grant);
        self.progress[job].places.push(node);
        self.holding.incomplete += u64::from(self.shape(job).pod_percent);
    }

    fn start(&mut self, job: usize) {
        let racks: BTreeSet<&String> =
            self.progress[job].places.iter().map(|node| &self.racks[*node].0).collect();
        let is_in_one_rack = racks.len() == 1;
        let percent = self.percent_of(job);
        self.holding.incomplete -= percent;
        self.holding.running += percent;
        self.progress[job].is_in_one_rack = is_in_one_rack;
        self.progress[job].started_at = Some(self.now);
        self.started.push(job);
    }

    #[expect(clippy::cast_precision_loss, reason = "sums are far below 2^52")]
    fn measures(&self) -> GangMeasures {
        let gangs = || (0..self.jobs.len()).filter(|job| self.shape(*job).pod_count > 1);
        let started = || gangs().filter_map(|job| Some((job, self.progress[job].started_at?)));
        let mut waits: Vec<u64> = started().map(|(job, at)| at - self.jobs[job].at_seconds).collect();
        waits.sort_unstable();
        let count = waits.len().max(1) as f64;
        let in_one_rack = started().filter(|(job, _)| self.progress[*job].is_in_one_rack).count();
        let gpus: usize = self.states.iter().map(|state| state.node().gpus().len()).sum();
        let all = (gpus as u64 * 100 * u64::from(self.experiment.hours) * 3600).max(1) as f64;
        let percent = |part: u64| 100.0 * part as f64 / all;
        let p95 = waits.get((waits.len() * 95).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default();
        GangMeasures {
            jobs: gangs().count(),
            never_started: gangs().count() - waits.len(),
            wait_minutes: waits.iter().sum::<u64>() as f64 / 60.0 / count,
            wait_p95_minutes: p95 as f64 / 60.0,
            one_rack_percent: 100.0 * in_one_rack as f64 / count,
            incomplete_percent: percent(self.gpu_seconds.incomplete),
            held_back_percent: percent(self.gpu_seconds.held_back),
            running_percent: percent(self.gpu_seconds.running),
        }
    }
}

/// Returns the first shape that equals each shape.
fn kinds(shapes: &[JobShape]) -> Vec<usize> {
    let mut firsts: Vec<usize> = Vec::new();
    let first = |(number, shape): (usize, &JobShape)| {
        let known = firsts.iter().copied().find(|first| shapes[*first] == *shape);
        known.unwrap_or_else(|| {
            firsts.push(number);
            number
        })
    };
    shapes.iter().enumerate().map(first).collect()
}

fn pod_name(job: usize) -> PodUid {
    PodUid(format!("job-{job}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joint_placement_leaves_no_gpu_idle_in_incomplete_jobs_and_starts_every_job() {
        let experiment = GangExperiment { hours: 6, ..GangExperiment::fat_tree(32, 0.9).unwrap() };
        for seed in [1, 2] {
            let jointly = simulate(&experiment, GangMode::Jointly, seed);
            assert_eq!((jointly.incomplete_percent, jointly.never_started), (0.0, 0));
            assert!(jointly.jobs > 0 && jointly.one_rack_percent > 50.0, "{jointly:?}");
            assert_eq!(jointly, simulate(&experiment, GangMode::Jointly, seed), "equal input, equal result");
        }
        let pods = simulate(&experiment, GangMode::PodByPod, 1);
        assert!(pods.incomplete_percent > 0.0, "{pods:?}");
    }
}
