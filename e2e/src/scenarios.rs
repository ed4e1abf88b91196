//! The scenarios on a real Kubernetes.

mod agent;
mod baseline;
mod broken;
mod conformance;
mod device_plugin;
mod extender;
mod gpu;
mod pod_runs;
mod restarts;
mod rights;
mod scheduler;
mod self_test;

use std::{future::Future, pin::Pin};

use anyhow::{Context, Result, bail};

use crate::{harness::Harness, runner::Settings};

type Running = Pin<Box<dyn Future<Output = Result<()>>>>;

/// A scenario that runs inside an enclosure.
pub(crate) type Enclosed = fn(Harness) -> Running;

/// Where a scenario runs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Body {
    Enclosed(Enclosed),
    /// In the runner itself, for scenarios about runners.
    Outside(fn(Settings) -> Running),
}

/// A scenario with its name and description.
#[derive(Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) body: Body,
    when: When,
}

impl Scenario {
    /// Returns true if no other scenario may run beside it, because it measures the host or uses its GPU.
    pub(crate) fn runs_alone(&self) -> bool {
        matches!(self.when, When::OnRequest | When::OnGpu)
    }
}

/// When a scenario runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// With all other scenarios.
    Always,
    /// Only when named, because it takes many minutes or measures a host that must be idle.
    OnRequest,
    /// Only on a host with a real GPU, by `e2e/gpu`.
    OnGpu,
    /// Only when named, and not listed. It fails or hangs on purpose, for the self test.
    Hidden,
}

/// Declares the scenario in the module of that name.
macro_rules! scenario {
    ($name:literal, $about:literal, $body:ident($run:path), $when:ident) => {
        Scenario {
            name: $name,
            about: $about,
            body: Body::$body(|given| Box::pin($run(given))),
            when: When::$when,
        }
    };
}

static SCENARIOS: &[Scenario] = &[
    scenario!(
        "pod-runs",
        "a pod runs on a real kubelet and its log is read",
        Enclosed(pod_runs::run),
        Always
    ),
    scenario!(
        "restarts",
        "every component restarts; a running pod stays, new pods run",
        Enclosed(restarts::run),
        Always
    ),
    scenario!(
        "device-plugin",
        "devices are registered, allocated and listed, and survive a kubelet restart",
        Enclosed(device_plugin::run),
        Always
    ),
    scenario!(
        "agent",
        "the agent serves every dialect: grants are followed, allocations agree, health is reported",
        Enclosed(agent::dialects),
        Always
    ),
    scenario!(
        "rights",
        "an agent's token writes nothing but its own fields, owners cannot lift their limits, pages need a token; installed in another namespace",
        Enclosed(rights::run),
        Always
    ),
    scenario!(
        "library",
        "the library enforces shares with the agent, without it, and after a crash",
        Enclosed(agent::library),
        Always
    ),
    scenario!(
        "dra",
        "claims of dynamic resource allocation: shares are enforced, unchanged pods run, all survives restarts",
        Enclosed(agent::dra),
        Always
    ),
    scenario!(
        "driver-files",
        "containers on plain runc run nvidia-smi from the driver directory that the agent fills",
        Enclosed(agent::driver),
        Always
    ),
    scenario!(
        "mig-mixed",
        "MIG instances are resources of their own: found through NVML, given to containers, back after a restart",
        Enclosed(agent::mig_mixed),
        Always
    ),
    scenario!(
        "mig-single",
        "MIG instances of one profile take the place of the GPUs",
        Enclosed(agent::mig_single),
        Always
    ),
    scenario!(
        "agent-restarts",
        "agent and kubelet are killed at random while pods start and end; all allocations agree afterwards",
        Enclosed(agent::restarts),
        Always
    ),
    scenario!(
        "agent-outage",
        "the agent registers by kubelet.sock, survives an outage of the API server, and reports a missing node",
        Enclosed(agent::outage),
        Always
    ),
    scenario!(
        "exporter",
        "processes of real containers are counted for the right container, and their series end with the pod",
        Enclosed(agent::exporter),
        Always
    ),
    scenario!(
        "agent-footprint",
        "memory and idle CPU of the agent with 8 GPUs and 100 pods",
        Enclosed(agent::footprint),
        OnRequest
    ),
    scenario!(
        "extender",
        "kube-scheduler calls filter, prioritize and bind; the Binding carries annotations",
        Enclosed(extender::run),
        Always
    ),
    scenario!(
        "conformance",
        "the real API server answers like the embedded one of tests and demo",
        Enclosed(conformance::run),
        Always
    ),
    scenario!(
        "baseline",
        "pods per second of kube-scheduler alone on 500 nodes",
        Enclosed(baseline::run),
        OnRequest
    ),
    scenario!(
        "scheduler",
        "tessera scheduler under kube-scheduler: every dialect, admission, quota, preemption, reuse, bypass, certificates",
        Enclosed(scheduler::dialects),
        Always
    ),
    scenario!(
        "scheduler-filter-only",
        "gpu-admission's configuration: kube-scheduler calls filter alone; nine pods of 60 % take seven GPUs, two wait",
        Enclosed(scheduler::filter_only),
        Always
    ),
    scenario!(
        "gangs",
        "two gangs that fit one at a time get their GPUs one after the other, in every order of arrival and across a kill",
        Enclosed(scheduler::gangs),
        Always
    ),
    scenario!(
        "queues",
        "Kueue admits Jobs, JobSets and groups of pods by quotas of our resources, and they get their GPUs as gangs",
        Enclosed(scheduler::queues),
        Always
    ),
    scenario!(
        "evictions",
        "a gang displaces one of lower priority as a whole, a borrower gives back, within budgets and only with --evict",
        Enclosed(scheduler::evictions),
        Always
    ),
    scenario!(
        "defragment",
        "kubectl inspect gpu defragment --apply moves a pod within budgets, and a reservation keeps the freed GPUs",
        Enclosed(scheduler::defragment),
        Always
    ),
    scenario!(
        "dra-scheduler",
        "claims through tessera scheduler: sets by links, GPUs filled exactly, stale proposals, crashes, beside device plugins",
        Enclosed(scheduler::claims),
        OnRequest
    ),
    scenario!(
        "dra-both",
        "random pods of device plugins and claims on one real node, while scheduler, kubelet and agent are killed",
        Enclosed(scheduler::both_offers),
        Always
    ),
    scenario!(
        "inspect",
        "kubectl inspect gpu and gpushare with a real kubectl: the same reasons as the event, and a refusal without rights",
        Enclosed(scheduler::inspect),
        Always
    ),
    scenario!(
        "together",
        "kube-scheduler, tessera scheduler, a real kubelet and the agent: pods run with their GPUs",
        Enclosed(scheduler::together),
        Always
    ),
    scenario!(
        "hami",
        "pods with HAMi's resources run unchanged; random pods of five dialects while components are killed",
        Enclosed(scheduler::hami),
        Always
    ),
    scenario!(
        "capacity",
        "allocatable minus requests is what pods of each dialect can still get; no pod is rejected because of it",
        Enclosed(scheduler::capacity),
        Always
    ),
    scenario!(
        "other-plugin",
        "a device plugin like NVIDIA's registers after the agent: it gets the resource, and no GPU is given away twice",
        Enclosed(scheduler::other_plugin),
        Always
    ),
    scenario!(
        "examples",
        "every manifest of examples/, with the real controllers: all pods are bound with a grant or wait as said",
        Enclosed(scheduler::examples),
        Always
    ),
    scenario!(
        "install",
        "the chart with its own image, accounts and policies: install, a share, upgrade, rollback and evictions under load, uninstall",
        Enclosed(scheduler::install),
        Always
    ),
    scenario!(
        "scheduler-kills",
        "tessera scheduler is killed before and after a Binding, and as the leader under load",
        Enclosed(scheduler::kills),
        Always
    ),
    scenario!(
        "scheduler-pairs",
        "a second kube-scheduler in the pod of its extender: either of them, or both, are killed as the leader",
        Enclosed(scheduler::pairs),
        Always
    ),
    scenario!(
        "scheduler-replay",
        "the openb trace on the real kube-scheduler: allocated GPUs with samples of nodes and with all nodes",
        Enclosed(scheduler::replay),
        OnRequest
    ),
    scenario!(
        "scheduler-throughput",
        "pods per second of kube-scheduler with the shipped configuration and of a stock kube-scheduler",
        Enclosed(scheduler::throughput),
        OnRequest
    ),
    scenario!(
        "scheduler-random",
        "10,000 random pods, two replicas, kills; every GPU is audited at every change",
        Enclosed(scheduler::random),
        OnRequest
    ),
    scenario!(
        "gpu-discovery",
        "a real GPU: capacity of every dialect, what the node publishes, kubectl inspect",
        Enclosed(gpu::discovery),
        OnGpu
    ),
    scenario!(
        "gpu-whole",
        "a real GPU as a whole: devices and driver of a container on plain runc",
        Enclosed(gpu::whole),
        OnGpu
    ),
    scenario!(
        "gpu-shares",
        "training, inference and a share of memory beside each other: shares, refusals, exporter, new ceilings",
        Enclosed(gpu::shares),
        OnGpu
    ),
    scenario!(
        "gpu-kills",
        "pods, agent, kubelet and scheduler are killed and a process is stopped, while others compute",
        Enclosed(gpu::kills),
        OnGpu
    ),
    scenario!(
        "gpu-hami",
        "two programs on a real GPU with HAMi's names are held to their time and memory",
        Enclosed(gpu::hami),
        OnGpu
    ),
    scenario!(
        "gpu-claims",
        "two programs on a real GPU with claims are held to their time and memory",
        Enclosed(gpu::claims),
        OnGpu
    ),
    scenario!(
        "gpu-escapes",
        "processes without the library on a real GPU: how soon they are detected, and what ends them",
        Enclosed(gpu::escapes),
        OnGpu
    ),
    scenario!(
        "gpu-mig",
        "instances of a real GPU in MIG mode: offered, given to containers, shown",
        Enclosed(gpu::mig),
        OnGpu
    ),
    scenario!(
        "self-test",
        "a dead component, a panic and a killed runner are reported and leave nothing behind",
        Outside(self_test::run),
        Always
    ),
    scenario!("broken-component", "a component dies", Enclosed(broken::component), Hidden),
    scenario!("broken-panic", "the scenario panics", Enclosed(broken::panic), Hidden),
    scenario!("broken-hang", "the scenario never ends", Enclosed(broken::hang), Hidden),
];

/// Returns the named scenarios, or all: of a host with a real GPU, or of any other one.
pub(crate) fn select(names: &[String], on_gpu: bool) -> Result<Vec<&'static Scenario>> {
    if names.is_empty() {
        let when = if on_gpu { When::OnGpu } else { When::Always };
        return Ok(SCENARIOS.iter().filter(|scenario| scenario.when == when).collect());
    }
    names.iter().map(|name| find(name)).collect()
}

/// Returns the named scenario, which must run in an enclosure.
pub(crate) fn only(names: &[String]) -> Result<Enclosed> {
    let [name] = names else { bail!("name exactly one scenario") };
    match find(name)?.body {
        Body::Enclosed(run) => Ok(run),
        Body::Outside(_) => bail!("{name} does not run in an enclosure"),
    }
}

/// Prints the list of scenarios.
pub(crate) fn print_list() {
    for scenario in SCENARIOS.iter().filter(|scenario| scenario.when != When::Hidden) {
        println!("{:<20} {}", scenario.name, scenario.about);
    }
}

fn find(name: &str) -> Result<&'static Scenario> {
    SCENARIOS
        .iter()
        .find(|scenario| scenario.name == name)
        .with_context(|| format!("there is no scenario {name:?}; --list prints all scenarios"))
}
