//! Every manifest of `examples/` and `examples/hami/`, applied by kubectl to the real API server. The real controllers
//! make the pods of Jobs, Deployments and the like, and the real kube-scheduler binds them to virtual nodes.

use std::{collections::BTreeSet, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{
    api::core::v1::{Node, Pod},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};
use serde_json::{Value, json};
use tessera_wire::tessera::inventory;

use super::{
    SOON, Site,
    front::Front,
    pods::{annotation, node_of_model},
};
use crate::harness::{Cluster, Harness, Parts, deploy};

/// The examples, and the pods of each that are bound. A StatefulSet starts its second pod when the first one is ready,
/// which no pod of a virtual node is.
const EXAMPLES: [(&str, usize); 27] = [
    ("cronjob", 1),
    ("deployment-with-hpa", 2),
    ("disruption-budget", 2),
    ("gpushare-deployment", 3),
    ("gpushare-memory", 1),
    ("inference-beside-training", 2),
    ("job-with-share", 4),
    ("memory-limit", 1),
    ("mig-instance", 0),
    ("notebooks-on-one-gpu", 2),
    ("pod-nvidia-gpu", 1),
    ("pod-on-a-model", 1),
    ("pod-share", 1),
    ("pod-two-containers", 1),
    ("pod-whole-gpu", 1),
    ("priorities", 2),
    ("quota", 1),
    ("soft-limit", 1),
    ("soft-limit-pair", 2),
    ("spread-over-nodes", 2),
    ("statefulset-notebooks", 1),
    ("training-by-links", 1),
    ("training-eight-gpus", 1),
    ("training-gang", 2),
    ("training-leaves-links", 1),
    ("training-two-gpus", 1),
    ("vllm-memory-share", 1),
];

/// Examples whose kinds come with projects that are not installed here, with these kinds: group, version, kind, plural
/// and the required field of the specification. The API server accepts the objects, and no controller makes their pods,
/// which the test of the demo does.
const OF_OTHER_PROJECTS: [(&str, [&str; 5]); 2] = [
    ("jobset-workers", ["jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", "replicatedJobs"]),
    ("kubeflow-pytorchjob", ["kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", "pytorchReplicaSpecs"]),
];

/// Slots of each GPU of the node that serves HAMi's resources.
const SLOTS: u16 = 10;

/// Examples with a pod that waits, and a part of kube-scheduler's message.
const WAITING: [(&str, &str); 2] = [("mig-instance", "nvidia.com/mig-1g.10gb"), ("quota", "ExceedsGPUQuota")];

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: true }).await?;
    let nodes: Api<Node> = Api::all(cluster.client());
    let of_examples = (0..3).map(|number| {
        let mut node = node_of_model(&format!("node-{number}"), 8, "GiB", "A100", 81_920);
        let labels = node.metadata.labels.get_or_insert_default();
        labels.insert("gaia.tencent.com/gpu-model".to_owned(), "A100".to_owned());
        node
    });
    cluster.create_all(&nodes, of_examples).await?;
    let site = Site::of(&harness, cluster.into()).await?;
    let replica = site.replica("tessera-scheduler", None)?;
    site.ready(&replica).await?;
    let front = Front::start(vec![replica.addresses]).await?;
    let _kube_scheduler = site.kube_scheduler(&front).await?;

    let of_others = OF_OTHER_PROJECTS.iter().map(|(name, _)| *name);
    let listed: BTreeSet<String> =
        EXAMPLES.iter().map(|(name, _)| *name).chain(of_others).map(str::to_owned).collect();
    ensure!(
        listed == present("")?,
        "the table of this scenario is not that of examples/: {:?}",
        present("")?
    );
    for (name, bound) in EXAMPLES {
        site.example(name, bound).await.with_context(|| format!("examples/{name}.yaml"))?;
    }
    harness.note(&format!(
        "{} examples applied; their pods were bound with a grant, or waited as said",
        EXAMPLES.len()
    ));
    for (name, kind) in OF_OTHER_PROJECTS {
        site.kind_of_another_project(name, kind).await.with_context(|| format!("examples/{name}.yaml"))?;
    }
    harness.note(
        "the examples of JobSet and Kubeflow are accepted, with definitions of our own and no controller",
    );
    nodes.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
    site.cluster.create_all(&nodes, [hami_node()?].into_iter()).await?;
    let of_hami = present("hami")?;
    ensure!(!of_hami.is_empty(), "there are no manifests in examples/hami");
    for name in &of_hami {
        let name = format!("hami/{name}");
        site.example(&name, 1).await.with_context(|| format!("examples/{name}.yaml"))?;
    }
    harness.note(&format!("{} examples with HAMi's resources were bound with a grant", of_hami.len()));
    Ok(())
}

/// Returns a virtual node whose agent would serve HAMi's resources.
fn hami_node() -> Result<Node> {
    let mut node = node_of_model("node-hami", 8, "GiB", "A100", 81_920);
    let annotations = node.metadata.annotations.get_or_insert_default();
    let text = annotations.get_mut(inventory::KEY).context("the node has no inventory")?;
    let mut described: Value = serde_json::from_str(text)?;
    described["nvidiaSlots"] = SLOTS.into();
    for gpu in described["gpus"].as_array_mut().into_iter().flatten() {
        gpu["numa"] = 0.into();
    }
    *text = described.to_string();
    if let Some(status) = &mut node.status {
        for resources in [&mut status.capacity, &mut status.allocatable].into_iter().flatten() {
            resources.insert("nvidia.com/gpu".to_owned(), Quantity((8 * SLOTS).to_string()));
        }
    }
    Ok(node)
}

fn folder() -> PathBuf {
    deploy().join("../examples")
}

/// Returns the names of the manifests in a folder of the examples.
fn present(part: &str) -> Result<BTreeSet<String>> {
    let files =
        fs::read_dir(folder().join(part))?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let manifests = files.iter().filter(|file| file.extension().is_some_and(|found| found == "yaml"));
    Ok(manifests.filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned())).collect())
}

impl Site {
    /// Applies an example with the definition of its kind, which is all that this cluster has of the other project. Only
    /// fields that the definition names are accepted above the pods' templates.
    async fn kind_of_another_project(&self, name: &str, kind: [&str; 5]) -> Result<()> {
        let definition = self.harness.state("manifests")?.join(format!("{name}.json"));
        fs::write(&definition, self::definition(kind).to_string())?;
        let definition = definition.display().to_string();
        let file = folder().join(format!("{name}.yaml")).display().to_string();
        self.cluster.kubectl(&["apply", "-f", &definition]).await?;
        self.cluster
            .kubectl(&["wait", "--for=condition=Established", "-f", &definition, "--timeout=60s"])
            .await?;
        self.harness
            .wait_for("kubectl apply", SOON, async || {
                Ok(Some(self.cluster.kubectl(&["apply", "--validate=strict", "-f", &file]).await?))
            })
            .await?;
        let stored = self.cluster.kubectl(&["get", "-f", &file, "-o", "json"]).await?;
        ensure!(stored.contains("\"aliyun.com/gpu\""), "the API server has dropped the request: {stored}");
        self.cluster.kubectl(&["delete", "-f", &file]).await?;
        Ok(())
    }

    /// Applies one example, waits until its pods are bound or wait for the expected reason, and deletes it.
    async fn example(&self, name: &str, bound: usize) -> Result<()> {
        let file = folder().join(format!("{name}.yaml")).display().to_string();
        // The API server rejects pods of a priority class or a namespace that it has only just got.
        self.harness
            .wait_for("kubectl apply", SOON, async || {
                Ok(Some(self.cluster.kubectl(&["apply", "-f", &file]).await?))
            })
            .await?;
        if name == "cronjob" {
            let at_once = ["create", "job", "at-once", "--from=cronjob/nightly-evaluation"];
            self.cluster.kubectl(&at_once).await?;
        }
        let waits = WAITING.iter().find(|(waiting, _)| *waiting == name).map(|(_, reason)| *reason);
        let pods: Api<Pod> = Api::all(self.cluster.client());
        self.harness
            .wait_for("the pods of the example", SOON, async || {
                let pods = pods.list(&ListParams::default()).await?.items;
                let (with_node, without): (Vec<&Pod>, Vec<&Pod>) = pods
                    .iter()
                    .partition(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()));
                let granted = with_node.iter().filter(|pod| !annotation(pod, "tessera.dev/grant").is_empty());
                let reasons: Vec<String> = without.iter().map(|pod| message(pod)).collect();
                let as_said = match waits {
                    Some(reason) => reasons.len() == 1 && reasons[0].contains(reason),
                    None => reasons.is_empty(),
                };
                ensure!(
                    with_node.len() == bound && granted.count() == bound && as_said,
                    "{} of {bound} pods are bound; the others: {reasons:?}",
                    with_node.len()
                );
                Ok(Some(()))
            })
            .await?;
        self.cluster.kubectl(&["delete", "-f", &file, "--wait=false"]).await?;
        if name == "cronjob" {
            self.cluster.kubectl(&["delete", "job", "at-once", "--wait=false", "--ignore-not-found"]).await?;
        }
        // No kubelet of a virtual node confirms that a pod has ended.
        self.harness
            .wait_for("all pods to be gone", SOON, async || {
                let at_once = ["delete", "pods", "--all", "--all-namespaces", "--force", "--grace-period=0"];
                self.cluster.kubectl(&at_once).await?;
                Ok(pods.list_metadata(&ListParams::default()).await?.items.is_empty().then_some(()))
            })
            .await
    }
}

/// Returns a minimal definition of a kind whose specification has one required field.
fn definition([group, version, kind, plural, field]: [&str; 5]) -> Value {
    let anything = json!({ "x-kubernetes-preserve-unknown-fields": true });
    let spec = json!({ "type": "object", "required": [field], "properties": { field: anything } });
    let schema = json!({ "type": "object", "required": ["spec"], "properties": { "spec": spec } });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.{group}") },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": { "kind": kind, "plural": plural, "singular": kind.to_lowercase() },
            "versions": [{
                "name": version,
                "served": true,
                "storage": true,
                "schema": { "openAPIV3Schema": schema },
            }],
        },
    })
}

/// Returns kube-scheduler's message about a pod without a node.
fn message(pod: &Pod) -> String {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let messages = conditions.filter(|condition| condition.type_ == "PodScheduled");
    messages.filter_map(|condition| condition.message.clone()).collect()
}
