//! Gangs: the pods of a job get their GPUs together, in any order of arrival and across a restart of the scheduler. A
//! gang that stays incomplete gives its GPUs back, and PodGroup objects state sizes.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, PodSchedulingGate};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PostParams};
use serde_json::json;

use super::{
    SOON, Site,
    front::Front,
    pods::{gpu_node, whole},
};
use crate::harness::Harness;

/// Orders in which the pods of two gangs with two pods each arrive.
const ORDERS: [[&str; 4]; 6] = [
    ["a-0", "a-1", "b-0", "b-1"],
    ["a-0", "b-0", "a-1", "b-1"],
    ["a-0", "b-0", "b-1", "a-1"],
    ["b-0", "a-0", "a-1", "b-1"],
    ["b-0", "a-0", "b-1", "a-1"],
    ["b-0", "b-1", "a-0", "a-1"],
];

/// The order in which the scheduler is killed between the two gangs.
const KILLED_IN: usize = 2;

pub(crate) async fn run(harness: Harness) -> Result<()> {
    // Each gang needs all GPUs of both nodes, so the gangs fit one at a time.
    let nodes = ["node-1", "node-2"].map(|name| gpu_node(name, 8, "GiB"));
    let site = Site::start(&harness, nodes.into_iter()).await?;
    let mut replica = site.replica("tessera-scheduler-1", None)?;
    site.ready(&replica).await?;
    let front = Front::start(vec![replica.addresses]).await?;
    let _kube_scheduler = site.kube_scheduler(&front).await?;

    site.make(&member("a-0")).await?;
    site.refused("a-0", "gang default/a waits for its pods: 1 of 2 exist").await?;
    delete(&site, ["a-0"]).await?;
    harness.note("a pod whose partner does not exist waits");

    for (number, order) in ORDERS.into_iter().enumerate() {
        for name in order {
            site.make(&member(name)).await?;
        }
        let first = bound_gang(&site, 4).await?;
        if number == KILLED_IN {
            replica.component.kill()?;
            replica = site.replica("tessera-scheduler-2", None)?;
            front.add(replica.addresses);
            site.ready(&replica).await?;
        }
        delete(&site, pods_of(&first)).await?;
        let second = bound_gang(&site, 2).await?;
        ensure!(first != second, "gang {first} ran twice");
        delete(&site, pods_of(&second)).await?;
        harness.note(&format!("{}: gang {first} ran, then gang {second}", order.join(", ")));
    }

    replica.component.kill()?;
    serve_pod_groups(&site).await?;
    let replica = site.replica_with("tessera-scheduler-3", None, &["--gang-timeout=3s"])?;
    front.add(replica.addresses);
    site.ready(&replica).await?;
    incomplete_gang(&site).await?;
    pod_group(&site).await
}

/// A gang of which one pod may not be scheduled: the other is bound, and the GPUs of the missing one become free again.
async fn incomplete_gang(site: &Site) -> Result<()> {
    let mut gated = member("c-1");
    let gate = PodSchedulingGate { name: "example.com/wait".to_owned() };
    gated.spec.get_or_insert_default().scheduling_gates = Some(vec![gate]);
    site.make(&gated).await?;
    site.make(&member("c-0")).await?;
    site.bound("c-0").await?;
    let event = site.event_about("c-0", "GangIncomplete").await?;
    let message = event.message.unwrap_or_default();
    ensure!(message.contains("was not bound within 3 s"), "{message}");
    ensure!(message.contains("Missing: c-1."), "{message}");
    site.make(&whole("other", 8)).await?;
    site.bound("other").await?;
    site.harness.note(&format!("event about c-0: {message}"));
    delete(site, ["c-0", "c-1", "other"]).await
}

/// Pods that name a PodGroup wait until the object states how many they are.
async fn pod_group(site: &Site) -> Result<()> {
    for name in ["d-0", "d-1"] {
        let mut pod = whole(name, 8);
        let labels = pod.metadata.labels.get_or_insert_default();
        labels.insert("scheduling.x-k8s.io/pod-group".to_owned(), "d".to_owned());
        site.make(&pod).await?;
    }
    site.refused("d-0", "gang default/d waits for its PodGroup, which does not exist").await?;
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("scheduling.x-k8s.io", "v1alpha1", "PodGroup"));
    let groups: Api<DynamicObject> = Api::default_namespaced_with(site.cluster.client(), &kind);
    let group = DynamicObject::new("d", &kind).data(json!({ "spec": { "minMember": 2 } }));
    groups.create(&PostParams::default(), &group).await.context("create the PodGroup")?;
    bound_gang(site, 2).await?;
    site.harness.note("the PodGroup states the size of its gang");
    Ok(())
}

/// Makes the API server serve the PodGroups of the coscheduling plugin.
async fn serve_pod_groups(site: &Site) -> Result<()> {
    let any = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let version = json!({
        "name": "v1alpha1", "served": true, "storage": true, "schema": { "openAPIV3Schema": any },
    });
    let definition: CustomResourceDefinition = serde_json::from_value(json!({
        "metadata": {
            "name": "podgroups.scheduling.x-k8s.io",
            // Names below k8s.io need an approval.
            "annotations": { "api-approved.kubernetes.io": "unapproved, for a test" },
        },
        "spec": {
            "group": "scheduling.x-k8s.io",
            "scope": "Namespaced",
            "names": { "plural": "podgroups", "singular": "podgroup", "kind": "PodGroup" },
            "versions": [version],
        },
    }))?;
    let definitions: Api<CustomResourceDefinition> = Api::all(site.cluster.client());
    definitions.create(&PostParams::default(), &definition).await.context("create the definition")?;
    let name = "podgroups.scheduling.x-k8s.io";
    site.harness
        .wait_for("PodGroups to be served", SOON, async || {
            let status = definitions.get(name).await?.status.unwrap_or_default();
            let conditions = status.conditions.unwrap_or_default();
            let is_met = conditions.iter().any(|it| it.type_ == "Established" && it.status == "True");
            Ok(is_met.then_some(()))
        })
        .await
}

/// Returns a pod with eight GPUs. Its gang is what its name begins with.
fn member(name: &str) -> Pod {
    let mut pod = whole(name, 8);
    let gang = name.split('-').next().unwrap_or_default();
    pod.metadata
        .annotations
        .get_or_insert_default()
        .insert("tessera.dev/gang".to_owned(), format!("{gang}/2"));
    pod
}

fn pods_of(gang: &str) -> [String; 2] {
    [format!("{gang}-0"), format!("{gang}-1")]
}

/// Waits until both pods of one gang are bound, and returns the gang. No pod of the other gang may have a node.
async fn bound_gang(site: &Site, pods: usize) -> Result<String> {
    site.harness
        .wait_for("both pods of a gang to be bound", SOON, async || {
            let all = site.cluster.pods().list(&ListParams::default()).await?.items;
            ensure!(all.len() == pods, "{} pods exist", all.len());
            let mut nodes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
            for pod in all {
                let Some(node) = pod.spec.and_then(|spec| spec.node_name) else { continue };
                let name = pod.metadata.name.unwrap_or_default();
                let gang = name.split('-').next().unwrap_or_default().to_owned();
                ensure!(nodes.entry(gang).or_default().insert(node), "two pods are on one node");
            }
            ensure!(nodes.len() < 2, "both gangs hold GPUs: {nodes:?}");
            Ok(nodes.into_iter().find(|(_, nodes)| nodes.len() == 2).map(|(gang, _)| gang))
        })
        .await
}

async fn delete(site: &Site, names: impl IntoIterator<Item = impl AsRef<str>>) -> Result<()> {
    let pods = site.cluster.pods();
    for name in names {
        pods.delete(name.as_ref(), &DeleteParams::default().grace_period(0)).await?;
    }
    Ok(())
}
