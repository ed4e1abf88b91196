//! Jobs one after the other on one machine.

use std::sync::Arc;

use tessera_core::gpu::Gpu;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::ledger::Ledger;
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::{Policy, place};
use tessera_core::request::{PodRequest, Request, Role, Traffic};
use tessera_core::topology::Topology;
use tessera_core::units::{MiB, MilliCpu, NodeName, PodUid};

use super::twister::Twister;
use super::{Rule, StreamError, peers};

/// One job of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) size: u8,
    pub(super) ticks: u32,
    pub(super) traffic: Traffic,
}

/// How well the jobs of a stream were served.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Served {
    /// Shares of the best bandwidth, added up over the jobs that depend on their links.
    pub(super) shares: f64,
    pub(super) jobs: u32,
}

/// Jobs ask for at least and at most so many GPUs, and for one less than the machine has.
const SIZES: (u8, u8) = (2, 5);
/// They run so long.
const TICKS: (u32, u32) = (5, 24);
/// Of six networks, four depend on their links.
const SENSITIVE: f64 = 4.0 / 6.0;

/// The jobs of a seed: for each its size, its length and its kind, drawn in this order.
pub(super) fn jobs(cards: usize, count: usize, seed: u32) -> Vec<Job> {
    let mut draws = Twister::new(seed);
    let cards = u8::try_from(cards).unwrap_or(u8::MAX);
    // A machine of two GPUs has no smaller sets than itself, one of one GPU none at all.
    let most = SIZES.1.min(cards.saturating_sub(1)).max(SIZES.0.min(cards));
    let least = SIZES.0.min(most);
    let job = |_| Job {
        size: u8::try_from(draws.between(least.into(), most.into())).unwrap_or(most),
        ticks: draws.between(TICKS.0, TICKS.1),
        traffic: if draws.unit() < SENSITIVE { Traffic::Sensitive } else { Traffic::Insensitive },
    };
    (0..count).map(job).collect()
}

/// A machine with its running jobs.
struct Machine<'a> {
    topology: &'a Topology,
    name: NodeName,
    ledger: Ledger,
    now: u32,
    /// When each running job ends.
    running: Vec<(u32, PodUid)>,
    chooser: Chooser,
}

enum Chooser {
    Core(Policy),
    Tree,
    Greedy,
    Preserve,
    Random(Box<Twister>),
}

/// Runs jobs in strict order: where the first in line does not fit, all wait until it does.
pub(super) fn run(topology: &Topology, rule: Rule, jobs: &[Job], seed: u32) -> Result<Served, StreamError> {
    let mut machine = Machine::new(topology, Chooser::new(rule, seed))?;
    let mut served = Served::default();
    for (number, job) in jobs.iter().enumerate() {
        let gpus = machine.start(number, *job)?;
        if job.traffic == Traffic::Sensitive && gpus.len() > 1 {
            served.shares += topology.machine().share(gpus);
            served.jobs += 1;
        }
    }
    Ok(served)
}

// === impl Chooser ===

impl Chooser {
    fn new(rule: Rule, seed: u32) -> Self {
        match rule {
            Rule::Lowest => Self::Core(Policy::Simple),
            Rule::Gpuallocator => Self::Core(Policy::BestEffort),
            Rule::Tessera => Self::Core(Policy::Tessera(Arc::default())),
            Rule::Tree => Self::Tree,
            Rule::Greedy => Self::Greedy,
            Rule::Preserve => Self::Preserve,
            // Not the draws that made the jobs.
            Rule::Random => Self::Random(Box::new(Twister::new(!seed))),
        }
    }
}

// === impl Machine ===

impl<'a> Machine<'a> {
    fn new(topology: &'a Topology, chooser: Chooser) -> Result<Self, StreamError> {
        let gpu = |index| Gpu {
            numa: topology.numa(index),
            ..Gpu::new(index, format!("GPU-{index}").as_str().into(), "GPU".into(), MiB(1))
        };
        let name = NodeName::from("machine");
        let gpus = topology.gpus().iter().map(gpu).collect();
        let mut ledger = Ledger::default();
        ledger.set_node(Node::new(name.clone(), gpus, topology.clone(), MilliCpu::ZERO, MiB::ZERO)?);
        Ok(Self { topology, name, ledger, now: 0, running: Vec::new(), chooser })
    }

    /// Waits until a job fits, and starts it.
    fn start(&mut self, number: usize, job: Job) -> Result<GpuSet, StreamError> {
        while self.state()?.idle().len() < usize::from(job.size) {
            self.wait()?;
        }
        let pod = PodRequest { traffic: job.traffic, ..PodRequest::of_mains([Request::Whole(job.size)]) };
        let gpus = self.choose(&pod, job)?;
        let uid = PodUid(format!("job-{number}"));
        let main = ContainerGrant {
            container: "main".to_owned(),
            role: Role::Main,
            cards: gpus.iter().map(|gpu| (gpu, Hold::Whole)).collect(),
        };
        self.ledger.book(PodGrant {
            pod: uid.clone(),
            node: self.name.clone(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers: vec![main],
        })?;
        self.running.push((self.now + job.ticks, uid));
        Ok(gpus)
    }

    fn choose(&mut self, pod: &PodRequest, job: Job) -> Result<GpuSet, StreamError> {
        let (free, size) = (self.state()?.idle(), usize::from(job.size));
        let chosen = match &mut self.chooser {
            Chooser::Tree => peers::tree(self.topology, free, size),
            Chooser::Greedy => peers::greedy(self.topology.machine(), free, size),
            Chooser::Preserve => peers::preserve(self.topology, free, size, job.traffic),
            Chooser::Random(draws) => Some(peers::random(free, size, draws)),
            Chooser::Core(policy) => {
                let policy = policy.clone();
                let placement = place(self.state()?, pod, &policy, GpuSet::EMPTY)?;
                placement.gpus.first().copied()
            }
        };
        chosen.ok_or(StreamError::NoSet { free: free.len(), size })
    }

    /// Until the next job ends; all that end then give back what they hold.
    fn wait(&mut self) -> Result<(), StreamError> {
        let never = || StreamError::TooSmall(self.topology.count());
        self.now = self.running.iter().map(|(end, _)| *end).min().ok_or_else(never)?;
        let now = self.now;
        for (_, ended) in self.running.extract_if(.., |(end, _)| *end <= now) {
            self.ledger.release(&ended);
        }
        Ok(())
    }

    fn state(&self) -> Result<&NodeState, StreamError> {
        self.ledger.node(&self.name).ok_or_else(|| StreamError::TooSmall(self.topology.count()))
    }
}
