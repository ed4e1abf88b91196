//! Every manifest of `examples/`, applied by kubectl to the real API server. The real controllers make the pods of Jobs,
//! Deployments and the like, and the real kube-scheduler binds them to virtual nodes.

use std::{collections::BTreeSet, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, api::ListParams};

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

/// Examples whose kinds come with projects that are not installed here. The test of the demo makes their pods.
const OF_OTHER_PROJECTS: [&str; 2] = ["jobset-workers", "kubeflow-pytorchjob"];

/// Examples with a pod that waits, and a part of kube-scheduler's message.
const WAITING: [(&str, &str); 2] = [("mig-instance", "nvidia.com/mig-1g.10gb"), ("quota", "ExceedsGPUQuota")];

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: true }).await?;
    let nodes = (0..3).map(|number| {
        let mut node = node_of_model(&format!("node-{number}"), 8, "GiB", "A100", 81_920);
        let labels = node.metadata.labels.get_or_insert_default();
        labels.insert("gaia.tencent.com/gpu-model".to_owned(), "A100".to_owned());
        node
    });
    cluster.create_all(&Api::<Node>::all(cluster.client()), nodes).await?;
    let site = Site::of(&harness, cluster.into()).await?;
    let replica = site.replica("tessera-scheduler", None)?;
    site.ready(&replica).await?;
    let front = Front::start(vec![replica.addresses]).await?;
    let _kube_scheduler = site.kube_scheduler(&front).await?;

    let listed: BTreeSet<String> =
        EXAMPLES.iter().map(|(name, _)| *name).chain(OF_OTHER_PROJECTS).map(str::to_owned).collect();
    ensure!(listed == present()?, "the table of this scenario is not that of examples/: {:?}", present()?);
    for (name, bound) in EXAMPLES {
        site.example(name, bound).await.with_context(|| format!("examples/{name}.yaml"))?;
    }
    harness.note(&format!(
        "{} examples applied; their pods were bound with a grant, or waited as said",
        EXAMPLES.len()
    ));
    Ok(())
}

fn folder() -> PathBuf {
    deploy().join("../examples")
}

/// Returns the names of the manifests.
fn present() -> Result<BTreeSet<String>> {
    let files = fs::read_dir(folder())?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let manifests = files.iter().filter(|file| file.extension().is_some_and(|found| found == "yaml"));
    Ok(manifests.filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned())).collect())
}

impl Site {
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

/// Returns kube-scheduler's message about a pod without a node.
fn message(pod: &Pod) -> String {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let messages = conditions.filter(|condition| condition.type_ == "PodScheduled");
    messages.filter_map(|condition| condition.message.clone()).collect()
}
