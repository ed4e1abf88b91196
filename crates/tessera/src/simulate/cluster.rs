//! `tessera simulate cluster`: fills a cluster with the pods of a trace.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use tessera_core::gpu::Model;
use tessera_core::topology::Topology;
use tessera_core::units::Count;
use tessera_sim::cluster::{Experiment, FillPolicy, FillResult, WorkloadKnowledge, run, trace};

use super::cluster_report::{self, PolicyResult};
use super::progress::Progress;
use crate::topology;

/// Fills a cluster with the pods of a trace until nothing fits, with each policy on the same
/// arrivals
#[derive(Debug, Args)]
#[command(
    after_help = "Policies: random, dotprod, clustering, packing, best-fit and fgd are published policies;
tessera and every other policy of `tessera place` belong to Tessera.

Examples:
  tessera simulate cluster --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv
  tessera simulate cluster --nodes N.csv --pods P.csv --policies fgd,tessera --plot curve.svg
  tessera simulate cluster --nodes N.csv --pods P.csv --target trace --json"
)]
pub(crate) struct Arguments {
    /// Node list with the columns sn, cpu_milli, memory_mib, gpu, model
    #[arg(long, value_name = "CSV")]
    nodes: PathBuf,

    /// Pod list with the columns name, cpu_milli, memory_mib, num_gpu, gpu_milli and, optionally,
    /// gpu_spec
    #[arg(long, value_name = "CSV")]
    pods: PathBuf,

    /// Policies to compare, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_values = FillPolicy::COMPARED)]
    policies: Vec<String>,

    /// Seeds of the arrivals: a range such as 42..51 (both ends included), or a list such as 42,43
    #[arg(long, value_name = "SEEDS", default_value = "42..51")]
    seeds: Seeds,

    /// GPUs requested by all arrivals, as a multiple of the cluster's GPUs
    #[arg(long, value_name = "PARTS", default_value_t = 1.3)]
    fill: f64,

    /// Knowledge of policy tessera about the workload: the pods seen so far, or the whole trace
    #[arg(long, value_name = "KNOWLEDGE", default_value = "learned")]
    target: Knowledge,

    /// Links of the nodes of a GPU model, such as V100M32=dgx1-v100.txt; applies to nodes with as
    /// many GPUs as the file. May be given several times. Compare with a run without it to see the
    /// effect of links
    #[arg(long, value_name = "MODEL=FILE")]
    machine: Vec<MachineFile>,

    /// Write the result as JSON to a file, or without one instead of the table. `refused` is the
    /// mean number of pods per run
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,

    /// Draw allocated over arrived GPUs as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// A model and its topology file, such as `V100M32=dgx1-v100.txt`.
#[derive(Clone, Debug)]
struct MachineFile {
    model: Model,
    file: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Knowledge {
    /// The pods that have arrived so far, as in a real cluster
    Learned,
    /// The whole trace from the start
    Trace,
}

/// A range `42..51` or a list `42,43` of seeds.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seeds(Vec<u64>);

pub(super) fn run_arguments(arguments: &Arguments) -> Result<ExitCode> {
    let policies = arguments.parse_policies()?;
    let experiment = arguments.experiment()?;
    let seeds = &arguments.seeds.0;
    let outcomes = run_all(&experiment, &policies, seeds);
    let names = arguments.policies.iter();
    let results: Vec<PolicyResult> =
        names.zip(outcomes).map(|(name, outcomes)| PolicyResult { name: name.clone(), outcomes }).collect();
    if let Some(file) = &arguments.plot {
        super::write_file(file, &cluster_report::plot(&results, seeds.len()))?;
    }
    let with_links = !arguments.machine.is_empty();
    if let Some(file) = &arguments.json {
        super::write_json(file, &cluster_report::json(&results, seeds, with_links))?;
    }
    // JSON on standard output must stand alone.
    if arguments.json.as_deref() != Some(Path::new("-")) {
        crate::print(&cluster_report::table(&results, with_links));
    }
    Ok(ExitCode::SUCCESS)
}

impl Arguments {
    fn parse_policies(&self) -> Result<Vec<FillPolicy>> {
        let parse = |name: &String| {
            let policy = name.parse::<FillPolicy>();
            policy.map_err(|_| {
                let others = "or a policy of `tessera place`";
                anyhow::anyhow!(
                    "unknown policy {name:?}; choose among {}, {others}",
                    FillPolicy::COMPARED.join(", ")
                )
            })
        };
        self.policies.iter().map(parse).collect()
    }

    fn experiment(&self) -> Result<Experiment> {
        ensure!(self.fill > 0.0 && self.fill <= 100.0, "--fill {}: write a number such as 1.3", self.fill);
        let nodes = crate::read_file(&self.nodes)?;
        let machines = self.machines()?;
        let links = |model: &Model, gpu_count: usize| {
            let machine = machines.iter().find(|(of, links)| of == model && links.count() == gpu_count);
            machine.map(|(_, links)| links.clone())
        };
        let nodes = trace::nodes(&nodes, links).with_context(|| self.nodes.display().to_string())?;
        for (model, links) in &machines {
            let used = nodes.iter().any(|node| node.topology() == links);
            ensure!(used, "--machine: no node has {} of model {model}", Count(links.count(), "GPU"));
        }
        ensure!(
            nodes.iter().any(|node| !node.gpus().is_empty()),
            "{}: no node has a GPU",
            self.nodes.display()
        );
        let pods = crate::read_file(&self.pods)?;
        let pods = trace::pods(&pods).with_context(|| self.pods.display().to_string())?;
        let target = match self.target {
            Knowledge::Learned => WorkloadKnowledge::Learned,
            Knowledge::Trace => WorkloadKnowledge::Trace,
        };
        Ok(Experiment { nodes: nodes.into_iter().map(Arc::new).collect(), pods, fill: self.fill, target })
    }
}

impl Arguments {
    fn machines(&self) -> Result<Vec<(Model, Topology)>> {
        let read = |machine: &MachineFile| {
            let links = topology::read(std::slice::from_ref(&machine.file))?.topology;
            Ok((machine.model.clone(), links))
        };
        self.machine.iter().map(read).collect()
    }
}

impl FromStr for MachineFile {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (model, file) =
            text.split_once('=').context("write MODEL=FILE, such as V100M32=dgx1-v100.txt")?;
        Ok(Self { model: model.into(), file: file.into() })
    }
}

/// Runs every policy on every seed, on as many threads as there are cores. Returns the results by
/// policy and seed.
fn run_all(experiment: &Experiment, policies: &[FillPolicy], seeds: &[u64]) -> Vec<Vec<FillResult>> {
    let total = policies.len() * seeds.len();
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let mut outcomes = vec![vec![FillResult::default(); seeds.len()]; policies.len()];
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(total) {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some(job) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|job| *job < total) {
                    let (policy, seed) = (job / seeds.len(), job % seeds.len());
                    let outcome = run(experiment, policies[policy].clone(), seeds[seed]);
                    // The receiver lives until every sender is dropped.
                    let _ = sender.send((policy, seed, outcome));
                }
            });
        }
        drop(sender);
        let mut progress = Progress::of(total);
        for (policy, seed, outcome) in receiver {
            progress.step("runs");
            outcomes[policy][seed] = outcome;
        }
    });
    outcomes
}

impl FromStr for Seeds {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = |text: &str| {
            text.trim()
                .parse::<u64>()
                .with_context(|| format!("`{text}`: write a range such as 42..51, or 42,43"))
        };
        let seeds: Vec<u64> = match text.split_once("..") {
            Some((first, last)) => {
                (number(first)?..=number(last.trim_start_matches('='))?).take(MAX_SEEDS + 1).collect()
            }
            None => text.split(',').map(number).collect::<Result<_>>()?,
        };
        if seeds.is_empty() || seeds.len() > MAX_SEEDS {
            bail!("`{text}`: write 1 to {MAX_SEEDS} seeds, such as 42..51");
        }
        Ok(Self(seeds))
    }
}

/// Largest number of seeds of one run. More would take hours.
const MAX_SEEDS: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_seeds_as_range_and_list() {
        assert_eq!("42..44".parse::<Seeds>().unwrap().0, [42, 43, 44]);
        assert_eq!("7".parse::<Seeds>().unwrap().0, [7]);
        assert_eq!("7, 9".parse::<Seeds>().unwrap().0, [7, 9]);
        for wrong in ["", "x", "5..4", "0..9999999999", "1..x"] {
            let error = format!("{:#}", wrong.parse::<Seeds>().unwrap_err());
            assert!(error.contains("42..51"), "{wrong}: {error}");
        }
    }
}
