//! `tessera scheduler`: the extender that kube-scheduler calls.

mod listen;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use tessera_cluster::lease::LeaseTiming;
use tessera_core::placement::Policy;
use tessera_scheduler::dashboard::AgentReader;
use tessera_scheduler::notices::Notices;
use tessera_scheduler::run::{Membership, Neighbour, lead};
use tessera_scheduler::server::{App, serve_all};
use tessera_scheduler::state::{DefaultPolicy, SchedulerSettings, ServedSchedulers, State};
use tessera_scheduler::verb::filter::PassOn;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::quota;
use tessera_wire::tessera::{rules, static_table};

use self::listen::ListenArguments;
use crate::log::LogArguments;
use crate::profile_page::ProfileArguments;
use crate::{host, old_flags, values};

/// Serves the extender that kube-scheduler calls: chooses nodes and GPUs and explains rejections
#[derive(Debug, Args)]
// The start scripts of the originals append EXTRA_FLAGS to set a flag again, and there the last value counts.
#[command(
    args_override_self = true,
    after_help = "Examples:
  tessera scheduler --certificates-in kube-system        # in a pod: deploy/scheduler
  tessera scheduler --insecure-listen 127.0.0.1:12345    # for tests on one host
  tessera scheduler --insecure-listen :39999             # the port of a replaced extender

kube-scheduler must be configured to call it: deploy/scheduler/kube-scheduler-edit.yaml.
Flags of gpu-admission and of the extenders of gputopology and gpushare are accepted too: docs/scheduler.md."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    listen: ListenArguments,

    /// Kubeconfig of the API server; $KUBECONFIG, the user's or the pod's service account if absent
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Policy for pods without the annotation tessera.dev/policy
    #[arg(long, value_name = "NAME", default_value = "tessera")]
    policy: Policy,

    /// GPU sets of policy static, by instance type; read again when the file changes [default: tables of
    /// DGX-1, DGX-2 and HGX]
    #[arg(long, value_name = "FILE")]
    static_table: Option<PathBuf>,

    /// Let pods of policy static wait for a set of the table, instead of taking other idle GPUs
    #[arg(long)]
    static_strict: bool,

    /// Count claims of dynamic resource allocation and bind pods with claims; needs Kubernetes 1.34 and the rights of
    /// deploy/scheduler/dra.yaml
    #[arg(long)]
    dra: bool,

    /// Time for which the GPUs of a gang stay reserved until all its pods are bound
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = values::time)]
    gang_timeout: Duration,

    /// Time for which a gang that waits may hold back GPUs that become free; 0 turns it off
    #[arg(long, value_name = "TIME", default_value = "600s", value_parser = values::time)]
    gang_hold_back: Duration,

    /// Evict pods of lower priority for gangs that fit nowhere and for pods that wait for claims, pods of namespaces
    /// that use more than their guarantees, and the rest of gangs that kube-scheduler preempts in part; needs the
    /// right to create pods/eviction
    #[arg(long)]
    evict: bool,

    /// Enables quotas: a JSON file with the ConfigMap and the node labels, in the format of
    /// gpu-admission
    #[arg(long, value_name = "FILE")]
    quota_config: Option<PathBuf>,

    /// A file of --static-table or --quota-config, known by its content; a flag of the original extenders
    #[arg(long, value_name = "FILE", hide = true)]
    config: Option<PathBuf>,

    /// Unit of aliyun.com/gpu-mem on nodes that do not publish one
    #[arg(long, value_name = "UNIT", default_value = "GiB")]
    memory_unit: MemoryUnit,

    /// Nodes that filter passes to kube-scheduler: those with the most suitable GPUs, or all that
    /// fit
    #[arg(long, value_name = "WHICH", default_value = "best")]
    pass_on: WhichNodes,

    /// File with a token of the audience tessera.dev/agent, with which the dashboard reads usage from
    /// agents; read again for each request
    #[arg(long, value_name = "FILE")]
    agent_token: Option<PathBuf>,

    /// Name of a kube-scheduler whose pods are bound, as pods name it in schedulerName; may be given
    /// several times
    #[arg(long, value_name = "NAME", default_values = [ServedSchedulers::DEFAULT, ServedSchedulers::SECOND])]
    scheduler_name: Vec<String>,

    /// Namespace of the lease by which replicas elect their leader
    #[arg(long, value_name = "NAME", default_value = rules::LEASE.0)]
    lease_namespace: String,

    /// Name of the lease
    #[arg(long, value_name = "NAME", default_value = rules::LEASE.1)]
    lease: String,

    /// Time after which another replica takes over from a leader that does not renew its lease
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=60))]
    lease_seconds: u32,

    /// Lead only while the kube-scheduler in the same pod holds this lease, in the namespace of the own one; one
    /// election then decides for both (deploy/scheduler-second)
    #[arg(long, value_name = "NAME")]
    neighbour_lease: Option<String>,

    /// Write no Kubernetes Events (granted GPUs and the reason, quota usage, failed bindings)
    #[arg(long)]
    no_events: bool,

    #[command(flatten)]
    profile: ProfileArguments,

    #[command(flatten)]
    log: LogArguments,

    /// Old flags that were given and have no effect
    #[arg(long, hide = true)]
    no_effect: Vec<String>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum WhichNodes {
    /// Those with the best GPUs for the pod; all if the pod has preferences of its own or a taint
    /// repels it from the best
    Best,
    /// All that fit; kube-scheduler's scores have more weight then, and each pod takes longer
    All,
}

impl From<WhichNodes> for PassOn {
    fn from(which: WhichNodes) -> Self {
        match which {
            WhichNodes::Best => Self::Best,
            WhichNodes::All => Self::All,
        }
    }
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    arguments.log.start()?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    runtime.block_on(serve_until_stopped(arguments))?;
    Ok(ExitCode::SUCCESS)
}

async fn serve_until_stopped(arguments: Arguments) -> Result<()> {
    old_flags::log_without_effect(&arguments.no_effect);
    arguments.profile.serve().await?;
    let Arguments {
        listen,
        kubeconfig,
        policy,
        mut static_table,
        static_strict,
        dra,
        gang_timeout,
        gang_hold_back,
        evict,
        mut quota_config,
        config,
        memory_unit,
        pass_on,
        agent_token,
        scheduler_name,
        lease_namespace,
        lease,
        lease_seconds,
        neighbour_lease,
        no_events,
        profile: _,
        log: _,
        no_effect: _,
    } = arguments;
    if let Some(file) = config {
        let is_quota = is_quota_config(&crate::read_file(&file)?);
        let meant = if is_quota { &mut quota_config } else { &mut static_table };
        meant.get_or_insert(file);
    }
    let quota = quota_config.as_deref().map(read_quota_settings).transpose()?;
    if let Some(file) = &static_table {
        check_static_table(file)?;
    }
    ensure!(
        gang_timeout >= Duration::from_secs(1),
        "--gang-timeout is {gang_timeout:?}, so no pod of a gang could be bound in time; write 1s or more"
    );
    listen.check()?;
    let settings = SchedulerSettings {
        policy: DefaultPolicy(policy),
        memory_unit,
        pass_on: pass_on.into(),
        quota,
        served: ServedSchedulers(scheduler_name),
        static_strict,
        dra,
        gang_timeout,
        gang_hold_back,
        evict,
    };
    let client = tessera_cluster::connect(kubeconfig.as_deref()).await?;
    let notices = if no_events { Notices::default() } else { Notices::start(client.clone()) };
    let app = App::new(State::new(settings.clone()), client).with_notices(notices);
    let app = Arc::new(app.with_agents(AgentReader::with_token(agent_token)));
    let (pages, verbs) = (listen.forwarded_pages(), listen.forwarded_verbs());
    let is_behind_service = listen.is_behind_service();
    let servers = serve_all(listen.open(&app, &lease_namespace).await?);
    let stop = host::termination_signal()?;
    let membership = Membership {
        identity: identity(),
        namespace: lease_namespace,
        lease,
        timing: LeaseTiming::with_duration(lease_seconds),
        pages,
        verbs,
        is_behind_service,
        neighbour: neighbour_lease.map(|lease| Neighbour { lease, host: host::name() }),
    };
    tokio::select! {
        () = lead(app, settings, membership, static_table, stop) => Ok(()),
        ended = servers => Ok(ended?),
    }
}

/// Rejects a table that cannot be parsed. An empty file is no table: gputopology's manifest makes one on hosts that have
/// none (`FileOrCreate`).
fn check_static_table(file: &std::path::Path) -> Result<()> {
    let text = crate::read_file(file)?;
    if text.trim().is_empty() {
        tracing::warn!(path = %file.display(), "the static table is empty; the shipped tables are used until it has contents");
        return Ok(());
    }
    static_table::parse(&text).with_context(|| format!("--static-table {}", file.display()))?;
    Ok(())
}

fn read_quota_settings(file: &std::path::Path) -> Result<quota::QuotaSettings> {
    quota::parse_settings(&crate::read_file(file)?).with_context(|| file.display().to_string())
}

/// Returns whether a file of `--config` is gpu-admission's, which has texts at the first level. A table of
/// GPU sets has only objects there.
fn is_quota_config(text: &str) -> bool {
    let object = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text);
    object.is_ok_and(|object| object.values().any(|value| value.is_string()))
}

/// Returns an identity that is different for every process: a replica that restarts under its name
/// must not count as the former leader.
fn identity() -> String {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{}_{}_{:x}", host::name(), std::process::id(), since_1970.as_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_the_files_of_the_original_extenders_apart() {
        let quota = r#"{"QuotaConfigMapName": "gpuquota", "QuotaConfigMapNamespace": "kube-system"}"#;
        assert!(is_quota_config(quota));
        for table in [r#"{"ecs.sccgn6.24xlarge": {"1": [[0], [1]], "2": [[0, 2]]}}"#, "{}", "", "not JSON"] {
            assert!(!is_quota_config(table), "{table}");
        }
    }
}
