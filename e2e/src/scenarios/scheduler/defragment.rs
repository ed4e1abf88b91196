//! `kubectl inspect gpu defragment --apply` on a real API server, kube-scheduler and ReplicaSet controller: pods move
//! within their budgets, the freed GPUs go to the pod that waits, and reservations outlive a scheduler.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{
    SOON, Site,
    front::Front,
    inspect::Kubectl,
    pods::{gpu_node, whole},
};
use crate::harness::{Cluster, Harness, Parts};

const NODES: [&str; 2] = ["node-1", "node-2"];

/// A user with the rights of `deploy/defragment/role.yaml`.
const USER: &str = "tidier";

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: true }).await?;
    let nodes = NODES.map(|name| gpu_node(name, 2, "GiB"));
    cluster.create_all(&Api::<Node>::all(cluster.client()), nodes.into_iter()).await?;
    let site = Site::of(&harness, cluster.into()).await?;
    let mut replica = site.replica("tessera-scheduler-1", None)?;
    site.ready(&replica).await?;
    let front = Front::start(vec![replica.addresses]).await?;
    let _kube_scheduler = site.kube_scheduler(&front).await?;
    let kubectl = Kubectl::install(&site)?;

    // One pod on each node leaves one free GPU on each, and the pod with two GPUs waits.
    for (place, name) in NODES.into_iter().enumerate() {
        let other = NODES[1 - place];
        cordon(&site, other, true).await?;
        replica_set(&site, &format!("set-{name}")).await?;
        cordon(&site, other, false).await?;
    }
    site.make(&whole("large", 2)).await?;
    site.refused("large", "Insufficient nvidia.com/gpu").await?;

    budget_holds(&site, &kubectl).await?;
    freed_room_is_not_lost(&site, &kubectl).await?;

    site.cluster.pods().delete("large", &DeleteParams::default().grace_period(0)).await?;
    let node = reserve_by_hand(&site).await?;
    replica.component.kill()?;
    replica = site.replica("tessera-scheduler-2", None)?;
    front.add(replica.addresses);
    site.ready(&replica).await?;
    reservation_is_found_again(&site, &kubectl, &node).await
}

/// A budget that allows no eviction stops the plan, and no pod is evicted.
async fn budget_holds(site: &Site, kubectl: &Kubectl) -> Result<()> {
    let budgets: Api<PodDisruptionBudget> = Api::default_namespaced(site.cluster.client());
    let budget = serde_json::from_value(json!({
        "metadata": { "name": "web" },
        "spec": { "maxUnavailable": 0, "selector": { "matchLabels": { "app": "web" } } },
    }))?;
    budgets.create(&PostParams::default(), &budget).await?;
    site.harness
        .wait_for("the budget to count its pods", SOON, async || {
            let status = budgets.get("web").await?.status;
            Ok(status.filter(|status| status.observed_generation.is_some()).map(drop))
        })
        .await?;
    let before = pods(site).await?;
    let output = kubectl.run(&["inspect", "gpu", "defragment", "--apply", "--yes"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.code() == Some(1) && text.contains("No moves make room."), "{text}");
    ensure!(pods(site).await? == before, "a pod was evicted against its budget");
    budgets.delete("web", &DeleteParams::default()).await?;
    site.harness.note("a PodDisruptionBudget without allowed disruptions keeps all pods where they are");
    Ok(())
}

/// A user with the least rights carries out the plan. A pod that only fits on the freed node does not get it.
async fn freed_room_is_not_lost(site: &Site, kubectl: &Kubectl) -> Result<()> {
    let role = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/defragment/role.yaml");
    kubectl.text(&["apply", "-f", role])?;
    let binding = format!("--user={USER}");
    kubectl.text(&["create", "clusterrolebinding", "gpu-tidier", "--clusterrole=gpu-tidier", &binding])?;
    site.cluster.wait_for_rights(USER).await?;
    let kubeconfig = site.cluster.kubeconfig(USER, "people")?;

    let plan: Value = serde_json::from_str(&kubectl.text(&["inspect", "gpu", "defragment", "--json"])?)?;
    let (node, victim) = (text(&plan["places"][0]["node"]), text(&plan["moves"][0]["pod"]));
    ensure!(plan["moves"].as_array().is_some_and(|moves| moves.len() == 1), "{plan}");

    let apply = ["inspect", "gpu", "defragment", "--apply", "--yes", "--json"];
    let applied = kubectl
        .command(&kubeconfig, &apply)?
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start kubectl")?;
    let nodes: Api<Node> = Api::all(site.cluster.client());
    site.harness
        .wait_for("the reservation on the node", SOON, async || {
            let annotations = nodes.get(&node).await?.metadata.annotations.unwrap_or_default();
            Ok(annotations.contains_key("tessera.dev/reservations").then_some(()))
        })
        .await?;
    let mut thief = whole("thief", 1);
    let only_there = [("kubernetes.io/hostname".to_owned(), node.clone())].into();
    thief.spec.get_or_insert_default().node_selector = Some(only_there);
    site.make(&thief).await?;

    let large = site.bound("large").await?;
    ensure!(large.spec.and_then(|spec| spec.node_name).as_deref() == Some(&node), "large is not on {node}");
    let output = tokio::task::spawn_blocking(move || applied.wait_with_output()).await??;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    let answer: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(answer["done"] == true && answer["evicted"] == json!([victim]), "{answer}\n{said}");
    let annotations = nodes.get(&node).await?.metadata.annotations.unwrap_or_default();
    ensure!(!annotations.contains_key("tessera.dev/reservations"), "the reservation is left");
    let thief = site.cluster.pods().get("thief").await?;
    ensure!(thief.spec.and_then(|spec| spec.node_name).is_none(), "the pod on {node} took the freed GPU");
    site.cluster.pods().delete("thief", &DeleteParams::default().grace_period(0)).await?;
    site.harness.note(&format!("{victim} moved, and large got node {node}:\n{said}"));
    Ok(())
}

/// Reserves both GPUs of the empty node for no pod, and returns the node.
async fn reserve_by_hand(site: &Site) -> Result<String> {
    let nodes: Api<Node> = Api::all(site.cluster.client());
    let taken: Vec<String> =
        pods(site).await?.into_iter().filter_map(|pod| pod.spec.and_then(|spec| spec.node_name)).collect();
    let node = NODES.into_iter().find(|node| !taken.iter().any(|taken| taken == node));
    let node = node.context("no node is empty")?.to_owned();
    let gpus = [0, 1].map(|gpu| json!({ "uuid": format!("GPU-{node}-{gpu}") }));
    let reservation = json!([{
        "name": "defragment/1x2", "owner": "jane", "until": "2999-01-01T00:00:00Z", "gpus": gpus,
    }]);
    let patch =
        json!({ "metadata": { "annotations": { "tessera.dev/reservations": reservation.to_string() } } });
    nodes.patch(&node, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(node)
}

/// A new scheduler keeps the reserved GPUs, every view shows them, and they are free after `--release`.
async fn reservation_is_found_again(site: &Site, kubectl: &Kubectl, node: &str) -> Result<()> {
    site.make(&whole("small", 2)).await?;
    site.refused("small", "suitable GPUs are reserved for defragment/1x2 (jane) at present").await?;
    let overview = kubectl.text(&["inspect", "gpu", "overview"])?;
    let line = "2 GPUs reserved for defragment/1x2 (jane) until 2999-01-01T00:00:00Z: GPU 0,1";
    ensure!(overview.contains(line), "{overview}");
    let json: Value = serde_json::from_str(&kubectl.text(&["inspect", "gpu", node, "-o", "json"])?)?;
    ensure!(json["nodes"][0]["reservations"][0]["name"] == "defragment/1x2", "{json}");
    let explained = kubectl.text(&["inspect", "gpu", "explain", "small"])?;
    ensure!(explained.contains("GPUs are reserved for defragment/1x2 (jane)"), "{explained}");
    let released = kubectl.text(&["inspect", "gpu", "defragment", "--release"])?;
    ensure!(released == format!("{node}: defragment/1x2 released\n"), "{released}");
    site.bound("small").await?;
    site.harness.note(&format!("after a restart of the scheduler:\n{overview}"));
    Ok(())
}

async fn pods(site: &Site) -> Result<Vec<Pod>> {
    Ok(site.cluster.pods().list(&ListParams::default().labels("app=web")).await?.items)
}

async fn cordon(site: &Site, node: &str, is_cordoned: bool) -> Result<()> {
    let patch = json!({ "spec": { "unschedulable": is_cordoned } });
    let nodes: Api<Node> = Api::all(site.cluster.client());
    nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

/// Creates a set of one pod with one GPU, and waits until the pod has a node.
async fn replica_set(site: &Site, name: &str) -> Result<()> {
    let labels = json!({ "app": "web", "set": name });
    let mut spec = serde_json::to_value(whole("web", 1).spec)?;
    // No kubelet ends pods on a virtual node.
    spec["terminationGracePeriodSeconds"] = 0.into();
    // A controller's pods start again, and no kubelet runs them here.
    spec["restartPolicy"] = "Always".into();
    let set: ReplicaSet = serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "replicas": 1,
            "selector": { "matchLabels": { "set": name } },
            "template": { "metadata": { "labels": labels }, "spec": spec },
        },
    }))?;
    Api::<ReplicaSet>::default_namespaced(site.cluster.client()).create(&PostParams::default(), &set).await?;
    let of_set = ListParams::default().labels(&format!("set={name}"));
    site.harness
        .wait_for(&format!("the pod of {name} to be bound"), SOON, async || {
            let all = site.cluster.pods().list(&of_set).await?.items;
            Ok(all
                .iter()
                .any(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()))
                .then_some(()))
        })
        .await
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
