//! Explanations for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use tessera_wire::tessera::explanation::NodeExplanation;

use crate::explain::Answer;
use crate::paint::Paint;
use crate::show::count;
use crate::table::align;
use crate::what_if::Room;

/// Nodes shown in full unless all are asked for.
const SHOWN: usize = 5;

/// Why a pod waits.
pub(crate) fn pod(answer: &Answer, all: bool, paint: Paint) -> String {
    let explanation = &answer.explanation;
    let who = format!("pod {}/{}", explanation.namespace, explanation.pod);
    let mut text = match &explanation.placed_on {
        Some(node) => {
            let mut text = format!("{who} is {} on node {node}\n", paint.good("placed"));
            answer.holds.iter().for_each(|hold| text.push_str(&format!("  {hold}\n")));
            if answer.holds.is_empty() {
                text.push_str("  nobody told which GPUs it holds: it bypassed the scheduler, or its agent has not answered yet\n");
            }
            return text;
        }
        None => format!("{who} waits\n"),
    };
    asks(&mut text, answer);
    text.push_str(&judgement(answer, all, paint));
    if let Some(said) = &answer.kube_scheduler {
        let _ = write!(text, "\nkube-scheduler said: {said}\n");
    }
    text
}

/// Where a pod that need not exist would go.
pub(crate) fn what_if(answer: &Answer, rooms: &[Room], all: bool, paint: Paint) -> String {
    let mut text = String::new();
    asks(&mut text, answer);
    text.push_str(&judgement(answer, all, paint));
    let total: usize = rooms.iter().map(|room| room.pods).sum();
    if total > 0 {
        let _ = write!(text, "\n{} like this would fit now\n", count(total, "pod"));
    }
    text
}

fn asks(text: &mut String, answer: &Answer) {
    if !answer.asks.is_empty() {
        let _ = writeln!(text, "asks for {}", answer.asks.join("; "));
    }
}

fn judgement(answer: &Answer, all: bool, paint: Paint) -> String {
    let views = &answer.explanation.nodes;
    let fitting: Vec<&NodeExplanation> = views.iter().filter(|view| view.fits).collect();
    let summary = format!("fits on {} of {}", fitting.len(), count(views.len(), "node"));
    let mut text = if fitting.is_empty() { paint.bad(&summary) } else { paint.good(&summary) };
    let _ = writeln!(text, " (policy {})", answer.explanation.policy);
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for view in views {
        if let Some(reason) = &view.reason {
            *reasons.entry(reason).or_default() += 1;
        }
    }
    if !reasons.is_empty() {
        let mut table = String::from("\nNODES\tOBSTACLE\n");
        let mut sorted: Vec<_> = reasons.into_iter().collect();
        sorted.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        sorted.iter().for_each(|(reason, count)| table.push_str(&format!("{count}\t{reason}\n")));
        text.push_str(&align(&table));
    }
    let shown = if fitting.is_empty() { nearest(answer, all) } else { best(&fitting) };
    let limit = if all { usize::MAX } else { SHOWN };
    if !fitting.is_empty() {
        text.push('\n');
    }
    for view in shown.iter().take(limit) {
        node(&mut text, answer, view, paint);
    }
    if shown.len() > limit {
        let _ = write!(text, "\n{} more; -o wide shows all\n", count(shown.len() - limit, "node"));
    }
    if !answer.smaller.is_empty() {
        text.push('\n');
    }
    for smaller in &answer.smaller {
        let _ = writeln!(text, "{} would fit now, on node {}", paint.good(&smaller.request), smaller.node);
    }
    text
}

/// Those that would do, the best first.
fn best<'a>(fitting: &[&'a NodeExplanation]) -> Vec<&'a NodeExplanation> {
    let mut sorted = fitting.to_vec();
    sorted.sort_by(|a, b| b.score.unwrap_or(0.0).total_cmp(&a.score.unwrap_or(0.0)));
    sorted
}

/// Those that would not: where the fewest pods would have to end first, the hopeless last. Of nodes that refuse as a whole there is no
/// more to say than the count of their reason; they are shown only where all are asked for.
fn nearest(answer: &Answer, all: bool) -> Vec<&NodeExplanation> {
    let ends = |view: &NodeExplanation| {
        answer
            .remedies
            .iter()
            .find(|remedy| remedy.node == view.node)
            .map_or(usize::MAX, |remedy| remedy.pods.len())
    };
    let of_interest = |view: &&NodeExplanation| all || !view.gpu_reasons.is_empty();
    let mut sorted: Vec<&NodeExplanation> = answer.explanation.nodes.iter().filter(of_interest).collect();
    sorted.sort_by_key(|view| (view.may_resolve != Some(true), ends(view), view.node.clone()));
    sorted
}

fn node(text: &mut String, answer: &Answer, view: &NodeExplanation, paint: Paint) {
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
            if let Some(remedy) = answer.remedies.iter().find(|remedy| remedy.node == view.node) {
                let one = if remedy.pods.len() == 1 { "this pod" } else { "these pods" };
                let _ = writeln!(text, "  would fit if {one} ended: {}", remedy.pods.join(", "));
            }
        }
    }
}
