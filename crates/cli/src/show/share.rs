//! Formats gpushare's tables.

use std::fmt::Write as _;

use tessera_core::units::MiB;

use crate::share::{NodeRow, ShareTable};
use crate::table::{NameColumn, align, align_within, widest, width};

/// Columns of the summary.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Columns {
    pub(crate) headers: bool,
    pub(crate) wide: bool,
    /// Columns of the terminal, or `None` if the output is piped.
    pub(crate) terminal: Option<usize>,
}

/// Form of the summary. The total of each node is part of every form.
#[derive(Clone, Copy, Debug)]
struct Form {
    /// Whether headings say what the numbers are, as in the documented table.
    long_headings: bool,
    addresses: bool,
    /// Number of columns of GPUs.
    gpus: usize,
}

/// Least width to which names of nodes are cut while GPUs can be left out.
const NAME_WIDTH: usize = 16;

/// Formats one line per node and the total of the cluster. A terminal that is too narrow for the documented table gets
/// short headings, then no addresses, and then only the first GPUs.
pub(crate) fn summary(table: &ShareTable, columns: Columns) -> String {
    let max_gpus = table.nodes.iter().map(|node| node.gpus.len()).max().unwrap_or(0);
    let documented = lines(table, columns, Form { long_headings: true, addresses: true, gpus: max_gpus });
    let documented = align(&documented.concat());
    let Some(terminal) = columns.terminal.filter(|terminal| widest(&documented) > *terminal) else {
        return documented;
    };
    let name_width = table.nodes.iter().map(|node| width(&node.name)).max().unwrap_or(0);
    let short = |addresses, gpus| {
        let [rows, totals] = lines(table, columns, Form { long_headings: false, addresses, gpus });
        let left_out = match max_gpus - gpus {
            0 => String::new(),
            1 => format!("GPU{gpus} is left out; pipe the output to see it\n"),
            _ => format!("GPU{gpus} to GPU{} are left out; pipe the output to see them\n", max_gpus - 1),
        };
        let names = [NameColumn { column: 0, preferred: NAME_WIDTH }];
        let fits = widest(&align(&rows)) <= terminal + name_width.saturating_sub(NAME_WIDTH);
        (align_within(&rows, Some(terminal), &names) + &totals + &left_out, fits)
    };
    let mut forms = [(true, max_gpus)].into_iter().chain((0..=max_gpus).rev().map(|gpus| (false, gpus)));
    let fitting = forms.find_map(|(addresses, gpus)| Some(short(addresses, gpus)).filter(|(_, fits)| *fits));
    fitting.unwrap_or_else(|| short(false, 0)).0
}

/// Returns the rows of the nodes with their headings, and the totals of the cluster below them.
fn lines(table: &ShareTable, columns: Columns, form: Form) -> [String; 2] {
    let unit = table.unit();
    let units = |amount: MiB| amount.0 / unit.mib();
    let any_pending = table.nodes.iter().any(|node| node.pending() > MiB::ZERO);
    let mut text = String::new();
    if columns.headers {
        text.push_str(if form.addresses { "NAME\tIPADDRESS\t" } else { "NAME\t" });
        let numbers = if form.long_headings { "(Allocated/Total)" } else { "" };
        (0..form.gpus).for_each(|gpu| text.push_str(&format!("GPU{gpu}{numbers}\t")));
        let allocated = if form.long_headings { "(Allocated)" } else { "" };
        text.push_str(&if any_pending { format!("PENDING{allocated}\t") } else { String::new() });
        // The original knows no unit without a node.
        let unit = if table.nodes.is_empty() { String::new() } else { unit.to_string() };
        let _ = write!(text, "GPU Memory({unit})");
        text.push_str(if columns.wide { "\tSTATUS\tMODEL\n" } else { "\n" });
    }
    let mut rule = 0;
    for node in &table.nodes {
        let mut row = format!("{}\t", node.name);
        if form.addresses {
            let _ = write!(row, "{}\t", node.address.as_deref().unwrap_or("unknown"));
        }
        for index in 0..form.gpus {
            let gpu = node.gpus.get(index).cloned().unwrap_or_default();
            let broken = if columns.wide && gpu.faulty { "!" } else { "" };
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
        return [text, String::new()];
    }
    let rule = if form.long_headings { rule } else { rule.min(columns.terminal.unwrap_or(rule)) };
    // The original ends the total with a cell.
    let end = if form.long_headings { "\t" } else { "" };
    let (line, total) = ("-".repeat(rule), total(table, units));
    [text, format!("{line}\nAllocated/Total GPU Memory In Cluster:\n{total}{end}\n")]
}

/// Longest line between two nodes. gpushare draws it as long as all rows of the first node
/// together, which would fill many lines of a terminal.
const MAX_RULE_WIDTH: usize = 160;

/// Formats every node with its pods. A terminal that is too narrow gets short headings.
pub(crate) fn details(table: &ShareTable, terminal: Option<usize>) -> String {
    let documented = detail_lines(table, true);
    match terminal {
        Some(terminal) if widest(&documented) > terminal => detail_lines(table, false),
        _ => documented,
    }
}

fn detail_lines(table: &ShareTable, long_headings: bool) -> String {
    let allocated = if long_headings { "(Allocated)" } else { "" };
    let unit = table.unit();
    let units = |amount: MiB| amount.0 / unit.mib();
    let mut text = String::new();
    let mut rule = 0;
    for node in &table.nodes {
        let pending = node.pending() > MiB::ZERO;
        let address = node.address.as_deref().unwrap_or("unknown");
        let _ = write!(text, "\nNAME:\t{}\nIPADDRESS:\t{address}\n\nNAME\tNAMESPACE\t", node.name);
        (0..node.gpus.len()).for_each(|gpu| text.push_str(&format!("GPU{gpu}{allocated}\t")));
        text.push_str(&if pending { format!("Pending{allocated}\t\n") } else { "\n".to_owned() });
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
