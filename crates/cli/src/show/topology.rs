//! Formats gputopology's tables.

use std::fmt::Write as _;

use tessera_core::units::NodeName;
use tessera_wire::foreign::inspect::{TopologyNode, TopologyView, link_word};

use crate::show::models;
use crate::survey::Survey;
use crate::table::align;

const RULE: &str = "----------------------------------------";

const LEGEND: &str = "
Legend:
 X    = Self
 SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
 NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
 PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
 PXB  = Connection traversing multiple PCIe switches (without traversing the PCIe Host Bridge)
 PIX  = Connection traversing a single PCIe switch
 PSB  = Connection traversing a single on-board PCIe switch
 NV#  = Connection traversing a bonded set of # NVLinks
";

/// Creates the same response as an extender's `inspect`.
pub(crate) fn view(survey: &Survey, detail: bool) -> TopologyView {
    let nodes = survey.with_gpus().map(|(_, state)| TopologyNode::new(state, detail)).collect();
    let policy = survey.rules.policy.as_ref().map_or_else(|| "unknown".to_owned(), ToString::to_string);
    TopologyView { nodes, error: String::new(), policy: if detail { policy } else { String::new() } }
}

/// Formats one line per node.
pub(crate) fn summary(view: &TopologyView, headers: bool) -> String {
    let mut text = String::new();
    if headers {
        text.push_str("NAME\tALLGPU\tUSEDGPU\n");
    }
    for node in &view.nodes {
        let _ = writeln!(text, "{}\t{}\t{}", node.name, node.total, node.used);
    }
    align(&text)
}

/// Formats one line per node with more columns.
pub(crate) fn wide(survey: &Survey, headers: bool) -> String {
    let mut text = String::new();
    if headers {
        text.push_str("NAME\tALLGPU\tUSEDGPU\tIDLE\tUNHEALTHY\tSTATUS\tTYPE\tMODEL\n");
    }
    for (facts, state) in survey.with_gpus() {
        let node = state.node();
        let used = node.gpus().iter().filter(|gpu| !state.used(gpu.index).is_none()).count();
        let unhealthy = node.gpus().iter().filter(|gpu| gpu.health.is_faulty()).count();
        let kind = node.instance_type.as_deref().unwrap_or("<none>");
        let (all, idle, status) = (node.gpus().len(), state.idle().len(), facts.status());
        let _ = writeln!(
            text,
            "{}\t{all}\t{used}\t{idle}\t{unhealthy}\t{status}\t{kind}\t{}",
            node.name,
            models(node)
        );
    }
    align(&text)
}

/// Formats every node with its links, and with its MIG instances if the survey knows them.
pub(crate) fn details(view: &TopologyView, survey: Option<&Survey>) -> String {
    let mut text = format!("gpu policy: {}\n", view.policy);
    for node in &view.nodes {
        let _ = writeln!(
            text,
            "{RULE}\nnode name: {}\nall gpu: {}\nused gpu: {}",
            node.name, node.total, node.used
        );
        if !node.kind.is_empty() {
            let _ = writeln!(text, "node type: {}", node.kind);
        }
        let facts = survey.and_then(|survey| survey.nodes.get(&NodeName(node.name.clone())));
        for (resource, instances) in facts.iter().flat_map(|facts| &facts.instances) {
            let pods: Vec<&str> = instances.pods.iter().map(|(pod, _)| pod.as_str()).collect();
            let (held, offered) = (instances.held(), instances.offered);
            let _ = writeln!(text, "mig instances: {held} of {offered} {resource} used {}", pods.join(" "));
        }
        if let Some(survey) = survey {
            text.push_str(&super::overview::reservations(survey, &NodeName(node.name.clone())));
        }
        if !node.topology.is_empty() {
            text.push_str("gpu topolocy:\n");
            text.push_str(&matrix(&node.topology));
        }
    }
    text.push_str(LEGEND);
    text
}

/// Formats the matrix of links. Cells are as wide as the GPU names above them. From ten GPUs on
/// they are wider than gputopology's.
fn matrix(rows: &[Vec<u8>]) -> String {
    let label = format!("GPU{}", rows.len().saturating_sub(1)).len() + 1;
    let mut text = " ".repeat(label);
    for column in 0..rows.len() {
        let _ = write!(text, "{:>label$}", format!("GPU{column}"));
    }
    for (row, links) in rows.iter().enumerate() {
        let _ = write!(text, "\n{:<label$}", format!("GPU{row}"));
        for link in links {
            let _ = write!(text, "{:>label$}", link_word(*link).unwrap_or_else(|| "X".to_owned()));
        }
    }
    text.push('\n');
    text
}
