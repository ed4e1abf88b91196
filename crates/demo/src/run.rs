//! Runs the demo from its start to its report.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tessera_sim::http::HttpClient;
use tessera_wire::tessera::node_use::{self, NodeUse};
use tokio_util::sync::CancellationToken;

use crate::cluster::Cluster;
use crate::jobs::{self, JobCounts, StreamSize};
use crate::report::{self, AgentReport, DemoReport, InvariantReport, PodCounts, StepReport};
use crate::scenario::{STEPS, play};
use crate::{DemoError, DemoOptions};

/// Pause between two rounds of the steps, at speed 1.
const ROUND_PAUSE: Duration = Duration::from_secs(20);

/// How long the end of the demo waits for kubelets, annotations and ledger to agree.
#[derive(Clone, Copy, Debug)]
struct SettleTimeouts {
    /// Longest time without a change.
    unchanged: Duration,
    /// Longest time in all.
    total: Duration,
}

/// Two hundred agents that start pods on a busy machine make progress for minutes.
const SETTLE: SettleTimeouts =
    SettleTimeouts { unchanged: Duration::from_secs(20), total: Duration::from_secs(300) };

/// The same after an interruption, when the user waits for the end.
const INTERRUPTED_SETTLE: SettleTimeouts =
    SettleTimeouts { unchanged: Duration::from_secs(3), total: Duration::from_secs(3) };

/// Manifest of a pod for the user to try.
const POD: &str = "\
apiVersion: v1
kind: Pod
metadata:
  name: mine
spec:
  containers:
    - name: main
      image: any
      resources:
        limits:
          tencent.com/vcuda-core: 30
          tencent.com/vcuda-memory: 16
";

/// Runs the demo until its time is over or `interrupted` resolves. Calls `say` with texts for the
/// user.
pub async fn run(
    options: DemoOptions,
    say: impl Fn(&str),
    interrupted: impl Future<Output = ()>,
) -> Result<DemoReport, DemoError> {
    let begun = Instant::now();
    let mut interrupted = std::pin::pin!(interrupted);
    let cluster = tokio::select! {
        started = Cluster::start(&options) => started?,
        () = &mut interrupted => return Err(DemoError::Interrupted),
    };
    let page_millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    let folder = cluster.directory.path();
    let kubeconfig = options.kubeconfig_out.clone().unwrap_or_else(|| folder.join("kubeconfig"));
    // The user may copy the path to a terminal in another directory.
    let kubeconfig = std::path::absolute(&kubeconfig).unwrap_or(kubeconfig);
    let pod = folder.join("pod.yaml");
    let written = write(&kubeconfig, &cluster.api.kubeconfig()).and_then(|()| write(&pod, POD));
    if let Err(error) = written {
        cluster.stop().await;
        return Err(error);
    }
    say(&introduction(&cluster, page_millis, &kubeconfig, &pod));

    let (started, processor) = (Instant::now(), report::processor_seconds());
    let (stop, counts) = (CancellationToken::new(), Arc::<JobCounts>::default());
    let (api, fed) = (Arc::clone(&cluster.api), Arc::clone(&counts));
    let tidy = tokio::spawn(jobs::tidy(Arc::clone(&api), Arc::clone(&counts), stop.clone()));
    let is_step_playing = Arc::<AtomicBool>::default();
    let feed = options.pods_per_second.is_none_or(|rate| rate > 0.0).then(|| {
        let size = StreamSize { gpus: cluster.shared_gpus(), largest: cluster.smallest_node_gpus() };
        let (options, stop, playing) = (options.clone(), stop.clone(), Arc::clone(&is_step_playing));
        tokio::spawn(async move { jobs::feed(api, fed, &options, size, playing, stop).await })
    });
    let mut steps = Vec::new();
    let show = async {
        if options.steps {
            steps = play_all(&cluster, 1, &is_step_playing, &say, started).await;
        }
        match options.duration {
            Some(duration) => tokio::time::sleep_until((started + duration).into()).await,
            None => endless(&cluster, &options, &is_step_playing, &say, started).await,
        }
    };
    let is_interrupted = tokio::select! {
        () = show => false,
        () = interrupted => {
            say("\nStopping.");
            true
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    let cores = (report::processor_seconds() - processor) / seconds;
    let agents = read_agents(&cluster).await;
    stop.cancel();
    for task in feed.into_iter().chain([tidy]) {
        // A panic of the task was logged when it happened.
        let _ = task.await;
    }
    let invariants = match is_interrupted {
        true => settle(&cluster, INTERRUPTED_SETTLE).await.interrupted(),
        false => settle(&cluster, SETTLE).await,
    };
    let report = DemoReport {
        nodes: cluster.nodes.len(),
        gpus: cluster.gpu_count(),
        seed: options.seed,
        page_millis,
        seconds,
        pods: pods(&cluster, &counts),
        steps,
        invariants,
        agents,
        process: report::process(cores),
    };
    cluster.stop().await;
    Ok(report)
}

fn write(file: &Path, text: &str) -> Result<(), DemoError> {
    std::fs::write(file, text).map_err(DemoError::io(format!("write {}", file.display())))
}

async fn play_all(
    cluster: &Cluster,
    round: u64,
    is_step_playing: &AtomicBool,
    say: &impl Fn(&str),
    started: Instant,
) -> Vec<StepReport> {
    let mut played = Vec::new();
    for name in STEPS {
        is_step_playing.store(true, Ordering::Relaxed);
        let step = play(cluster, name, round).await;
        is_step_playing.store(false, Ordering::Relaxed);
        let verdict = if step.happened { "" } else { "FAILED: " };
        say(&format!("{:>7.1} s  {name:<12}  {verdict}{}", started.elapsed().as_secs_f64(), step.detail));
        played.push(step);
    }
    played
}

/// Repeats the steps until the demo is interrupted.
async fn endless(
    cluster: &Cluster,
    options: &DemoOptions,
    is_step_playing: &AtomicBool,
    say: &impl Fn(&str),
    started: Instant,
) {
    for round in 2.. {
        let pause = ROUND_PAUSE.as_secs_f64() / options.speed;
        tokio::time::sleep(Duration::try_from_secs_f64(pause).unwrap_or(ROUND_PAUSE)).await;
        if options.steps {
            play_all(cluster, round, is_step_playing, say, started).await;
        }
    }
}

/// Compares kubelets, annotations and ledger until they agree or a timeout has passed. Changes may still be in progress:
/// on a busy machine, the pods of a large cluster that were bound last start much later.
async fn settle(cluster: &Cluster, timeouts: SettleTimeouts) -> InvariantReport {
    let begun = Instant::now();
    let (mut changed_at, mut last) = (begun, Vec::new());
    let differences = loop {
        let mut found = Vec::new();
        for node in &cluster.nodes {
            found.extend(cluster.audit.compare_kubelet(node));
            found.extend(cluster.audit.compare_ledger(cluster.app.read().ledger(), &node.name));
        }
        if found != last {
            (changed_at, last) = (Instant::now(), found.clone());
        }
        let is_over = changed_at.elapsed() > timeouts.unchanged || begun.elapsed() > timeouts.total;
        if found.is_empty() || is_over {
            break found;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let grants = cluster.nodes.iter().map(|node| node.node.kubelet().held_devices().len()).sum();
    let state = cluster.audit.state();
    let (checks, violations) = (state.checks, state.violations.clone());
    InvariantReport { checks, violations, differences, unsettled: 0, grants }
}

fn pods(cluster: &Cluster, counts: &JobCounts) -> PodCounts {
    let done = cluster.scheduler.counters();
    let bound = done.bound.load(Ordering::Relaxed);
    let nanos = Duration::from_nanos(done.bind_nanos.load(Ordering::Relaxed));
    PodCounts {
        created: counts.created.load(Ordering::Relaxed),
        bound,
        succeeded: counts.succeeded.load(Ordering::Relaxed),
        failed: counts.failed.load(Ordering::Relaxed),
        evicted: done.evicted.load(Ordering::Relaxed),
        refusals: done.unschedulable.load(Ordering::Relaxed),
        broken_attempts: done.failed.load(Ordering::Relaxed),
        bind_millis: nanos.as_secs_f64() * 1000.0
            / f64::from(u32::try_from(bound.max(1)).unwrap_or(u32::MAX)),
    }
}

/// Reads the usage from the agents' pages.
async fn read_agents(cluster: &Cluster) -> AgentReport {
    let mut agents = AgentReport::default();
    for node in &cluster.nodes {
        let Ok(mut client) = HttpClient::new(&node.agent_url) else { continue };
        let Ok((200, body)) = client.send("GET", node_use::PATH, &[], "").await else { continue };
        let Ok(used) = serde_json::from_str::<NodeUse>(&body) else { continue };
        agents.answered += 1;
        agents.containers += used.containers.len();
        let has_use = |share: &node_use::ShareUse| share.memory_used_mib.is_some_and(|used| used > 0);
        agents.in_use +=
            used.containers.iter().filter(|container| container.gpus.iter().any(has_use)).count();
    }
    agents
}

fn introduction(cluster: &Cluster, page_millis: u64, kubeconfig: &Path, pod: &Path) -> String {
    let (nodes, gpus, url) = (cluster.nodes.len(), cluster.gpu_count(), &cluster.url);
    let taken = cluster
        .taken
        .map(|address| format!("{address} is in use by another program; using another port.\n\n"));
    let (taken, kubeconfig) = (taken.unwrap_or_default(), kubeconfig.display());
    let seconds = Duration::from_millis(page_millis).as_secs_f64();
    let commands = [
        ("kubectl get pods -A --watch".to_owned(), "watch pods start and end"),
        (
            format!("kubectl apply -f {}", pod.display()),
            "create a pod with 30 % of a GPU and 4 GiB of its memory",
        ),
        ("kubectl describe pod mine".to_owned(), "show its node and its GPU"),
        (format!("curl {url}/explain/default/mine"), "show why it runs there or why it waits"),
        (
            "kubectl inspect gpu".to_owned(),
            "show which pod holds which GPU; needs the plugin: docs/inspect.md",
        ),
    ];
    let width = commands.iter().map(|(command, _)| command.len()).max().unwrap_or_default();
    let commands: String =
        commands.iter().map(|(command, what)| format!("  {command:<width$}  {what}\n")).collect();
    format!(
        "{taken}\
A cluster of {nodes} simulated nodes with {gpus} GPUs started in {seconds:.2} s.
The scheduler and the {nodes} agents are the real ones; the API server, the kubelets and the GPUs are embedded.

  Open      {url}/
  kubectl   export KUBECONFIG={kubeconfig}

Try these commands in another terminal:
{commands}
Press Ctrl-C to stop the demo. All its files are removed.
"
    )
}
