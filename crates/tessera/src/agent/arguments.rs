//! What `tessera agent` can be told.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tessera_agent::controller::WithoutLibrary;
use tessera_core::placement::Policy;
use tessera_limits::limits::ShareMeaning;
use tessera_node::gpus::GpuSource;
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit};
use tessera_wire::kubelet::container_response::VisibleDevices;

use super::health_checks::DisabledChecks;
use crate::log::LogArguments;
use crate::metrics::SamplingArguments;
use crate::values::Listen;

/// Groups of flags in the help, by what a reader looks for.
const OFFERED: &str = "What is offered";
const HANDED: &str = "How containers get their GPUs";
const SHARES: &str = "Shares, and what holds containers to them";
const KUBELET: &str = "The kubelet";
const HEALTH: &str = "Health";

/// Offers the GPUs of this node to its kubelet, hands them to containers, and keeps the books true.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  NODE_NAME=node-1 tessera agent                              # in a pod: deploy/agent
  tessera agent --node-name node-1 --kubeconfig admin.conf    # outside of one, as root
  tessera agent --node-name node-1 --gpus simulated:node.txt  # without a GPU, like another machine
  NODE_NAME=node-1 tessera agent --dialects gpushare          # aliyun.com/gpu-mem alone

Flags of gpu-manager and of gpushare's device plugin are understood too: docs/agent.md.")]
pub(crate) struct Arguments {
    /// The node's name in Kubernetes
    #[arg(long, value_name = "NAME", env = "NODE_NAME", alias = "hostname-override")]
    pub(super) node_name: String,

    /// How to reach the API server; the pod's service account, or the user's kubeconfig, where absent
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub(super) kubeconfig: Option<PathBuf>,

    /// Where the GPUs come from: nvml, or simulated:FILE
    #[arg(long, value_name = "SOURCE", default_value = "nvml")]
    pub(super) gpus: GpuSource,

    /// The vocabularies to serve, separated by commas
    #[arg(long, value_name = "NAMES", help_heading = OFFERED, value_enum, value_delimiter = ',', default_values = ["gputopology", "gpushare", "vcuda"])]
    pub(super) dialects: Vec<DialectName>,

    /// The unit of aliyun.com/gpu-mem on this node: GiB, MiB, or a number of MiB such as 256MiB
    #[arg(long, value_name = "UNIT", help_heading = OFFERED, default_value = "GiB")]
    pub(super) memory_unit: MemoryUnit,

    /// How GPUs are chosen for pods that nobody placed
    #[arg(long, value_name = "NAME", help_heading = OFFERED, default_value = "tessera")]
    pub(super) policy: Policy,

    /// What names a GPU in NVIDIA_VISIBLE_DEVICES
    #[arg(long, value_name = "WHICH", help_heading = HANDED, value_enum, default_value = "uuid", alias = "device-id-strategy")]
    pub(super) visible_devices: VisibleName,

    /// How containers get their GPUs: by NVIDIA_VISIBLE_DEVICES, or by CDI names
    #[arg(long, value_name = "HOW", help_heading = HANDED, value_enum, default_value = "envvar")]
    pub(super) device_list_strategy: Strategy,

    /// The CDI kind of the GPUs
    #[arg(long, value_name = "KIND", help_heading = HANDED, default_value = "nvidia.com/gpu")]
    pub(super) cdi_kind: String,

    /// A directory with the driver's libraries, mounted at /usr/local/nvidia into vcuda containers
    #[arg(long, value_name = "DIRECTORY", help_heading = HANDED)]
    pub(super) driver_directory: Option<String>,

    /// Where pages are served, such as :5678 or 127.0.0.1:5678; "off" for none
    #[arg(long, value_name = "ADDRESS", default_value = ":5678")]
    pub(super) listen: Listen,

    /// Old name of the port in --listen
    #[arg(long, hide = true)]
    pub(super) query_port: Option<u16>,

    /// Old name of the address in --listen
    #[arg(long, hide = true)]
    pub(super) query_addr: Option<String>,

    /// Where others reach these pages, written to the node as tessera.dev/agent, such as http://10.0.0.5:5678
    /// [default: the address in POD_IP or HOST_IP with the port of --listen, else none]
    #[arg(long, value_name = "URL")]
    pub(super) advertise: Option<String>,

    #[command(flatten)]
    pub(super) sampling: SamplingArguments,

    /// Labels to set on the node: key=value,key=value
    #[arg(long, value_name = "KEY=VALUE,...", help_heading = OFFERED, default_value = "")]
    pub(super) node_labels: String,

    /// The node's type; otherwise its label node.kubernetes.io/instance-type is used
    #[arg(long, value_name = "TYPE", help_heading = OFFERED)]
    pub(super) instance_type: Option<String>,

    /// A URL that answers with the node's type, asked once at the start if --instance-type is not given
    #[arg(long, value_name = "URL", help_heading = OFFERED)]
    pub(super) instance_type_url: Option<String>,

    /// Where limits of containers are written
    #[arg(long, value_name = "DIRECTORY", help_heading = SHARES, default_value = "/var/lib/tessera/grants", alias = "virtual-manager-path")]
    pub(super) grants: String,

    /// libtessera.so, which holds containers to their shares [default: beside this program]
    #[arg(long, value_name = "FILE", help_heading = SHARES)]
    pub(super) library: Option<PathBuf>,

    /// What becomes of shares when there is no library
    #[arg(long, value_name = "WHAT", help_heading = SHARES, value_enum, default_value = "refuse")]
    pub(super) without_library: Without,

    /// Whether a pod with the annotation tessera.dev/isolation=off is not held to its share
    #[arg(long, help_heading = SHARES)]
    pub(super) allow_opt_out: bool,

    /// Whether processes that use GPUs, or memory of them, that they were not given are killed
    #[arg(long, help_heading = SHARES)]
    pub(super) kill_escaped: bool,

    /// What a percentage of compute means: of the GPU's time, or of what the work would reach alone
    #[arg(long, value_name = "WHAT", help_heading = SHARES, value_enum, default_value = "time")]
    pub(super) share_means: ShareMeans,

    /// Where descriptions of CDI devices are read by the runtime, for --device-list-strategy cdi-cri
    #[arg(long, value_name = "DIRECTORY", help_heading = HANDED, default_value = "/var/run/cdi")]
    pub(super) cdi_directory: PathBuf,

    /// The kubelet's root directory
    #[arg(long, value_name = "DIRECTORY", help_heading = KUBELET, default_value = "/var/lib/kubelet")]
    pub(super) kubelet_root: PathBuf,

    /// Where kubelet.sock is, for --registration kubelet-socket [default: device-plugins in the kubelet's root]
    #[arg(long, value_name = "DIRECTORY", help_heading = KUBELET)]
    pub(super) device_plugin_path: Option<PathBuf>,

    /// How plugins and kubelet meet
    #[arg(long, value_name = "HOW", help_heading = KUBELET, value_enum, default_value = "auto")]
    pub(super) registration: Registration,

    /// How long a GPU must stay quiet after a passing trouble, in seconds
    #[arg(long, help_heading = HEALTH, default_value = "300", value_name = "SECONDS")]
    pub(super) quiet_time: u64,

    /// Whether GPUs are watched for errors
    #[arg(long, value_name = "YES", help_heading = HEALTH, default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(super) health_check: bool,

    /// Errors not to watch for, as in NVIDIA's plugin: "all" or "xids" for none at all, or a list of XIDs such as 63,94
    #[arg(long, value_name = "KINDS", help_heading = HEALTH, env = "DP_DISABLE_HEALTHCHECKS", default_value = "")]
    pub(super) disable_health_checks: DisabledChecks,

    /// The only driver there is, as gpu-manager was told
    #[arg(long, hide = true, default_value = "nvidia", value_parser = ["nvidia"])]
    pub(super) driver: String,

    #[command(flatten)]
    pub(super) log: LogArguments,

    /// Old flags that were given and do nothing
    #[arg(long, hide = true)]
    pub(super) no_effect: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum DialectName {
    Nvidia,
    Gputopology,
    Gpushare,
    Vcuda,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum VisibleName {
    Uuid,
    Index,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Strategy {
    Envvar,
    CdiCri,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Without {
    /// Containers that ask for a share are refused
    Refuse,
    /// They are served, and nothing holds them to their share
    Serve,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum ShareMeans {
    /// 30 is 30 % of the GPU's time
    Time,
    /// 30 is 30 % of what the same work reaches alone: counts the higher clock of work that is limited by power
    Throughput,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Registration {
    /// plugins_registry where the kubelet has one, else kubelet.sock
    Auto,
    /// The kubelet comes to the plugins
    PluginsRegistry,
    /// The plugins go to the kubelet
    KubeletSocket,
}

impl From<DialectName> for Dialect {
    fn from(name: DialectName) -> Self {
        match name {
            DialectName::Nvidia => Self::Nvidia,
            DialectName::Gputopology => Self::Gputopology,
            DialectName::Gpushare => Self::Gpushare,
            DialectName::Vcuda => Self::Vcuda,
        }
    }
}

impl From<VisibleName> for VisibleDevices {
    fn from(name: VisibleName) -> Self {
        match name {
            VisibleName::Uuid => Self::Uuid,
            VisibleName::Index => Self::Index,
        }
    }
}

impl From<Without> for WithoutLibrary {
    fn from(what: Without) -> Self {
        match what {
            Without::Refuse => Self::Refuse,
            Without::Serve => Self::Serve,
        }
    }
}

impl From<ShareMeans> for ShareMeaning {
    fn from(what: ShareMeans) -> Self {
        match what {
            ShareMeans::Time => Self::Time,
            ShareMeans::Throughput => Self::Throughput,
        }
    }
}
