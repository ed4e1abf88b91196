//! Formats trees of GPUs in gpu-manager's form.

use std::fmt::Write as _;

use tessera_core::node::NodeState;
use tessera_core::units::{MiB, Percent};
use tessera_wire::foreign::gpu_tree::{self, GpuActivity};
use tessera_wire::tessera::node_use::NodeUse;

use crate::survey::Survey;

/// Formats one node. `used` holds the measurements of its agent, if it answered.
pub(crate) fn node(survey: &Survey, state: &NodeState, used: Option<&NodeUse>, pods: bool) -> String {
    let activity: Vec<GpuActivity> = used.map(activity).unwrap_or_default();
    let text = gpu_tree::print(state, &activity);
    if pods { with_pods(survey, state, &text) } else { text }
}

fn activity(used: &NodeUse) -> Vec<GpuActivity> {
    let count = used.gpus.iter().map(|gpu| usize::from(gpu.index) + 1).max().unwrap_or(0);
    let mut activity = vec![GpuActivity::default(); count];
    for gpu in &used.gpus {
        activity[usize::from(gpu.index)].used = MiB(gpu.memory_used_mib.unwrap_or(0));
    }
    activity
}

/// Adds the pods on each GPU to its line.
fn with_pods(survey: &Survey, state: &NodeState, text: &str) -> String {
    let holders = survey.holders(&state.node().name);
    let mut out = String::new();
    for line in text.lines() {
        out.push_str(line);
        let leaf =
            line.rsplit_once("---GPU").and_then(|(_, rest)| rest.split_once(' ')?.0.parse::<u8>().ok());
        if let Some(index) = leaf {
            for (pod, grant) in &holders {
                if let Some((_, usage)) = grant.footprint().find(|(gpu, _)| gpu.0 == index) {
                    let what = match usage.compute_percent {
                        _ if usage.whole => "whole".to_owned(),
                        Percent(0) => usage.memory.to_string(),
                        compute_percent => format!("{compute_percent} {}", usage.memory),
                    };
                    let _ = write!(out, " {}/{} [{what}]", pod.namespace, pod.name);
                }
            }
        }
        out.push('\n');
    }
    out
}
