//! `tessera simulate cluster`: compares policies on a trace or on generated workloads.

use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use tessera_core::gpu::Model;
use tessera_core::topology::Topology;
use tessera_core::units::Count;
use tessera_sim::cluster::{Experiment, FillPolicy, WorkloadKnowledge, run, trace};

use super::cluster_report::{self, PolicyResult};
use super::{parallel, workloads};
use crate::topology;

/// Compares policies on the same arrivals: the pods of a trace, or a generated workload
///
/// A trace fills its cluster until nothing fits. A generated workload runs on nodes with eight GPUs.
#[derive(Debug, Args)]
#[command(
    after_help = "Policies: random, dotprod, clustering, packing, best-fit and fgd are published policies;
tessera and every other policy of `tessera place` belong to Tessera.

Workloads: alike-25, two-30-70, full-30-70, memory-30, bare-25, turnover-25, churn-80, churn-alike-80 (each
with any percentage from 1 to 99), mib-percent, shares-then-1, shares-then-8, shares-then-whole, quarters-then-8,
whole-then-shares, mixed, day-night, kinds-mixed, kinds-small-first; with the prefix restart- the scheduler
restarts at random moments, with burst- all pods are created together; all runs a selection

Examples:
  tessera simulate cluster --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv
  tessera simulate cluster --nodes N.csv --pods P.csv --policies fgd,tessera --plot curve.svg
  tessera simulate cluster --nodes N.csv --pods P.csv --target trace --json
  tessera simulate cluster --workload alike-25,restart-alike-25
  tessera simulate cluster --workload all --traces openb --json bench.json"
)]
pub(crate) struct Arguments {
    /// Node list with the columns sn, cpu_milli, memory_mib, gpu, model
    #[arg(long, value_name = "CSV", required_unless_present = "workload", requires = "pods")]
    nodes: Option<PathBuf>,

    /// Pod list with the columns name, cpu_milli, memory_mib, num_gpu, gpu_milli and, optionally,
    /// gpu_spec
    #[arg(long, value_name = "CSV", required_unless_present = "workload", requires = "nodes")]
    pods: Option<PathBuf>,

    /// Generated workloads instead of a trace, separated by commas, or `all`
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        conflicts_with_all = ["nodes", "pods", "fill", "machine", "plot"]
    )]
    workload: Vec<String>,

    /// Nodes of the cluster of a generated workload, with eight GPUs each
    #[arg(long, value_name = "NODES", default_value_t = 100, requires = "workload")]
    node_count: usize,

    /// Folder of the openb trace: adds its workloads openb-NAME to the generated ones
    #[arg(long, value_name = "FOLDER", requires = "workload")]
    traces: Option<PathBuf>,

    /// Policies to compare, separated by commas [default: the published ones and tessera; binpack
    /// instead of dotprod and clustering for generated workloads]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    policies: Vec<String>,

    /// Seeds of the arrivals: a range such as 42..51 (both ends included), or a list such as 42,43
    /// [default: 42..51; 42..46 for generated workloads]
    #[arg(long, value_name = "SEEDS")]
    seeds: Option<Seeds>,

    /// GPUs requested by all arrivals, as a multiple of the cluster's GPUs
    #[arg(long, value_name = "PARTS", default_value_t = DEFAULT_FILL)]
    fill: f64,

    /// Knowledge of policy tessera about the workload: the pods seen so far, or all pods
    #[arg(long, value_name = "KNOWLEDGE", default_value = "learned")]
    target: Knowledge,

    /// Nodes that kube-scheduler offers for each pod: it checks the nodes in turn until so many fit by its own
    /// count [default: all]
    #[arg(long, value_name = "NODES")]
    sample: Option<NonZeroUsize>,

    /// Links of the nodes of a GPU model, such as V100M32=dgx1-v100.txt; applies to nodes with as
    /// many GPUs as the file. May be given several times. Compare with a run without it to see the
    /// effect of links
    #[arg(long, value_name = "MODEL=FILE")]
    machine: Vec<MachineFile>,

    /// Write the result as JSON to a file, or without one instead of the table. All values are means
    /// per run
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
    /// All pods of the trace or workload from the start
    Trace,
}

/// A range `42..51` or a list `42,43` of seeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seeds(pub(super) Vec<u64>);

pub(super) fn run_arguments(arguments: &Arguments) -> Result<ExitCode> {
    if !arguments.workload.is_empty() {
        return run_workloads(arguments);
    }
    let (names, policies) = arguments.policies(&FillPolicy::COMPARED)?;
    let experiment = arguments.experiment()?;
    let seeds = arguments.seeds(FILL_SEEDS);
    let outcomes = parallel::run(policies.len() * seeds.len(), |job| {
        let (policy, seed) = (job / seeds.len(), job % seeds.len());
        run(&experiment, policies[policy].clone(), seeds[seed])
    });
    let outcomes = outcomes.chunks(seeds.len()).map(<[_]>::to_vec);
    let results: Vec<PolicyResult> =
        names.into_iter().zip(outcomes).map(|(name, outcomes)| PolicyResult { name, outcomes }).collect();
    if let Some(file) = &arguments.plot {
        super::write_file(file, &cluster_report::plot(&results, seeds.len()))?;
    }
    let with_links = !arguments.machine.is_empty();
    if let Some(file) = &arguments.json {
        super::write_json(file, &cluster_report::json(&results, &seeds, with_links))?;
    }
    // JSON on standard output must stand alone.
    if arguments.json.as_deref() != Some(Path::new("-")) {
        crate::print(&cluster_report::table(&results, with_links));
    }
    Ok(ExitCode::SUCCESS)
}

fn run_workloads(arguments: &Arguments) -> Result<ExitCode> {
    let (names, policies) = arguments.policies(&workloads::POLICIES)?;
    let result = workloads::run(&workloads::Plan {
        workloads: workloads::named(&arguments.workload, arguments.traces.as_deref())?,
        node_count: arguments.node_count,
        policies: names.into_iter().zip(policies).collect(),
        seeds: arguments.seeds(WORKLOAD_SEEDS),
        target: arguments.target.into(),
        sample: arguments.sample(),
    })?;
    if let Some(file) = &arguments.json {
        super::write_json(file, &result.json())?;
    }
    if arguments.json.as_deref() != Some(Path::new("-")) {
        crate::print(&result.text());
    }
    Ok(ExitCode::SUCCESS)
}

impl Arguments {
    /// Returns the policies with their names.
    fn policies(&self, default: &[&str]) -> Result<(Vec<String>, Vec<FillPolicy>)> {
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
        let names = if self.policies.is_empty() {
            default.iter().map(|name| (*name).to_owned()).collect()
        } else {
            self.policies.clone()
        };
        let policies = names.iter().map(parse).collect::<Result<_>>()?;
        Ok((names, policies))
    }

    fn seeds(&self, default: RangeInclusive<u64>) -> Vec<u64> {
        self.seeds.as_ref().map_or_else(|| default.collect(), |seeds| seeds.0.clone())
    }

    fn sample(&self) -> Option<usize> {
        self.sample.map(NonZeroUsize::get)
    }

    fn experiment(&self) -> Result<Experiment> {
        ensure!(self.fill > 0.0 && self.fill <= 100.0, "--fill {}: write a number such as 1.3", self.fill);
        let files = self.nodes.as_deref().zip(self.pods.as_deref());
        let (nodes, pods) = files.context("write both --nodes and --pods, or --workload")?;
        let machines = self.machines()?;
        let links = |model: &Model, gpu_count: usize| {
            let machine = machines.iter().find(|(of, links)| of == model && links.count() == gpu_count);
            machine.map(|(_, links)| links.clone())
        };
        let experiment = read_trace(nodes, pods, links)?;
        for (model, links) in &machines {
            let used = experiment.nodes.iter().any(|node| node.topology() == links);
            ensure!(used, "--machine: no node has {} of model {model}", Count(links.count(), "GPU"));
        }
        let (fill, target, sample) = (self.fill, self.target.into(), self.sample());
        Ok(Experiment { fill, target, sample, ..experiment })
    }

    fn machines(&self) -> Result<Vec<(Model, Topology)>> {
        let read = |machine: &MachineFile| {
            let links = topology::read(std::slice::from_ref(&machine.file))?.topology;
            Ok((machine.model.clone(), links))
        };
        self.machine.iter().map(read).collect()
    }
}

/// Reads a trace. `links` returns the links of a node by model and number of GPUs.
pub(super) fn read_trace(
    nodes: &Path,
    pods: &Path,
    links: impl Fn(&Model, usize) -> Option<Topology>,
) -> Result<Experiment> {
    let (node_text, pod_text) = (crate::read_file(nodes)?, crate::read_file(pods)?);
    let found = trace::nodes(&node_text, links).with_context(|| nodes.display().to_string())?;
    ensure!(found.iter().any(|node| !node.gpus().is_empty()), "{}: no node has a GPU", nodes.display());
    Ok(Experiment {
        nodes: found.into_iter().map(Arc::new).collect(),
        pods: trace::pods(&pod_text).with_context(|| pods.display().to_string())?,
        fill: DEFAULT_FILL,
        target: WorkloadKnowledge::Learned,
        sample: None,
    })
}

impl From<Knowledge> for WorkloadKnowledge {
    fn from(knowledge: Knowledge) -> Self {
        match knowledge {
            Knowledge::Learned => Self::Learned,
            Knowledge::Trace => Self::Trace,
        }
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

/// GPUs requested by the pods of a trace, as a multiple of the cluster's GPUs, as published.
const DEFAULT_FILL: f64 = 1.3;

/// Seeds of a trace, as published.
const FILL_SEEDS: RangeInclusive<u64> = 42..=51;
/// Seeds of a generated workload.
const WORKLOAD_SEEDS: RangeInclusive<u64> = 42..=46;

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
