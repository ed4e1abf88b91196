//! The choice of a node by policy, and of GPUs by their links. The nodes are virtual, because the scenario has one real
//! kubelet: kube-scheduler and the extender place the pods, and no container starts.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, api::DeleteParams};
use serde_json::{Value, json};
use tessera_wire::tessera::inventory;

use super::{
    super::pods::{gpu_node, split_into_slots},
    CORES, GPU, MEMORY, Scene,
    choices::annotated,
    granted,
};

const NODES: [&str; 2] = ["policy-a", "policy-b"];

/// Each node has two pairs of GPUs with NVLinks. The GPUs of a pair do not follow each other.
const GPUS: u64 = 4;
const PAIRS: [[u8; 2]; 2] = [[0, 2], [1, 3]];
const NVLINKS: u8 = 12;

/// Devices of `nvidia.com/gpu` for each GPU.
const SLOTS: u64 = 10;

/// Label of the virtual nodes, which the pods of this step select.
const LABEL: &str = "e2e-policies";

impl Scene {
    pub(super) async fn policies(&self) -> Result<()> {
        let nodes = Api::<Node>::all(self.stage.cluster.client());
        let made: Vec<Node> = NODES.iter().map(|name| linked_node(name)).collect::<Result<_>>()?;
        self.stage.cluster.create_all(&nodes, made.into_iter()).await?;
        self.nodes_by_policy().await?;
        self.gpus_by_links().await?;
        self.site.delete_all_pods().await?;
        for name in NODES {
            nodes.delete(name, &DeleteParams::default()).await?;
        }
        Ok(())
    }

    async fn nodes_by_policy(&self) -> Result<()> {
        let part = [(GPU, "1"), (MEMORY, "3000"), (CORES, "10")];
        let policy = "hami.io/node-scheduler-policy";
        let first = self.node_of("first", &part, &[]).await?;
        let packed = self.node_of("node-binpack", &part, &[(policy, "binpack")]).await?;
        ensure!(packed == first, "binpack chose {packed}, and {first} has pods");
        let spread = self.node_of("node-spread", &part, &[(policy, "spread")]).await?;
        ensure!(spread != first, "spread chose {spread}, which has pods");
        let packed = self.node_of("node-binpack-again", &part, &[(policy, "binpack")]).await?;
        ensure!(packed == first, "binpack chose {packed}, and {first} has more pods");
        self.site.harness.note(&format!("binpack chose {first} twice, spread chose {spread}"));
        self.site.delete_all_pods().await
    }

    async fn gpus_by_links(&self) -> Result<()> {
        let two = [(GPU, "2"), (MEMORY, "3000"), (CORES, "10")];
        let policy = [("hami.io/gpu-scheduler-policy", "topology-aware")];
        for name in ["linked", "linked-too"] {
            self.node_of(name, &two, &policy).await?;
            let gpus = self.numbers_of(name).await?;
            ensure!(
                PAIRS.iter().any(|pair| gpus == BTreeSet::from(*pair)),
                "{name} got GPUs {gpus:?}, which have no NVLinks"
            );
            self.site.harness.note(&format!("{name} got GPUs {gpus:?}, which have NVLinks"));
        }
        Ok(())
    }

    /// Creates a pod for the virtual nodes and returns its node.
    async fn node_of(
        &self,
        name: &str,
        asked: &[(&str, &str)],
        annotations: &[(&str, &str)],
    ) -> Result<String> {
        let mut pod: Pod = annotated(name, asked, annotations);
        if let Some(spec) = &mut pod.spec {
            spec.node_selector = Some([(LABEL.to_owned(), String::new())].into());
        }
        self.site.make(&pod).await?;
        self.site.bound(name).await?.spec.and_then(|spec| spec.node_name).context("no node")
    }

    /// Returns the numbers of the GPUs that a pod was granted, which end their UUIDs.
    async fn numbers_of(&self, name: &str) -> Result<BTreeSet<u8>> {
        let pod = self.stage.cluster.pods().get(name).await?;
        let number = |uuid: &str| Ok(uuid.rsplit('-').next().unwrap_or_default().parse()?);
        granted(&pod)?.iter().map(|(uuid, ..)| number(uuid)).collect()
    }
}

fn linked_node(name: &str) -> Result<Node> {
    let mut node = split_into_slots(gpu_node(name, GPUS, "GiB"), GPUS, SLOTS)?;
    node.metadata.labels.get_or_insert_default().insert(LABEL.to_owned(), String::new());
    for inventory in node.metadata.annotations.iter_mut().filter_map(|all| all.get_mut(inventory::KEY)) {
        let mut document: Value = serde_json::from_str(inventory)?;
        let links = (0..GPUS).flat_map(|first| (first + 1..GPUS).map(move |second| (first, second)));
        let link = |(first, second): (u64, u64)| {
            let is_pair = PAIRS.iter().any(|pair| pair.map(u64::from) == [first, second]);
            json!([first, second, "NODE", if is_pair { NVLINKS } else { 0 }])
        };
        document["links"] = links.map(link).collect();
        *inventory = document.to_string();
    }
    Ok(node)
}
