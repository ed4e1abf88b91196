//! Jobs that run one after the other on one host.

use std::sync::Arc;

use tessera_core::claim::{ClaimPart, Exchange, Review, review};
use tessera_core::gpu::Gpu;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::ledger::Ledger;
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::{Policy, place};
use tessera_core::request::{ContainerRole, LinkSensitivity, PodRequest, Request};
use tessera_core::topology::Topology;
use tessera_core::units::{MiB, MilliCpu, NodeName, PodUid};

use super::twister::Twister;
use super::{StreamError, StreamPolicy, peers};

/// A job of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamJob {
    /// Number of GPUs.
    pub size: u8,
    /// Run time in ticks.
    pub ticks: u32,
    /// Whether the job depends on its links.
    pub traffic: LinkSensitivity,
}

/// Bandwidth shares of the link-sensitive jobs of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct BandwidthSum {
    /// Sum of the shares of the best bandwidth.
    pub(super) shares: f64,
    pub(super) jobs: u32,
}

/// Smallest and largest number of GPUs of a job. A job also leaves one GPU of the host free.
const SIZES: (u8, u8) = (2, 5);
/// Shortest and longest run time of a job, in ticks.
const TICKS: (u32, u32) = (5, 24);
/// Probability that a job depends on its links: four of the six networks of the published
/// experiment do.
const SENSITIVE_PROBABILITY: f64 = 4.0 / 6.0;

/// Returns the jobs of a seed. Size, run time and sensitivity are drawn in this order.
#[must_use]
pub fn jobs(gpu_count: usize, count: usize, seed: u32) -> Vec<StreamJob> {
    let mut draws = Twister::new(seed);
    let gpu_count = u8::try_from(gpu_count).unwrap_or(u8::MAX);
    // A host with two GPUs has no smaller sets, and a host with one GPU has no sets at all.
    let most = SIZES.1.min(gpu_count.saturating_sub(1)).max(SIZES.0.min(gpu_count));
    let least = SIZES.0.min(most);
    let job = |_| StreamJob {
        size: u8::try_from(draws.between(least.into(), most.into())).unwrap_or(most),
        ticks: draws.between(TICKS.0, TICKS.1),
        traffic: if draws.unit() < SENSITIVE_PROBABILITY {
            LinkSensitivity::Sensitive
        } else {
            LinkSensitivity::Insensitive
        },
    };
    (0..count).map(job).collect()
}

/// A host with its running jobs.
struct SimulatedHost<'a> {
    topology: &'a Topology,
    name: NodeName,
    ledger: Ledger,
    now: u32,
    /// End tick and UID of each running job.
    running: Vec<(u32, PodUid)>,
    chooser: GpuChooser,
}

enum GpuChooser {
    Core(Policy),
    /// The lowest free indexes, reviewed as the GPUs of a claim.
    Claims(Policy),
    Tree,
    Greedy,
    Preserve,
    Random(Box<Twister>),
}

/// Runs jobs in strict order: while the first job does not fit, all later ones wait.
pub(super) fn run(
    topology: &Topology,
    policy: StreamPolicy,
    jobs: &[StreamJob],
    seed: u32,
) -> Result<BandwidthSum, StreamError> {
    let mut host = SimulatedHost::new(topology, GpuChooser::new(policy, seed))?;
    let mut served = BandwidthSum::default();
    for (number, job) in jobs.iter().enumerate() {
        let gpus = host.start(number, *job)?;
        if job.traffic == LinkSensitivity::Sensitive && gpus.len() > 1 {
            served.shares += topology.bandwidth_model().share(gpus);
            served.jobs += 1;
        }
    }
    Ok(served)
}

impl GpuChooser {
    fn new(policy: StreamPolicy, seed: u32) -> Self {
        match policy {
            StreamPolicy::Lowest => Self::Core(Policy::Simple),
            StreamPolicy::Gpuallocator => Self::Core(Policy::BestEffort),
            StreamPolicy::Tessera => Self::Core(Policy::Tessera(Arc::default())),
            StreamPolicy::Claims => Self::Claims(Policy::Tessera(Arc::default())),
            StreamPolicy::Tree => Self::Tree,
            StreamPolicy::Greedy => Self::Greedy,
            StreamPolicy::Preserve => Self::Preserve,
            // The choices must not repeat the draws that made the jobs.
            StreamPolicy::Random => Self::Random(Box::new(Twister::new(!seed))),
        }
    }
}

impl<'a> SimulatedHost<'a> {
    fn new(topology: &'a Topology, chooser: GpuChooser) -> Result<Self, StreamError> {
        let gpu = |index| Gpu {
            numa: topology.numa(index),
            ..Gpu::new(index, format!("GPU-{index}").as_str().into(), "GPU".into(), MiB(1))
        };
        let name = NodeName::from("host");
        let gpus = topology.gpus().iter().map(gpu).collect();
        let mut ledger = Ledger::default();
        ledger.set_node(Node::new(name.clone(), gpus, topology.clone(), MilliCpu::ZERO, MiB::ZERO)?);
        Ok(Self { topology, name, ledger, now: 0, running: Vec::new(), chooser })
    }

    /// Waits until the job fits, then starts it.
    fn start(&mut self, number: usize, job: StreamJob) -> Result<GpuSet, StreamError> {
        while self.state()?.idle().len() < usize::from(job.size) {
            self.wait()?;
        }
        let pod =
            PodRequest { link_sensitivity: job.traffic, ..PodRequest::of_mains([Request::Whole(job.size)]) };
        let gpus = self.choose(&pod, job)?;
        let uid = PodUid(format!("job-{number}"));
        let main = ContainerGrant {
            container: "main".to_owned(),
            role: ContainerRole::Main,
            holds: gpus.iter().map(|gpu| (gpu, Hold::Whole)).collect(),
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

    fn choose(&mut self, pod: &PodRequest, job: StreamJob) -> Result<GpuSet, StreamError> {
        let (free, size) = (self.state()?.idle(), usize::from(job.size));
        let chosen = match &mut self.chooser {
            GpuChooser::Tree => peers::tree(self.topology, free, size),
            GpuChooser::Greedy => peers::greedy(self.topology.bandwidth_model(), free, size),
            GpuChooser::Preserve => peers::preserve(self.topology, free, size, job.traffic),
            GpuChooser::Random(draws) => Some(peers::random(free, size, draws)),
            GpuChooser::Claims(policy) => {
                let policy = policy.clone();
                let gpus = free.iter().take(size).collect();
                let proposed = [ClaimPart { request: "gpu".to_owned(), gpus, hold: Hold::Whole }];
                let exchange = Exchange::SameKind { distinct: false };
                let parts = match review(self.state()?, &proposed, exchange, &policy, job.traffic) {
                    Review::Replace { parts, .. } => parts,
                    Review::Keep | Review::NoRoom(_) => proposed.to_vec(),
                };
                Some(parts.iter().flat_map(|part| part.gpus.iter().copied()).collect())
            }
            GpuChooser::Core(policy) => {
                let policy = policy.clone();
                let placement = place(self.state()?, pod, &policy, GpuSet::EMPTY)?;
                placement.gpus.first().copied()
            }
        };
        chosen.ok_or(StreamError::NoSet { free: free.len(), size })
    }

    /// Advances to the end of the next job and releases the GPUs of all jobs that end then.
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
