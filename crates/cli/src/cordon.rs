//! `cordon` and `uncordon`: keep new pods from GPUs of a node, and let them use the GPUs again.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use tessera_cluster::annotate_node::{self, VersionedNode};
use tessera_core::gpu::Gpu;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::tessera::gpu_cordon;
use tessera_wire::tessera::parsed_node;

use crate::args::Cordon;
use crate::load;
use crate::options::SourceOptions;

/// Attempts to change a node that others change at the same time.
const MAX_ATTEMPTS: usize = 5;

/// Which of the two commands runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Cordon,
    Uncordon,
}

/// Changes the annotations of a node and returns what to print, one line for each GPU.
pub(crate) async fn change(source: &SourceOptions, options: &Cordon, direction: Direction) -> Result<String> {
    if source.endpoint.is_some() {
        bail!("--endpoint only reads; remove it to change the node with your kubeconfig");
    }
    let client = load::client(source).await?;
    for _ in 0..MAX_ATTEMPTS {
        let VersionedNode { node, version } = annotate_node::read(&client, &options.node).await?;
        let parsed = parsed_node::parse(&node, MemoryUnit::default())?;
        let gpus = select(&options.node, parsed.node.gpus(), &options.gpus)?;
        let uuids: BTreeSet<&str> = gpus.iter().map(|gpu| &*gpu.uuid.0).collect();
        let annotations = &node.metadata.annotations;
        let changes = match direction {
            Direction::Cordon => gpu_cordon::cordon(annotations, &uuids),
            Direction::Uncordon => gpu_cordon::uncordon(annotations, &uuids),
        };
        if changes.is_empty() || annotate_node::write(&client, &options.node, &version, &changes).await? {
            return Ok(report(&options.node, annotations, &gpus, direction));
        }
    }
    bail!("node {:?} changes too often; try again", options.node);
}

/// Returns the GPUs that were named by index or UUID.
fn select<'a>(node: &str, gpus: &'a [Gpu], names: &[String]) -> Result<Vec<&'a Gpu>> {
    let mut selected: Vec<&Gpu> = Vec::new();
    for name in names {
        let found = gpus.iter().find(|gpu| gpu.index.to_string() == *name || *gpu.uuid.0 == **name);
        let Some(gpu) = found else {
            let all: Vec<String> = gpus.iter().map(|gpu| format!("{} ({})", gpu.index, gpu.uuid)).collect();
            match all.is_empty() {
                true => bail!("node {node:?} offers no GPU"),
                false => bail!("node {node:?} has no GPU {name:?}; choose one of {}", all.join(", ")),
            }
        };
        if !selected.iter().any(|known| known.index == gpu.index) {
            selected.push(gpu);
        }
    }
    Ok(selected)
}

fn report(node: &str, before: &BTreeMap<String, String>, gpus: &[&Gpu], direction: Direction) -> String {
    let known = gpu_cordon::cordoned(before);
    let line = |gpu: &&Gpu| {
        let was_cordoned = known.contains(&*gpu.uuid.0);
        let done = match (direction, was_cordoned) {
            (Direction::Cordon, false) => "cordoned",
            (Direction::Cordon, true) => "already cordoned",
            (Direction::Uncordon, true) => "uncordoned",
            (Direction::Uncordon, false) => "already uncordoned",
        };
        format!("node/{node} gpu/{} {done}\n", gpu.index)
    };
    gpus.iter().map(line).collect()
}
