//! Formats explanations as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use tessera_core::units::Count;
use tessera_wire::tessera::explanation::{NodeExplanation, PodExplanation, unreported};

use crate::paint::Paint;
use crate::table::align;

/// Number of nodes shown in full without `-o wide`.
const SHOWN_NODES: usize = 5;

/// Line above nodes in the order of the scheduler.
const BEST_FIRST: &str = "best node first";

/// Line above nodes of which only the scheduler knows the order.
const BY_NAME: &str =
    "nodes by name; --endpoint URL shows which ones and which of their GPUs the scheduler prefers";

/// Formats the explanation of an existing pod. kube-scheduler's own report on a waiting pod comes
/// first.
pub(crate) fn pod(explanation: &PodExplanation, all: bool, paint: Paint) -> String {
    let pod = format!("pod {}/{}", explanation.namespace, explanation.pod);
    if let Some(node) = &explanation.placed_on {
        return placed(explanation, &pod, node, paint);
    }
    let mut text = format!("{pod} {}\n", paint.notable("waits"));
    match &explanation.kube_scheduler {
        Some(report) => {
            let message = if report.message.is_empty() { &report.reason } else { &report.message };
            let _ = writeln!(text, "kube-scheduler: {message}");
        }
        None => {
            let scheduler = explanation.unreported.as_deref().unwrap_or("unknown");
            let _ = writeln!(text, "{}", unreported(scheduler));
        }
    }
    if let Some(gang) = &explanation.gang {
        let _ = writeln!(text, "{gang}");
    }
    if let Some(reservation) = &explanation.reservation {
        let _ = writeln!(text, "{reservation}");
    }
    requests(&mut text, explanation);
    text.push_str(&verdicts(explanation, all, paint));
    text
}

fn placed(explanation: &PodExplanation, pod: &str, node: &str, paint: Paint) -> String {
    let mut text = format!("{pod} is {} on node {node}\n", paint.good("placed"));
    explanation.holds.iter().for_each(|hold| text.push_str(&format!("  {hold}\n")));
    if explanation.holds.is_empty() {
        text.push_str(
            "  its GPUs are unknown: it bypassed the scheduler, or its agent has not reported them yet\n",
        );
    }
    match &explanation.placement_reason {
        Some(reason) => {
            let _ = writeln!(text, "chosen because: {reason}");
        }
        None => text.push_str("the pod does not say why: another scheduler or an older version placed it\n"),
    }
    text
}

/// Formats where a hypothetical pod would fit.
pub(crate) fn what_if(explanation: &PodExplanation, all: bool, paint: Paint) -> String {
    let mut text = String::new();
    requests(&mut text, explanation);
    text.push_str(&verdicts(explanation, all, paint));
    let total: usize = explanation.room.iter().map(|room| room.pods).sum();
    if total > 0 {
        let least = if explanation.room.iter().any(|room| room.or_more) { "at least " } else { "" };
        let _ = write!(text, "\n{least}{} like this would fit now\n", Count(total, "pod"));
    }
    text
}

fn requests(text: &mut String, explanation: &PodExplanation) {
    if !explanation.asks.is_empty() {
        let _ = writeln!(text, "requests {}", explanation.asks.join("; "));
    }
    if !explanation.unserved.is_empty() {
        let _ = writeln!(text, "requests {}, which no node offers", explanation.unserved.join(", "));
    }
}

fn verdicts(explanation: &PodExplanation, all: bool, paint: Paint) -> String {
    let views = &explanation.nodes;
    let best = explanation.best();
    let nodes = Count(views.len(), "node");
    let summary = match explanation.is_undecided() {
        true => format!("the GPUs of {} of {nodes} would do", best.len()),
        false => format!("fits on {} of {nodes}", best.len()),
    };
    let mut text = match (best.is_empty(), explanation.is_undecided()) {
        (true, _) => paint.bad(&summary),
        (false, true) => paint.notable(&summary),
        (false, false) => paint.good(&summary),
    };
    let _ = writeln!(text, " (policy {})", explanation.policy);
    if !explanation.unchecked.is_empty() {
        let _ = writeln!(text, "only kube-scheduler checks: {}", explanation.unchecked.join(", "));
    }
    if let Some(rule) = &explanation.unknown_rule {
        let _ = writeln!(text, "only the scheduler knows {rule}; ask it with --endpoint URL");
    }
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
    let shown = if best.is_empty() { nearest(explanation, all) } else { best.clone() };
    let limit = if all { usize::MAX } else { SHOWN_NODES };
    if !best.is_empty() {
        text.push('\n');
    }
    if best.len() > 1 {
        let order = if explanation.is_ranked() { BEST_FIRST } else { BY_NAME };
        let _ = writeln!(text, "{order}");
    }
    for view in shown.iter().take(limit) {
        node(&mut text, explanation, view, paint);
    }
    if shown.len() > limit {
        let _ = write!(text, "\n{} more; -o wide shows all\n", Count(shown.len() - limit, "node"));
    }
    if !explanation.smaller.is_empty() {
        text.push('\n');
    }
    for smaller in &explanation.smaller {
        let _ = writeln!(text, "smaller: {} on node {}", paint.good(&smaller.request), smaller.node);
    }
    text
}

/// Sorts the rejecting nodes: nodes where the fewest pods would have to end come first, nodes where
/// no eviction helps come last. Equal nodes keep the order of their names.
///
/// Nodes that reject the pod as a whole appear only with `all`, because the table of reasons counts
/// them already.
fn nearest(explanation: &PodExplanation, all: bool) -> Vec<&NodeExplanation> {
    let ends = |view: &NodeExplanation| {
        let relief = explanation.relief.iter().find(|relief| relief.node == view.node);
        relief.map_or(usize::MAX, |relief| relief.pods.len())
    };
    let of_interest = |view: &&NodeExplanation| all || !view.gpu_reasons.is_empty();
    let mut sorted: Vec<&NodeExplanation> = explanation.nodes.iter().filter(of_interest).collect();
    sorted.sort_by_key(|view| (view.may_resolve != Some(true), ends(view)));
    sorted
}

fn node(text: &mut String, explanation: &PodExplanation, view: &NodeExplanation, paint: Paint) {
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
                let why = gpu.reason.as_deref().unwrap_or("would do");
                let _ = writeln!(gpus, "  GPU{}\t{why}", gpu.gpu);
            }
            text.push_str(&align(&gpus));
            for owner in &view.reserved_for {
                let _ = writeln!(text, "  GPUs are reserved for {owner}");
            }
            if let Some(relief) = explanation.relief.iter().find(|relief| relief.node == view.node) {
                let one = if relief.pods.len() == 1 { "this pod" } else { "these pods" };
                let _ = writeln!(text, "  enough GPUs if {one} ended: {}", relief.pods.join(", "));
            }
        }
    }
}
