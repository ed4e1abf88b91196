//! The overview: a bar for each GPU, what is free, waiting pods and totals, fitted to the terminal.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use tessera_core::gpu::Gpu;
use tessera_core::grant::GpuUsage;
use tessera_core::natural::natural;
use tessera_core::node::NodeState;
use tessera_core::units::{Count, GpuIndex, MiB, NodeName, Percent};
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::explanation::unreported;
use tessera_wire::tessera::reservation::NodeReservation;

use crate::paint::Paint;
use crate::show::age::age;
use crate::survey::{NodeFacts, Survey};
use crate::table::{cut, width, wrap_lines};

/// Widest bar of one GPU.
const MAX_BAR: usize = 10;

/// Width of the column of free memory, such as `172 of 240 GiB`.
const MEMORY_WIDTH: usize = 14;

/// Least width that is kept for the status.
const STATUS_WIDTH: usize = 6;

/// Form of the overview.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OverviewForm {
    /// Columns of the terminal.
    pub(crate) columns: usize,
    /// True to list the pods on each GPU.
    pub(crate) wide: bool,
    /// Current time in seconds since 1970, for the ages of waiting pods.
    pub(crate) now_seconds: i64,
    pub(crate) paint: Paint,
}

/// Formats the overview. No line is wider than the terminal.
pub(crate) fn overview(survey: &Survey, form: OverviewForm) -> String {
    let mut nodes: Vec<(&NodeFacts, &NodeState)> = survey.with_gpus().collect();
    nodes.sort_by(|(_, a), (_, b)| natural(&a.node().name.0, &b.node().name.0));
    let most_gpus = nodes.iter().map(|(_, state)| state.node().gpus().len()).max().unwrap_or(0).max(1);
    let longest = nodes.iter().map(|(_, state)| width(&state.node().name.0)).max().unwrap_or(0);
    let name_width = longest.clamp(4, (form.columns / 4).max(4));
    // The columns besides the bars: name, free percent, free memory and status.
    let status_width = nodes.iter().map(|(facts, _)| width(&facts.status())).max().unwrap_or(0);
    let rest = name_width + 2 + 1 + 4 + 2 + MEMORY_WIDTH + 2 + status_width.max(STATUS_WIDTH);
    let room = form.columns.saturating_sub(rest) / most_gpus;
    // Bars touch each other where there is no room for more than one column each.
    let gap = usize::from(room >= 2);
    let bar = room.saturating_sub(gap).clamp(1, MAX_BAR);
    let bars_width = ((bar + gap) * most_gpus).max(4);
    let mut text = format!(
        "{:name_width$}  {:bars_width$} {:>4}  {:<MEMORY_WIDTH$}  STATUS\n",
        "NODE", "GPUS", "FREE", "MEMORY FREE"
    );
    let mut totals = Totals::default();
    for (facts, state) in &nodes {
        let own = Totals::of(facts, state);
        totals.add(&own);
        let gpus = state.node().gpus();
        let bars = gpus.iter().map(|gpu| gpu_bar(gpu, (facts, state), bar, form.paint) + &" ".repeat(gap));
        let bars: String = bars.collect();
        let padding = " ".repeat(bars_width.saturating_sub((bar + gap) * gpus.len()));
        let memory = format!("{} of {} GiB", own.free_memory.0 / 1024, own.memory.0 / 1024);
        let name = cut(&state.node().name.0, name_width);
        let spaces = " ".repeat(name_width - width(&name));
        let _ = writeln!(
            text,
            "{name}{spaces}  {bars}{padding} {:>4}  {memory:<MEMORY_WIDTH$}  {}",
            own.free_percent(),
            facts.status()
        );
        for (resource, instances) in &facts.instances {
            let _ = writeln!(text, "  {} of {} {resource} held", instances.held(), instances.offered);
        }
        text.push_str(&reservations(survey, &state.node().name));
        if form.wide {
            text.push_str(&wrap_lines(&holders(survey, state), form.columns));
        }
    }
    let _ = writeln!(
        text,
        "\n{}, {}: {} free, {} of {} of memory free",
        Count(nodes.len(), "node"),
        Count(totals.gpus, "GPU"),
        totals.free_percent(),
        gib(totals.free_memory),
        gib(totals.memory),
    );
    if !totals.problems.is_empty() {
        let problems = totals.problems.iter().map(|(problem, gpus)| format!("{gpus} {problem}"));
        let problems = problems.collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "{}", form.paint.bad(&format!("GPUs without new pods: {problems}")));
    }
    waiting(&mut text, &survey.waiting, form);
    text.push_str(&form.paint.faint("# held  . free  x takes no pods\n"));
    text.lines().map(|line| cut(line, form.columns) + "\n").collect()
}

/// Formats the waiting pods, which a cluster without GPUs can have too. No line is wider than the terminal.
pub(crate) fn waiting_pods(survey: &Survey, form: OverviewForm) -> String {
    let mut text = String::new();
    waiting(&mut text, &survey.waiting, form);
    text.trim_start().lines().map(|line| cut(line, form.columns) + "\n").collect()
}

/// Sums over GPUs. GPUs and nodes that take no new pods have nothing free.
#[derive(Default)]
struct Totals {
    gpus: usize,
    /// Number of GPUs by the problem that keeps new pods from them.
    problems: BTreeMap<&'static str, usize>,
    free: f64,
    memory: MiB,
    free_memory: MiB,
}

impl Totals {
    fn of(facts: &NodeFacts, state: &NodeState) -> Self {
        let mut totals = Self::default();
        let node_problem = node_problem(facts);
        for gpu in state.node().gpus() {
            totals.gpus += 1;
            totals.memory += gpu.memory;
            match gpu.health.problem().or(node_problem) {
                Some(problem) => *totals.problems.entry(problem).or_default() += 1,
                None => {
                    totals.free += free_part(gpu, state);
                    totals.free_memory += state.room(gpu.index).memory;
                }
            }
        }
        totals
    }

    fn add(&mut self, other: &Self) {
        self.gpus += other.gpus;
        for (problem, gpus) in &other.problems {
            *self.problems.entry(problem).or_default() += gpus;
        }
        self.free += other.free;
        self.memory += other.memory;
        self.free_memory += other.free_memory;
    }

    fn free_percent(&self) -> String {
        let gpus = f64::from(u32::try_from(self.gpus.max(1)).unwrap_or(u32::MAX));
        format!("{:.0}%", 100.0 * self.free / gpus)
    }
}

/// Returns why no GPU of a node takes new pods, if none does.
fn node_problem(facts: &NodeFacts) -> Option<&'static str> {
    match (facts.ready, facts.cordoned) {
        (Some(false), _) => Some("on nodes that are not ready"),
        (_, true) => Some("on cordoned nodes"),
        _ => None,
    }
}

/// Returns the free part of a GPU by the scarcer of compute and memory.
fn free_part(gpu: &Gpu, state: &NodeState) -> f64 {
    let room = state.room(gpu.index);
    let part = |free: u64, all: u64| {
        let number = |value: u64| f64::from(u32::try_from(value).unwrap_or(u32::MAX));
        number(free) / number(all.max(1))
    };
    part(room.memory.0, gpu.memory.0).min(f64::from(room.compute_percent.0) / 100.0).clamp(0.0, 1.0)
}

/// Draws a GPU. The part that is not held is free only if the node takes new pods.
fn gpu_bar(gpu: &Gpu, (facts, state): (&NodeFacts, &NodeState), bar: usize, paint: Paint) -> String {
    if !gpu.health.is_healthy() {
        return paint.bad(&"x".repeat(bar));
    }
    let free = free_part(gpu, state);
    let columns = f64::from(u32::try_from(bar).unwrap_or(u32::MAX));
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the bar's width"
    )]
    let held = ((1.0 - free) * columns).round() as usize;
    // Only an idle GPU has an empty bar, and only a full GPU a full one.
    let held = match free {
        free if free >= 1.0 => 0,
        free if free <= 0.0 => bar,
        _ if bar == 1 => 1,
        _ => held.clamp(1, bar - 1),
    };
    let rest = match node_problem(facts) {
        Some(_) => paint.bad(&"x".repeat(bar - held)),
        None => paint.good(&".".repeat(bar - held)),
    };
    paint.notable(&"#".repeat(held)) + &rest
}

/// Lists the pods on each GPU of a node.
fn holders(survey: &Survey, state: &NodeState) -> String {
    let mut text = String::new();
    let holders = survey.holders(&state.node().name);
    for gpu in state.node().gpus() {
        let held = holders.iter().filter_map(|(pod, grant)| {
            let (_, usage) = grant.footprint().find(|(index, _)| *index == gpu.index)?;
            let share = match usage.compute_percent {
                _ if usage.whole => "whole".to_owned(),
                Percent(0) => gib(usage.memory),
                percent => format!("{percent} {}", gib(usage.memory)),
            };
            Some(format!("{}/{} {share}", pod.namespace, pod.name))
        });
        let held: Vec<String> = held.collect();
        let words = match gpu.health.problem() {
            // Pods that run on a cordoned GPU stay there.
            Some(problem) if held.is_empty() => problem.to_owned(),
            Some(problem) => format!("{problem}, {}", held.join(", ")),
            None if held.is_empty() => {
                reserved_for(survey, state, gpu.index).unwrap_or_else(|| "idle".to_owned())
            }
            None => held.join(", "),
        };
        let _ = writeln!(text, "  GPU{} {words}", gpu.index);
    }
    text
}

/// Returns for whom a GPU is reserved, such as `reserved for maintenance (jane)`, or `None` if it is not.
pub(crate) fn reserved_for(survey: &Survey, state: &NodeState, gpu: GpuIndex) -> Option<String> {
    let all = survey.reservations(&state.node().name);
    let own = all.iter().filter(|(_, kept)| kept.iter().any(|(index, _)| *index == gpu));
    let whom: Vec<String> = own.map(|(reservation, _)| reservation.beneficiary()).collect();
    (!whom.is_empty()).then(|| format!("reserved for {}", whom.join(", ")))
}

/// Lists the reservations of a node, one line each.
pub(crate) fn reservations(survey: &Survey, node: &NodeName) -> String {
    let line = |(reservation, kept): &(&NodeReservation, Vec<(GpuIndex, GpuUsage)>)| {
        let gpus: Vec<String> = kept.iter().map(|(gpu, _)| gpu.to_string()).collect();
        let free =
            if gpus.is_empty() { "none is free yet".to_owned() } else { format!("GPU {}", gpus.join(",")) };
        let (count, whom) = (Count(reservation.gpus.len(), "GPU"), reservation.beneficiary());
        format!("  {count} reserved for {whom} until {}: {free}\n", reservation.until)
    };
    survey.reservations(node).iter().map(line).collect()
}

fn waiting(text: &mut String, pods: &[Pod], form: OverviewForm) {
    if pods.is_empty() {
        return;
    }
    let verb = if pods.len() == 1 { "waits" } else { "wait" };
    let heading = form.paint.notable(&format!("{} {verb} for GPUs:", Count(pods.len(), "pod")));
    let _ = writeln!(text, "\n{heading}");
    let name = |pod: &Pod| format!("{}/{}", pod.metadata.namespace, pod.metadata.name);
    let wide = pods.iter().map(|pod| width(&name(pod))).max().unwrap_or(0).min(40);
    for pod in pods {
        let since = age(pod.metadata.creation_timestamp.as_deref(), form.now_seconds);
        let report = match &pod.status.conditions.unscheduled {
            Some(report) if report.message.is_empty() => report.reason.clone(),
            Some(report) => report.message.clone(),
            None => unreported(pod.spec.scheduler()),
        };
        let _ = writeln!(text, "  {:wide$}  {since:>4}  {report}", cut(&name(pod), wide));
    }
}

/// Formats memory in GiB, or in MiB below one GiB.
pub(crate) fn gib(memory: MiB) -> String {
    match memory.0 {
        mib @ 1..1024 => format!("{mib} MiB"),
        mib => format!("{} GiB", mib / 1024),
    }
}
