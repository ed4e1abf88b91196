//! The JSON and YAML output of the list of nodes.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write as _};

use anyhow::{Context as _, Result};
use serde::{Serialize, Serializer};
use tessera_core::grant::GpuUsage;
use tessera_core::node::{Node, NodeState};
use tessera_core::units::GpuIndex;
use tessera_wire::foreign::dialect::Dialect;
use tessera_wire::foreign::dialect::DialectSet;
use tessera_wire::tessera::reservation::NodeReservation;

use crate::args::OutputFormat;
use crate::survey::{NodeFacts, Survey};

/// The whole output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Document<'a> {
    /// Policy of the scheduler, if it publishes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<String>,
    nodes: Nodes<'a>,
    /// Waiting pods that request GPUs, as NAMESPACE/NAME.
    waiting: Vec<String>,
}

/// The nodes. Each is created while it is written, so that only one of thousands is in memory.
#[derive(Debug)]
struct Nodes<'a> {
    survey: &'a Survey,
    only_sharing: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeDocument {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    status: String,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    memory_unit: String,
    serves: Vec<String>,
    gpus: Vec<GpuDocument>,
    /// MIG instances by resource.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    instances: BTreeMap<String, InstancesDocument>,
    /// Reservations in effect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reservations: Vec<ReservationDocument>,
    /// Pods whose GPUs are unknown.
    pending: Vec<PendingDocument>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct GpuDocument {
    index: u8,
    uuid: String,
    model: String,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
    healthy: bool,
    /// True if one container holds the whole GPU.
    whole: bool,
    used_percent: u32,
    #[serde(rename = "usedMiB")]
    used_mib: u64,
    pods: Vec<HoldDocument>,
}

/// GPUs that are kept for a waiting pod, or for none.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ReservationDocument {
    name: String,
    owner: String,
    until: String,
    /// The waiting pod as NAMESPACE/NAME.
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    /// UUIDs of the reserved GPUs.
    gpus: Vec<String>,
    /// What is free of them and kept now. It counts as used.
    kept: Vec<KeptDocument>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct KeptDocument {
    index: u8,
    percent: u32,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
}

#[derive(Debug, Serialize)]
struct InstancesDocument {
    offered: u64,
    held: u64,
    /// Pods that hold instances, as NAMESPACE/NAME.
    pods: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct HoldDocument {
    namespace: String,
    name: String,
    uid: String,
    percent: u32,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    terminating: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PendingDocument {
    namespace: String,
    name: String,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
}

impl<'a> Document<'a> {
    /// Creates the output of all nodes with GPUs, or only of nodes that share GPU memory.
    pub(crate) fn new(survey: &'a Survey, only_sharing: bool) -> Self {
        let waiting =
            survey.waiting.iter().map(|pod| format!("{}/{}", pod.metadata.namespace, pod.metadata.name));
        Self {
            policy: survey.rules.policy.as_ref().map(ToString::to_string),
            nodes: Nodes { survey, only_sharing },
            waiting: waiting.collect(),
        }
    }
}

impl Serialize for Nodes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let document = |(facts, state)| node(self.survey, facts, state);
        match self.only_sharing {
            true => serializer.collect_seq(self.survey.sharing().map(document)),
            false => serializer.collect_seq(self.survey.with_gpus().map(document)),
        }
    }
}

fn node(survey: &Survey, facts: &NodeFacts, state: &NodeState) -> NodeDocument {
    let node = state.node();
    let holders = survey.holders(&node.name);
    let gpu_document = |gpu: &tessera_core::gpu::Gpu| {
        let used = state.used(gpu.index);
        let held = holders.iter().filter_map(|(pod, grant)| {
            let (_, usage) = grant.footprint().find(|(index, _)| *index == gpu.index)?;
            Some(HoldDocument {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: grant.pod.to_string(),
                percent: if usage.whole { 100 } else { usage.compute_percent.0 },
                memory_mib: if usage.whole { gpu.memory.0 } else { usage.memory.0 },
                terminating: pod.terminating,
            })
        });
        GpuDocument {
            index: gpu.index.0,
            uuid: gpu.uuid.to_string(),
            model: gpu.model.to_string(),
            memory_mib: gpu.memory.0,
            healthy: gpu.health.is_healthy(),
            whole: used.whole,
            used_percent: if used.whole { 100 } else { used.compute_percent.0 },
            used_mib: if used.whole { gpu.memory.0 } else { used.memory.0 },
            pods: held.collect(),
        }
    };
    let serves = |dialect: &Dialect| facts.dialects.offered.covers(DialectSet::default().with(*dialect));
    NodeDocument {
        name: node.name.to_string(),
        address: facts.address.clone(),
        status: facts.status(),
        kind: node.instance_type.clone(),
        memory_unit: facts.unit.to_string(),
        serves: Dialect::ALL.iter().filter(|dialect| serves(dialect)).map(ToString::to_string).collect(),
        gpus: node.gpus().iter().map(gpu_document).collect(),
        instances: facts
            .instances
            .iter()
            .map(|(resource, instances)| {
                let pods = instances.pods.iter().map(|(pod, _)| pod.clone()).collect();
                let document = InstancesDocument { offered: instances.offered, held: instances.held(), pods };
                (resource.clone(), document)
            })
            .collect(),
        reservations: survey
            .reservations(&node.name)
            .into_iter()
            .map(|kept| reservation(node, kept))
            .collect(),
        pending: survey
            .unknown_gpus(&node.name)
            .iter()
            .map(|pod| PendingDocument {
                namespace: pod.facts.namespace.clone(),
                name: pod.facts.name.clone(),
                memory_mib: pod.memory.0,
            })
            .collect(),
    }
}

fn reservation(
    node: &Node,
    (entry, kept): (&NodeReservation, Vec<(GpuIndex, GpuUsage)>),
) -> ReservationDocument {
    let document = |(gpu, usage): (GpuIndex, GpuUsage)| {
        let memory = node.gpu(gpu).map_or(0, |known| known.memory.0);
        KeptDocument {
            index: gpu.0,
            percent: if usage.whole { 100 } else { usage.compute_percent.0 },
            memory_mib: if usage.whole { memory } else { usage.memory.0 },
        }
    };
    ReservationDocument {
        name: entry.name.clone(),
        owner: entry.owner.clone(),
        until: entry.until.clone(),
        pod: entry.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name)),
        gpus: entry.gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
        kept: kept.into_iter().map(document).collect(),
    }
}

/// Formats a value as JSON or YAML.
pub(crate) fn print(value: &impl Serialize, format: OutputFormat) -> Result<String> {
    Ok(match format {
        OutputFormat::Yaml => serde_saphyr::to_string(value).context("cannot write YAML")?,
        OutputFormat::Json | OutputFormat::Wide | OutputFormat::Name => {
            format!("{}\n", serde_json::to_string_pretty(value)?)
        }
    })
}

/// Writes a value to standard output as JSON without building the whole text first. A closed
/// standard output is not an error.
pub(crate) fn write_json(value: &impl Serialize) -> Result<()> {
    let mut out = BufWriter::new(std::io::stdout().lock());
    match serde_json::to_writer_pretty(&mut out, value) {
        Err(error) if error.is_io() => Ok(()),
        written => {
            written?;
            let _ = out.write_all(b"\n").and_then(|()| out.flush());
            Ok(())
        }
    }
}
