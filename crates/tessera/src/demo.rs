//! `tessera demo`: runs a whole cluster in one process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use tessera_core::units::Count;
use tessera_demo::{DemoOptions, MachineModel, built_in_models};

use crate::{host, log, values};

/// Runs a simulated cluster with GPUs, pods and the dashboard. Needs no GPU, no Kubernetes and no
/// root
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera demo                       # six nodes; open the URL it prints
  tessera demo --nodes 50 --pods 20  # a larger cluster with twenty pods per second
  tessera demo --topology dgx.txt    # nodes with the topology of your host
  tessera demo --kubeconfig-out kc   # then: kubectl --kubeconfig kc get pods -A
  tessera demo --for 30s --json      # for scripts: prints a report, exits with 1 on an error

TESSERA_LOG=info shows the log of the scheduler and the agents.")]
pub(crate) struct Arguments {
    /// Number of nodes; the last of several is reserved for the preemption
    #[arg(long, value_name = "COUNT", default_value_t = 6)]
    nodes: usize,

    /// Topologies of the nodes, used in turn: output of `nvidia-smi topo -m`; two built-in models
    /// with 8 GPUs if absent
    #[arg(long, value_name = "FILE", num_args = 1..)]
    topology: Vec<PathBuf>,

    /// Pods per second in the stream of pods; by default 0.04 for each GPU
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, value_parser = values::number)]
    pods: Option<f64>,

    /// Parts to run
    #[arg(long, value_name = "WHICH", value_enum, default_value = "all")]
    scenario: Scenario,

    /// Seed of the stream; the same seed gives the same pods
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Speed factor: at 2, twice as many pods arrive and each runs half as long
    #[arg(long, value_name = "FACTOR", default_value = "1", allow_negative_numbers = true, value_parser = values::number)]
    speed: f64,

    /// Address of the dashboard; another port is used if this one is in use
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:12345", value_parser = values::address)]
    listen: SocketAddr,

    /// File for a kubeconfig; without it the demo writes one to its temporary directory
    #[arg(long, value_name = "FILE")]
    kubeconfig_out: Option<PathBuf>,

    /// Duration; the demo ends after this time and after one round of the steps: 30s, 2m
    #[arg(long = "for", value_name = "TIME", value_parser = values::time)]
    duration: Option<Duration>,

    /// Print only a JSON report at the end
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// The steps and the stream of pods
    All,
    /// Only the steps: fractions, training sets, notebooks, a quota, a broken GPU, a preemption
    Steps,
    /// Only the stream of pods
    Stream,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    log::start_quietly("error")?;
    ensure!(
        arguments.pods.is_none_or(|pods| (0.0..=1000.0).contains(&pods)),
        "--pods: write a rate from 0 to 1000 pods per second"
    );
    ensure!(
        arguments.speed > 0.0 && arguments.speed <= 100.0,
        "--speed: write a number above 0 and up to 100"
    );
    let options = DemoOptions {
        nodes: arguments.nodes,
        machine_models: machine_models(&arguments.topology)?,
        pods_per_second: if arguments.scenario == Scenario::Steps { Some(0.0) } else { arguments.pods },
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
    // All tasks mostly wait, so two threads suffice for fifty nodes.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let report = runtime.block_on(async {
        let interrupted = host::termination_signal()?;
        anyhow::Ok(tessera_demo::run(options, say, interrupted).await?)
    })?;
    // Threads that watch GPUs check for the end ten times a second. The process does not wait for
    // them.
    runtime.shutdown_background();
    if arguments.json {
        crate::print(&format!("{}\n", serde_json::to_string_pretty(&report)?));
    } else {
        let (pods, process) = (&report.pods, &report.process);
        crate::print(&format!(
            "{} bound, {} without a node, {} evicted; {}, {}; {:.2} cores, {} MiB.\n",
            Count(pods.bound, "pod"),
            Count(pods.refusals, "attempt"),
            Count(pods.evicted, "pod"),
            Count(report.invariants.checks, "check"),
            Count(report.invariants.violations.len(), "violation"),
            process.cores,
            process.peak_mib,
        ));
        for problem in report.problems() {
            crate::print(&format!("FAILED: {problem}\n"));
        }
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
