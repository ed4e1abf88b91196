//! What users type.

use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};

use crate::options::{Reach, Selecting};

/// Shows the GPUs of the cluster: how many each node has, how many are used, what joins them; and why a pod waits.
///
/// Reads nodes and pods with your own kubeconfig. No scheduler and no agent need run, but `top` asks the agents.
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
    reach: Reach,
}

const GPU_EXAMPLES: &str = "\
Examples:
  # GPUs of every node, and how many of them are used
  kubectl inspect gpu

  # One node, with its links
  kubectl inspect gpu -d node-1

  # Why a pod waits, and what would help
  kubectl inspect gpu explain -n team train-0

  # Where a pod with a third of a GPU would go
  kubectl inspect gpu what-if tencent.com/vcuda-core=33,tencent.com/vcuda-memory=20

  # What is really used of what was granted
  kubectl inspect gpu top

  # For scripts
  kubectl inspect gpu -o json -l pool=training";

/// Shows the GPU memory of the cluster: how much of each GPU is promised to pods that share it.
///
/// Reads nodes and pods with your own kubeconfig. `kubectl inspect gpu` tells more: links, why a pod waits, what is really used.
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
    reach: Reach,
}

const SHARE_EXAMPLES: &str = "\
Examples:
  # Memory of every GPU that is shared
  kubectl inspect gpushare

  # With the pods that hold it
  kubectl inspect gpushare -d

  # One node, refreshed when something changes
  kubectl inspect gpushare -w node-1";

/// How nodes are shown.
#[derive(Clone, Debug, Args)]
pub(crate) struct View {
    #[command(flatten)]
    pub(crate) selecting: Selecting,

    /// Show details: links and instance type of each node, or the pods on its GPUs.
    #[arg(short = 'd', long)]
    pub(crate) details: bool,

    /// Show it in another form; --json is short for -o json.
    #[arg(short, long, value_name = "FORM", conflicts_with = "details")]
    pub(crate) output: Option<Form>,

    /// Keep showing it, anew after every change.
    #[arg(short, long)]
    pub(crate) watch: bool,

    /// Leave the line with the names of the columns out.
    #[arg(long)]
    pub(crate) no_headers: bool,
}

/// Forms of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    /// Everything, as JSON.
    Json,
    /// Everything, as YAML.
    Yaml,
    /// A table with more columns.
    Wide,
    /// Names of nodes only, as node/NAME.
    Name,
}

/// More questions.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the GPUs of each node as a tree, by what joins them, with what is left of each.
    Tree(Tree),
    /// Tell why a pod waits: what stands in the way on every node, and what would help.
    Explain(Explain),
    /// Tell where a pod with this request would go, and how many of them fit. Exit code 1 where none does.
    WhatIf(WhatIf),
    /// Show what is used of what was granted, as the agents of the nodes measure it now.
    Top(Top),
}

/// Arguments of `tree`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # The GPUs of one node, and who is on each
  kubectl inspect gpu tree node-1 -o wide

  # All nodes of a pool, without asking their agents
  kubectl inspect gpu tree -l pool=training --no-agents")]
pub(crate) struct Tree {
    #[command(flatten)]
    pub(crate) selecting: Selecting,

    /// Name the pods on each GPU.
    #[arg(short, long, value_name = "FORM", value_parser = ["wide"])]
    pub(crate) output: Option<String>,

    /// Do not ask the agents how much memory is really used.
    #[arg(long)]
    pub(crate) no_agents: bool,
}

/// Arguments of `explain`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # Why a pod waits, and what would help
  kubectl inspect gpu explain -n team train-0

  # Every node, also those of which many have the same obstacle
  kubectl inspect gpu explain team/train-0 -o wide

  # For scripts: the nodes that would do
  kubectl inspect gpu explain team/train-0 -o name")]
pub(crate) struct Explain {
    /// The pod's name, or NAMESPACE/NAME.
    pub(crate) pod: String,

    /// The pod's namespace; that of the kubeconfig's context where absent.
    #[arg(short, long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,

    /// Show it in another form; `wide` shows every node, `name` those that would do.
    #[arg(short, long, value_name = "FORM")]
    pub(crate) output: Option<Form>,
}

/// Arguments of `what-if`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # Two GPUs and sixteen processors
  kubectl inspect gpu what-if nvidia.com/gpu=2,cpu=16

  # A third of a GPU and 5 GiB of its memory, against the quota of a team
  kubectl inspect gpu what-if -n team tencent.com/vcuda-core=33 tencent.com/vcuda-memory=20

  # For scripts: whether it fits, by the exit code
  kubectl inspect gpu what-if aliyun.com/gpu-mem=8 -o name && echo fits")]
pub(crate) struct WhatIf {
    /// Resources and amounts, as in a manifest: aliyun.com/gpu-mem=8, or nvidia.com/gpu=2,cpu=16.
    #[arg(required = true, value_name = "RESOURCE=AMOUNT", value_delimiter = ',')]
    pub(crate) request: Vec<String>,

    /// Whose quota it would count against; that of the kubeconfig's context where absent.
    #[arg(short, long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,

    /// Show it in another form; `wide` shows every node, `name` those that would do.
    #[arg(short, long, value_name = "FORM")]
    pub(crate) output: Option<Form>,
}

/// Arguments of `top`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  # What is used of what was granted, shown anew every two seconds
  kubectl inspect gpu top

  # One node, once, for scripts
  kubectl inspect gpu top node-1 -o json")]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) selecting: Selecting,

    /// Show it once, also on a terminal.
    #[arg(long)]
    pub(crate) once: bool,

    /// Seconds between two looks.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) interval: u64,

    /// Show it in another form.
    #[arg(short, long, value_name = "FORM", value_parser = ["json", "yaml"])]
    pub(crate) output: Option<String>,

    /// Leave the line with the names of the columns out.
    #[arg(long)]
    pub(crate) no_headers: bool,
}

/// What either plugin was asked.
#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) reach: Reach,
    pub(crate) question: Question,
}

/// The question.
#[derive(Debug)]
pub(crate) enum Question {
    View(View),
    More(Command),
}

impl Gpu {
    /// What stands before a command belongs to none.
    pub(crate) fn checked(self) -> Result<Self, clap::Error> {
        let View { selecting, details, output, watch, no_headers } = &self.view;
        let plain =
            !details && output.is_none() && !watch && !no_headers && *selecting == Selecting::default();
        if self.command.is_some() && !plain {
            let message = "options and names of nodes come after the command";
            return Err(Self::command().error(clap::error::ErrorKind::ArgumentConflict, message));
        }
        Ok(self)
    }
}

impl From<Gpu> for Arguments {
    fn from(Gpu { view, command, reach }: Gpu) -> Self {
        let question = command.map_or(Question::View(view), Question::More);
        Self { reach, question }
    }
}

impl From<Share> for Arguments {
    fn from(Share { view, reach }: Share) -> Self {
        Self { reach, question: Question::View(view) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_make_sense() {
        Gpu::command().debug_assert();
        Share::command().debug_assert();
    }
}
