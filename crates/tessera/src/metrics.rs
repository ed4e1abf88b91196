//! `tessera metrics`: prints the metrics of this host's GPUs without Kubernetes.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use tessera_agent::exporter::families::{self, MetricsOptions, PodMemoryLabels, Vocabulary};
use tessera_agent::shell::{Sampling, Standalone, StandaloneError};
use tessera_core::units::NodeName;
use tessera_node::gpus::GpuSource;
use tessera_wire::metrics::Format;
use tokio_util::sync::CancellationToken;

use crate::{host, log, values};

/// Prints the usage of this host's GPUs as Prometheus metrics, without Kubernetes
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera metrics                             # sample for five seconds, print, exit
  tessera metrics --for 60s --process-series  # also by process
  tessera metrics --listen :5678              # serve /metrics until stopped
  tessera metrics --metrics dcgm              # with the metric names of dcgm-exporter")]
pub(crate) struct Arguments {
    /// Source of the GPUs: nvml, or simulated:FILE
    #[arg(long, value_name = "SOURCE", default_value = "nvml")]
    gpus: GpuSource,

    /// Name of this host in labels [default: its host name]
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,

    /// Sampling time before printing, such as 30s
    #[arg(long = "for", default_value = "5s", value_name = "TIME", value_parser = values::time)]
    sampling_time: Duration,

    /// Serve pages on this address instead of printing, such as :5678
    #[arg(long, value_name = "ADDRESS", value_parser = values::address)]
    listen: Option<SocketAddr>,

    #[command(flatten)]
    sampling: SamplingArguments,
}

/// Options of sampling and of the written metrics.
#[derive(Debug, Args)]
#[command(next_help_heading = "Measuring")]
pub(crate) struct SamplingArguments {
    /// Sampling interval of GPUs and their processes, in seconds
    #[arg(long, default_value = "2", value_name = "SECONDS", value_parser = values::number)]
    sample_every: f64,

    /// Directory of the processes by PID [default: /proc, if it shows the whole host]
    #[arg(long, value_name = "DIRECTORY")]
    proc_root: Option<PathBuf>,

    /// Metric families of /metrics, separated by commas: native, map, pod-memory, gpu-manager,
    /// dcgm, dcgm-pods, cadvisor, hami, hami-legacy
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_values = ["native", "map", "pod-memory", "gpu-manager"])]
    metrics: Vec<Vocabulary>,

    /// Also write native series of single processes
    #[arg(long)]
    process_series: bool,

    /// Largest number of processes with their own series; the others are summed up
    #[arg(long, default_value = "256", value_name = "COUNT")]
    most_processes: usize,

    /// Labels of pod_used_gpu_mem_MB: those of its first version, of its last one, or both
    #[arg(long, value_name = "VERSION", value_enum, default_value = "both")]
    pod_memory_labels: LabelSet,

    /// Label with the node's name in DCGM's metrics
    #[arg(long, value_name = "LABEL", default_value = "Hostname", value_parser = ["Hostname", "hostname"])]
    hostname_label: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LabelSet {
    Both,
    Old,
    New,
}

impl SamplingArguments {
    pub(crate) fn settings(&self) -> Result<Sampling> {
        let interval = Duration::try_from_secs_f64(self.sample_every).ok();
        let interval = interval.filter(|interval| *interval >= Duration::from_millis(100));
        Ok(Sampling {
            interval: interval.context("--sample-every: write seconds, at least 0.1")?,
            proc_root: self.proc_root.clone().unwrap_or_else(|| PathBuf::from("/proc")),
            // A directory given by the user is trusted to show the whole host.
            trust_proc_root: self.proc_root.is_some(),
            host_ip: std::env::var("HOST_IP").or_else(|_| std::env::var("hostIP")).unwrap_or_default(),
            metrics: MetricsOptions {
                vocabularies: self.metrics.iter().copied().collect(),
                processes: self.process_series,
                max_processes: self.most_processes,
                pod_memory_labels: match self.pod_memory_labels {
                    LabelSet::Both => PodMemoryLabels::Both,
                    LabelSet::Old => PodMemoryLabels::Old,
                    LabelSet::New => PodMemoryLabels::New,
                },
                hostname_label: self.hostname_label.clone(),
                ..MetricsOptions::default()
            },
        })
    }
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    log::start_quietly("warn")?;
    let sampling = arguments.sampling.settings()?;
    let options = sampling.metrics.clone();
    let node = NodeName(arguments.node_name.unwrap_or_else(host::name));
    let standalone = match Standalone::start(node, Arc::from(arguments.gpus.open(None)), sampling) {
        Ok(standalone) => standalone,
        Err(StandaloneError::Gpus(error)) => return Ok(crate::inventory::no_gpus(&error)),
        Err(error) => return Err(error.into()),
    };
    match arguments.listen {
        Some(address) => serve(standalone, address)?,
        None => {
            std::thread::sleep(arguments.sampling_time);
            crate::print(&families::metrics(&standalone.snapshot(), &options, Format::Plain));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn serve(standalone: Standalone, address: SocketAddr) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let stop = CancellationToken::new();
        let (stopped, asked) = (stop.clone(), host::termination_signal()?);
        tokio::spawn(async move {
            asked.await;
            stopped.cancel();
        });
        let (listener, address) = host::listen(address, "--listen").await?;
        eprintln!("serving http://{address}/metrics");
        standalone.serve(listener, stop).await;
        Ok(())
    })
}
