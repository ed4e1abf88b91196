//! Formats explanations as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use tessera_core::units::Count;
use tessera_wire::tessera::explanation::NodeExplanation;

use crate::explain::PodReport;
use crate::paint::Paint;
use crate::table::align;
use crate::what_if::Room;

/// Number of nodes shown in full without `-o wide`.
const SHOWN_NODES: usize = 5;

/// Formats the explanation of an existing pod.
pub(crate) fn pod(report: &PodReport, all: bool, paint: Paint) -> String {
    let explanation = &report.explanation;
    let pod = format!("pod {}/{}", explanation.namespace, explanation.pod);
    let mut text = match &explanation.placed_on {
        Some(node) => {
            let mut text = format!("{pod} is {} on node {node}\n", paint.good("placed"));
            report.holds.iter().for_each(|hold| text.push_str(&format!("  {hold}\n")));
            if report.holds.is_empty() {
                text.push_str("  its GPUs are unknown: it bypassed the scheduler, or its agent has not reported them yet\n");
            }
            return text;
        }
        None => format!("{pod} waits\n"),
    };
    requests(&mut text, report);
    text.push_str(&verdicts(report, all, paint));
    if let Some(message) = &report.kube_scheduler {
        let _ = write!(text, "\nkube-scheduler: {message}\n");
    }
    text
}

/// Formats where a hypothetical pod would fit.
pub(crate) fn what_if(report: &PodReport, rooms: &[Room], all: bool, paint: Paint) -> String {
    let mut text = String::new();
    requests(&mut text, report);
    text.push_str(&verdicts(report, all, paint));
    let total: usize = rooms.iter().map(|room| room.pods).sum();
    if total > 0 {
        let _ = write!(text, "\n{} like this would fit now\n", Count(total, "pod"));
    }
    text
}

fn requests(text: &mut String, report: &PodReport) {
    if !report.requests.is_empty() {
        let _ = writeln!(text, "requests {}", report.requests.join("; "));
    }
}

fn verdicts(report: &PodReport, all: bool, paint: Paint) -> String {
    let views = &report.explanation.nodes;
    let fitting: Vec<&NodeExplanation> = views.iter().filter(|view| view.fits).collect();
    let summary = format!("fits on {} of {}", fitting.len(), Count(views.len(), "node"));
    let mut text = if fitting.is_empty() { paint.bad(&summary) } else { paint.good(&summary) };
    let _ = writeln!(text, " (policy {})", report.explanation.policy);
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for view in views {
        if let Some(reason) = &view.reason {
            *reasons.entry(reason).or_default() += 1;
        }
    }
    if !reasons.is_empty() {
        let mut table = String::from("\nNODES\tREASON\n");
        let mut sorted: Vec<_> = reasons.into_iter().collect();
        sorted.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        sorted.iter().for_each(|(reason, count)| table.push_str(&format!("{count}\t{reason}\n")));
        text.push_str(&align(&table));
    }
    let shown = if fitting.is_empty() { nearest(report, all) } else { best(&fitting) };
    let limit = if all { usize::MAX } else { SHOWN_NODES };
    if !fitting.is_empty() {
        text.push('\n');
    }
    for view in shown.iter().take(limit) {
        node(&mut text, report, view, paint);
    }
    if shown.len() > limit {
        let _ = write!(text, "\n{} more; -o wide shows all\n", Count(shown.len() - limit, "node"));
    }
    if !report.smaller.is_empty() {
        text.push('\n');
    }
    for smaller in &report.smaller {
        let _ = writeln!(text, "{} would fit now, on node {}", paint.good(&smaller.request), smaller.node);
    }
    text
}

/// Sorts the fitting nodes, best first.
fn best<'a>(fitting: &[&'a NodeExplanation]) -> Vec<&'a NodeExplanation> {
    let mut sorted = fitting.to_vec();
    sorted.sort_by(|a, b| b.score.unwrap_or(0.0).total_cmp(&a.score.unwrap_or(0.0)));
    sorted
}

/// Sorts the rejecting nodes: nodes where the fewest pods would have to end come first, nodes where
/// no eviction helps come last.
///
/// Nodes that reject the pod as a whole appear only with `all`, because the table of reasons counts
/// them already.
fn nearest(report: &PodReport, all: bool) -> Vec<&NodeExplanation> {
    let ends = |view: &NodeExplanation| {
        report
            .remedies
            .iter()
            .find(|remedy| remedy.node == view.node)
            .map_or(usize::MAX, |remedy| remedy.pods.len())
    };
    let of_interest = |view: &&NodeExplanation| all || !view.gpu_reasons.is_empty();
    let mut sorted: Vec<&NodeExplanation> = report.explanation.nodes.iter().filter(of_interest).collect();
    sorted.sort_by_key(|view| (view.may_resolve != Some(true), ends(view), view.node.clone()));
    sorted
}

fn node(text: &mut String, report: &PodReport, view: &NodeExplanation, paint: Paint) {
    match &view.reason {
        None => {
            let gpus = view.gpus.iter().map(|container| {
                let gpus = container.gpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
                if view.gpus.len() > 1 {
                    format!("{} GPU {gpus}", container.container)
                } else {
                    format!("GPU {gpus}")
                }
            });
            let _ = writeln!(text, "{}: {}", view.node, paint.good(&gpus.collect::<Vec<_>>().join("; ")));
        }
        Some(reason) => {
            let _ = writeln!(text, "\n{}: {}", view.node, paint.bad(reason));
            let mut gpus = String::new();
            for gpu in &view.gpu_reasons {
                let why = gpu.reason.as_deref().unwrap_or("fits");
                let _ = writeln!(gpus, "  GPU{}\t{why}", gpu.gpu);
            }
            text.push_str(&align(&gpus));
            if let Some(remedy) = report.remedies.iter().find(|remedy| remedy.node == view.node) {
                let one = if remedy.pods.len() == 1 { "this pod" } else { "these pods" };
                let _ = writeln!(text, "  would fit if {one} ended: {}", remedy.pods.join(", "));
            }
        }
    }
}
