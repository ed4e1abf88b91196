//! Formats measured use as a table with a line per GPU, and below it a line per container.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use tessera_wire::tessera::node_use::{ContainerUse, GpuUse, NodeUse, ShareUse};

use crate::args::SortKey;
use crate::paint::Paint;
use crate::run::Context;
use crate::table::{NameColumn, align, align_within, widest};
use crate::top::ClusterUse;

/// Cell of a value that was not measured.
const UNKNOWN: &str = "-";

/// Compute share of a container that was granted only memory: the time that others leave.
const REST: &str = "rest";

/// Which containers are listed, and in which order.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Order {
    pub(crate) sort: Option<SortKey>,
    pub(crate) rows: Option<usize>,
}

impl Order {
    /// Returns whether the table lists only containers, so that a node without an answer has no line.
    pub(crate) fn lists_containers(self) -> bool {
        self.sort.is_some() || self.rows.is_some()
    }
}

/// Columns of the table.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Whether the container has a column of its own.
    container: bool,
    /// Whether used and granted memory share a column, in GiB.
    joins_memory: bool,
}

/// The layout of piped output and of wide terminals.
const FULL: Layout = Layout { container: true, joins_memory: false };

/// Least width to which names of pods are cut while other names can be shorter.
const POD_WIDTH: usize = 28;

/// Formats the table. A terminal that is too narrow for all columns gets fewer of them, so that pods can be told apart.
pub(crate) fn table(usage: &ClusterUse, order: Order, headers: bool, context: Context) -> String {
    let paint = context.paint;
    let full = lines(usage, order, headers, FULL, paint);
    let Some(columns) = context.columns.filter(|columns| widest(&align(&full)) > *columns) else {
        return align(&full);
    };
    if columns >= WIDE_TERMINAL {
        return align_within(&full, Some(columns), &names(FULL));
    }
    let narrow = Layout { container: has_several_containers(usage), joins_memory: true };
    let text = lines(usage, order, headers, narrow, paint);
    align_within(&text, Some(columns), &names(narrow))
}

/// Width from which a terminal has all columns, with names that are cut.
const WIDE_TERMINAL: usize = 120;

/// Returns the columns with names: the node, the pod and the container.
fn names(layout: Layout) -> Vec<NameColumn> {
    let columns =
        [(0, 0), (2, POD_WIDTH), (3, 0)].map(|(column, preferred)| NameColumn { column, preferred });
    columns.into_iter().take(if layout.container { 3 } else { 2 }).collect()
}

/// Returns whether a pod has several containers in the table, so that the name of a pod does not suffice.
fn has_several_containers(usage: &ClusterUse) -> bool {
    let containers = usage.nodes.iter().flat_map(|node| &node.used).flat_map(|used| &used.containers);
    let mut seen = BTreeSet::new();
    let mut pods = containers.map(|container| &container.uid);
    !pods.all(|uid| seen.insert(uid))
}

fn lines(usage: &ClusterUse, order: Order, headers: bool, layout: Layout, paint: Paint) -> String {
    let mut text = String::new();
    if headers {
        let container = if layout.container { "CONTAINER\t" } else { "" };
        let memory = if layout.joins_memory { "MEMORY" } else { "MEMORY(MiB)\tGRANTED(MiB)" };
        let _ = writeln!(text, "NODE\tGPU\tPOD\t{container}BUSY\tGRANTED\t{memory}\tWAITED");
    }
    if order.lists_containers() {
        for (node, container, share) in sorted(usage, order) {
            text.push_str(&row(node, container, share, layout, paint));
        }
        return text;
    }
    for node in &usage.nodes {
        match (&node.used, &node.error) {
            (Some(used), _) => gpus(&mut text, usage, &node.node, used, layout, paint),
            (None, error) => {
                let error = error.as_deref().unwrap_or("no answer");
                let _ = writeln!(text, "{}\t{UNKNOWN}\t{}", node.node, paint.bad(error));
            }
        }
    }
    text
}

/// Returns containers of all nodes in the wanted order. Unknown values come last.
fn sorted(usage: &ClusterUse, order: Order) -> Vec<(&str, &ContainerUse, &ShareUse)> {
    let mut rows: Vec<(&str, &ContainerUse, &ShareUse)> = Vec::new();
    for node in &usage.nodes {
        let containers = node.used.iter().flat_map(|used| &used.containers);
        rows.extend(
            containers.flat_map(|one| one.gpus.iter().map(move |share| (node.node.as_str(), one, share))),
        );
    }
    let down = |a: Option<f64>, b: Option<f64>| {
        b.unwrap_or(f64::NEG_INFINITY).total_cmp(&a.unwrap_or(f64::NEG_INFINITY))
    };
    rows.sort_by(|(_, one, a), (_, other, b)| {
        let by_pod = || (&one.namespace, &one.pod, a.index).cmp(&(&other.namespace, &other.pod, b.index));
        let by_value = match order.sort.unwrap_or(SortKey::Busy) {
            SortKey::Busy => down(a.busy_percent, b.busy_percent),
            SortKey::Memory => b.memory_used_mib.cmp(&a.memory_used_mib),
            SortKey::Waste => down(usage.waste(a), usage.waste(b)),
            SortKey::Pod => std::cmp::Ordering::Equal,
        };
        by_value.then_with(by_pod)
    });
    rows.truncate(order.rows.unwrap_or(usize::MAX));
    rows
}

fn gpus(text: &mut String, usage: &ClusterUse, node: &str, used: &NodeUse, layout: Layout, paint: Paint) {
    for gpu in &used.gpus {
        let GpuUse { uuid, index, memory_used_mib, busy_percent } = gpu;
        let container = if layout.container { "\t" } else { "" };
        let memory = match layout.joins_memory {
            true => of_granted(*memory_used_mib, usage.gpu_memory.get(uuid).map(|memory| memory.0)),
            false => number(*memory_used_mib) + "\t",
        };
        let (all, busy) = (paint.faint("(all)"), percent(*busy_percent));
        let _ = writeln!(text, "{node}\t{index}\t{all}\t{container}{busy}\t\t{memory}\t");
        for container in &used.containers {
            for share in container.gpus.iter().filter(|share| share.index == *index) {
                text.push_str(&row(node, container, share, layout, paint));
            }
        }
    }
}

fn row(node: &str, container: &ContainerUse, share: &ShareUse, layout: Layout, paint: Paint) -> String {
    let ContainerUse { namespace, pod, container, .. } = container;
    let memory = match layout.joins_memory {
        true => of_granted(share.memory_used_mib, share.granted_mib),
        false => number(share.memory_used_mib),
    };
    let memory = match (share.memory_used_mib, share.granted_mib) {
        (Some(used), Some(granted)) if used > granted => paint.bad(&memory),
        (Some(_), None) => paint.notable(&memory),
        _ => memory,
    };
    let granted = match share.granted_percent {
        None => UNKNOWN.to_owned(),
        Some(0) => REST.to_owned(),
        Some(percent) => format!("{percent}%"),
    };
    let container = if layout.container { format!("{container}\t") } else { String::new() };
    let granted_memory = if layout.joins_memory { String::new() } else { number(share.granted_mib) + "\t" };
    format!(
        "{node}\t{}\t{namespace}/{pod}\t{container}{}\t{granted}\t{memory}\t{granted_memory}{}\n",
        share.index,
        percent(share.busy_percent),
        percent(share.throttled_percent),
    )
}

fn percent(value: Option<f64>) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), |value| format!("{value:.0}%"))
}

fn number(value: Option<u64>) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), |value| value.to_string())
}

/// Formats used memory beside the memory that may be used, in GiB.
fn of_granted(used: Option<u64>, granted: Option<u64>) -> String {
    match (used, granted) {
        (None, None) => UNKNOWN.to_owned(),
        (used, None) => format!("{} GiB", gib(used)),
        (used, granted) => format!("{}/{} GiB", gib(used), gib(granted)),
    }
}

/// Formats MiB as GiB with one decimal below 10 GiB. The number is rounded down, as in the other views.
fn gib(mib: Option<u64>) -> String {
    let Some(mib) = mib else { return UNKNOWN.to_owned() };
    let tenths = mib.saturating_mul(10) / 1024;
    match tenths {
        0..100 => format!("{}.{}", tenths / 10, tenths % 10),
        _ => (tenths / 10).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::plugin::Plugin;
    use crate::usage::UsageError;

    const PIPED: Context =
        Context { plugin: Plugin::Gpu, paint: Paint { on: false }, terminal: false, columns: None };

    #[test]
    fn sorts_and_cuts_containers() {
        let read: NodeUse = serde_json::from_str(
            r#"{"gpus":[],"containers":[
                {"namespace":"t","pod":"a","uid":"a","container":"c","gpus":[{"uuid":"g","index":0,"grantedPercent":50,"busyPercent":50.0,"memoryUsedMiB":1}]},
                {"namespace":"t","pod":"b","uid":"b","container":"c","gpus":[{"uuid":"g","index":0,"grantedPercent":100,"busyPercent":1.0,"memoryUsedMiB":9}]},
                {"namespace":"t","pod":"c","uid":"c","container":"c","gpus":[{"uuid":"g","index":0,"grantedPercent":10}]}]}"#,
        )
        .unwrap();
        let usage = ClusterUse::new(BTreeMap::from([("n".to_owned(), Ok(read))]), BTreeMap::new());
        let pods = |sort, rows| {
            let text = table(&usage, Order { sort: Some(sort), rows }, false, PIPED);
            text.lines().map(|line| line.split_whitespace().nth(2).unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(pods(SortKey::Busy, None), ["t/a", "t/b", "t/c"]);
        assert_eq!(pods(SortKey::Waste, None), ["t/b", "t/a", "t/c"]);
        assert_eq!(pods(SortKey::Memory, Some(1)), ["t/b"]);
        assert_eq!(pods(SortKey::Pod, Some(2)), ["t/a", "t/b"]);
    }

    #[test]
    fn shows_missing_measurements_and_silent_agents_as_unknown() {
        let read: NodeUse = serde_json::from_str(
            r#"{"gpus":[{"uuid":"a","index":0,"memoryUsedMiB":5000,"busyPercent":61.4},{"uuid":"b","index":1}],
                "containers":[{"namespace":"team","pod":"train","uid":"u","container":"main","gpus":[
                  {"uuid":"a","index":0,"grantedPercent":30,"grantedMiB":4096,"memoryUsedMiB":3950,"busyPercent":29.6,"throttledPercent":12.0}]},
                 {"namespace":"team","pod":"notes","uid":"w","container":"main","gpus":[{"uuid":"a","index":0,"grantedPercent":0,"grantedMiB":512,"memoryUsedMiB":350}]},
                 {"namespace":"team","pod":"stray","uid":"v","container":"main","gpus":[{"uuid":"a","index":0,"memoryUsedMiB":700}]}]}"#,
        )
        .unwrap();
        let refused = Err(UsageError::NoAddress);
        let answers = BTreeMap::from([("n1".to_owned(), Ok(read)), ("n2".to_owned(), refused)]);
        assert_eq!(
            table(&ClusterUse::new(answers, BTreeMap::new()), Order::default(), true, PIPED),
            "\
NODE  GPU  POD         CONTAINER  BUSY  GRANTED  MEMORY(MiB)  GRANTED(MiB)  WAITED
n1    0    (all)                  61%            5000                       
n1    0    team/train  main       30%   30%      3950         4096          12%
n1    0    team/notes  main       -     rest     350          512           -
n1    0    team/stray  main       -     -        700          -             -
n1    1    (all)                  -              -                          
n2    -    the node publishes no address
"
        );
    }
}
