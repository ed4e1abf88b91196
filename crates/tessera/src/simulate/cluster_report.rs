//! The output of `simulate cluster`: a table, JSON and a plot.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;
use tessera_core::units::Count;
use tessera_sim::cluster::pod::PodSize;
use tessera_sim::cluster::{FRAGMENTATION_AT, FillResult};

use super::plot::{Chart, Curve};

/// The results of one policy, by seed.
#[derive(Debug)]
pub(super) struct PolicyResult {
    pub(super) name: String,
    pub(super) outcomes: Vec<FillResult>,
}

/// Policy that the others are compared with, run by run.
const REFERENCE: &str = "fgd";
/// Policy that the plot highlights.
const OURS: &str = "tessera";

/// The result for scripts. Its keys are stable.
#[derive(Debug, Serialize)]
pub(super) struct JsonResult {
    policies: Vec<JsonPolicy>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonPolicy {
    name: String,
    allocated_percent: JsonAllocated,
    refused: BTreeMap<&'static str, f64>,
    decision_micros: JsonMicros,
    seconds_per_run: f64,
    /// Mean bandwidth share of pods with several GPUs. Present only if some links are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth_share: Option<f64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonAllocated {
    mean: f64,
    per_seed: BTreeMap<u64, f64>,
}

#[derive(Debug, Serialize)]
struct JsonMicros {
    p50: f64,
    p99: f64,
}

pub(super) fn json(results: &[PolicyResult], seeds: &[u64], with_links: bool) -> JsonResult {
    let policy = |result: &PolicyResult| JsonPolicy {
        name: result.name.clone(),
        allocated_percent: JsonAllocated {
            mean: mean(result.allocated()),
            per_seed: seeds.iter().copied().zip(result.allocated()).collect(),
        },
        refused: PodSize::WITH_GPUS.iter().map(|size| size.name()).zip(result.refused()).collect(),
        decision_micros: JsonMicros { p50: result.micros(50), p99: result.micros(99) },
        seconds_per_run: mean(result.outcomes.iter().map(|outcome| outcome.seconds)),
        bandwidth_share: with_links.then(|| result.bandwidth_share()),
    };
    JsonResult { policies: results.iter().map(policy).collect() }
}

pub(super) fn table(results: &[PolicyResult], with_links: bool) -> String {
    let width = results.iter().map(|result| result.name.len()).max().unwrap_or(0).max(6);
    let mut text = allocation_table(results, width);
    text.push('\n');
    text.push_str(&fragmentation_table(results, width));
    if with_links {
        let _ = writeln!(
            text,
            "\nBandwidth of pods with several GPUs, as a share of the best on their machines:"
        );
        for result in results {
            let _ = writeln!(text, "{:width$} {:8.3}", result.name, result.bandwidth_share());
        }
    }
    text
}

/// Returns the table of allocations, rejections and times.
fn allocation_table(results: &[PolicyResult], width: usize) -> String {
    let reference = results.iter().find(|result| result.name == REFERENCE);
    let mut text = format!("{:width$}   GPUs allocated, %    against {REFERENCE}", "");
    let _ = writeln!(text, "       pods refused per run               decision, us      run");
    let _ = write!(text, "{:width$}     mean   spread     mean    worst", "policy");
    for size in PodSize::WITH_GPUS {
        let _ = write!(text, " {:>7}", size.name());
    }
    let _ = writeln!(text, "     p50      p99        s");
    for result in results {
        let allocated: Vec<f64> = result.allocated().collect();
        let _ = write!(
            text,
            "{:width$} {:8.2} {:8.2}",
            result.name,
            mean(result.allocated()),
            spread(&allocated)
        );
        match reference.map(|reference| result.differences(reference)) {
            Some(differences) if result.name != REFERENCE => {
                let worst = differences.iter().copied().fold(f64::INFINITY, f64::min);
                let _ = write!(text, " {:+8.2} {worst:+8.2}", mean(differences.into_iter()));
            }
            _ => text.push_str("        .        ."),
        }
        for refused in result.refused() {
            let _ = write!(text, " {refused:7.1}");
        }
        let seconds = mean(result.outcomes.iter().map(|outcome| outcome.seconds));
        let _ = writeln!(text, " {:7.1} {:8.1} {seconds:8.3}", result.micros(50), result.micros(99));
    }
    text
}

/// Returns the table of idle GPUs that the expected pods cannot use.
fn fragmentation_table(results: &[PolicyResult], width: usize) -> String {
    let title = "Idle GPUs that the expected pods cannot use, % of all / % of the idle, by arrived GPUs:";
    let mut text = format!("{title}\n{:width$}", "policy");
    for arrived in FRAGMENTATION_AT {
        let _ = write!(text, " {:>15}", format!("{arrived}%"));
    }
    text.push('\n');
    for result in results {
        let _ = write!(text, "{:width$}", result.name);
        for position in 0..FRAGMENTATION_AT.len() {
            let at = || result.outcomes.iter().filter_map(|outcome| outcome.fragmentation.get(position));
            let (of_all, of_idle) = (mean(at().map(|point| point.1)), mean(at().map(|point| point.2)));
            let _ = write!(text, " {:>15}", format!("{of_all:.2} / {of_idle:.1}"));
        }
        text.push('\n');
    }
    text
}

pub(super) fn plot(results: &[PolicyResult], seeds: usize) -> String {
    let curve = |result: &PolicyResult| Curve {
        name: result.name.clone(),
        points: mean_curve(&result.outcomes),
        highlighted: result.name == OURS,
    };
    // Below this mark everything fits, and all curves coincide.
    let start = 70.0;
    Chart {
        title: "GPUs allocated as pods arrive".to_owned(),
        subtitle: format!(
            "mean of {}; the distance to the diagonal is the rejected part",
            Count(seeds, "seed")
        ),
        x_label: "GPUs requested by arrived pods, % of the cluster".to_owned(),
        y_label: "GPUs allocated, % of the cluster".to_owned(),
        x_from: start,
        y_from: start,
        curves: results.iter().map(curve).collect(),
    }
    .svg()
}

/// Returns the mean of the curves of all seeds, point by point. The curves have points at slightly
/// different arrivals.
fn mean_curve(outcomes: &[FillResult]) -> Vec<(f64, f64)> {
    let steps = outcomes.iter().map(|outcome| outcome.curve.len()).min().unwrap_or(0);
    let at = |step: usize| outcomes.iter().map(move |outcome| outcome.curve[step]);
    let mut points: Vec<(f64, f64)> = (0..steps)
        .map(|step| (mean(at(step).map(|point| point.0)), mean(at(step).map(|point| point.1))))
        .collect();
    let ends = || outcomes.iter().filter_map(|outcome| outcome.curve.last());
    points.push((mean(ends().map(|point| point.0)), mean(ends().map(|point| point.1))));
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

impl PolicyResult {
    fn allocated(&self) -> impl Iterator<Item = f64> {
        self.outcomes.iter().map(|outcome| outcome.allocated_percent)
    }

    /// Returns the mean number of rejected pods per run, by [`PodSize::WITH_GPUS`].
    fn refused(&self) -> impl Iterator<Item = f64> {
        (0..PodSize::WITH_GPUS.len())
            .map(|size| mean(self.outcomes.iter().map(|outcome| f64::from(outcome.refused[size]))))
    }

    fn bandwidth_share(&self) -> f64 {
        mean(self.outcomes.iter().flat_map(|outcome| &outcome.bandwidth_shares).copied())
    }

    /// Returns how much more the policy allocates than the reference on the same arrivals.
    fn differences(&self, reference: &Self) -> Vec<f64> {
        self.allocated().zip(reference.allocated()).map(|(mine, theirs)| mine - theirs).collect()
    }

    /// Returns a percentile of the decision times of all runs, in microseconds.
    fn micros(&self, percentile: usize) -> f64 {
        let mut nanos: Vec<u64> =
            self.outcomes.iter().flat_map(|outcome| &outcome.decision_nanos).copied().collect();
        nanos.sort_unstable();
        let position = (nanos.len() * percentile / 100).min(nanos.len().saturating_sub(1));
        #[expect(clippy::cast_precision_loss, reason = "no decision takes 2^52 ns")]
        nanos.get(position).map_or(0.0, |nanos| *nanos as f64 / 1000.0)
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (count, sum) = values.fold((0.0, 0.0), |(count, sum), value| (count + 1.0, sum + value));
    if count > 0.0 { sum / count } else { 0.0 }
}

/// Returns the standard deviation of a sample.
fn spread(values: &[f64]) -> f64 {
    let mean_value = mean(values.iter().copied());
    let squares: f64 = values.iter().map(|value| (value - mean_value).powi(2)).sum();
    #[expect(clippy::cast_precision_loss, reason = "few seeds")]
    let freedom = values.len().saturating_sub(1).max(1) as f64;
    (squares / freedom).sqrt()
}
