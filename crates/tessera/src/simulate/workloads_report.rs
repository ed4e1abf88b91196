//! The output of `simulate cluster --workload`: tables and JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Serialize, Serializer};
use tessera_sim::cluster::bench::{Headline, Measure, Measures};

/// Policy that the summary compares with the best of the others.
const OURS: &str = "tessera";

/// The results of all workloads.
pub(super) struct BenchResult {
    pub(super) workloads: Vec<WorkloadResult>,
    pub(super) seeds: Vec<u64>,
    pub(super) node_count: usize,
}

/// The results of one workload.
pub(super) struct WorkloadResult {
    pub(super) name: String,
    pub(super) about: String,
    pub(super) headline: Headline,
    pub(super) policies: Vec<PolicyMeasures>,
}

/// The results of one policy on one workload.
pub(super) struct PolicyMeasures {
    pub(super) name: String,
    /// One run per seed.
    pub(super) runs: Vec<Measures>,
}

/// How policy `tessera` compares with the best other policy on a workload.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Comparison {
    workload: String,
    #[serde(serialize_with = "as_key")]
    measure: Measure,
    is_larger_better: bool,
    /// The best policy of all.
    best: String,
    best_other: String,
    best_other_value: f64,
    tessera_value: f64,
    /// Negative if tessera is better.
    tessera_worse_by: f64,
    /// Number of seeds in which tessera is worse than that policy.
    worse_in_seeds: usize,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct JsonResult {
    node_count: usize,
    seeds: Vec<u64>,
    workloads: Vec<JsonWorkload>,
    summary: Vec<Comparison>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonWorkload {
    name: String,
    about: String,
    headline: &'static str,
    headline_reason: &'static str,
    policies: Vec<JsonPolicy>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonPolicy {
    name: String,
    mean: BTreeMap<&'static str, f64>,
    headline_per_seed: Vec<f64>,
}

/// Heading and width of each column, in the order of [`Measure::ALL`].
const COLUMNS: [(&str, &str, usize); 10] = [
    ("opened", "peak", 7),
    ("opened", "GPUs", 7),
    ("1-GPU", "fit", 7),
    ("8-GPU", "fit", 7),
    ("whole", "GPUs", 7),
    ("alloc.", "%", 7),
    ("granted", "%", 8),
    ("not", "placed", 8),
    ("wait min", "mean", 9),
    ("wait min", "p95", 9),
];

impl BenchResult {
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for workload in &self.workloads {
            text.push_str(&workload.text());
            text.push('\n');
        }
        text.push_str(&self.summary_text());
        text
    }

    pub(super) fn json(&self) -> JsonResult {
        JsonResult {
            node_count: self.node_count,
            seeds: self.seeds.clone(),
            workloads: self.workloads.iter().map(WorkloadResult::json).collect(),
            summary: self.summary(),
        }
    }

    fn summary(&self) -> Vec<Comparison> {
        self.workloads.iter().filter_map(WorkloadResult::comparison).collect()
    }

    fn summary_text(&self) -> String {
        let summary = self.summary();
        if summary.is_empty() {
            return String::new();
        }
        let width = summary.iter().map(|row| row.workload.len()).max().unwrap_or(0).max(8);
        let titles = summary.iter().map(|row| row.title().len()).max().unwrap_or(0);
        let mut text = format!(
            "Headline measures, mean of {} seeds; tessera against the best other policy (negative: better):\n",
            self.seeds.len()
        );
        let _ = writeln!(
            text,
            "{:width$}  {:titles$} {:>9} {:>9}  {:9} {:>10} {:>8} {:>6}",
            "workload", "measure", "tessera", "best", "other", "worse by", "in %", "seeds"
        );
        for row in &summary {
            let in_percent = match row.best_other_value {
                0.0 => ".".to_owned(),
                best => format!("{:+.1}", 100.0 * row.tessera_worse_by / best),
            };
            let _ = writeln!(
                text,
                "{:width$}  {:titles$} {:9.1} {:9.1}  {:9} {:+10.1} {in_percent:>8} {:>6}",
                row.workload,
                row.title(),
                row.tessera_value,
                row.best_other_value,
                row.best_other,
                row.tessera_worse_by,
                format!("{}/{}", row.worse_in_seeds, self.seeds.len()),
            );
        }
        text
    }
}

impl WorkloadResult {
    fn text(&self) -> String {
        let Headline { measure, reason } = self.headline;
        let better = if measure.is_larger_better() { "larger" } else { "smaller" };
        let mut text = format!("{}: {}\n", self.name, self.about);
        let _ = writeln!(text, "Headline: {} ({better} is better), because {reason}.", measure.title());
        let means: Vec<(&str, Measures)> =
            self.policies.iter().map(|policy| (policy.name.as_str(), policy.mean())).collect();
        let width = means.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(6);
        let shown = |measure: Measure| means.iter().any(|(_, mean)| mean.get(measure).is_some());
        let columns = || Measure::ALL.into_iter().zip(COLUMNS).filter(|(measure, _)| shown(*measure));
        let _ = write!(text, "{:width$}", "");
        columns().for_each(|(_, (upper, _, width))| _ = write!(text, " {upper:>width$}"));
        let _ = write!(text, "\n{:width$}", "policy");
        columns().for_each(|(_, (_, lower, width))| _ = write!(text, " {lower:>width$}"));
        text.push('\n');
        for (name, mean) in &means {
            let _ = write!(text, "{name:width$}");
            for (measure, (_, _, width)) in columns() {
                match mean.get(measure) {
                    Some(value) => _ = write!(text, " {value:>width$.1}"),
                    None => _ = write!(text, " {:>width$}", "."),
                }
            }
            text.push('\n');
        }
        text
    }

    fn json(&self) -> JsonWorkload {
        let policy = |policy: &PolicyMeasures| {
            let mean = policy.mean();
            JsonPolicy {
                name: policy.name.clone(),
                mean: Measure::ALL
                    .into_iter()
                    .filter_map(|measure| Some((measure.key(), mean.get(measure)?)))
                    .collect(),
                headline_per_seed: policy.values(self.headline.measure),
            }
        };
        JsonWorkload {
            name: self.name.clone(),
            about: self.about.clone(),
            headline: self.headline.measure.key(),
            headline_reason: self.headline.reason,
            policies: self.policies.iter().map(policy).collect(),
        }
    }

    /// Returns how tessera compares with the best other policy, if both were run.
    fn comparison(&self) -> Option<Comparison> {
        let measure = self.headline.measure;
        let is_larger_better = measure.is_larger_better();
        let worse_by = |ours: f64, theirs: f64| if is_larger_better { theirs - ours } else { ours - theirs };
        let ours = self.policies.iter().find(|policy| policy.name == OURS)?;
        let others = self.policies.iter().filter(|policy| policy.name != OURS);
        let valued = others.filter_map(|policy| Some((policy, policy.mean().get(measure)?)));
        let (best, best_value) = valued.min_by(|(_, a), (_, b)| worse_by(*a, *b).total_cmp(&0.0))?;
        let ours_value = ours.mean().get(measure)?;
        let pairs = ours.values(measure).into_iter().zip(best.values(measure));
        Some(Comparison {
            workload: self.name.clone(),
            measure,
            is_larger_better,
            best: if worse_by(ours_value, best_value) <= 0.0 { OURS.to_owned() } else { best.name.clone() },
            best_other: best.name.clone(),
            best_other_value: best_value,
            tessera_value: ours_value,
            tessera_worse_by: worse_by(ours_value, best_value),
            worse_in_seeds: pairs.filter(|(ours, theirs)| worse_by(*ours, *theirs) > 1e-9).count(),
        })
    }
}

impl Comparison {
    fn title(&self) -> String {
        let better = if self.is_larger_better { "larger" } else { "smaller" };
        format!("{} ({better})", self.measure.title())
    }
}

fn as_key<S: Serializer>(measure: &Measure, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(measure.key())
}

impl PolicyMeasures {
    fn mean(&self) -> Measures {
        Measures::mean(&self.runs)
    }

    fn values(&self, measure: Measure) -> Vec<f64> {
        self.runs.iter().filter_map(|run| run.get(measure)).collect()
    }
}

#[cfg(test)]
mod tests {
    use tessera_sim::cluster::WorkloadKnowledge;
    use tessera_sim::cluster::bench::{BenchWorkload, replay};

    use super::*;

    fn result(workload: &str, policies: &[&str]) -> BenchResult {
        let workload = BenchWorkload::named(workload).unwrap();
        let scenario = workload.scenario(2, 1).unwrap();
        let run = |name: &&str| {
            let run = replay(&scenario, name.parse().unwrap(), WorkloadKnowledge::Learned);
            PolicyMeasures { name: (*name).to_owned(), runs: vec![run] }
        };
        let policies = policies.iter().map(run).collect();
        let BenchWorkload { name, about, headline, .. } = workload;
        let workloads = vec![WorkloadResult { name, about, headline, policies }];
        BenchResult { workloads, seeds: vec![1], node_count: 2 }
    }

    #[test]
    fn the_summary_compares_with_the_best_other_policy_in_the_direction_of_the_measure() {
        // Of 16 GPUs, alike-60 opens one for each of six pods, whatever the policy.
        let equal = &result("alike-60", &["spread", "binpack", "tessera"]).summary()[0];
        assert_eq!((equal.best.as_str(), equal.tessera_value), ("tessera", 6.0));
        assert_eq!((equal.tessera_worse_by, equal.worse_in_seeds), (0.0, 0));
        let mut doctored = result("quarters-then-8", &["spread", "binpack", "tessera"]);
        let (others, ours) = doctored.workloads[0].policies.split_at_mut(2);
        ours[0].runs.clone_from(&others[0].runs);
        let worse = &doctored.summary()[0];
        assert_eq!((worse.best.as_str(), worse.best_other.as_str()), ("binpack", "binpack"));
        assert_eq!((worse.best_other_value, worse.tessera_worse_by, worse.worse_in_seeds), (8.0, 8.0, 1));
        assert!(result("alike-60", &["binpack"]).summary().is_empty());
    }

    #[test]
    fn the_text_shows_waiting_only_where_pods_end_and_json_uses_stable_keys() {
        assert!(!result("alike-60", &["binpack"]).text().contains("wait"));
        let result = result("churn-80", &["binpack", "tessera"]);
        assert!(result.text().contains("wait min"), "{}", result.text());
        let json = serde_json::to_value(result.json()).unwrap();
        assert_eq!(json["workloads"][0]["headline"], "eightGpuPodsFit");
        assert_eq!(json["summary"][0]["measure"], "eightGpuPodsFit");
        let means = json["workloads"][0]["policies"][1]["mean"].as_object().unwrap();
        assert_eq!(means.len(), Measure::ALL.len());
    }
}
