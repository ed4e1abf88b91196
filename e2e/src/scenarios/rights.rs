//! Refused and permitted writes under the shipped roles and admission policies, which are installed
//! in another namespace by an overlay, and who may read the pages of agents.

mod agent;
mod claims;
mod owner;
mod pages;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use axum::http::{Method, Request};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use serde_json::{Value, json};

use crate::harness::{Cluster, Harness, Parts, deploy};

const SOON: Duration = Duration::from_secs(60);

/// Namespace of the installation.
const NAMESPACE: &str = "gpu-system";
/// Name of the agent's service account.
const ACCOUNT: &str = "tessera-agent";
/// Node of the agent.
const NODE: &str = "virtual-0000";
/// Another node.
const ELSEWHERE: &str = "virtual-0001";
/// Pod on [`NODE`] and pod on [`ELSEWHERE`].
const PODS: [(&str, &str); 2] = [("here", NODE), ("elsewhere", ELSEWHERE)];

/// A request that must be refused, and the text of the refusal.
struct Attempt {
    method: Method,
    path: String,
    body: Value,
    text: String,
}

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: false }).await?;
    cluster.add_virtual_nodes(2).await?;
    for name in [NAMESPACE, "team"] {
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let namespace = Namespace { metadata, ..Namespace::default() };
        Api::all(cluster.client()).create(&PostParams::default(), &namespace).await?;
    }
    for (name, node) in PODS {
        cluster.pods().create(&PostParams::default(), &pod(name, node)?).await?;
    }
    let kubectl = Kubectl { admin: cluster.kubeconfig("admin", "system:masters")? };
    kubectl.run(&["apply", "-k", &overlay(&harness)?.display().to_string()])?;
    kubectl.allow_config_maps()?;
    cluster.wait_for_rights(&format!("system:serviceaccount:{NAMESPACE}:{ACCOUNT}")).await?;
    harness.note("the manifests are installed in another namespace");
    agent::check(&harness, &cluster, &kubectl).await?;
    owner::check(&harness, &cluster).await?;
    pages::check(&harness, &cluster, &kubectl).await?;
    claims::check(&harness, &cluster, &kubectl).await
}

struct Kubectl {
    admin: PathBuf,
}

impl Kubectl {
    fn run(&self, arguments: &[&str]) -> Result<()> {
        let output = Command::new("kubectl").args(arguments).env("KUBECONFIG", &self.admin).output();
        let output = output.context("cannot run kubectl")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl {arguments:?}: {errors}");
        Ok(())
    }

    /// Gives the agent its right in `kube-system`, as docs/install.md says.
    fn allow_config_maps(&self) -> Result<()> {
        let account = format!("--serviceaccount={NAMESPACE}:{ACCOUNT}");
        let verbs = "--verb=create,patch,delete";
        self.run(&["-n", "kube-system", "create", "role", ACCOUNT, verbs, "--resource=configmaps"])?;
        self.run(&["-n", "kube-system", "create", "rolebinding", ACCOUNT, "--role=tessera-agent", &account])
    }
}

/// Writes an overlay that installs agent and scheduler in [`NAMESPACE`].
fn overlay(harness: &Harness) -> Result<PathBuf> {
    let folder = harness.state("overlay")?;
    let part = |name: &str| -> Result<PathBuf> { relative(&folder, &deploy().join(name).canonicalize()?) };
    let overlay = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": [part("agent")?, part("scheduler")?],
    });
    fs::write(folder.join("kustomization.yaml"), overlay.to_string())?;
    Ok(folder)
}

/// Returns a path relative to a folder. Kustomize accepts no absolute ones.
fn relative(folder: &Path, path: &Path) -> Result<PathBuf> {
    let folder = folder.canonicalize()?;
    let up = folder.components().skip(1).map(|_| "..").collect::<PathBuf>();
    Ok(up.join(path.strip_prefix("/")?))
}

fn pod(name: &str, node: &str) -> Result<Pod> {
    let pod = json!({
        "metadata": { "name": name },
        "spec": { "nodeName": node, "containers": [{ "name": "main", "image": "none" }] },
    });
    Ok(serde_json::from_value(pod)?)
}

/// Verifies that every attempt is refused with its text.
async fn all_refused(cluster: &Cluster, client: &Client, attempts: &[Attempt]) -> Result<()> {
    if let Some(first) = attempts.first() {
        cluster.wait_for_refusal(client, first.request()?, &first.text).await?;
    }
    for attempt in attempts {
        let Attempt { method, path, body, text } = attempt;
        let reply = attempt.refusal(client).await.with_context(|| format!("{method} {path} {body}"))?;
        ensure!(reply.contains(text), "{method} {path} {body} was answered with {reply:?}, not {text:?}");
    }
    Ok(())
}

impl Attempt {
    fn new(method: &Method, path: &str, body: Value, text: impl Into<String>) -> Self {
        Self { method: method.clone(), path: path.to_owned(), body, text: text.into() }
    }

    /// Returns the message of the API server's refusal.
    async fn refusal(&self, client: &Client) -> Result<String> {
        match client.request::<Value>(self.request()?).await {
            Err(kube::Error::Api(status)) => Ok(status.message.clone()),
            Err(error) => Err(error.into()),
            Ok(answer) => bail!("the request succeeded: {answer}"),
        }
    }

    fn request(&self) -> Result<Request<Vec<u8>>> {
        let is_patch = self.method == Method::PATCH;
        let media = if is_patch { "application/strategic-merge-patch+json" } else { "application/json" };
        let request = Request::builder().method(&self.method).uri(&self.path).header("content-type", media);
        Ok(request.body(serde_json::to_vec(&self.body)?)?)
    }
}
