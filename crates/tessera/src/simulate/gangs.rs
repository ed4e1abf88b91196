//! `tessera simulate gangs`: compares joint placement of jobs with placement pod by pod.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use tessera_sim::cluster::gangs::{GangExperiment, GangMeasures, GangMode, simulate};

use super::cluster::{Seeds, read_trace};
use super::parallel;

/// Compares joint placement of jobs with several pods with placement pod by pod, on a cluster with racks
///
/// Jobs arrive, run for an hour on average and end. A generated cluster has nodes with eight GPUs in racks of 16 nodes,
/// and jobs of 1 to 64 GPUs. In the openb trace, each pod with several GPUs becomes a job of pods with one GPU each, and
/// 16 neighbouring nodes are a rack.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera simulate gangs
  tessera simulate gangs --node-count 512 --load 0.8 --json
  tessera simulate gangs --traces openb --seeds 42")]
pub(crate) struct Arguments {
    /// Nodes of the generated cluster
    #[arg(long, value_name = "NODES", default_value_t = 128)]
    node_count: usize,

    /// Offered GPU time, as a part of the GPU time of the cluster
    #[arg(long, value_name = "PART", default_value_t = 0.9)]
    load: f64,

    /// Folder of the openb trace: uses its nodes and pods instead of a generated cluster
    #[arg(long, value_name = "FOLDER", conflicts_with = "node_count")]
    traces: Option<PathBuf>,

    /// Seeds of the arrivals: a range such as 42..44 (both ends included), or a list such as 42,43
    #[arg(long, value_name = "SEEDS", default_value = "42..44")]
    seeds: Seeds,

    /// Write the result as JSON to a file, or without one instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Largest generated cluster. More nodes would take hours.
const MAX_NODES: usize = 10_000;

/// The two ways of placement, with their names in the result.
const MODES: [(&str, GangMode); 2] = [("pod by pod", GangMode::PodByPod), ("jointly", GangMode::Jointly)];

/// The result for scripts: one row for each way of placement and seed. Its keys are stable.
#[derive(Debug, Serialize)]
struct Row {
    placement: &'static str,
    seed: u64,
    jobs: usize,
    never_started: usize,
    wait_minutes: f64,
    wait_p95_minutes: f64,
    one_rack_percent: f64,
    incomplete_percent: f64,
    held_back_percent: f64,
    running_percent: f64,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Arguments { node_count, load, traces, seeds, json } = arguments;
    ensure!(
        (1..=MAX_NODES).contains(node_count),
        "--node-count {node_count}: write a number from 1 to {MAX_NODES}"
    );
    ensure!(*load > 0.0 && *load <= 10.0, "--load {load}: write a number such as 0.9");
    let experiment = match traces {
        Some(folder) => {
            let (nodes, pods) =
                (folder.join("openb_node_list_gpu_node.csv"), folder.join("openb_pod_list_default.csv"));
            GangExperiment::of_trace(&read_trace(&nodes, &pods, |_, _| None)?, *load)
        }
        None => GangExperiment::fat_tree(*node_count, *load)?,
    };
    let count = seeds.0.len();
    let rows = parallel::run(MODES.len() * count, |number| {
        let ((placement, mode), seed) = (MODES[number / count], seeds.0[number % count]);
        Row::new(placement, seed, &simulate(&experiment, mode, seed))
    });
    if let Some(file) = json {
        super::write_json(file, &rows)?;
    }
    if json.as_deref() != Some(Path::new("-")) {
        crate::print(&table(&rows));
    }
    Ok(ExitCode::SUCCESS)
}

impl Row {
    fn new(placement: &'static str, seed: u64, measures: &GangMeasures) -> Self {
        let GangMeasures { jobs, never_started, wait_minutes, wait_p95_minutes, .. } = *measures;
        let GangMeasures { one_rack_percent, incomplete_percent, held_back_percent, running_percent, .. } =
            *measures;
        Self {
            placement,
            seed,
            jobs,
            never_started,
            wait_minutes,
            wait_p95_minutes,
            one_rack_percent,
            incomplete_percent,
            held_back_percent,
            running_percent,
        }
    }
}

/// Returns a line for each way of placement and seed. Percentages are of all GPU time.
fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<12}{:>6}{:>8}{:>15}{:>12}{:>12}{:>12}{:>14}{:>12}{:>11}\n",
        "placement",
        "seed",
        "jobs",
        "never started",
        "wait (min)",
        "95 % (min)",
        "one rack %",
        "incomplete %",
        "held back %",
        "running %"
    );
    for row in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<12}{:>6}{:>8}{:>15}{:>12.1}{:>12.1}{:>12.1}{:>14.2}{:>12.2}{:>11.1}",
            row.placement,
            row.seed,
            row.jobs,
            row.never_started,
            row.wait_minutes,
            row.wait_p95_minutes,
            row.one_rack_percent,
            row.incomplete_percent,
            row.held_back_percent,
            row.running_percent
        );
    }
    text
}
