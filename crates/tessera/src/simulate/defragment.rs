//! `tessera simulate defragment`: how much evictions add to the allocation of a full cluster.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use tessera_sim::cluster::defragment::{CurvePoint, defragment};
use tessera_sim::cluster::{Experiment, FillPolicy};

use super::cluster::{Seeds, read_trace};
use super::parallel;

/// Fills a cluster with the pods of a trace, then moves pods to make room for those that were rejected
///
/// The planner is that of `kubectl inspect gpu defragment`: it makes room for one rejected pod after the other, the
/// largest first, with as few evictions as it finds.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera simulate defragment --nodes examples/trace/nodes.csv --pods examples/trace/pods.csv
  tessera simulate defragment --nodes N.csv --pods P.csv --policy fgd --max-evictions 500 --json")]
pub(crate) struct Arguments {
    /// Node list with the columns sn, cpu_milli, memory_mib, gpu, model
    #[arg(long, value_name = "CSV")]
    nodes: PathBuf,

    /// Pod list with the columns name, cpu_milli, memory_mib, num_gpu, gpu_milli and, optionally, gpu_spec
    #[arg(long, value_name = "CSV")]
    pods: PathBuf,

    /// Policy that fills the cluster
    #[arg(long, value_name = "NAME", default_value = "tessera")]
    policy: String,

    /// Seeds of the arrivals: a range such as 42..44 (both ends included), or a list such as 42,43
    #[arg(long, value_name = "SEEDS", default_value = "42..44")]
    seeds: Seeds,

    /// Largest number of evictions
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    max_evictions: usize,

    /// Write the curves as JSON to a file, or without one instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Numbers of evictions in the table. The last row is the end of the curve.
const SHOWN_EVICTIONS: [usize; 8] = [0, 10, 25, 50, 100, 200, 400, 800];

/// The curve of one seed, for scripts. Its keys are stable.
#[derive(Debug, Serialize)]
struct Curve {
    seed: u64,
    points: Vec<Point>,
}

/// A point of a curve, for scripts. Its keys are stable.
#[derive(Clone, Copy, Debug, Serialize)]
struct Point {
    evictions: usize,
    placed: usize,
    allocated_percent: f64,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Arguments { nodes, pods, policy, seeds, max_evictions, json } = arguments;
    let policy: FillPolicy = policy.parse()?;
    ensure!(*max_evictions > 0, "--max-evictions 0: write 1 or more");
    let experiment: Experiment = read_trace(nodes, pods, |_, _| None)?;
    let curves = parallel::run(seeds.0.len(), |number| {
        let seed = seeds.0[number];
        let points = defragment(&experiment, policy.clone(), seed, *max_evictions);
        Curve { seed, points: points.into_iter().map(Point::from).collect() }
    });
    if let Some(file) = json {
        super::write_json(file, &curves)?;
    }
    if json.as_deref() != Some(Path::new("-")) {
        crate::print(&table(&curves));
    }
    Ok(ExitCode::SUCCESS)
}

impl From<CurvePoint> for Point {
    fn from(CurvePoint { evictions, placed, allocated_percent }: CurvePoint) -> Self {
        Self { evictions, placed, allocated_percent }
    }
}

impl Curve {
    /// Returns the last point with at most so many evictions.
    fn at(&self, evictions: usize) -> Option<Point> {
        self.points.iter().take_while(|point| point.evictions <= evictions).last().copied()
    }
}

/// Returns a line for each shown number of evictions, with the means of all seeds.
fn table(curves: &[Curve]) -> String {
    let mut text = format!("{:>9}{:>13}{:>19}\n", "evictions", "pods placed", "GPUs allocated, %");
    let most = curves.iter().filter_map(|curve| curve.points.last()).map(|point| point.evictions).max();
    let most = most.unwrap_or_default();
    for evictions in SHOWN_EVICTIONS.into_iter().filter(|shown| *shown < most).chain([most]) {
        let points: Vec<Point> = curves.iter().filter_map(|curve| curve.at(evictions)).collect();
        let count = f64::from(u32::try_from(points.len().max(1)).unwrap_or(u32::MAX));
        let placed: usize = points.iter().map(|point| point.placed).sum();
        let placed = f64::from(u32::try_from(placed).unwrap_or(u32::MAX)) / count;
        let allocated = points.iter().map(|point| point.allocated_percent).sum::<f64>() / count;
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{evictions:>9}{placed:>13.1}{allocated:>19.2}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_the_state_at_each_number_of_evictions() {
        let points = [(0, 0, 90.0), (2, 1, 91.0), (12, 4, 93.0)];
        let points = points.map(|(evictions, placed, allocated_percent)| Point {
            evictions,
            placed,
            allocated_percent,
        });
        let curve = Curve { seed: 1, points: points.to_vec() };
        let rows: Vec<Vec<String>> = table(&[curve])
            .lines()
            .skip(1)
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect();
        let expected = [["0", "0.0", "90.00"], ["10", "1.0", "91.00"], ["12", "4.0", "93.00"]];
        assert_eq!(rows, expected.map(|row| row.map(str::to_owned).to_vec()));
    }
}
