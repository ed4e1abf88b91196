//! gpushare's tables.

use std::fmt::Write as _;

use tessera_core::units::MiB;

use crate::share::{ShareNode, ShareTable};
use crate::table::align;

/// How the summary is shown.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Columns {
    pub(crate) headers: bool,
    pub(crate) wide: bool,
}

/// One line per node, and the cluster's total.
pub(crate) fn summary(table: &ShareTable, columns: Columns) -> String {
    let unit = table.unit();
    let units = |amount: MiB| amount.0 / unit.mib();
    let most = table.nodes.iter().map(|node| node.cards.len()).max().unwrap_or(0);
    let any_pending = table.nodes.iter().any(|node| node.pending() > MiB::ZERO);
    let mut text = String::new();
    if columns.headers {
        text.push_str("NAME\tIPADDRESS\t");
        (0..most).for_each(|gpu| text.push_str(&format!("GPU{gpu}(Allocated/Total)\t")));
        text.push_str(if any_pending { "PENDING(Allocated)\t" } else { "" });
        let _ = write!(text, "GPU Memory({unit})");
        text.push_str(if columns.wide { "\tSTATUS\tMODEL\n" } else { "\n" });
    }
    let mut rule = 0;
    for node in &table.nodes {
        let mut row = format!("{}\t{}\t", node.name, node.address.as_deref().unwrap_or("unknown"));
        for gpu in 0..most {
            let card = node.cards.get(gpu).cloned().unwrap_or_default();
            let broken = if columns.wide && card.unhealthy { "!" } else { "" };
            let _ = write!(row, "{}/{}{broken}\t", units(card.used), units(card.total));
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

/// The original draws its rule as long as all rows of the first node together, over many lines of a terminal where those are many.
const WIDEST_RULE: usize = 160;

/// Every node with its pods.
pub(crate) fn details(table: &ShareTable) -> String {
    let unit = table.unit();
    let units = |amount: MiB| amount.0 / unit.mib();
    let mut text = String::new();
    let mut rule = 0;
    for node in &table.nodes {
        let pending = node.pending() > MiB::ZERO;
        let address = node.address.as_deref().unwrap_or("unknown");
        let _ = write!(text, "\nNAME:\t{}\nIPADDRESS:\t{address}\n\nNAME\tNAMESPACE\t", node.name);
        (0..node.cards.len()).for_each(|gpu| text.push_str(&format!("GPU{gpu}(Allocated)\t")));
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
            rule = (rows.len() + 10).min(WIDEST_RULE);
        }
        text.push_str(&rows);
        let (used, total) = sums(node, units);
        let _ = write!(text, "Allocated :\t{used} ({}%)\t\nTotal :\t{total} \t\n", percent(used, total));
        let _ = writeln!(text, "{}", "-".repeat(rule));
    }
    let _ = write!(text, "\n\nAllocated/Total GPU Memory In Cluster:\t{}\t\n", total(table, units));
    align(&text)
}

/// Used and total units of a node, those of pending pods included.
fn sums(node: &ShareNode, units: impl Fn(MiB) -> u64) -> (u64, u64) {
    let used: u64 = node.cards.iter().map(|card| units(card.used)).sum();
    (used + units(node.pending()), node.cards.iter().map(|card| units(card.total)).sum())
}

fn total(table: &ShareTable, units: impl Fn(MiB) -> u64 + Copy) -> String {
    let sums = table.nodes.iter().map(|node| sums(node, units));
    let (used, total) = sums.fold((0, 0), |(used, total), node| (used + node.0, total + node.1));
    format!("{used}/{total} ({}%)", percent(used, total))
}

fn percent(used: u64, total: u64) -> u64 {
    (used.saturating_mul(100)).checked_div(total).unwrap_or(0)
}
