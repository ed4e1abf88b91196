//! The command lines of both plugins.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};

use tessera_wire::tessera::eviction;

use crate::options::{NodeSelection, SourceOptions};

/// Shows the GPUs of the cluster: how many each node has, how many are used, their links, and why a
/// pod waits.
///
/// Reads nodes and pods with your kubeconfig. It needs no scheduler and no agents, except for
/// `top`.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-inspect-gpu",
    bin_name = "kubectl inspect gpu",
    version,
    max_term_width = 110,
    subcommand_help_heading = "Commands",
    after_help = GPU_EXAMPLES
)]
pub(crate) struct Gpu {
    #[command(flatten)]
    view: View,
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    source: SourceOptions,
}

const GPU_EXAMPLES: &str = "\
Examples:
  # GPUs of every node, and how many of them are used
  kubectl inspect gpu

  # The cluster at a glance, with bars and waiting pods
  kubectl inspect gpu overview

  # One node with the links between its GPUs
  kubectl inspect gpu -d node-1

  # Why a pod waits, and what would help
  kubectl inspect gpu explain -n team train-0

  # Where a pod with a third of a GPU would go
  kubectl inspect gpu what-if tencent.com/vcuda-core=33,tencent.com/vcuda-memory=20

  # Measured use of each grant
  kubectl inspect gpu top

  # For scripts
  kubectl inspect gpu -o json -l pool=training";

/// Shows the GPU memory of the cluster: how much of each shared GPU is allocated to pods.
///
/// Reads nodes and pods with your kubeconfig. `kubectl inspect gpu` shows more: links, why a pod
/// waits, measured use.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-inspect-gpushare",
    bin_name = "kubectl inspect gpushare",
    version,
    max_term_width = 110,
    after_help = SHARE_EXAMPLES
)]
pub(crate) struct Share {
    #[command(flatten)]
    view: View,
    #[command(flatten)]
    source: SourceOptions,
}

const SHARE_EXAMPLES: &str = "\
Examples:
  # Memory of every shared GPU
  kubectl inspect gpushare

  # The same with the pods that hold the memory
  kubectl inspect gpushare -d

  # One node, printed again after every change
  kubectl inspect gpushare -w node-1";

/// Options of the list of nodes.
#[derive(Clone, Debug, Args)]
pub(crate) struct View {
    #[command(flatten)]
    pub(crate) selection: NodeSelection,

    /// Show details: the links and instance type of each node, or the pods on its GPUs.
    #[arg(short = 'd', long)]
    pub(crate) details: bool,

    /// Output format. --json is short for -o json.
    #[arg(short, long, value_name = "FORMAT", conflicts_with = "details")]
    pub(crate) output: Option<OutputFormat>,

    /// Watch the cluster and print again after every change.
    #[arg(short, long)]
    pub(crate) watch: bool,

    /// Omit the line with the column names.
    #[arg(long)]
    pub(crate) no_headers: bool,
}

/// Output formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Everything, as JSON.
    Json,
    /// Everything, as YAML.
    Yaml,
    /// A table with more columns.
    Wide,
    /// Node names only, as node/NAME.
    Name,
}

/// Orders of `top`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortKey {
    /// The busiest first.
    Busy,
    /// The largest use of memory first.
    Memory,
    /// The largest unused part of the granted compute first.
    Waste,
    /// By namespace and name of the pod.
    Pod,
}

/// Subcommands of `kubectl inspect gpu`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show a bar for each GPU, what is free, waiting pods and totals, fitted to the terminal.
    Overview(Overview),
    /// Show the GPUs of each node as a tree of their links, with the free capacity of each GPU.
    Tree(Tree),
    /// Explain why a pod waits: the reason on every node, and what would help.
    Explain(Explain),
    /// Show where a pod with this request would fit, and how many of them. Exits with code 1 if it
    /// fits nowhere.
    WhatIf(WhatIf),
    /// Show the measured use of each grant, as reported by the agents.
    Top(Top),
    /// Keep new pods from GPUs of a node. Pods that run there stay.
    Cordon(Cordon),
    /// Let new pods use GPUs of a node again.
    Uncordon(Cordon),
    /// Plan which pods to move so that waiting pods or a wanted shape fit. Changes nothing without --apply. Exits
    /// with code 1 if no moves help.
    Defragment(Defragment),
}

/// Arguments of `defragment`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # The moves that make room for the pods that wait
  kubectl inspect gpu defragment

  # The moves that give two nodes 8 free GPUs each
  kubectl inspect gpu defragment --shape 2x8

  # Carry out the moves, after a question
  kubectl inspect gpu defragment --apply

  # For scripts
  kubectl inspect gpu defragment --shape 1x8 -o json")]
pub(crate) struct Defragment {
    /// Free GPUs that are wanted, as NODESxGPUS. The default is what the waiting pods request.
    #[arg(long, value_name = "NODESxGPUS", value_parser = parse_shape)]
    pub(crate) shape: Option<Shape>,

    /// Highest priority of pods that may be moved for --shape. For waiting pods it is their own priority.
    #[arg(long, value_name = "PRIORITY", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) max_priority: i32,

    /// Largest number of evictions.
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    pub(crate) max_evictions: usize,

    /// Carry out the moves one after the other, and reserve the freed GPUs meanwhile. Asks before.
    #[arg(long)]
    pub(crate) apply: bool,

    /// Carry out the moves without a question.
    #[arg(long, requires = "apply")]
    pub(crate) yes: bool,

    /// Longest time to wait for a pod to end, to be created again or to be bound: 90s, 5m, 1h.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_time, requires = "apply")]
    pub(crate) step_timeout: Duration,

    /// Time after which the reservations end, even if the command is interrupted.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_time, requires = "apply")]
    pub(crate) reserve_for: Duration,

    /// Leave the reservations of --shape in place until they end.
    #[arg(long, requires = "apply", requires = "shape")]
    pub(crate) keep: bool,

    /// End all reservations that this command has made before, and evict no pods.
    #[arg(long, conflicts_with_all = ["apply", "shape"])]
    pub(crate) release: bool,

    /// Output format.
    #[arg(short, long, value_name = "FORMAT", value_parser = ["json", "yaml"])]
    pub(crate) output: Option<String>,
}

/// A number of nodes with this number of free GPUs each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) nodes: u16,
    pub(crate) gpus: u8,
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let time = eviction::parse_duration(text).filter(|time| !time.is_zero());
    time.ok_or_else(|| format!("{text:?} is not a time; write 90s, 5m or 1h"))
}

fn parse_shape(text: &str) -> Result<Shape, String> {
    let wrong = || format!("{text:?} is not a shape; write NODESxGPUS, such as 2x8");
    let (nodes, gpus) = text.split_once('x').ok_or_else(wrong)?;
    let (nodes, gpus) = (nodes.parse().map_err(|_| wrong())?, gpus.parse().map_err(|_| wrong())?);
    if nodes == 0 || gpus == 0 { Err(wrong()) } else { Ok(Shape { nodes, gpus }) }
}

/// Arguments of `cordon` and `uncordon`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # No new pods on GPU 3 of a node
  kubectl inspect gpu cordon node-1 3

  # New pods again, on two GPUs
  kubectl inspect gpu uncordon node-1 3 GPU-8f2ac1d4-0d3e-4d51-8a53-5b7e3a0c9f11")]
pub(crate) struct Cordon {
    /// Name of the node.
    pub(crate) node: String,

    /// Indexes or UUIDs of GPUs.
    #[arg(required = true, value_name = "GPU")]
    pub(crate) gpus: Vec<String>,
}

/// Arguments of `overview`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # The whole cluster at a glance
  kubectl inspect gpu overview

  # The nodes of a pool, with the pods on each GPU
  kubectl inspect gpu overview -l pool=training -o wide")]
pub(crate) struct Overview {
    #[command(flatten)]
    pub(crate) selection: NodeSelection,

    /// Name the pods on each GPU.
    #[arg(short, long, value_name = "FORMAT", value_parser = ["wide"])]
    pub(crate) output: Option<String>,
}

/// Arguments of `tree`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # The GPUs of one node, with the pods on each GPU
  kubectl inspect gpu tree node-1 -o wide

  # All nodes of a pool, without queries to their agents
  kubectl inspect gpu tree -l pool=training --no-agents")]
pub(crate) struct Tree {
    #[command(flatten)]
    pub(crate) selection: NodeSelection,

    /// Name the pods on each GPU.
    #[arg(short, long, value_name = "FORMAT", value_parser = ["wide"])]
    pub(crate) output: Option<String>,

    /// Do not query the agents for the used memory.
    #[arg(long)]
    pub(crate) no_agents: bool,
}

/// Arguments of `explain`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # Why a pod waits, and what would help
  kubectl inspect gpu explain -n team train-0

  # Every node, including nodes that reject the pod as a whole
  kubectl inspect gpu explain team/train-0 -o wide

  # For scripts: the nodes where the pod fits
  kubectl inspect gpu explain team/train-0 -o name")]
pub(crate) struct Explain {
    /// Name of the pod, or NAMESPACE/NAME.
    pub(crate) pod: String,

    /// Namespace of the pod. The default is the namespace of the kubeconfig's context.
    #[arg(short, long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,

    /// Output format. `wide` shows every node, `name` the nodes where the pod fits.
    #[arg(short, long, value_name = "FORMAT")]
    pub(crate) output: Option<OutputFormat>,
}

/// Arguments of `what-if`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # Two GPUs and sixteen CPUs
  kubectl inspect gpu what-if nvidia.com/gpu=2,cpu=16

  # A third of a GPU and 5 GiB of its memory, checked against the quota of a team
  kubectl inspect gpu what-if -n team tencent.com/vcuda-core=33 tencent.com/vcuda-memory=20

  # 8000 MiB of each of two GPUs of one NUMA node
  kubectl inspect gpu what-if nvidia.com/gpu=2,nvidia.com/gpumem=8000 -a tessera.dev/numa-bind=true

  # For scripts: whether it fits, by the exit code
  kubectl inspect gpu what-if aliyun.com/gpu-mem=8 -o name && echo fits")]
pub(crate) struct WhatIf {
    /// Resources and amounts, as in a manifest: aliyun.com/gpu-mem=8, or nvidia.com/gpu=2,cpu=16.
    #[arg(required = true, value_name = "RESOURCE=AMOUNT", value_delimiter = ',')]
    pub(crate) request: Vec<String>,

    /// Annotation of the pod, such as tessera.dev/use-gpu-models=A100. May be given several times.
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub(crate) annotation: Vec<String>,

    /// Namespace whose quota applies. The default is the namespace of the kubeconfig's context.
    #[arg(short, long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,

    /// Output format. `wide` shows every node, `name` the nodes where the pod fits.
    #[arg(short, long, value_name = "FORMAT")]
    pub(crate) output: Option<OutputFormat>,
}

/// Arguments of `top`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # Measured use of each grant, refreshed every two seconds
  kubectl inspect gpu top

  # The ten containers that waste most of their grant, once
  kubectl inspect gpu top --sort waste -n 10 --once

  # One node, once, for scripts
  kubectl inspect gpu top node-1 -o json")]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) selection: NodeSelection,

    /// List only containers, in this order.
    #[arg(long, value_name = "KEY")]
    pub(crate) sort: Option<SortKey>,

    /// List at most this many containers, and no lines of whole GPUs.
    #[arg(short = 'n', long, value_name = "COUNT")]
    pub(crate) rows: Option<usize>,

    /// Print once, even on a terminal.
    #[arg(long)]
    pub(crate) once: bool,

    /// Seconds between two measurements.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) interval: u64,

    /// Output format.
    #[arg(short, long, value_name = "FORMAT", value_parser = ["json", "yaml"])]
    pub(crate) output: Option<String>,

    /// Omit the line with the column names.
    #[arg(long)]
    pub(crate) no_headers: bool,
}

/// Rewrites the words of a command line that the original tools accept and clap does not: flags of Go have one
/// dash or two, and may have a value. `--json` is short for `--output=json`.
pub(crate) fn normalize(words: Vec<OsString>) -> Vec<OsString> {
    let rewrite = |(place, word): (usize, OsString)| match word.to_str().filter(|_| place > 0) {
        Some("--json") => Some("--output=json".into()),
        Some("-help") => Some("--help".into()),
        Some("--d" | "-d=true" | "--d=true") => Some("-d".into()),
        Some("-d=false" | "--d=false") => None,
        _ => Some(word),
    };
    words.into_iter().enumerate().filter_map(rewrite).collect()
}

/// Parsed command line of either plugin.
#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) source: SourceOptions,
    pub(crate) action: CliAction,
}

/// What the plugin is to do.
#[derive(Debug)]
pub(crate) enum CliAction {
    List(View),
    Run(Command),
}

impl Gpu {
    /// Rejects options and node names before a subcommand, because no subcommand would use them.
    pub(crate) fn checked(self) -> Result<Self, clap::Error> {
        let View { selection, details, output, watch, no_headers } = &self.view;
        let plain =
            !details && output.is_none() && !watch && !no_headers && *selection == NodeSelection::default();
        if self.command.is_some() && !plain {
            let message = "write options and node names after the subcommand";
            return Err(Self::command().error(clap::error::ErrorKind::ArgumentConflict, message));
        }
        Ok(self)
    }
}

impl From<Gpu> for Arguments {
    fn from(Gpu { view, command, source }: Gpu) -> Self {
        let action = command.map_or(CliAction::List(view), CliAction::Run);
        Self { source, action }
    }
}

impl From<Share> for Arguments {
    fn from(Share { view, source }: Share) -> Self {
        Self { source, action: CliAction::List(view) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_in_the_form_of_the_original_tools_are_accepted() {
        let normalized = |line: &str| {
            let words = normalize(line.split(' ').map(OsString::from).collect());
            words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(normalized("inspect -d node-1"), "inspect -d node-1");
        assert_eq!(normalized("inspect --d -d=true --d=true"), "inspect -d -d -d");
        assert_eq!(normalized("inspect -d=false node-1"), "inspect node-1");
        assert_eq!(normalized("inspect -help"), "inspect --help");
        assert_eq!(normalized("inspect --json"), "inspect --output=json");
        for line in ["inspect -h", "inspect -help", "inspect --help"] {
            let words = normalize(line.split(' ').map(OsString::from).collect());
            let help = Share::try_parse_from(words).unwrap_err();
            assert_eq!(help.kind(), clap::error::ErrorKind::DisplayHelp, "{line}");
            let text = help.to_string();
            assert!(
                text.contains("Usage: kubectl inspect gpushare") && text.contains("-d, --details"),
                "{text}"
            );
        }
    }

    #[test]
    fn both_command_lines_are_valid() {
        Gpu::command().debug_assert();
        Share::command().debug_assert();
    }
}
