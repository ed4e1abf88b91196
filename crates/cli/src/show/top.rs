//! Formats measured use as a table with a line per GPU, and below it a line per container.

use std::fmt::Write as _;

use tessera_wire::tessera::node_use::{ContainerUse, GpuUse, NodeUse, ShareUse};

use crate::args::SortKey;
use crate::paint::Paint;
use crate::run::Context;
use crate::table::align_within;
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

/// Columns with names, which are cut on a narrow terminal: the node, the pod and the container.
const NAMES: [usize; 3] = [0, 2, 3];

pub(crate) fn table(usage: &ClusterUse, order: Order, headers: bool, context: Context) -> String {
    let Context { paint, columns, .. } = context;
    let mut text = String::new();
    if headers {
        text.push_str("NODE\tGPU\tPOD\tCONTAINER\tBUSY\tGRANTED\tMEMORY(MiB)\tGRANTED(MiB)\tWAITED\n");
    }
    if order.lists_containers() {
        sorted(&mut text, usage, order, paint);
        return align_within(&text, columns, &NAMES);
    }
    for node in &usage.nodes {
        match (&node.used, &node.error) {
            (Some(used), _) => gpus(&mut text, &node.node, used, paint),
            (None, error) => {
                let error = error.as_deref().unwrap_or("no answer");
                let _ = writeln!(text, "{}\t{UNKNOWN}\t{}", node.node, paint.bad(error));
            }
        }
    }
    align_within(&text, columns, &NAMES)
}

/// Lists containers of all nodes in the wanted order. Unknown values come last.
fn sorted(text: &mut String, usage: &ClusterUse, order: Order, paint: Paint) {
    let mut rows: Vec<(&str, &ContainerUse, &ShareUse)> = Vec::new();
    for node in &usage.nodes {
        let containers = node.used.iter().flat_map(|used| &used.containers);
        rows.extend(
            containers.flat_map(|one| one.gpus.iter().map(move |share| (node.node.as_str(), one, share))),
        );
    }
    let waste = |share: &ShareUse| Some(f64::from(share.granted_percent?) - share.busy_percent?);
    let down = |a: Option<f64>, b: Option<f64>| {
        b.unwrap_or(f64::NEG_INFINITY).total_cmp(&a.unwrap_or(f64::NEG_INFINITY))
    };
    rows.sort_by(|(_, one, a), (_, other, b)| {
        let by_pod = || (&one.namespace, &one.pod, a.index).cmp(&(&other.namespace, &other.pod, b.index));
        let by_value = match order.sort.unwrap_or(SortKey::Busy) {
            SortKey::Busy => down(a.busy_percent, b.busy_percent),
            SortKey::Memory => b.memory_used_mib.cmp(&a.memory_used_mib),
            SortKey::Waste => down(waste(a), waste(b)),
            SortKey::Pod => std::cmp::Ordering::Equal,
        };
        by_value.then_with(by_pod)
    });
    for (node, container, share) in rows.iter().take(order.rows.unwrap_or(usize::MAX)) {
        row(text, node, container, share, paint);
    }
}

fn gpus(text: &mut String, node: &str, used: &NodeUse, paint: Paint) {
    for gpu in &used.gpus {
        let GpuUse { index, memory_used_mib, busy_percent, .. } = gpu;
        let (busy, memory) = (percent(*busy_percent), number(*memory_used_mib));
        let _ = writeln!(text, "{node}\t{index}\t{}\t\t{busy}\t\t{memory}\t\t", paint.faint("(all)"));
        for container in &used.containers {
            for share in container.gpus.iter().filter(|share| share.index == *index) {
                row(text, node, container, share, paint);
            }
        }
    }
}

fn row(text: &mut String, node: &str, container: &ContainerUse, share: &ShareUse, paint: Paint) {
    let ContainerUse { namespace, pod, container, .. } = container;
    let memory = number(share.memory_used_mib);
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
    let _ = writeln!(
        text,
        "{node}\t{}\t{namespace}/{pod}\t{container}\t{}\t{granted}\t{memory}\t{}\t{}",
        share.index,
        percent(share.busy_percent),
        number(share.granted_mib),
        percent(share.throttled_percent),
    );
}

fn percent(value: Option<f64>) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), |value| format!("{value:.0}%"))
}

fn number(value: Option<u64>) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), |value| value.to_string())
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
        let usage = ClusterUse::new(BTreeMap::from([("n".to_owned(), Ok(read))]));
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
            table(&ClusterUse::new(answers), Order::default(), true, PIPED),
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
