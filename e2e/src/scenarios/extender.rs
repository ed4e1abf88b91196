//! A minimal extender that a real kube-scheduler calls, and that binds with annotations.

mod golden;
mod server;

use std::{collections::BTreeMap, pin::pin, time::Duration};

use anyhow::{Context, Result, ensure};
use futures::TryStreamExt;
use k8s_openapi::{
    api::{core::v1::Node, core::v1::Pod},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::{
    Api,
    api::PostParams,
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tessera_cluster::{BindError, Binding, LeanPod};

use self::server::{GRANT, Recorded, Server};
use crate::harness::{Cluster, Extender, Harness, Parts, pod, virtual_node};

/// Resource whose pods concern the extender.
const RESOURCE: &str = "e2e.tessera.dev/gpu";

/// Nodes of the scenario. The extender accepts the second and the third, and prefers the third.
const NODES: [&str; 3] = ["full", "fair", "fine"];

const SOON: Duration = Duration::from_secs(30);

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: false }).await?;
    let nodes: Api<Node> = Api::all(cluster.client());
    cluster.create_all(&nodes, NODES.into_iter().map(node)).await?;
    allow_binding(&cluster).await?;
    let binder = tessera_cluster::connect(Some(&cluster.kubeconfig("e2e-extender", "e2e")?)).await?;
    let server = Server::start(binder.clone()).await?;

    for (scheduler, node_cache_capable) in [("by-name", true), ("by-node", false)] {
        let extender = Extender { url: server.url.clone(), resource: RESOURCE.into(), node_cache_capable };
        let component = format!("kube-scheduler-{scheduler}");
        let _scheduler = cluster.start_scheduler(&component, extender.scheduler_configuration(scheduler))?;
        let bound = place(&harness, &cluster, scheduler).await?;
        ensure!(bound.spec.node_name == "fine", "the pod was bound to {:?}", bound.spec.node_name);
        let recorded = server.take_recorded();
        check_calls(&recorded)?;
        golden::compare_or_record(&harness, scheduler, recorded)?;
        harness.note(&format!(
            "{scheduler}: filter, prioritize and bind were called; node and annotation came together"
        ));
        a_pod_that_fits_nowhere_says_why(&harness, &cluster, scheduler).await?;
        server.take_recorded();
    }
    a_pod_is_bound_only_once(&cluster, &binder).await?;
    harness.note("a second binding and a binding for another UID are rejected");
    Ok(())
}

/// Creates a pod and watches it until it has a node. The annotation must appear together with the
/// node.
async fn place(harness: &Harness, cluster: &Cluster, scheduler: &str) -> Result<LeanPod> {
    let name = format!("placed-{scheduler}");
    let pods: Api<LeanPod> = Api::default_namespaced(cluster.client());
    let only_it = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut states = pin!(watcher(pods, only_it).applied_objects());
    cluster.pods().create(&PostParams::default(), &asking_pod(&name, scheduler, "2")).await?;
    let until_bound = async {
        loop {
            let pod = states.try_next().await?.context("the watch ended")?;
            let granted = pod.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(GRANT));
            let bound = !pod.spec.node_name.is_empty();
            ensure!(granted == bound, "the pod had only one of node and annotation: {pod:?}");
            if bound {
                return Ok(pod);
            }
        }
    };
    harness.complete(&format!("{name} to be bound"), SOON, until_bound).await
}

fn check_calls(recorded: &[Recorded]) -> Result<()> {
    let verbs: Vec<&str> = recorded.iter().map(|call| call.verb).collect();
    ensure!(verbs == ["filter", "prioritize", "bind"], "the calls were {verbs:?}");
    let offered = |index: usize| -> Result<Vec<String>> {
        let args: tessera_wire::foreign::extender::ExtenderArgs =
            serde_json::from_slice(&recorded[index].body)?;
        let mut names: Vec<String> = args.names().map(str::to_owned).collect();
        names.sort();
        Ok(names)
    };
    ensure!(offered(0)? == ["fair", "fine", "full"], "filter was offered {:?}", offered(0)?);
    ensure!(offered(1)? == ["fair", "fine"], "prioritize was offered {:?}", offered(1)?);
    Ok(())
}

async fn a_pod_that_fits_nowhere_says_why(
    harness: &Harness,
    cluster: &Cluster,
    scheduler: &str,
) -> Result<()> {
    let name = format!("refused-{scheduler}");
    cluster.pods().create(&PostParams::default(), &asking_pod(&name, scheduler, "7")).await?;
    let message = harness
        .wait_for(&format!("{name} to be refused"), SOON, async || {
            let status = cluster.pods().get(&name).await?.status.unwrap_or_default();
            let conditions = status.conditions.unwrap_or_default();
            Ok(conditions.into_iter().find(|c| c.type_ == "PodScheduled").and_then(|c| c.message))
        })
        .await?;
    ensure!(message.contains("3 no GPU with 7 free"), "the pod's message is {message:?}");
    harness.note(&format!("{scheduler}: {message}"));
    Ok(())
}

async fn a_pod_is_bound_only_once(cluster: &Cluster, binder: &kube::Client) -> Result<()> {
    let bound = cluster.pods().get("placed-by-name").await?;
    let binding = |uid: &str| Binding {
        namespace: "default".into(),
        pod: "placed-by-name".into(),
        uid: uid.into(),
        node: "fair".into(),
        annotations: BTreeMap::new(),
    };
    let uid = bound.metadata.uid.context("the pod has no UID")?;
    for uid in [uid.as_str(), "00000000-0000-0000-0000-000000000000"] {
        let outcome = binding(uid).send(binder).await;
        ensure!(matches!(outcome, Err(BindError::Conflict(_))), "the binding gave {outcome:?}");
    }
    let mut missing = binding(&uid);
    missing.pod = "nobody".into();
    let outcome = missing.send(binder).await;
    ensure!(matches!(outcome, Err(BindError::Gone(_))), "the binding gave {outcome:?}");
    Ok(())
}

/// Grants the right to bind and nothing else, which is all that a scheduler needs to write.
async fn allow_binding(cluster: &Cluster) -> Result<()> {
    let create = |path: &str, object: Value| -> Result<_> {
        let request = axum::http::Request::post(format!("/apis/rbac.authorization.k8s.io/v1/{path}"))
            .header("content-type", "application/json")
            .body(object.to_string().into_bytes())?;
        let client = cluster.client();
        Ok(async move { client.request::<Value>(request).await })
    };
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": "e2e-extender" },
        "rules": [{ "apiGroups": [""], "resources": ["pods/binding"], "verbs": ["create"] }],
    });
    let grant = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": { "name": "e2e-extender" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "e2e-extender" },
        "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "e2e-extender" }],
    });
    create("clusterroles", role)?.await?;
    create("clusterrolebindings", grant)?.await?;
    cluster.wait_for_rights("e2e-extender").await
}

fn node(name: &str) -> Node {
    let mut node = virtual_node(name);
    if let Some(status) = &mut node.status {
        for amounts in [&mut status.capacity, &mut status.allocatable].into_iter().flatten() {
            amounts.insert(RESOURCE.into(), Quantity("80".into()));
        }
    }
    node
}

fn asking_pod(name: &str, scheduler: &str, amount: &str) -> Pod {
    let mut asking = pod(name, "true", &[(RESOURCE, amount)]);
    asking.metadata.annotations = Some([("example.com/note".to_owned(), "kept".to_owned())].into());
    if let Some(spec) = &mut asking.spec {
        spec.scheduler_name = Some(scheduler.into());
        // The volume of the token would have another name in every run.
        spec.automount_service_account_token = Some(false);
    }
    asking
}
