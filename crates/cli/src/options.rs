//! Options that several subcommands share.

use std::path::PathBuf;

use clap::Args;
use tessera_cluster::Selection;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::tessera::rules;

/// Options that select the source of the data.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Data source")]
pub(crate) struct SourceOptions {
    /// Kubeconfig file. The default is $KUBECONFIG, ~/.kube/config or, in a pod, its service
    /// account.
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig. The default is its current context.
    #[arg(long, value_name = "NAME", global = true)]
    pub(crate) context: Option<String>,

    /// Query a scheduler instead of the API server: http://HOST:PORT, optionally with the path of an
    /// extender's `inspect` endpoint.
    #[arg(long, value_name = "URL", global = true)]
    pub(crate) endpoint: Option<String>,

    /// Namespace of the scheduler, through which `top` and `tree` read agents that need a token.
    #[arg(long, value_name = "NAME", global = true, default_value = rules::LEASE.0)]
    pub(crate) scheduler_namespace: String,

    /// Unit of aliyun.com/gpu-mem on nodes that do not publish theirs: GiB, MiB or a number such as
    /// 256MiB.
    #[arg(long, value_name = "UNIT", global = true)]
    pub(crate) memory_unit: Option<MemoryUnit>,
}

/// Options that select nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct NodeSelection {
    /// Show only this node: NAME or node/NAME, which -o name prints.
    #[arg(value_parser = node_name)]
    pub(crate) node: Option<String>,

    /// Show only nodes with these labels.
    #[arg(short = 'l', long, value_name = "KEY=VALUE,...", conflicts_with = "node")]
    pub(crate) selector: Option<String>,

    /// Show only nodes with these fields, such as spec.unschedulable=false.
    #[arg(long, value_name = "FIELD=VALUE,...", conflicts_with = "node")]
    pub(crate) field_selector: Option<String>,
}

#[expect(clippy::unnecessary_wraps, reason = "clap requires a Result")]
fn node_name(typed: &str) -> Result<String, std::convert::Infallible> {
    Ok(typed.strip_prefix("node/").or_else(|| typed.strip_prefix("nodes/")).unwrap_or(typed).to_owned())
}

impl NodeSelection {
    /// Returns the selection of nodes for the API server.
    pub(crate) fn nodes(&self) -> Selection {
        let fields = match &self.node {
            Some(node) => Some(format!("metadata.name={node}")),
            None => self.field_selector.clone(),
        };
        Selection { labels: self.selector.clone(), fields }
    }

    /// Returns the selection of running and waiting pods. Label selectors cannot select pods by
    /// node, so pods of other nodes are skipped later.
    pub(crate) fn pods(&self) -> Selection {
        let living = "status.phase!=Succeeded,status.phase!=Failed";
        let fields = match &self.node {
            Some(node) => format!("spec.nodeName={node},{living}"),
            None => living.to_owned(),
        };
        Selection { labels: None, fields: Some(fields) }
    }
}
