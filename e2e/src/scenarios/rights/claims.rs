//! With claims, agents write the slices of their own nodes and the scheduler writes the state of claims, and nothing else.

use anyhow::{Context, Result};
use axum::http::Method;
use kube::Client;
use serde_json::{Value, json};
use tessera_cluster::connect;

use super::{ACCOUNT, Attempt, ELSEWHERE, Kubectl, NODE, all_refused};
use crate::harness::{Cluster, Harness};

/// Namespace of the shipped accounts.
const SYSTEM: &str = "kube-system";
/// Name of the scheduler's service account.
const SCHEDULER: &str = "tessera-scheduler";

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const CLASSES: &str = "/apis/resource.k8s.io/v1/deviceclasses";
const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims";
/// The claim that the attempts are about.
const CLAIM: &str = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/training";

pub(super) async fn check(harness: &Harness, cluster: &Cluster, kubectl: &Kubectl) -> Result<()> {
    for account in [ACCOUNT, SCHEDULER] {
        kubectl.run(&["-n", SYSTEM, "create", "serviceaccount", account])?;
    }
    cluster.create_shipped("agent-dra/dra.yaml").await?;
    cluster.create_shipped("scheduler/dra.yaml").await?;
    let admin = cluster.client();
    let claim: Value = send(&admin, &Method::POST, CLAIMS, claim()).await?;
    agent(harness, cluster, &claim).await?;
    scheduler(harness, cluster, &claim).await?;
    without_binding(harness, cluster, kubectl, &claim).await
}

async fn agent(harness: &Harness, cluster: &Cluster, claim: &Value) -> Result<()> {
    let token = async |node: Option<&str>| -> Result<Client> {
        Ok(connect(Some(&cluster.service_account_kubeconfig(SYSTEM, ACCOUNT, node).await?)).await?)
    };
    let agent = token(Some(NODE)).await?;
    let own = slice("own", NODE, "gpu.tessera.dev");
    let of_agent =
        |text: &str| format!("the agent of node {NODE} may not write ResourceSlices of another {text}");
    let refused = [
        Attempt::new(&Method::POST, SLICES, slice("other", ELSEWHERE, "gpu.tessera.dev"), of_agent("node")),
        Attempt::new(&Method::POST, SLICES, slice("other", NODE, "gpu.nvidia.com"), of_agent("driver")),
        forbidden(&Method::DELETE, &format!("{SLICES}/own"), Value::Null, "delete", "resourceslices"),
        forbidden(&Method::POST, CLAIMS, claim.clone(), "create", "resourceclaims"),
        forbidden(&Method::GET, CLAIMS, Value::Null, "list", "resourceclaims"),
        forbidden(&Method::PUT, &format!("{CLAIM}/status"), claim.clone(), "update", "resourceclaims/status"),
        forbidden(&Method::POST, CLASSES, class(), "create", "deviceclasses"),
    ];
    all_refused(cluster, &agent, &refused).await?;
    let own = send(&agent, &Method::POST, SLICES, own).await?;
    let neighbour = token(Some(ELSEWHERE)).await?;
    let text = format!("the agent of node {ELSEWHERE} may not write ResourceSlices of another node");
    let path = format!("{SLICES}/own");
    all_refused(cluster, &neighbour, &[Attempt::new(&Method::PUT, &path, own.clone(), text)]).await?;
    let nowhere = token(None).await?;
    let text = "the token of this agent names no node, so it may write nothing";
    all_refused(cluster, &nowhere, &[Attempt::new(&Method::PUT, &path, own, text)]).await?;
    harness.note(&format!("{} writes about claims with tokens of agents are refused", refused.len() + 2));
    Ok(())
}

async fn scheduler(harness: &Harness, cluster: &Cluster, claim: &Value) -> Result<()> {
    let kubeconfig = cluster.service_account_kubeconfig(SYSTEM, SCHEDULER, None).await?;
    let scheduler = connect(Some(&kubeconfig)).await?;
    let pod = "/api/v1/namespaces/default/pods/here";
    let refused = [
        forbidden(&Method::PUT, CLAIM, claim.clone(), "update", "resourceclaims"),
        forbidden(&Method::POST, CLAIMS, claim.clone(), "create", "resourceclaims"),
        forbidden(&Method::DELETE, CLAIM, Value::Null, "delete", "resourceclaims"),
        forbidden(&Method::POST, SLICES, slice("x", NODE, "gpu.tessera.dev"), "create", "resourceslices"),
        forbidden(&Method::POST, CLASSES, class(), "create", "deviceclasses"),
        forbidden(&Method::POST, &format!("{pod}/eviction"), json!({}), "create", "pods/eviction"),
    ];
    all_refused(cluster, &scheduler, &refused).await?;
    send(&scheduler, &Method::PUT, &format!("{CLAIM}/status"), allocated(claim)).await?;
    harness.note(&format!(
        "{} writes with the scheduler's token are refused, an allocation is not",
        refused.len()
    ));
    Ok(())
}

/// Verifies that the right to write the state of claims alone does not suffice to allocate.
async fn without_binding(
    harness: &Harness,
    cluster: &Cluster,
    kubectl: &Kubectl,
    claim: &Value,
) -> Result<()> {
    kubectl.run(&["-n", "team", "create", "serviceaccount", "half"])?;
    let verbs = ["--verb=update", "--resource=resourceclaims/status"];
    kubectl.run(&[&["create", "clusterrole", "half"][..], &verbs].concat())?;
    kubectl.run(&[
        "create",
        "clusterrolebinding",
        "half",
        "--clusterrole=half",
        "--serviceaccount=team:half",
    ])?;
    cluster.wait_for_rights("system:serviceaccount:team:half").await?;
    let half = connect(Some(&cluster.service_account_kubeconfig("team", "half", None).await?)).await?;
    let mut cleared = claim.clone();
    // Whichever version is stored: the update names none.
    cleared["metadata"].as_object_mut().context("a claim without metadata")?.remove("resourceVersion");
    cleared["status"] = json!({});
    let attempt = Attempt::new(&Method::PUT, &format!("{CLAIM}/status"), cleared, "resourceclaims/binding");
    all_refused(cluster, &half, &[attempt]).await?;
    harness.note("without the right to resourceclaims/binding no allocation changes");
    Ok(())
}

fn forbidden(method: &Method, path: &str, body: Value, verb: &str, resource: &str) -> Attempt {
    Attempt::new(method, path, body, format!("cannot {verb} resource \"{resource}\""))
}

fn slice(name: &str, node: &str, driver: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "gpu-0" }],
        },
    })
}

fn class() -> Value {
    json!({ "metadata": { "name": "mine" }, "spec": {} })
}

fn claim() -> Value {
    let request = json!({ "name": "gpu", "exactly": { "deviceClassName": "tessera" } });
    json!({ "metadata": { "name": "training" }, "spec": { "devices": { "requests": [request] } } })
}

/// Returns the claim with a GPU.
fn allocated(claim: &Value) -> Value {
    let result = json!({ "request": "gpu", "driver": "gpu.tessera.dev", "pool": NODE, "device": "gpu-0" });
    let mut claim = claim.clone();
    claim["status"] = json!({ "allocation": { "devices": { "results": [result] } } });
    claim
}

async fn send(client: &Client, method: &Method, path: &str, body: Value) -> Result<Value> {
    let attempt = Attempt::new(method, path, body, "");
    client.request(attempt.request()?).await.with_context(|| format!("{method} {path}"))
}
