//! The plan of `defragment` as text.

use std::fmt::Write as _;

use tessera_core::units::Count;

use super::age;
use crate::defragment::DefragmentView;
use crate::defragment::apply::AppliedView;
use crate::table::align;

/// Formats the plan: what it gains and costs, then the moves, then what stays.
pub(crate) fn text(view: &DefragmentView) -> String {
    if view.wanted == 0 {
        return "No pod waits for GPUs. Name a shape to plan for, such as --shape 2x8.\n".to_owned();
    }
    let mut out = match (view.moves.len(), view.fitting) {
        (0, 0) => "No moves make room.\n".to_owned(),
        (0, _) if view.unmet.is_empty() => "Everything that is wanted fits without moves.\n".to_owned(),
        (0, _) => "No moves make more room.\n".to_owned(),
        (count, _) => format!(
            "{} would be evicted and created again elsewhere. This loses {} of GPU time.\n",
            Count(count, "pod"),
            age::short(view.lost_gpu_seconds)
        ),
    };
    let _ = writeln!(out, "Then {} of {} that are wanted have room.", view.fitting, view.wanted);
    if !view.moves.is_empty() {
        let mut rows = "\nEVICTED POD\tFROM\tTO\tGPUS\tLOST\n".to_owned();
        for step in &view.moves {
            let lost = age::short(step.lost_gpu_seconds);
            let _ = writeln!(rows, "{}\t{}\t{}\t{}\t{lost}", step.pod, step.from, step.to, list(&step.gpus));
        }
        out.push_str(&align(&rows));
    }
    if !view.places.is_empty() {
        let mut rows = "\nWANTED\tNODE\tGPUS\n".to_owned();
        for place in &view.places {
            let _ = writeln!(rows, "{}\t{}\t{}", place.wanted, place.node, list(&place.gpus));
        }
        out.push_str(&align(&rows));
    }
    if !view.unmet.is_empty() {
        let _ = writeln!(out, "\nNo room even with moves: {}", view.unmet.join(", "));
    }
    for (reason, count) in &view.staying {
        let _ = writeln!(out, "{} must stay: {reason}", Count(*count, "pod"));
    }
    out
}

/// Formats what was done, and what is left to do.
pub(crate) fn applied(view: &AppliedView) -> String {
    let mut out = format!("\n{} evicted.", Count(view.evicted.len(), "pod"));
    match &view.problem {
        None => out.push_str(" All that was planned has room.\n"),
        Some(problem) => {
            let _ = writeln!(out, " The rest of the plan was not carried out: {problem}.");
        }
    }
    if let Some(until) = view.until.as_ref().filter(|_| !view.reservations.is_empty()) {
        let _ = writeln!(out, "\nThese reservations stay until {until}:");
        view.reservations.iter().for_each(|entry| {
            let _ = writeln!(out, "  {entry}");
        });
        if view.problem.is_some() {
            out.push_str("The same command goes on from here. ");
        }
        out.push_str("`kubectl inspect gpu defragment --release` ends them now.\n");
    }
    out
}

fn list(gpus: &[u8]) -> String {
    gpus.iter().map(u8::to_string).collect::<Vec<_>>().join(",")
}
