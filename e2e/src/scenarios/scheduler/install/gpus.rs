//! What pods hold while the components are replaced: the kubelet's devices against the grants, and the sum of each GPU.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use kube::{Api, api::ListParams};
use serde_json::Value;
use tessera_cluster::LeanPod;
use tessera_node::pod_resources::PodResources;
use tessera_wire::{
    foreign::dialect::MemoryUnit,
    kubelet::device_id::{DeviceIds, Resource},
};

use super::Installation;
use crate::scenarios::{agent::eight_gpus, scheduler::audit::Audit};

/// Time between two comparisons.
const INTERVAL: Duration = Duration::from_millis(300);

/// The comparisons that were made.
#[derive(Debug, Default)]
pub(super) struct Comparisons {
    pub(super) rounds: usize,
    /// Pods whose devices were compared with their grant.
    pub(super) pods: BTreeSet<String>,
}

impl Installation {
    /// Compares what the kubelet gave with what the scheduler granted, until `stop` is set. Fails if a device has two
    /// holders, a pod holds another GPU than it was granted, or the grants of a GPU exceed it.
    pub(super) async fn compare_gpus(&self, stop: &Cell<bool>) -> Result<Comparisons> {
        let kubelet = PodResources::at(&self.node.pod_resources())?;
        let pods: Api<LeanPod> = Api::default_namespaced(self.cluster().client());
        let gpus = eight_gpus().gpus;
        let ids = DeviceIds::new(&gpus, MemoryUnit::GiB);
        let memory = gpus.iter().map(|gpu| gpu.memory.0).min().context("no GPUs")?;
        let mut made = Comparisons::default();
        while !stop.get() {
            let listed = kubelet.list().await?;
            // The pods are read later, so a pod that the kubelet lists has its grant or is gone.
            let known = pods.list(&ListParams::default()).await?.items;
            let mut audit = Audit::of_memory(memory);
            known.iter().try_for_each(|pod| audit.see(pod))?;
            let known: BTreeMap<&str, &LeanPod> =
                known.iter().filter_map(|pod| Some((pod.metadata.name.as_deref()?, pod))).collect();
            let mut holders = BTreeMap::new();
            for entry in listed.iter().filter(|entry| entry.namespace == "default") {
                for container in &entry.containers {
                    let mut held = BTreeSet::new();
                    for (resource, id) in container.ids.iter().flat_map(|(name, ids)| {
                        Resource::named(name)
                            .into_iter()
                            .flat_map(|known| ids.iter().map(move |id| (known, id)))
                    }) {
                        let other = holders.insert((resource, id.clone()), entry.name.clone());
                        ensure!(other.is_none(), "{} and {other:?} both hold {id}", entry.name);
                        let (gpu, _) =
                            ids.read(resource, id).with_context(|| format!("{id} is not a device"))?;
                        held.insert(gpus[usize::from(gpu.0)].uuid.0.to_string());
                    }
                    let Some(pod) = known.get(&*entry.name).filter(|_| !held.is_empty()) else { continue };
                    let granted = granted(pod, &container.name)?;
                    ensure!(
                        granted == held,
                        "{} was granted {granted:?}, the kubelet gave {held:?}",
                        entry.name
                    );
                    made.pods.insert(entry.name.clone());
                }
            }
            made.rounds += 1;
            tokio::time::sleep(INTERVAL).await;
        }
        Ok(made)
    }
}

/// Returns the GPUs that the annotations of a pod grant to a container.
fn granted(pod: &LeanPod, container: &str) -> Result<BTreeSet<String>> {
    let annotations = pod.metadata.annotations.clone().unwrap_or_default();
    let grant: Value = serde_json::from_str(annotations.get("tessera.dev/grant").context("no grant")?)?;
    let gpus = grant[container].as_array().cloned().unwrap_or_default();
    Ok(gpus.iter().filter_map(|gpu| Some(gpu["uuid"].as_str()?.to_owned())).collect())
}
