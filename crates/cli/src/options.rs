//! Options that several questions share.

use std::path::PathBuf;

use clap::Args;
use tessera_cluster::Selection;
use tessera_wire::foreign::dialect::MemoryUnit;

/// Whom to ask.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Whom to ask")]
pub(crate) struct Reach {
    /// The kubeconfig; $KUBECONFIG, ~/.kube/config or the pod's own account where absent.
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// The context of the kubeconfig; its current one where absent.
    #[arg(long, value_name = "NAME", global = true)]
    pub(crate) context: Option<String>,

    /// Ask a scheduler instead of the API server, by its `inspect`: http://HOST:PORT, or with the path of an original extender.
    #[arg(long, value_name = "URL", global = true)]
    pub(crate) endpoint: Option<String>,

    /// What one aliyun.com/gpu-mem is on nodes that do not say: GiB, MiB or, say, 256MiB.
    #[arg(long, value_name = "UNIT", global = true)]
    pub(crate) memory_unit: Option<MemoryUnit>,
}

/// Which nodes to show.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct Selecting {
    /// Only this node; `node/NAME`, as -o name prints it, will do too.
    #[arg(value_parser = node_name)]
    pub(crate) node: Option<String>,

    /// Only nodes with these labels.
    #[arg(short = 'l', long, value_name = "KEY=VALUE,...", conflicts_with = "node")]
    pub(crate) selector: Option<String>,

    /// Only nodes with these fields, such as spec.unschedulable=false.
    #[arg(long, value_name = "FIELD=VALUE,...", conflicts_with = "node")]
    pub(crate) field_selector: Option<String>,
}

#[expect(clippy::unnecessary_wraps, reason = "what a parser of arguments answers with")]
fn node_name(typed: &str) -> Result<String, std::convert::Infallible> {
    Ok(typed.strip_prefix("node/").or_else(|| typed.strip_prefix("nodes/")).unwrap_or(typed).to_owned())
}

impl Selecting {
    /// The nodes meant.
    pub(crate) fn nodes(&self) -> Selection {
        let fields = match &self.node {
            Some(node) => Some(format!("metadata.name={node}")),
            None => self.field_selector.clone(),
        };
        Selection { labels: self.selector.clone(), fields }
    }

    /// The pods on them that may hold something; those of other nodes are passed over later.
    pub(crate) fn pods(&self) -> Selection {
        let living = "status.phase!=Succeeded,status.phase!=Failed";
        let fields = match &self.node {
            Some(node) => format!("spec.nodeName={node},{living}"),
            None => living.to_owned(),
        };
        Selection { labels: None, fields: Some(fields) }
    }
}
