//! Formats gpushare's tables.

use std::fmt::Write as _;

use tessera_core::units::MiB;

use crate::share::{NodeRow, ShareTable};
use crate::table::align;

/// Columns of the summary.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Columns {
    pub(crate) headers: bool,
    pub(crate) wide: bool,
}

/// Formats one line per node and the total of the cluster.
pub(crate) fn summary(table: &ShareTable, columns: Columns) -> String {
    let unit = table.unit();
    let units = |amount: MiB| amount.0 / unit.mib();
    let max_gpus = table.nodes.iter().map(|node| node.gpus.len()).max().unwrap_or(0);
    let any_pending = table.nodes.iter().any(|node| node.pending() > MiB::ZERO);
    let mut text = String::new();
    if columns.headers {
        text.push_str("NAME\tIPADDRESS\t");
        (0..max_gpus).for_each(|gpu| text.push_str(&format!("GPU{gpu}(Allocated/Total)\t")));
        text.push_str(if any_pending { "PENDING(Allocated)\t" } else { "" });
        // The original knows no unit without a node.
        let unit = if table.nodes.is_empty() { String::new() } else { unit.to_string() };
        let _ = write!(text, "GPU Memory({unit})");
        text.push_str(if columns.wide { "\tSTATUS\tMODEL\n" } else { "\n" });
    }
    let mut rule = 0;
    for node in &table.nodes {
        let mut row = format!("{}\t{}\t", node.name, node.address.as_deref().unwrap_or("unknown"));
        for index in 0..max_gpus {
            let gpu = node.gpus.get(index).cloned().unwrap_or_default();
            let broken = if columns.wide && gpu.unhealthy { "!" } else { "" };
            let _ = write!(row, "{}/{}{broken}\t", units(gpu.used), units(gpu.total));
        }
        if any_pending {
            let pending = units(node.pending());
            row.push_str(&if pending > 0 { format!("{pending}\t") } else { "\t".to_owned() });
        }
        let (used, total) = sums(node, units);
        let _ = write!(row, "{used}/{total}");
        if columns.wide {
            let _ = write!(row, "\t{}\t{}", node.status, node.models);
        }
        row.push('\n');
        if rule == 0 {
            rule = row.len() + 20;
        }
        text.push_str(&row);
    }
    if !columns.headers {
        return align(&text);
    }
    let _ = write!(
        text,
        "{}\nAllocated/Total GPU Memory In Cluster:\n{}\t\n",
        "-".repeat(rule),
        total(table, units)
    );
    align(&text)
}

/// Longest line between two nodes. gpushare draws it as long as all rows of the first node
/// together, which would fill many lines of a terminal.
const MAX_RULE_WIDTH: usize = 160;

/// Formats every node with its pods.
pub(crate) fn details(table: &ShareTable) -> String {
    let unit = table.unit();
    let units = |amount: MiB| amount.0 / unit.mib();
    let mut text = String::new();
    let mut rule = 0;
    for node in &table.nodes {
        let pending = node.pending() > MiB::ZERO;
        let address = node.address.as_deref().unwrap_or("unknown");
        let _ = write!(text, "\nNAME:\t{}\nIPADDRESS:\t{address}\n\nNAME\tNAMESPACE\t", node.name);
        (0..node.gpus.len()).for_each(|gpu| text.push_str(&format!("GPU{gpu}(Allocated)\t")));
        text.push_str(if pending { "Pending(Allocated)\t\n" } else { "\n" });
        let mut rows = String::new();
        for pod in &node.pods {
            let _ = write!(rows, "{}\t{}\t", pod.name, pod.namespace);
            pod.held.iter().for_each(|held| rows.push_str(&format!("{}\t", units(*held))));
            if pending {
                let _ = write!(rows, "{}\t", units(pod.pending));
            }
            rows.push('\n');
        }
        if rule == 0 {
            rule = (rows.len() + 10).min(MAX_RULE_WIDTH);
        }
        text.push_str(&rows);
        let (used, total) = sums(node, units);
        let _ = write!(text, "Allocated :\t{used} ({}%)\t\nTotal :\t{total} \t\n", percent(used, total));
        let _ = writeln!(text, "{}", "-".repeat(rule));
    }
    let _ = write!(text, "\n\nAllocated/Total GPU Memory In Cluster:\t{}\t\n", total(table, units));
    align(&text)
}

/// Returns the used and total units of a node, including pods whose GPU is unknown.
fn sums(node: &NodeRow, units: impl Fn(MiB) -> u64) -> (u64, u64) {
    let used: u64 = node.gpus.iter().map(|gpu| units(gpu.used)).sum();
    let total: u64 = node.gpus.iter().map(|gpu| units(gpu.total)).sum();
    (used + units(node.pending()), total + units(node.unlisted))
}

fn total(table: &ShareTable, units: impl Fn(MiB) -> u64 + Copy) -> String {
    let sums = table.nodes.iter().map(|node| sums(node, units));
    let (used, total) = sums.fold((0, 0), |(used, total), node| (used + node.0, total + node.1));
    format!("{used}/{total} ({}%)", percent(used, total))
}

fn percent(used: u64, total: u64) -> u64 {
    (used.saturating_mul(100)).checked_div(total).unwrap_or(0)
}
