//! `tessera simulate cluster --workload`: runs policies on generated workloads.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use tessera_core::node::BadNode;
use tessera_sim::cluster::bench::{BenchWorkload, Headline, Measure, Measures, Scenario, replay};
use tessera_sim::cluster::{Experiment, FillPolicy, WorkloadKnowledge};

use super::cluster::read_trace;
use super::parallel;
use super::workloads_report::{BenchResult, PolicyMeasures, WorkloadResult};

/// Policies that are compared unless the command line names others.
pub(super) const POLICIES: [&str; 6] = ["random", "binpack", "packing", "best-fit", "fgd", "tessera"];

/// Workloads of the openb trace, by the names of their files.
const OPENB: [&str; 5] = ["default", "cpu100", "gpushare60", "gpuspec20", "multigpu30"];
const OPENB_NODES: &str = "openb_node_list_gpu_node.csv";
const OPENB_HEADLINE: Headline = Headline {
    measure: Measure::Allocated,
    reason: "the pods request more than the cluster has, as published",
};

/// Largest number of nodes. More would take hours.
const MAX_NODES: usize = 10_000;

/// The runs to make.
pub(super) struct Plan {
    pub(super) workloads: Vec<NamedWorkload>,
    pub(super) node_count: usize,
    pub(super) policies: Vec<(String, FillPolicy)>,
    pub(super) seeds: Vec<u64>,
    pub(super) target: WorkloadKnowledge,
    pub(super) sample: Option<usize>,
}

/// A workload that can be run.
pub(super) enum NamedWorkload {
    Generated(BenchWorkload),
    Openb { name: String, experiment: Box<Experiment> },
}

/// Returns the workloads of these names. `all` stands for all generated ones and, if the folder of
/// the openb trace is given, for those of the trace.
pub(super) fn named(names: &[String], traces: Option<&Path>) -> Result<Vec<NamedWorkload>> {
    let mut workloads = Vec::new();
    for name in names {
        match (name.as_str(), name.strip_prefix("openb-"), traces) {
            ("all", ..) => {
                workloads.extend(BenchWorkload::all().into_iter().map(NamedWorkload::Generated));
                if let Some(folder) = traces {
                    for name in OPENB {
                        workloads.push(openb(name, folder)?);
                    }
                }
            }
            (_, Some(name), Some(folder)) => workloads.push(openb(name, folder)?),
            (_, Some(_), None) => bail!("--workload {name}: write --traces FOLDER with the openb trace"),
            _ => workloads.push(NamedWorkload::Generated(BenchWorkload::named(name).with_context(|| {
                let known: Vec<String> = BenchWorkload::all().into_iter().map(|known| known.name).collect();
                format!("unknown workload {name:?}; choose among {}, or all", known.join(", "))
            })?)),
        }
    }
    Ok(workloads)
}

fn openb(name: &str, folder: &Path) -> Result<NamedWorkload> {
    let pods = folder.join(format!("openb_pod_list_{name}.csv"));
    let experiment = read_trace(&folder.join(OPENB_NODES), &pods, |_, _| None)?;
    Ok(NamedWorkload::Openb { name: format!("openb-{name}"), experiment: Box::new(experiment) })
}

/// Runs every policy on every workload and seed.
pub(super) fn run(plan: &Plan) -> Result<BenchResult> {
    let Plan { workloads, node_count, policies, seeds, target, sample } = plan;
    ensure!(
        (1..=MAX_NODES).contains(node_count),
        "--node-count {node_count}: write a number from 1 to {MAX_NODES}"
    );
    let runs = parallel::run(workloads.len() * seeds.len(), |job| {
        let scenario = workloads[job / seeds.len()].scenario(*node_count, seeds[job % seeds.len()])?;
        let scenario = scenario.sampled(*sample);
        let replayed = policies.iter().map(|(_, policy)| replay(&scenario, policy.clone(), *target));
        Ok::<Vec<Measures>, BadNode>(replayed.collect())
    });
    let runs: Vec<Vec<Measures>> = runs.into_iter().collect::<Result<_, _>>()?;
    let of_workload = |(workload, runs): (&NamedWorkload, &[Vec<Measures>])| WorkloadResult {
        name: workload.name().to_owned(),
        about: workload.about().to_owned(),
        headline: workload.headline(),
        policies: (policies.iter().enumerate())
            .map(|(position, (name, _))| PolicyMeasures {
                name: name.clone(),
                runs: runs.iter().map(|run| run[position]).collect(),
            })
            .collect(),
    };
    let workloads = workloads.iter().zip(runs.chunks(seeds.len())).map(of_workload).collect();
    Ok(BenchResult { workloads, seeds: seeds.clone(), node_count: *node_count })
}

impl NamedWorkload {
    fn name(&self) -> &str {
        match self {
            Self::Generated(workload) => &workload.name,
            Self::Openb { name, .. } => name,
        }
    }

    fn about(&self) -> &str {
        match self {
            Self::Generated(workload) => &workload.about,
            Self::Openb { .. } => "pods of the openb trace on its own nodes request 130 % of the cluster",
        }
    }

    fn headline(&self) -> Headline {
        match self {
            Self::Generated(workload) => workload.headline,
            Self::Openb { .. } => OPENB_HEADLINE,
        }
    }

    fn scenario(&self, node_count: usize, seed: u64) -> Result<Scenario, BadNode> {
        match self {
            Self::Generated(workload) => workload.scenario(node_count, seed),
            Self::Openb { experiment, .. } => Ok(Scenario::of_trace(experiment, seed)),
        }
    }
}
