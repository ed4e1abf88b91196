//! `tessera topology`: reads a topology matrix and writes it in another form.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use tessera_core::gpu::Gpu;
use tessera_core::node::{Node, NodeState};
use tessera_core::topology::Topology;
use tessera_core::units::{Count, MiB, MilliCpu};
use tessera_wire::foreign::smi_matrix::{self, SmiMatrix};
use tessera_wire::foreign::{gpu_topology, gpu_tree};

/// Default memory of a GPU: that of the most common data-centre GPUs.
pub(crate) const DEFAULT_MEMORY: MiB = MiB(81_920);

/// Default CPU and host memory per GPU, large enough to be no constraint.
const USUAL_CPU: MilliCpu = MilliCpu(32_000);
const USUAL_HOST_MEMORY: MiB = MiB(262_144);

/// Reads `nvidia-smi topo -m` output and writes it as a matrix, as the GPU_TOPOLOGY annotation or
/// as a tree
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  nvidia-smi topo -m > node.txt && tessera topology node.txt --as tree
  tessera topology nvlink.txt pcie.txt --as annotation")]
pub(crate) struct Arguments {
    /// Output of `nvidia-smi topo -m`; further files (such as of `topo -mp`) add what the first
    /// does not contain
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Form of the output
    #[arg(long = "as", value_name = "FORM", default_value = "matrix")]
    form: Form,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Form {
    /// The matrix of nvidia-smi
    Matrix,
    /// The node annotation GPU_TOPOLOGY
    Annotation,
    /// The tree of groups of gpu-manager
    Tree,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let matrix = read(&arguments.files)?;
    let text = match arguments.form {
        Form::Matrix => smi_matrix::print(&matrix),
        Form::Annotation => gpu_topology::print(&matrix.topology).unwrap_or_default() + "\n",
        Form::Tree => {
            let gpu_count = matrix.topology.count();
            let node = node(matrix.topology, &vec![DEFAULT_MEMORY; gpu_count], usual_cpu(gpu_count))?;
            gpu_tree::print(&NodeState::empty(Arc::new(node)), &[])
        }
    };
    crate::print(&text);
    Ok(ExitCode::SUCCESS)
}

/// Reads a matrix and completes it with further ones of the same host.
pub(crate) fn read(files: &[PathBuf]) -> Result<SmiMatrix> {
    let mut matrices = files.iter().map(|file| read_one(file));
    let mut matrix = matrices.next().context("no topology file given")??;
    for (other, file) in matrices.zip(&files[1..]) {
        let (gpu_count, others) = (matrix.topology.count(), other?);
        matrix.topology = matrix.topology.completed_by(&others.topology).with_context(|| {
            format!("{} describes {}, not {gpu_count}", file.display(), Count(others.topology.count(), "GPU"))
        })?;
    }
    Ok(matrix)
}

/// Reads one matrix.
pub(crate) fn read_one(file: &Path) -> Result<SmiMatrix> {
    let text = crate::read_file(file)?;
    smi_matrix::parse(&text).with_context(|| file.display().to_string())
}

/// Returns the default CPU of a node with this many GPUs.
pub(crate) fn usual_cpu(gpu_count: usize) -> MilliCpu {
    MilliCpu(gpu_count as u64 * USUAL_CPU.0)
}

/// Returns a node with healthy GPUs of one unnamed model, with these links and memory sizes.
pub(crate) fn node(topology: Topology, memory: &[MiB], cpu: MilliCpu) -> Result<Node> {
    let gpu_count = topology.count();
    ensure!(
        memory.len() == gpu_count,
        "{} for {}",
        Count(memory.len(), "memory size"),
        Count(gpu_count, "GPU")
    );
    let gpus = topology.gpus().iter().zip(memory).map(|(index, memory)| Gpu {
        numa: topology.numa(index),
        ..Gpu::new(index, format!("GPU-{index}").as_str().into(), "GPU".into(), *memory)
    });
    let host_memory = MiB(topology.count() as u64 * USUAL_HOST_MEMORY.0);
    Ok(Node::new("node".into(), gpus.collect(), topology, cpu, host_memory)?)
}
