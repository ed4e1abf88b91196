//! The command line of `tessera agent`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tessera_agent::controller::{MigStrategy, WithoutLibrary};
use tessera_core::placement::Policy;
use tessera_limits::limits::ShareMeaning;
use tessera_node::gpus::GpuSource;
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit};
use tessera_wire::kubelet::container_response::VisibleDevices;

use super::health_checks::DisabledChecks;
use crate::log::LogArguments;
use crate::metrics::SamplingArguments;
use crate::profile_page::ProfileArguments;
use crate::values::{self, Listen};

/// Headings of the flags in the help.
const OFFERED: &str = "Offered resources";
const HANDED: &str = "GPUs in containers";
const SHARES: &str = "Shares and their enforcement";
const KUBELET: &str = "The kubelet";
const HEALTH: &str = "Health";

/// Offers the GPUs of this node to its kubelet, assigns them to containers and enforces shares
#[derive(Debug, Args)]
// The start script of gpu-manager appends EXTRA_FLAGS to set a flag again, and there the last value counts.
#[command(
    args_override_self = true,
    after_help = "Examples:
  NODE_NAME=node-1 tessera agent                              # in a pod: deploy/agent
  tessera agent --node-name node-1 --kubeconfig admin.conf    # outside of one, as root
  tessera agent --node-name node-1 --gpus simulated:node.txt  # simulated GPUs of another host
  NODE_NAME=node-1 tessera agent --dialects gpushare          # aliyun.com/gpu-mem only

Flags of gpu-manager and of gpushare's device plugin are accepted too: docs/agent.md."
)]
pub(crate) struct Arguments {
    /// Name of the node in Kubernetes
    #[arg(long, value_name = "NAME", env = "NODE_NAME", alias = "hostname-override", value_parser = values::node_name)]
    pub(super) node_name: String,

    /// Kubeconfig of the API server; $KUBECONFIG, the user's or the pod's service account if absent
    #[arg(long, value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,

    /// Source of the GPUs: nvml, or simulated:FILE
    #[arg(long, value_name = "SOURCE", default_value = "nvml")]
    pub(super) gpus: GpuSource,

    /// Interface through which pods get GPUs: device plugins, claims of dynamic resource allocation, or both
    #[arg(long, value_name = "WHAT", help_heading = OFFERED, value_enum, default_value = "plugins")]
    pub(super) offer: Offer,

    /// Dialects to serve, separated by commas; one whose resource another plugin of the node serves is left out
    #[arg(long, value_name = "NAMES", help_heading = OFFERED, value_enum, value_delimiter = ',', default_values = ["nvidia", "gputopology", "gpushare", "vcuda"])]
    pub(super) dialects: Vec<DialectName>,

    /// Unit of aliyun.com/gpu-mem on this node: GiB, MiB, or a number of MiB such as 256MiB
    #[arg(long, value_name = "UNIT", help_heading = OFFERED, default_value = "GiB")]
    pub(super) memory_unit: MemoryUnit,

    /// Devices of nvidia.com/gpu per GPU with the dialect hami: the most containers that share a GPU by it
    #[arg(long, value_name = "COUNT", help_heading = OFFERED, default_value = "10", alias = "device-split-count", value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) nvidia_slots: u16,

    /// Report devices as unhealthy while pods of other dialects hold their part of a GPU
    #[arg(long, value_name = "YES", help_heading = OFFERED, default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(super) withdraw_held: bool,

    /// How instances of GPUs in MIG mode are offered
    #[arg(long, value_name = "STRATEGY", help_heading = OFFERED, value_enum, default_value = "none", env = "MIG_STRATEGY")]
    pub(super) mig_strategy: MigInstances,

    /// Policy for pods that bypassed the scheduler
    #[arg(long, value_name = "NAME", help_heading = OFFERED, default_value = "tessera")]
    pub(super) policy: Policy,

    /// Identifier of GPUs in NVIDIA_VISIBLE_DEVICES
    #[arg(long, value_name = "WHICH", help_heading = HANDED, value_enum, default_value = "uuid", alias = "device-id-strategy")]
    pub(super) visible_devices: VisibleName,

    /// How containers receive their GPUs and the library
    #[arg(long, value_name = "HOW", help_heading = HANDED, value_enum, default_value = "auto")]
    pub(super) device_list_strategy: Strategy,

    /// CDI kind of the GPUs
    #[arg(long, value_name = "KIND", help_heading = HANDED, default_value = "nvidia.com/gpu")]
    pub(super) cdi_kind: String,

    /// Directory with the driver's libraries, mounted at /usr/local/nvidia into vcuda containers
    /// [default: /var/lib/tessera/driver if the agent fills it, else none]
    #[arg(long, value_name = "DIRECTORY", help_heading = HANDED)]
    pub(super) driver_directory: Option<String>,

    /// Root directory of a host without NVIDIA's container runtime. The agent fills the driver directory with the
    /// driver it finds there, and gives it and device nodes to the containers of every dialect
    #[arg(long, value_name = "DIRECTORY", help_heading = HANDED)]
    pub(super) driver_root: Option<PathBuf>,

    /// volume.conf of gpu-manager: driver directories to fill, and their files
    #[arg(long, value_name = "FILE", help_heading = HANDED, conflicts_with = "driver_directory")]
    pub(super) volume_config: Option<PathBuf>,

    /// Extra configuration of gpu-manager: more devices for vcuda containers
    #[arg(long, value_name = "FILE", help_heading = HANDED)]
    pub(super) extra_config: Option<PathBuf>,

    /// Address of the pages, such as :5678 or 127.0.0.1:5678; "off" for none
    #[arg(long, value_name = "ADDRESS", default_value = ":5678")]
    pub(super) listen: Listen,

    /// Who may read the pages
    #[arg(long, value_name = "WHO", value_enum, default_value = "authenticated")]
    pub(super) pages_access: PagesReaders,

    /// Address of /healthz and /readyz for the kubelet, with plain HTTP; "off" for none
    #[arg(long, value_name = "ADDRESS", default_value = ":5679")]
    pub(super) probes_listen: Listen,

    /// Path of a socket for gpu-manager's gRPC interface, such as /var/run/gpu-manager.sock
    #[arg(long, value_name = "PATH")]
    pub(super) manager_socket: Option<PathBuf>,

    /// Old name of the port in --listen
    #[arg(long, hide = true)]
    pub(super) query_port: Option<u16>,

    /// Old name of the address in --listen
    #[arg(long, hide = true)]
    pub(super) query_addr: Option<String>,

    /// URL of the pages for other components, written to the node as tessera.dev/agent, such as
    /// https://10.0.0.5:5678 [default: the address in POD_IP or HOST_IP and the port of the pages]
    #[arg(long, value_name = "URL")]
    pub(super) advertise: Option<String>,

    #[command(flatten)]
    pub(super) sampling: SamplingArguments,

    /// Labels to set on the node: key=value,key=value
    #[arg(long, value_name = "KEY=VALUE,...", help_heading = OFFERED, default_value = "")]
    pub(super) node_labels: String,

    /// Instance type of the node; its label node.kubernetes.io/instance-type if absent
    #[arg(long, value_name = "TYPE", help_heading = OFFERED)]
    pub(super) instance_type: Option<String>,

    /// URL that returns the instance type, read once at the start if --instance-type is not given
    #[arg(long, value_name = "URL", help_heading = OFFERED)]
    pub(super) instance_type_url: Option<String>,

    /// Directory of the containers' limits
    #[arg(long, value_name = "DIRECTORY", help_heading = SHARES, default_value = "/var/lib/tessera/grants", alias = "virtual-manager-path")]
    pub(super) grants: String,

    /// libtessera.so, which enforces shares in containers [default: beside this program]
    #[arg(long, value_name = "FILE", help_heading = SHARES)]
    pub(super) library: Option<PathBuf>,

    /// Serve requests for a share of a GPU; otherwise only whole GPUs
    #[arg(long, value_name = "YES", help_heading = SHARES, default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(super) share_mode: bool,

    /// Treatment of shares if the library is missing
    #[arg(long, value_name = "WHAT", help_heading = SHARES, value_enum, default_value = "refuse")]
    pub(super) without_library: Without,

    /// Do not enforce the share of a pod with the annotation tessera.dev/isolation=off
    #[arg(long, help_heading = SHARES)]
    pub(super) allow_opt_out: bool,

    /// Follow changes of the annotation tencent.com/vcuda-core-limit while a container runs; the
    /// admission policy permits them in namespaces labelled tessera.dev/ceiling-changes=allowed
    #[arg(long, help_heading = SHARES)]
    pub(super) allow_ceiling_changes: bool,

    /// Lend memory of GPUs that no pod was granted to pods with the annotation tessera.dev/gpu-memory-limit
    #[arg(long, value_name = "YES", help_heading = SHARES, default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(super) lend_memory: bool,

    /// What to do about processes that use more of a GPU than they were granted. Every one is reported
    #[arg(long, value_name = "WHAT", help_heading = SHARES, value_enum, default_value = "report")]
    pub(super) on_escape: EscapeAction,

    /// Deprecated: the same as --on-escape kill
    #[arg(long, help_heading = SHARES, hide = true)]
    pub(super) kill_escaped: bool,

    /// Meaning of a percentage of compute: of the GPU's time, or of the throughput of the same work
    /// alone
    #[arg(long, value_name = "WHAT", help_heading = SHARES, value_enum, default_value = "time")]
    pub(super) share_means: ShareMeans,

    /// Directory where the runtime reads CDI devices; /etc/cdi is read too
    #[arg(long, value_name = "DIRECTORY", help_heading = HANDED, default_value = "/var/run/cdi")]
    pub(super) cdi_directory: PathBuf,

    /// Root directory of the kubelet
    #[arg(long, value_name = "DIRECTORY", help_heading = KUBELET, default_value = "/var/lib/kubelet")]
    pub(super) kubelet_root: PathBuf,

    /// Directory of kubelet.sock, for --registration kubelet-socket [default: device-plugins in the
    /// kubelet's root]
    #[arg(long, value_name = "DIRECTORY", help_heading = KUBELET)]
    pub(super) device_plugin_path: Option<PathBuf>,

    /// How plugins register with the kubelet
    #[arg(long, value_name = "HOW", help_heading = KUBELET, value_enum, default_value = "auto")]
    pub(super) registration: Registration,

    /// Time in seconds that a GPU must be free of errors after a transient one
    #[arg(long, help_heading = HEALTH, default_value = "300", value_name = "SECONDS")]
    pub(super) quiet_time: u64,

    /// Watch GPUs for errors
    #[arg(long, value_name = "YES", help_heading = HEALTH, default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(super) health_check: bool,

    /// Ignored errors, as in NVIDIA's plugin: "all" or "xids" for all errors, or a list of XIDs
    /// such as 63,94; "pending-reset" for retired memory that waits for a reset
    #[arg(long, value_name = "KINDS", help_heading = HEALTH, env = "DP_DISABLE_HEALTHCHECKS", default_value = "")]
    pub(super) disable_health_checks: DisabledChecks,

    /// The only supported driver; a flag of gpu-manager
    #[arg(long, hide = true, default_value = "nvidia", value_parser = ["nvidia"])]
    pub(super) driver: String,

    #[command(flatten)]
    pub(super) profile: ProfileArguments,

    #[command(flatten)]
    pub(super) log: LogArguments,

    /// Old flags that were given and have no effect
    #[arg(long, hide = true)]
    pub(super) no_effect: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum PagesReaders {
    /// Callers with a token of Kubernetes and the ClusterRole tessera-agent-reader, by HTTPS
    Authenticated,
    /// Every client that reaches the address, by plain HTTP
    Open,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum DialectName {
    Nvidia,
    Gputopology,
    Gpushare,
    Vcuda,
    Hami,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum VisibleName {
    Uuid,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Offer {
    /// The resources of --dialects by device plugins
    Plugins,
    /// Claims only; pods with nvidia.com/gpu need a DeviceClass with that extendedResourceName
    Dra,
    /// Both; all pods with GPUs must then come through Tessera's scheduler
    Both,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Strategy {
    /// By CDI if the container runtime has it and a specification names the GPUs, else envvar
    Auto,
    /// By NVIDIA_VISIBLE_DEVICES, and the library by mounts
    Envvar,
    /// By CDI names
    CdiCri,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum MigInstances {
    /// Not at all
    None,
    /// As GPUs, such as nvidia.com/gpu, if all instances of the node have one profile
    Single,
    /// As nvidia.com/mig-PROFILE
    Mixed,
}

impl From<MigInstances> for MigStrategy {
    fn from(strategy: MigInstances) -> Self {
        match strategy {
            MigInstances::None => Self::None,
            MigInstances::Single => Self::Single,
            MigInstances::Mixed => Self::Mixed,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Without {
    /// Reject containers that request a share
    Refuse,
    /// Serve them without enforcing their share
    Serve,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum EscapeAction {
    /// Record an event for the pod and count it
    Report,
    /// Also stop and continue the process, so that it gets no more than its share of time
    Throttle,
    /// Also kill the process
    Kill,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum ShareMeans {
    /// 30 means 30 % of the GPU's time
    Time,
    /// 30 means 30 % of the throughput of the same work alone, which includes the higher clock of
    /// power-limited work
    Throughput,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Registration {
    /// plugins_registry if the kubelet has one, else kubelet.sock
    Auto,
    /// The kubelet connects to the plugins
    PluginsRegistry,
    /// The plugins connect to the kubelet
    KubeletSocket,
}

impl From<DialectName> for Dialect {
    fn from(name: DialectName) -> Self {
        match name {
            DialectName::Nvidia => Self::Nvidia,
            DialectName::Gputopology => Self::Gputopology,
            DialectName::Gpushare => Self::Gpushare,
            DialectName::Vcuda => Self::Vcuda,
            DialectName::Hami => Self::Hami,
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
