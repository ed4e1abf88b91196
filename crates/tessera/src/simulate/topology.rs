//! `tessera simulate topology`: runs a stream of jobs on each of several hosts.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, value_parser};
use serde::Serialize;
use tessera_core::topology::Topology;
use tessera_sim::topology::{StreamPolicy, bandwidth_share};

use super::progress::Progress;
use crate::topology::read_one;

/// Runs a stream of jobs of 2 to 5 GPUs on each host with each policy. Prints the share of the
/// possible all-reduce bandwidth that link-sensitive jobs get
///
/// 1 means that every such job was as fast as that many GPUs can be on the empty host.
#[derive(Debug, Args)]
#[command(after_help = "Policies: lowest (free indexes), tree (Gaia), gpuallocator (NVIDIA go-gpuallocator),
greedy and preserve (MAPA) and random are published policies; tessera is Tessera's own;
claims corrects the lowest free indexes as the scheduler does for claims.

Examples:
  tessera simulate topology --topology dgx1.txt pcie8.txt
  tessera simulate topology --topology node.txt --policies gpuallocator,tessera --seeds 30
  tessera simulate topology --topology *.txt --json")]
pub(crate) struct Arguments {
    /// Topologies of the hosts: outputs of `nvidia-smi topo -m`
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    topology: Vec<PathBuf>,

    /// Policies to compare, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_values = StreamPolicy::COMPARED)]
    policies: Vec<StreamPolicy>,

    /// Jobs per stream
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = value_parser!(u32).range(1..=1_000_000))]
    jobs: u32,

    /// Streams per host and policy: seeds 0, 1, ...
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u32).range(1..=10_000))]
    seeds: u32,

    /// Write the result as JSON to a file, or without one instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// The result for scripts. Its keys are stable.
#[derive(Debug, Serialize)]
struct JsonResult {
    machines: Vec<Machine>,
}

#[derive(Debug, Serialize)]
struct Machine {
    file: String,
    policies: Vec<Score>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Score {
    name: &'static str,
    bandwidth_share: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    // All files are read first, so that an error in the last one does not waste a run.
    let topologies = arguments.topology.iter().map(|file| Ok(read_one(file)?.topology));
    let topologies = topologies.collect::<Result<Vec<_>>>()?;
    let mut progress = Progress::of(topologies.len() * arguments.policies.len());
    let machines = arguments.topology.iter().zip(&topologies).map(|(file, topology)| {
        let file = file.display().to_string();
        let policies = arguments.scores(topology, &file, &mut progress).with_context(|| file.clone())?;
        Ok(Machine { file, policies })
    });
    let machines = machines.collect::<Result<Vec<_>>>()?;
    drop(progress);
    let shown_as_json = arguments.json.as_ref().is_some_and(|file| file.as_os_str() == "-");
    if !shown_as_json {
        crate::print(&table(&machines, &arguments.policies));
    }
    if let Some(file) = &arguments.json {
        super::write_json(file, &JsonResult { machines })?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Arguments {
    fn scores(&self, topology: &Topology, file: &str, progress: &mut Progress) -> Result<Vec<Score>> {
        let mut scores = Vec::new();
        for policy in &self.policies {
            progress.step(&format!("{file} {policy}"));
            if !policy.serves(topology) {
                eprintln!(
                    "note: {file}: policy {policy} compares every set of GPUs and is skipped for {} GPUs",
                    topology.count()
                );
                continue;
            }
            let bandwidth_share = bandwidth_share(topology, *policy, self.jobs as usize, self.seeds)?;
            scores.push(Score { name: policy.name(), bandwidth_share });
        }
        Ok(scores)
    }
}

/// Returns a table with a line per host and a column per policy. Stars mark the best results of a
/// line.
fn table(machines: &[Machine], policies: &[StreamPolicy]) -> String {
    let names = short_names(machines);
    let width = names.iter().map(|name| name.len()).max().unwrap_or(0).max("machine".len());
    let mut text =
        "Share of the best all-reduce bandwidth, mean over the jobs that depend on it (* best)\n\n"
            .to_owned();
    // Writing to a String cannot fail.
    let _ = write!(text, "{:width$}", "machine");
    let column = |policy: &StreamPolicy| policy.name().len().max("0.0000".len());
    for policy in policies {
        let _ = write!(text, "   {:>1$}", policy.name(), column(policy));
    }
    for (machine, name) in machines.iter().zip(names) {
        let _ = write!(text, "\n{name:width$}");
        // Results that print the same count as equal.
        let shown = |score: &Score| format!("{:.4}", score.bandwidth_share);
        let best = machine.policies.iter().map(shown).max().unwrap_or_default();
        for policy in policies {
            let score = machine.policies.iter().find(|score| score.name == policy.name());
            let cell = score.map_or_else(|| "-".to_owned(), shown);
            let marked = if cell == best { format!("*{cell}") } else { cell };
            let _ = write!(text, "  {marked:>0$}", column(policy) + 1);
        }
    }
    text.push('\n');
    text
}

/// Returns the file names without their directories if these names are distinct.
fn short_names(machines: &[Machine]) -> Vec<&str> {
    let full = || machines.iter().map(|machine| machine.file.as_str());
    let short = || full().map(|file| file.rsplit('/').next().unwrap_or(file));
    let distinct: BTreeSet<&str> = short().collect();
    if distinct.len() == machines.len() { short().collect() } else { full().collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_the_best_results_of_each_line() {
        let score = |name, bandwidth_share| Score { name, bandwidth_share };
        let machines = [
            Machine { file: "a.txt".into(), policies: vec![score("greedy", 0.5), score("tessera", 0.75)] },
            Machine { file: "long/b.txt".into(), policies: vec![score("tessera", 1.0)] },
            Machine { file: "c".into(), policies: vec![score("greedy", 0.50001), score("tessera", 0.5)] },
        ];
        let text = table(&machines, &[StreamPolicy::Greedy, StreamPolicy::Tessera]);
        let expected = "machine   greedy   tessera
a.txt     0.5000   *0.7500
b.txt          -   *1.0000
c        *0.5000   *0.5000
";
        assert_eq!(text.split_once("\n\n").unwrap().1, expected);
    }

    #[test]
    fn files_with_the_same_name_keep_their_directories() {
        let machine = |file: &str| Machine { file: file.into(), policies: Vec::new() };
        assert_eq!(short_names(&[machine("x/a"), machine("y/b")]), ["a", "b"]);
        assert_eq!(short_names(&[machine("x/a"), machine("y/a")]), ["x/a", "y/a"]);
    }
}
