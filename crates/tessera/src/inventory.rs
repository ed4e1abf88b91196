//! `tessera inventory`: shows the GPUs of this host as the agent finds and publishes them.

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use tessera_core::units::{Count, MiB};
use tessera_node::gpus::{
    DiscoveredGpus, GpuSample, GpuSource, Gpus, GpusError, ProcessMemory, SampleInterval,
};
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::smi_matrix::{self, SmiMatrix};
use tessera_wire::tessera::inventory::{self, Inventory};

/// Shows the GPUs of this host as the agent finds them: GPUs, memory, links, processes
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera inventory
  tessera inventory --json > node.json && tessera agent --gpus simulated:node.json ...
  tessera inventory --gpus simulated:topology.txt")]
pub(crate) struct Arguments {
    /// Source of the GPUs: nvml, or simulated:FILE
    #[arg(long, value_name = "SOURCE", default_value = "nvml")]
    gpus: GpuSource,

    /// Unit of aliyun.com/gpu-mem on this node: GiB, MiB, or a number of MiB such as 256MiB
    #[arg(long, value_name = "UNIT", default_value = "GiB")]
    memory_unit: MemoryUnit,

    /// Print the node annotation tessera.dev/inventory, which --gpus simulated:FILE reads
    #[arg(long)]
    json: bool,

    /// Also watch for error events of the GPUs for one round, and print them
    #[arg(long)]
    watch: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let gpus = arguments.gpus.open(None);
    let found = match gpus.discover() {
        Ok(found) => found,
        Err(error) => return Ok(no_gpus(&error)),
    };
    if arguments.json {
        let DiscoveredGpus { gpus, topology, .. } = found;
        let (memory_unit, nvidia_slots) = (arguments.memory_unit, None);
        let inventory = Inventory {
            gpus,
            topology,
            memory_unit,
            nvidia_slots,
            whole_gpus_only: false,
            withheld: Vec::new(),
        };
        crate::print(&(inventory::print(&inventory) + "\n"));
        return Ok(ExitCode::SUCCESS);
    }
    let looks = found.gpus.iter().map(|gpu| gpus.sample(&gpu.uuid, SampleInterval::default()).ok());
    crate::print(&describe(&found, &looks.collect::<Vec<_>>()));
    if arguments.watch {
        crate::print(&watch(gpus.as_ref()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints why there are no GPUs and how to continue without one. The exit code is 1, because the
/// command line is correct.
pub(crate) fn no_gpus(error: &GpusError) -> ExitCode {
    eprintln!("error: {error}");
    if matches!(error, GpusError::NoDriver(_) | GpusError::NoGpu) {
        eprintln!(
            "To run without a GPU, use --gpus simulated:FILE. FILE is the output of `nvidia-smi topo -m` or \
             `tessera inventory --json` on another host."
        );
    }
    ExitCode::FAILURE
}

fn describe(found: &DiscoveredGpus, looks: &[Option<GpuSample>]) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "driver: {}", found.driver.as_deref().unwrap_or("none (simulated)"));
    for gpu in &found.gpus {
        let pci = found.pci.get(gpu.index.position()).map_or("", String::as_str);
        let numa = gpu.numa.map_or_else(|| "unknown".to_owned(), |node| node.to_string());
        let health = gpu.health.problem().unwrap_or("healthy");
        let _ = writeln!(
            text,
            "GPU{}: {}, {}, {}, /dev/nvidia{}, PCI {pci}, NUMA node {numa}, {health}",
            gpu.index, gpu.uuid, gpu.model, gpu.memory, gpu.minor
        );
        for instance in found.instances.iter().filter(|instance| instance.gpu == gpu.index) {
            let nodes = instance.device_nodes.join(" ");
            let _ = writeln!(
                text,
                "  MIG {}: {}, {}, GPU instance {}, compute instance {} {nodes}",
                instance.profile,
                instance.uuid,
                instance.memory,
                instance.gpu_instance,
                instance.compute_instance
            );
        }
        let Some(Some(look)) = looks.get(gpu.index.position()) else { continue };
        let used = look.memory.map_or(MiB::ZERO, |memory| MiB(memory.used >> 20));
        let process = |process: &ProcessMemory| match process.bytes {
            Some(bytes) => format!("{} ({})", process.pid, MiB(bytes >> 20)),
            None => process.pid.to_string(),
        };
        let processes: Vec<String> = look.processes.iter().flatten().map(process).collect();
        let _ = writeln!(text, "  in use: {used}; processes: [{}]", processes.join(", "));
    }
    if let Some(links) = found.topology.nvswitch_links() {
        let _ = writeln!(
            text,
            "all GPUs reach each other through NVSwitch, with {} each",
            Count(links, "NVLink")
        );
    }
    text.push('\n');
    text.push_str(&smi_matrix::print(&SmiMatrix {
        topology: found.topology.clone(),
        cpu_affinity: Vec::new(),
    }));
    text
}

/// Watches the GPUs for one round: until the first pause between events.
fn watch(gpus: &dyn Gpus) -> String {
    let mut text = String::from("\nwatching for error events for one round\n");
    let outcome = gpus.watch(&mut |incident| match incident {
        Some(incident) => {
            let _ = writeln!(text, "{incident:?}");
            ControlFlow::Continue(())
        }
        None => ControlFlow::Break(()),
    });
    let _ = match outcome {
        Ok(_) => writeln!(text, "no further events"),
        Err(error) => writeln!(text, "cannot watch for error events: {error}"),
    };
    text
}
