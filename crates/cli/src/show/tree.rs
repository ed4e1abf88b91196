//! Formats the GPUs of a node as a tree of their links, with readable units.

use std::fmt::Write as _;

use tessera_core::node::NodeState;
use tessera_core::tree::{Group, GroupLevel, TopologyTree};
use tessera_core::units::{GpuIndex, MiB, Percent};
use tessera_wire::tessera::node_use::NodeUse;

use crate::show::overview::{gib, reserved_for};
use crate::survey::Survey;

/// Formats one node. `used` holds the measurements of its agent, if it answered; without them the used memory is
/// unknown.
pub(crate) fn node(survey: &Survey, state: &NodeState, used: Option<&NodeUse>, pods: bool) -> String {
    let (idle, all) = (state.idle().len(), state.node().gpus().len());
    let mut text = format!("{}: {idle} of {all} GPUs idle\n", state.node().name);
    let root = state.node().topology().tree();
    let tree = Tree { survey, state, used, pods };
    tree.children(&mut text, root, "");
    text
}

struct Tree<'a> {
    survey: &'a Survey,
    state: &'a NodeState,
    used: Option<&'a NodeUse>,
    pods: bool,
}

impl Tree<'_> {
    fn children(&self, text: &mut String, group: &Group, indent: &str) {
        for (place, child) in group.children.iter().enumerate() {
            let is_last = place + 1 == group.children.len();
            let (branch, below) = if is_last { ("`-- ", "    ") } else { ("|-- ", "|   ") };
            let _ = match child {
                TopologyTree::Leaf(gpu) => writeln!(text, "{indent}{branch}{}", self.leaf(*gpu)),
                TopologyTree::Group(group) => writeln!(text, "{indent}{branch}{}", level_name(group.level)),
            };
            if let TopologyTree::Group(group) = child {
                self.children(text, group, &format!("{indent}{below}"));
            }
        }
    }

    fn leaf(&self, index: GpuIndex) -> String {
        let Some(gpu) = self.state.node().gpu(index) else { return format!("GPU{index}") };
        let room = self.state.room(index);
        let mut line = match gpu.health.problem() {
            Some(problem) => format!("GPU{index} {problem}"),
            None => format!(
                "GPU{index} {} and {} of {} free",
                room.compute_percent,
                gib(room.memory),
                gib(gpu.memory)
            ),
        };
        let measured = self.used.and_then(|used| used.gpus.iter().find(|gpu| gpu.index == index.0));
        if let Some(mib) = measured.and_then(|gpu| gpu.memory_used_mib) {
            let _ = write!(line, ", {} in use", gib(MiB(mib)));
        }
        if self.pods {
            for (pod, grant) in self.survey.holders(&self.state.node().name) {
                if let Some((_, usage)) = grant.footprint().find(|(gpu, _)| *gpu == index) {
                    let what = match usage.compute_percent {
                        _ if usage.whole => "whole".to_owned(),
                        Percent(0) => gib(usage.memory),
                        percent => format!("{percent} {}", gib(usage.memory)),
                    };
                    let _ = write!(line, "  {}/{} [{what}]", pod.namespace, pod.name);
                }
            }
            if let Some(reserved) = reserved_for(self.survey, self.state, index) {
                let _ = write!(line, "  [{reserved}]");
            }
        }
        line
    }
}

/// Returns the name of a level in the words of `nvidia-smi topo`.
fn level_name(level: GroupLevel) -> &'static str {
    match level {
        GroupLevel::NvLink => "NVLink",
        GroupLevel::SameBoard => "PSB (same board)",
        GroupLevel::SingleSwitch => "PIX (one PCIe switch)",
        GroupLevel::MultiSwitch => "PXB (several PCIe switches)",
        GroupLevel::HostBridge => "PHB (one host bridge)",
        GroupLevel::Node => "NODE (one NUMA node)",
        GroupLevel::System => "SYS (several NUMA nodes)",
        GroupLevel::Root => "(unknown links)",
    }
}
