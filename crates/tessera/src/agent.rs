//! `tessera agent`: the daemon on a node with GPUs.

pub(crate) mod old_flags;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use tessera_agent::machine::{Isolation, Library, Settings, WithoutLibrary};
use tessera_agent::shell::{self, Ports, install_library};
use tessera_cluster::node_agent::NodeClient;
use tessera_core::placement::Policy;
use tessera_core::units::NodeName;
use tessera_limits::limits::Meaning;
use tessera_node::device_plugin::Meeting;
use tessera_node::gpus::Source;
use tessera_wire::dialect::{Dialect, MemoryUnit};
use tessera_wire::hand_over::{HandOver, VisibleDevices};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::metrics::SamplingArguments;

/// Offers the GPUs of this node to its kubelet, hands them to containers, and keeps the books true.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The node's name in Kubernetes
    #[arg(long, env = "NODE_NAME", alias = "hostname-override")]
    node_name: String,

    /// How to reach the API server; without it as the pod this runs in
    #[arg(long, env = "KUBECONFIG")]
    kubeconfig: Option<PathBuf>,

    /// Where the GPUs come from: nvml, or simulated:FILE
    #[arg(long, default_value = "nvml")]
    gpus: Source,

    /// The vocabularies to serve
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["gputopology", "gpushare", "vcuda"])]
    dialects: Vec<DialectName>,

    /// The unit of aliyun.com/gpu-mem on this node: GiB, MiB, or a number of MiB such as 256MiB
    #[arg(long, default_value = "GiB")]
    memory_unit: MemoryUnit,

    /// How GPUs are chosen for pods that nobody placed
    #[arg(long, default_value = "tessera")]
    policy: Policy,

    /// What names a GPU in NVIDIA_VISIBLE_DEVICES
    #[arg(long, value_enum, default_value = "uuid", alias = "device-id-strategy")]
    visible_devices: VisibleName,

    /// How containers get their GPUs: by NVIDIA_VISIBLE_DEVICES, or by CDI names
    #[arg(long, value_enum, default_value = "envvar")]
    device_list_strategy: Strategy,

    /// The CDI kind of the GPUs
    #[arg(long, default_value = "nvidia.com/gpu")]
    cdi_kind: String,

    /// A directory with the driver's libraries, mounted at /usr/local/nvidia into vcuda containers
    #[arg(long)]
    driver_directory: Option<String>,

    /// Where pages are served, such as :5678 or 127.0.0.1:5678; "off" for none
    #[arg(long, default_value = ":5678")]
    listen: String,

    /// Old name of the port in --listen
    #[arg(long, hide = true)]
    query_port: Option<u16>,

    /// Old name of the address in --listen
    #[arg(long, hide = true)]
    query_addr: Option<String>,

    /// Where others reach these pages, written to the node as tessera.dev/agent, such as http://10.0.0.5:5678
    /// [default: the address in HOST_IP or POD_IP with the port of --listen, else none]
    #[arg(long, value_name = "URL")]
    advertise: Option<String>,

    #[command(flatten)]
    sampling: SamplingArguments,

    /// Labels to set on the node: key=value,key=value
    #[arg(long, default_value = "")]
    node_labels: String,

    /// The node's type; otherwise its label node.kubernetes.io/instance-type is used
    #[arg(long)]
    instance_type: Option<String>,

    /// A URL that answers with the node's type, asked once at the start if --instance-type is not given (plain HTTP)
    #[arg(long)]
    instance_type_url: Option<String>,

    /// Where limits of containers are written
    #[arg(long, default_value = "/var/lib/tessera/grants", alias = "virtual-manager-path")]
    grants: String,

    /// libtessera.so, which holds containers to their shares [default: beside this program]
    #[arg(long)]
    library: Option<PathBuf>,

    /// What becomes of shares when there is no library
    #[arg(long, value_enum, default_value = "refuse")]
    without_library: Without,

    /// Whether a pod with the annotation tessera.dev/isolation=off is not held to its share
    #[arg(long)]
    allow_opt_out: bool,

    /// Whether processes that use GPUs, or memory of them, that they were not given are killed
    #[arg(long)]
    kill_escaped: bool,

    /// What a percentage of compute means: of the GPU's time, or of what the work would reach alone
    #[arg(long, value_enum, default_value = "time")]
    share_means: ShareMeans,

    /// Where descriptions of CDI devices are read by the runtime, for --device-list-strategy cdi-cri
    #[arg(long, default_value = "/var/run/cdi")]
    cdi_directory: PathBuf,

    /// The kubelet's root directory
    #[arg(long, default_value = "/var/lib/kubelet")]
    kubelet_root: PathBuf,

    /// Where kubelet.sock is, for --registration kubelet-socket [default: device-plugins in the kubelet's root]
    #[arg(long)]
    device_plugin_path: Option<PathBuf>,

    /// How plugins and kubelet meet
    #[arg(long, value_enum, default_value = "auto")]
    registration: Registration,

    /// How long a GPU must stay quiet after a passing trouble, in seconds
    #[arg(long, default_value = "300", value_name = "SECONDS")]
    quiet_time: u64,

    /// Whether GPUs are watched for errors
    #[arg(long, default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    health_check: bool,

    /// Errors not to watch for, as in NVIDIA's plugin: "all" or "xids" for none at all, or a list of XIDs such as 63,94
    #[arg(long, env = "DP_DISABLE_HEALTHCHECKS", default_value = "")]
    disable_health_checks: String,

    /// The only driver there is, as gpu-manager was told
    #[arg(long, hide = true, default_value = "nvidia", value_parser = ["nvidia"])]
    driver: String,

    /// Old flags that were given and do nothing
    #[arg(long, hide = true)]
    no_effect: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DialectName {
    Nvidia,
    Gputopology,
    Gpushare,
    Vcuda,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum VisibleName {
    Uuid,
    Index,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Strategy {
    Envvar,
    CdiCri,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Without {
    /// Containers that ask for a share are refused
    Refuse,
    /// They are served, and nothing holds them to their share
    Serve,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShareMeans {
    /// 30 is 30 % of the GPU's time
    Time,
    /// 30 is 30 % of what the same work reaches alone: counts the higher clock of work that is limited by power
    Throughput,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Registration {
    /// plugins_registry where the kubelet has one, else kubelet.sock
    Auto,
    /// The kubelet comes to the plugins
    PluginsRegistry,
    /// The plugins go to the kubelet
    KubeletSocket,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    // The agent mostly waits: two threads keep its memory small and no question of the kubelet behind another.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(serve(arguments))?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(arguments: Arguments) -> Result<()> {
    for name in &arguments.no_effect {
        tracing::info!("--{name} has no effect: {}", old_flags::why(name));
    }
    let listen = address(&arguments)?;
    let grants = std::path::absolute(&arguments.grants)?;
    let isolation = isolation(&arguments, &grants);
    let labels = labels(&arguments.node_labels)?;
    let meeting = meeting(&arguments);
    let advertise = advertise(&arguments, listen)?;
    let sampling = arguments.sampling.settings()?;
    let client = tessera_cluster::connect(arguments.kubeconfig.as_deref()).await?;
    let gpus = arguments.gpus.open();
    let Arguments { instance_type, instance_type_url, .. } = &arguments;
    let instance_type = match (instance_type, instance_type_url) {
        (None, Some(url)) => match instance_type_at(url).await {
            Ok(found) => Some(found),
            Err(error) => {
                tracing::warn!("no instance type from {url}: {error:#}");
                None
            }
        },
        (given, _) => given.clone(),
    };
    let disabled = arguments.disable_health_checks.to_lowercase();
    let settings = Settings {
        node: NodeName(arguments.node_name.clone()),
        dialects: arguments.dialects.iter().map(|name| (*name).into()).collect(),
        memory_unit: arguments.memory_unit,
        policy: arguments.policy,
        hand_over: HandOver {
            visible: match arguments.visible_devices {
                VisibleName::Uuid => VisibleDevices::Uuid,
                VisibleName::Index => VisibleDevices::Index,
            },
            cdi_kind: matches!(arguments.device_list_strategy, Strategy::CdiCri)
                .then_some(arguments.cdi_kind),
            device_nodes: gpus.have_device_nodes(),
            driver_directory: arguments.driver_directory,
            cgpu_disabled: false,
        },
        isolation,
        grants: grants.display().to_string(),
        instance_type,
        labels,
        quiet_time: Duration::from_secs(arguments.quiet_time),
        ignored_xids: disabled.split(',').filter_map(|xid| xid.trim().parse().ok()).collect(),
        advertise,
    };
    let ports = Ports {
        gpus: Arc::from(gpus),
        watch_health: arguments.health_check && disabled != "all" && !disabled.contains("xids"),
        cluster: Arc::new(NodeClient::new(client, arguments.node_name)),
        meeting,
        pod_resources: arguments.kubelet_root.join("pod-resources/kubelet.sock"),
        listen,
        sampling,
    };
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stopped = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stopped.cancel();
    });
    tracing::info!(node = %settings.node, "starting");
    shell::run(settings, ports, stop).await?;
    Ok(())
}

/// The library is put where containers can mount it. What that means if it fails is said now, and again for every container.
fn isolation(arguments: &Arguments, grants: &Path) -> Isolation {
    let beside = || Ok(std::env::current_exe()?.with_file_name(Library::FILE));
    let library = arguments.library.clone().map_or_else(beside, Ok);
    let cdi = matches!(arguments.device_list_strategy, Strategy::CdiCri).then_some(&*arguments.cdi_directory);
    let installed = library
        .map_err(|error: std::io::Error| format!("cannot tell where this program lies: {error}"))
        .and_then(|library| install_library(&library, grants, cdi));
    let without_library = match arguments.without_library {
        Without::Refuse => WithoutLibrary::Refuse,
        Without::Serve => WithoutLibrary::Serve,
    };
    if let Err(reason) = &installed {
        let so = match without_library {
            WithoutLibrary::Refuse => "shares of GPUs will be refused; whole GPUs are served",
            WithoutLibrary::Serve => "SHARES ARE NOT ENFORCED: containers can use all of their GPUs",
        };
        tracing::error!("{reason}: {so}; --library FILE names another place");
    }
    Isolation {
        library: installed,
        without_library,
        allow_opt_out: arguments.allow_opt_out,
        meaning: match arguments.share_means {
            ShareMeans::Time => Meaning::Time,
            ShareMeans::Throughput => Meaning::Throughput,
        },
        kill_escaped: arguments.kill_escaped,
    }
}

/// `:5678` means every address of the node.
fn address(arguments: &Arguments) -> Result<Option<SocketAddr>> {
    let text = match (&arguments.query_addr, arguments.query_port) {
        (None, None) => arguments.listen.clone(),
        (address, port) => {
            let address = address.as_deref().unwrap_or("127.0.0.1").replace("localhost", "127.0.0.1");
            format!("{address}:{}", port.unwrap_or(5678))
        }
    };
    listen_address(&text)
}

/// `:5678`, `127.0.0.1:5678`, or `off`.
pub(crate) fn listen_address(text: &str) -> Result<Option<SocketAddr>> {
    if text == "off" {
        return Ok(None);
    }
    let full = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    let parsed = full.parse().with_context(|| format!("--listen {text}: write :5678 or 127.0.0.1:5678"))?;
    Ok(Some(parsed))
}

/// What is given, or what the pod's environment tells of the node.
fn advertise(arguments: &Arguments, listen: Option<SocketAddr>) -> Result<Option<String>> {
    if let Some(url) = &arguments.advertise {
        let known = url.starts_with("http://") || url.starts_with("https://");
        ensure!(known, "--advertise {url}: write a URL such as http://10.0.0.5:5678");
        return Ok(Some(url.trim_end_matches('/').to_owned()));
    }
    let Some(listen) = listen else { return Ok(None) };
    // On the host network both are the same; otherwise only the pod's own leads here.
    let told =
        ["POD_IP", "HOST_IP"].into_iter().find_map(|name| std::env::var(name).ok()?.parse::<IpAddr>().ok());
    Ok(told.map(|address| format!("http://{}", SocketAddr::new(address, listen.port()))))
}

fn labels(text: &str) -> Result<BTreeMap<String, String>> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair
                .split_once('=')
                .with_context(|| format!("--node-labels: found {pair:?}, expected key=value"))?;
            Ok((key.trim().to_owned(), value.trim().to_owned()))
        })
        .collect()
}

fn meeting(arguments: &Arguments) -> Meeting {
    let registry = arguments.kubelet_root.join("plugins_registry");
    let sockets =
        arguments.device_plugin_path.clone().unwrap_or_else(|| arguments.kubelet_root.join("device-plugins"));
    match arguments.registration {
        Registration::PluginsRegistry => Meeting::PluginsRegistry(registry),
        Registration::KubeletSocket => Meeting::KubeletSocket(sockets),
        Registration::Auto if arguments.device_plugin_path.is_none() && registry.is_dir() => {
            Meeting::PluginsRegistry(registry)
        }
        Registration::Auto => Meeting::KubeletSocket(sockets),
    }
}

/// What a metadata service of a cloud answers: one line over plain HTTP, within two seconds.
async fn instance_type_at(url: &str) -> Result<String> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let rest = url.strip_prefix("http://").context("only http:// is supported")?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let address = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
    let ask = async {
        let mut stream = tokio::net::TcpStream::connect(&address).await?;
        let request = format!("GET /{path} HTTP/1.0\r\nHost: {host}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(65_536).read_to_end(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer = tokio::time::timeout(Duration::from_secs(2), ask).await.context("no answer in time")??;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    let status = head.lines().next().unwrap_or_default();
    ensure!(status.split(' ').nth(1) == Some("200"), "it answered {status:?}");
    let found = body.trim();
    ensure!(!found.is_empty() && found.len() < 256 && !found.contains(['\n', '<']), "it answered {found:?}");
    Ok(found.to_owned())
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
