//! `tessera agent`: the daemon on a node with GPUs.

mod arguments;
mod driver_files;
mod health_checks;
mod injection;
mod instance_type;
mod other_plugins;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tessera_agent::controller::{
    AgentSettings, ClaimSettings, InstalledLibrary, Isolation, LibraryError, OnEscape, WithoutLibrary,
};
use tessera_agent::shell::{self, PagesAccess, PagesPort, Ports, install_library};
use tessera_cluster::node_agent::NodeClient;
use tessera_core::units::NodeName;
use tessera_node::device_plugin::RegistrationMode;
use tessera_wire::kubelet::container_response::InjectionSettings;
use tessera_wire::tessera::agent_address::AgentAddress;
use tokio_util::sync::CancellationToken;

pub(crate) use self::arguments::Arguments;
use self::arguments::{EscapeAction, Offer, PagesReaders, Registration};
use self::driver_files::DriverFiles;
use crate::{host, old_flags, service_manager, values};

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    arguments.log.start()?;
    // The agent mostly waits. Two threads keep its memory small and let it answer two calls of the
    // kubelet at once.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(serve(arguments))?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(arguments: Arguments) -> Result<()> {
    old_flags::log_without_effect(&arguments.no_effect);
    arguments.profile.serve().await?;
    for word in &arguments.disable_health_checks.unknown {
        tracing::warn!(
            word,
            "unknown word in --disable-health-checks is ignored; write all, xids, pending-reset or numbers of XIDs"
        );
    }
    let (labels, advertised) = (labels(&arguments.node_labels)?, advertised(&arguments)?);
    let listen = address(&arguments)?;
    let sampling = arguments.sampling.settings()?;
    let client = tessera_cluster::connect(arguments.kubeconfig.as_deref()).await?;
    let access = match arguments.pages_access {
        PagesReaders::Authenticated => PagesAccess::authenticated(client.clone())?,
        PagesReaders::Open => PagesAccess::Open,
    };
    let node = NodeClient::new(client, arguments.node_name.clone());
    let stop = CancellationToken::new();
    let mut injection = InjectionSettings::default();
    let driver = DriverFiles::new(&arguments, &mut injection)?;
    let gpus = arguments.gpus.open(driver.libraries());
    driver.keep_filled(stop.clone()).await;
    let by_cdi = injection::uses_cdi(&arguments, &*gpus, &node).await;
    let mut settings = AgentSettings { labels, ..settings(&arguments, injection, by_cdi)? };
    let pod_resources = arguments.kubelet_root.join("pod-resources/kubelet.sock");
    (settings.dialects, settings.left_to_others) =
        other_plugins::left_to_us(&settings.dialects, &pod_resources).await;
    let mut pages = None;
    if let Some(address) = listen {
        let (listener, address) = host::listen(address, "--listen").await?;
        let scheme = if arguments.pages_access == PagesReaders::Open { "http" } else { "https" };
        tracing::info!(url = %format_args!("{scheme}://{address}/"), "serving pages");
        if arguments.pages_access == PagesReaders::Open && !address.ip().is_loopback() {
            tracing::warn!(
                %address,
                "every client that reaches this address can read which pods and processes use the GPUs; \
                 use --pages-access authenticated, or restrict it by a NetworkPolicy"
            );
        }
        let certificate = access.fingerprint().map(Ok);
        let url = advertised.or_else(|| reached_at(scheme, address));
        settings.advertise = url.map(|url| AgentAddress { url, certificate });
        pages = Some(PagesPort { listener, access });
    }
    let probes = match arguments.probes_listen.0 {
        Some(address) => {
            let (listener, address) = host::listen(address, "--probes-listen").await?;
            tracing::info!(url = %format_args!("http://{address}/"), "answering probes");
            Some(listener)
        }
        None => None,
    };
    if let (None, Some(url)) = (&settings.instance_type, &arguments.instance_type_url) {
        settings.instance_type = instance_type::fetch(url).await;
    }
    settings.injection.device_nodes = gpus.have_device_nodes();
    let ports = Ports {
        gpus: Arc::from(gpus),
        watch_health: arguments.health_check && !arguments.disable_health_checks.all,
        cluster: Arc::new(node),
        pod_resources,
        pages,
        probes,
        display_socket: arguments.manager_socket,
        sampling,
        leave: CancellationToken::new(),
        on_start: Box::new(|| service_manager::notify("READY=1")),
    };
    let (leave, stopped) = (ports.leave.clone(), stop.clone());
    let asked = host::termination_signal()?;
    tokio::spawn(async move {
        asked.await;
        tracing::info!(
            "stopping: pods that are bound already are admitted first; a second signal stops at once"
        );
        leave.cancel();
        if let Ok(urged) = host::termination_signal() {
            urged.await;
            stopped.cancel();
        }
    });
    tracing::info!(node = %settings.node, "starting the agent");
    shell::run(settings, ports, stop).await?;
    service_manager::notify("STOPPING=1");
    Ok(())
}

/// Returns the settings of the agent that follow from the flags, without labels and address.
fn settings(arguments: &Arguments, injection: InjectionSettings, by_cdi: bool) -> Result<AgentSettings> {
    let grants = std::path::absolute(&arguments.grants)?;
    Ok(AgentSettings {
        node: NodeName(arguments.node_name.clone()),
        dialects: match arguments.offer {
            Offer::Plugins | Offer::Both => arguments.dialects.iter().map(|name| (*name).into()).collect(),
            Offer::Dra => Vec::new(),
        },
        left_to_others: Vec::new(),
        claims: (arguments.offer != Offer::Plugins).then(|| ClaimSettings {
            cdi_directory: arguments.cdi_directory.clone(),
            registry: arguments.kubelet_root.join("plugins_registry"),
            plugins: arguments.kubelet_root.join("plugins"),
        }),
        memory_unit: arguments.memory_unit,
        nvidia_slots: arguments.nvidia_slots,
        withdraw_held: arguments.withdraw_held,
        mig_strategy: arguments.mig_strategy.into(),
        policy: arguments.policy.clone(),
        injection: InjectionSettings {
            visible: arguments.visible_devices.into(),
            cdi_kind: by_cdi.then(|| arguments.cdi_kind.clone()),
            // Set when the GPUs are known.
            device_nodes: false,
            cgpu_disabled: false,
            ..injection
        },
        registration: registration(arguments),
        labels: BTreeMap::new(),
        advertise: None,
        isolation: isolation(arguments, &grants, by_cdi),
        grants: grants.display().to_string(),
        instance_type: arguments.instance_type.clone(),
        quiet_time: Duration::from_secs(arguments.quiet_time),
        ignored_xids: arguments.disable_health_checks.xids.clone(),
        ignore_pending_reset: arguments.disable_health_checks.pending_reset,
    })
}

/// Installs the library where containers can mount it. A failure is logged here, and later for
/// every container that needs the library.
fn isolation(arguments: &Arguments, grants: &Path, by_cdi: bool) -> Isolation {
    let beside = || Ok(std::env::current_exe()?.with_file_name(InstalledLibrary::FILE));
    let library = arguments.library.clone().map_or_else(beside, Ok);
    let cdi = by_cdi.then_some(&*arguments.cdi_directory);
    let installed = library
        .map_err(|error: std::io::Error| LibraryError::OwnPath(error.to_string()))
        .and_then(|library| install_library(&library, grants, cdi));
    let without_library = arguments.without_library.into();
    if let Err(reason) = &installed {
        let so = match without_library {
            WithoutLibrary::Refuse => "containers with a share of a GPU are rejected, whole GPUs are served",
            WithoutLibrary::Serve => "SHARES ARE NOT ENFORCED: containers can use all of their GPUs",
        };
        tracing::error!(
            error = %reason,
            "cannot install libtessera.so; {so}; --library FILE names another file"
        );
    }
    Isolation {
        library: installed,
        without_library,
        serve_shares: arguments.share_mode,
        allow_opt_out: arguments.allow_opt_out,
        allow_ceiling_changes: arguments.allow_ceiling_changes,
        lend_memory: arguments.lend_memory,
        meaning: arguments.share_means.into(),
        on_escape: on_escape(arguments),
    }
}

/// Returns what happens to processes that escape. The old flag takes precedence.
fn on_escape(arguments: &Arguments) -> OnEscape {
    if arguments.kill_escaped {
        tracing::warn!("--kill-escaped is deprecated; use --on-escape kill");
        return OnEscape::Kill;
    }
    match arguments.on_escape {
        EscapeAction::Report => OnEscape::Report,
        EscapeAction::Throttle => OnEscape::Throttle,
        EscapeAction::Kill => OnEscape::Kill,
    }
}

/// Returns the address of the pages. The old flags take precedence over `--listen`.
fn address(arguments: &Arguments) -> Result<Option<SocketAddr>> {
    let (None, None) = (&arguments.query_addr, arguments.query_port) else {
        let address =
            arguments.query_addr.as_deref().unwrap_or("127.0.0.1").replace("localhost", "127.0.0.1");
        let text = format!("{address}:{}", arguments.query_port.unwrap_or(5678));
        let parsed = values::address(&text);
        return Ok(Some(parsed.with_context(|| format!("--query-addr {address}"))?));
    };
    Ok(arguments.listen.0)
}

/// Returns the URL of `--advertise`.
fn advertised(arguments: &Arguments) -> Result<Option<String>> {
    let Some(url) = &arguments.advertise else { return Ok(None) };
    let known = url.starts_with("http://") || url.starts_with("https://");
    ensure!(known, "--advertise {url}: write a URL such as https://10.0.0.5:5678");
    // No client would send a token to such a URL.
    let fits = arguments.pages_access == PagesReaders::Open || url.starts_with("https://");
    ensure!(fits, "--advertise {url}: the pages need HTTPS; write https://..., or --pages-access open");
    Ok(Some(url.trim_end_matches('/').to_owned()))
}

/// Returns the URL of the pages with the address from the pod's environment.
fn reached_at(scheme: &str, listening: SocketAddr) -> Option<String> {
    // On the host network both addresses are equal. Otherwise only the pod's own address leads
    // here.
    let address =
        ["POD_IP", "HOST_IP"].into_iter().find_map(|name| std::env::var(name).ok()?.parse::<IpAddr>().ok());
    address.map(|address| format!("{scheme}://{}", SocketAddr::new(address, listening.port())))
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

fn registration(arguments: &Arguments) -> RegistrationMode {
    let registry = arguments.kubelet_root.join("plugins_registry");
    let sockets =
        arguments.device_plugin_path.clone().unwrap_or_else(|| arguments.kubelet_root.join("device-plugins"));
    match arguments.registration {
        Registration::PluginsRegistry => RegistrationMode::PluginsRegistry(registry),
        Registration::KubeletSocket => RegistrationMode::KubeletSocket(sockets),
        Registration::Auto if arguments.device_plugin_path.is_none() && registry.is_dir() => {
            RegistrationMode::PluginsRegistry(registry)
        }
        Registration::Auto => RegistrationMode::KubeletSocket(sockets),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct CommandLine {
        #[command(flatten)]
        agent: Arguments,
    }

    /// gpu-manager needs `--share-mode=true` for shares; here they are served unless the flag forbids it.
    #[test]
    fn share_mode_decides_whether_shares_are_served() {
        let folder = tempfile::tempdir().unwrap();
        let grants = folder.path().display().to_string();
        let serves_shares = |flags: &[&str]| {
            let common = ["tessera", "--node-name", "n", "--grants", &grants];
            let line = CommandLine::try_parse_from([&common, flags].concat()).unwrap();
            settings(&line.agent, InjectionSettings::default(), false).unwrap().isolation.serve_shares
        };
        assert!(serves_shares(&[]));
        assert!(serves_shares(&["--share-mode"]));
        assert!(serves_shares(&["--share-mode=true"]));
        assert!(!serves_shares(&["--share-mode=false"]));
    }
}
