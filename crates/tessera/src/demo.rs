//! `tessera demo`: a whole cluster in one process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use tessera_demo::{DemoOptions, MachineModel, built_in_models};

use crate::{host, log, values};

/// Shows it all at work: simulated nodes with GPUs, pods that come and go, the dashboard. Needs no GPU, no Kubernetes, no root.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera demo                       # six nodes; open the page it names
  tessera demo --nodes 50 --pods 20  # a larger cluster, twenty pods a second
  tessera demo --topology dgx.txt    # nodes like a machine of yours
  tessera demo --kubeconfig-out kc   # then: kubectl --kubeconfig kc get pods -A
  tessera demo --for 30s --json      # for scripts: a report; exit code 1 if anything went wrong

TESSERA_LOG=info shows what the scheduler and the agents log.")]
pub(crate) struct Arguments {
    /// How many nodes; the last one is reserved for the preemption
    #[arg(long, value_name = "COUNT", default_value_t = 6)]
    nodes: usize,

    /// What the nodes look like, in turns: output of `nvidia-smi topo -m`; without it two kinds of machine_models with 8 GPUs
    #[arg(long, value_name = "FILE", num_args = 1..)]
    topology: Vec<PathBuf>,

    /// How many pods a second come by themselves
    #[arg(long, value_name = "RATE", default_value = "2", allow_negative_numbers = true, value_parser = values::number)]
    pods: f64,

    /// What is shown
    #[arg(long, value_name = "WHICH", value_enum, default_value = "all")]
    scenario: Scenario,

    /// The same seed brings the same pods
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// How fast time goes for the pods: 2 for twice as many, each running half as long
    #[arg(long, value_name = "FACTOR", default_value = "1", allow_negative_numbers = true, value_parser = values::number)]
    speed: f64,

    /// Where the dashboard is served; another port if this one is taken
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:12345", value_parser = values::address)]
    listen: SocketAddr,

    /// Write a kubeconfig here, for kubectl; without it one lies beside the sockets while the demo runs
    #[arg(long, value_name = "FILE")]
    kubeconfig_out: Option<PathBuf>,

    /// End after this time, once every step was shown: 30s, 2m
    #[arg(long = "for", value_name = "TIME", value_parser = values::time)]
    duration: Option<Duration>,

    /// Print nothing but a report as JSON at the end
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// The steps, amid pods that come and go
    All,
    /// The steps alone: fractions, training sets, notebooks, a quota, a broken GPU, a preemption
    Steps,
    /// Pods that come and go, alone
    Stream,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    log::start_quietly("error")?;
    ensure!(arguments.pods >= 0.0 && arguments.pods <= 1000.0, "--pods: write pods a second, 0 to 1000");
    ensure!(
        arguments.speed > 0.0 && arguments.speed <= 100.0,
        "--speed: write a number above 0, at most 100"
    );
    let options = DemoOptions {
        nodes: arguments.nodes,
        machine_models: machine_models(&arguments.topology)?,
        pods_per_second: if arguments.scenario == Scenario::Steps { 0.0 } else { arguments.pods },
        steps: arguments.scenario != Scenario::Stream,
        seed: arguments.seed,
        speed: arguments.speed,
        listen: arguments.listen,
        kubeconfig_out: arguments.kubeconfig_out.clone(),
        duration: arguments.duration,
    };
    let quiet = arguments.json;
    let say = |text: &str| {
        if !quiet {
            crate::print(&format!("{text}\n"));
        }
    };
    // Everything mostly waits: two threads do for fifty nodes.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let report = runtime.block_on(async {
        let interrupted = host::asked_to_end()?;
        anyhow::Ok(tessera_demo::run(options, say, interrupted).await?)
    })?;
    // Threads that watch GPUs look for the end ten times a second.
    runtime.shutdown_background();
    if arguments.json {
        crate::print(&format!("{}\n", serde_json::to_string_pretty(&report)?));
    } else {
        let (pods, process) = (&report.pods, &report.process);
        crate::print(&format!(
            "{} pods placed, {} refused for a while, {} evicted; {} checks, {} violations. {:.2} cores, {} MiB.\n",
            pods.bound,
            pods.refusals,
            pods.evicted,
            report.invariants.checks,
            report.invariants.violations.len(),
            process.cores,
            process.peak_mib,
        ));
    }
    Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn machine_models(files: &[PathBuf]) -> Result<Vec<MachineModel>> {
    if files.is_empty() {
        return Ok(built_in_models());
    }
    let read = |file: &PathBuf| {
        let matrix = tessera_wire::foreign::smi_matrix::parse(&crate::read_file(file)?);
        let matrix = matrix.with_context(|| file.display().to_string())?;
        ensure!(matrix.topology.count() > 0, "{}: lists no GPU", file.display());
        Ok(MachineModel::of(matrix.topology))
    };
    files.iter().map(read).collect()
}
