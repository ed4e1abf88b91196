//! `tessera place`: makes one decision of the core without a cluster.

mod report;
mod spec;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use tessera_core::forecast::Forecast;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::{ContainerGrant, PodGrant};
use tessera_core::ledger::Ledger;
use tessera_core::node::NodeState;
use tessera_core::placement::static_table::StaticTable;
use tessera_core::placement::{Policy, place};
use tessera_core::request::{ContainerRole, LinkSensitivity, PodRequest};
use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName};
use tessera_core::workload::Workload;
use tessera_wire::tessera::static_table;

use crate::topology;
use spec::{Indexes, Requests, Used};

/// Chooses GPUs of one node for a request and prints the reason. Exits with 1 if the request does
/// not fit
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera place --topology node.txt --request whole:2
  tessera place --topology node.txt --used 0=50c/2048m,3=whole --request share:30c/4096m --json
  tessera place --topology node.txt --request nvidia:1+vcuda:50/30 --policy link
  tessera place --topology nvlink.txt --topology pcie.txt --request gputopology:2 --policy link")]
pub(crate) struct Arguments {
    /// Output of `nvidia-smi topo -m`; further files (such as of `topo -mp`) add what the first
    /// does not contain
    #[arg(long, value_name = "FILE", required = true)]
    topology: Vec<PathBuf>,

    /// Memory of each GPU: one number for all, or one per GPU separated by commas
    #[arg(long, value_name = "MIB", value_delimiter = ',', default_values_t = [topology::DEFAULT_MEMORY.0])]
    memory: Vec<u64>,

    /// CPUs of the node for pods; no constraint if absent
    #[arg(long, value_name = "N")]
    node_cpu: Option<f64>,

    /// CPUs requested by the pod
    #[arg(long, value_name = "N", default_value_t = 0.0)]
    cpu: f64,

    /// GPUs in use, such as 0=50c/2048m,3=whole (percent of compute / MiB)
    #[arg(long, value_name = "SPEC", default_value = "")]
    used: Used,

    /// Request of the pod: whole:2, share:50c/7680m, share:2x50c/7680m (of each of 2 GPUs), memory:8192m,
    /// vcuda:50/30, vcuda:200, gpushare:8GiB, nvidia:1 or gputopology:4; several containers separated by +
    #[arg(long, value_name = "SPEC")]
    request: Requests,

    /// Policy: tessera, link, fragment, share, simple, static, best-effort, binpack or spread
    #[arg(long, value_name = "NAME", default_value = "tessera")]
    policy: Policy,

    /// GPU sets by instance type, for policy static
    #[arg(long, value_name = "FILE")]
    static_table: Option<PathBuf>,

    /// With policy static, choose only sets of the table
    #[arg(long)]
    static_strict: bool,

    /// Instance type of the node in the static table; needed only if the table lists several
    #[arg(long, value_name = "TYPE")]
    instance_type: Option<String>,

    /// GPUs that must be among the chosen ones, such as 4,5
    #[arg(long, value_name = "INDEXES")]
    require: Option<Indexes>,

    /// Whether the pod depends on the links between its GPUs
    #[arg(long, value_name = "KIND", default_value = "sensitive")]
    traffic: TrafficKind,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum TrafficKind {
    /// The pod gets the best links
    Sensitive,
    /// The pod leaves the good links to other pods
    Insensitive,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let node = arguments.node()?;
    let policy = match arguments.policy()? {
        // The workload is unknown, so the forecast assumes one that is usual for such a node.
        Policy::Tessera(_) => Policy::Tessera(Arc::new(Forecast::new(
            &Workload::guess([node.node()]),
            &[&node].into_iter().collect(),
        ))),
        other => other,
    };
    let required = arguments.required(&node)?;
    let pod = arguments.pod()?;
    let outcome = place(&node, &pod, &policy, required);
    let report = report::Report::new(&node, &pod, &policy, &outcome);
    crate::print(&if arguments.json { report.json() } else { report.text() });
    Ok(if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Arguments {
    fn policy(&self) -> Result<Policy> {
        let Policy::Static(_) = &self.policy else { return Ok(self.policy.clone()) };
        let table = match &self.static_table {
            Some(file) => {
                let table = crate::read_file(file)?;
                static_table::parse(&table).with_context(|| file.display().to_string())?
            }
            None => static_table::shipped(),
        };
        Ok(Policy::Static(Arc::new(StaticTable { strict: self.static_strict, ..table })))
    }

    fn node(&self) -> Result<NodeState> {
        let matrix = topology::read(&self.topology)?;
        let gpu_count = matrix.topology.count();
        let memory: Vec<MiB> = match self.memory.as_slice() {
            [one] => vec![MiB(*one); gpu_count],
            each => each.iter().copied().map(MiB).collect(),
        };
        let cpu = match self.node_cpu {
            Some(cpus) => milli_cpu(cpus)?,
            // The CPU request must not be a reason for a rejection.
            None => topology::usual_cpu(gpu_count) + milli_cpu(self.cpu)?,
        };
        let mut node = topology::node(matrix.topology, &memory, cpu).context("--memory")?;
        node.instance_type = self.instance_type()?;
        let name = node.name.clone();
        let mut ledger = Ledger::default();
        ledger.set_node(node);
        for (number, (gpu, hold)) in self.used.0.iter().enumerate() {
            ensure!(
                gpu.position() < gpu_count,
                "--used: there is no GPU {gpu}; the node has {gpu_count}, counted from 0"
            );
            ledger.book(holder(&name, number, *gpu, *hold)).context("--used")?;
        }
        ledger.node(&name).cloned().context("the node is in the ledger")
    }

    /// Returns the requested instance type, or the only one of the table.
    fn instance_type(&self) -> Result<Option<String>> {
        let Policy::Static(table) = self.policy()? else {
            return Ok(None);
        };
        let listed: Vec<&String> = table.sets.keys().collect();
        match (&self.instance_type, listed.as_slice()) {
            (Some(name), _) => {
                ensure!(table.sets.contains_key(name), "--instance-type {name}: the table lists {listed:?}");
                Ok(Some(name.clone()))
            }
            (None, [only]) => Ok(Some((*only).clone())),
            (None, _) => {
                ensure!(listed.is_empty(), "the table lists {listed:?}; choose one with --instance-type");
                Ok(None)
            }
        }
    }

    fn required(&self, node: &NodeState) -> Result<GpuSet> {
        let Some(Indexes(indexes)) = &self.require else {
            return Ok(GpuSet::EMPTY);
        };
        let all = node.node().topology().gpus();
        for gpu in indexes {
            ensure!(all.contains(*gpu), "--require: there is no GPU {gpu}, only {all}");
        }
        Ok(indexes.iter().copied().collect())
    }

    fn pod(&self) -> Result<PodRequest> {
        let link_sensitivity = match self.traffic {
            TrafficKind::Sensitive => LinkSensitivity::Sensitive,
            TrafficKind::Insensitive => LinkSensitivity::Insensitive,
        };
        let containers = PodRequest::of_mains(self.request.0.iter().copied());
        Ok(PodRequest { cpu: milli_cpu(self.cpu)?, link_sensitivity, ..containers })
    }
}

fn milli_cpu(cpus: f64) -> Result<MilliCpu> {
    ensure!((0.0..=1e6).contains(&cpus), "{cpus} CPUs: write a number from 0 to 1000000");
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range was checked")]
    Ok(MilliCpu((cpus * 1000.0).round() as u64))
}

/// Returns the grant of a pod that holds part of a GPU.
fn holder(node: &NodeName, number: usize, gpu: GpuIndex, hold: tessera_core::grant::Hold) -> PodGrant {
    PodGrant {
        pod: format!("used-{number}").as_str().into(),
        node: node.clone(),
        cpu: MilliCpu::ZERO,
        memory: MiB::ZERO,
        containers: vec![ContainerGrant {
            container: "used".to_owned(),
            role: ContainerRole::Main,
            holds: vec![(gpu, hold)],
        }],
    }
}
