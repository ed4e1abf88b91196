//! Who may read the pages of an agent: the API server decides, and the scheduler's dashboard has the right.

use std::{fs, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use tessera_cluster::fetch::{FetchError, Fetcher};
use tessera_wire::tessera::{
    agent_address::{AUDIENCE, AgentAddress, Fingerprint},
    inventory,
    node_use::{self, MeasuredUse},
};

use super::{ACCOUNT, Kubectl, NAMESPACE, NODE, SOON};
use crate::{
    harness::{Cluster, Component, Harness, free_port},
    scenarios::agent::eight_gpus,
};

/// Service account of the scheduler in `deploy/scheduler`.
const SCHEDULER: &str = "tessera-scheduler";

/// Service account without rights, which gets the role of readers.
const READER: &str = "reader";

/// Pages of the agent, which runs as long as this value lives.
struct Pages {
    _agent: Component,
    url: String,
    certificate: Fingerprint,
}

impl Pages {
    /// Returns the status code of an answer, and its text.
    async fn get(&self, path: &str, token: Option<&str>) -> Result<(u16, String)> {
        let url = format!("{}{path}", self.url);
        match Fetcher::new(Duration::from_secs(10)).get_pinned(&url, self.certificate, token).await {
            Ok(text) => Ok((200, text)),
            Err(FetchError::Status { code, text }) => Ok((code, text)),
            Err(error) => Err(error).with_context(|| url),
        }
    }

    async fn expect(&self, what: &str, token: Option<&str>, code: u16, words: &str) -> Result<()> {
        let (answered, text) = self.get("/metrics", token).await?;
        ensure!(
            answered == code && text.contains(words),
            "{what}: {answered} {text:?}, not {code} {words:?}"
        );
        Ok(())
    }
}

pub(super) async fn check(harness: &Harness, cluster: &Cluster, kubectl: &Kubectl) -> Result<()> {
    let pages = start_agent(harness, cluster).await?;
    kubectl.run(&["-n", "team", "create", "serviceaccount", READER])?;
    let reader = cluster.service_account_token("team", READER, &[], None).await?;
    let for_agents = cluster.service_account_token("team", READER, &[AUDIENCE], None).await?;
    let for_others = cluster.service_account_token("team", READER, &["vault"], None).await?;
    pages.expect("without a token", None, 401, "ClusterRole tessera-agent-reader").await?;
    pages.expect("with garbage", Some("garbage"), 401, "does not accept this token").await?;
    pages.expect("for another audience", Some(&for_others), 401, "does not accept this token").await?;
    let command = "--clusterrole=tessera-agent-reader --serviceaccount=team:reader";
    pages.expect("without the role", Some(&reader), 403, command).await?;
    harness.note("readers without a token or without the role get no page");

    let account = format!("--serviceaccount=team:{READER}");
    kubectl.run(&["create", "clusterrolebinding", READER, "--clusterrole=tessera-agent-reader", &account])?;
    for token in [&reader, &for_agents] {
        harness
            .wait_for("the reader to get the metrics", SOON, async || {
                pages.expect("with the role", Some(token), 200, "tessera_gpu_info").await.map(Some)
            })
            .await?;
    }
    harness.note("a reader with the role gets the pages, with a token for agents or for the API server");

    let (_scheduler, dashboard) = start_scheduler(harness, cluster, kubectl).await?;
    let url = format!("http://{dashboard}{}", node_use::scheduler_path(NODE));
    let fetcher = Fetcher::new(Duration::from_secs(10));
    let used = harness
        .wait_for("the dashboard to show the usage of the node", SOON, async || {
            let measured: MeasuredUse = serde_json::from_str(&fetcher.get(&url).await?)?;
            let reason = measured.not_measured.unwrap_or_default();
            measured.used.map(Some).ok_or_else(|| anyhow!("not measured: {reason}"))
        })
        .await?;
    ensure!(used.gpus.len() == eight_gpus().gpus.len(), "the dashboard shows {used:?}");
    harness
        .note("the dashboard reads the agent with a token of its audience and knows it by its certificate");
    Ok(())
}

/// Starts the agent of [`NODE`] with its shipped rights and waits until it publishes its certificate.
async fn start_agent(harness: &Harness, cluster: &Cluster) -> Result<Pages> {
    let directory = harness.state("agent")?;
    let gpus = directory.join("gpus.json");
    fs::write(&gpus, inventory::print(&eight_gpus()))?;
    let kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, ACCOUNT, Some(NODE)).await?;
    let (port, probes) = (free_port()?, format!("127.0.0.1:{}", free_port()?));
    let program = harness
        .tessera()?
        .arguments(["agent", "--without-library=serve"])
        .argument(format!("--node-name={NODE}"))
        .argument(format!("--kubeconfig={}", kubeconfig.display()))
        .argument(format!("--gpus=simulated:{}", gpus.display()))
        .argument(format!("--grants={}", directory.join("grants").display()))
        .argument(format!("--kubelet-root={}", directory.join("kubelet").display()))
        .argument(format!("--listen=127.0.0.1:{port}"))
        .argument(format!("--probes-listen={probes}"))
        .environment("POD_IP", "127.0.0.1");
    let agent = harness.start("tessera-agent", program)?;
    let fetcher = Fetcher::new(Duration::from_secs(10));
    let url = format!("http://{probes}/healthz");
    harness.wait_for("the probe", SOON, async || Ok(Some(fetcher.get(&url).await?))).await?;
    let nodes: Api<Node> = Api::all(cluster.client());
    let (url, certificate) = harness
        .wait_for("the address and the certificate of the agent", SOON, async || {
            let node = serde_json::from_value(serde_json::to_value(nodes.get(NODE).await?)?)?;
            let AgentAddress { url, certificate } = AgentAddress::of(&node).context("no address")?;
            let certificate = certificate.context("no certificate")??;
            Ok(url.ends_with(&format!(":{port}")).then_some((url, certificate)))
        })
        .await?;
    ensure!(url == format!("https://127.0.0.1:{port}"), "the agent publishes {url}");
    harness.note("an agent publishes its certificate, and its probes need no token");
    Ok(Pages { _agent: agent, url, certificate })
}

/// Starts the scheduler with its shipped rights. Returns it with the address of its dashboard.
async fn start_scheduler(
    harness: &Harness,
    cluster: &Cluster,
    kubectl: &Kubectl,
) -> Result<(Component, String)> {
    let account = format!("--serviceaccount={NAMESPACE}:{SCHEDULER}");
    let (verbs, maps) = ("--verb=list,watch", "--resource=configmaps");
    kubectl.run(&["-n", "kube-system", "create", "role", SCHEDULER, verbs, maps])?;
    kubectl.run(&[
        "-n",
        "kube-system",
        "create",
        "rolebinding",
        SCHEDULER,
        &format!("--role={SCHEDULER}"),
        &account,
    ])?;
    cluster.wait_for_rights(&format!("system:serviceaccount:{NAMESPACE}:{SCHEDULER}")).await?;
    let token = harness.state("scheduler")?.join("token");
    fs::write(&token, cluster.service_account_token(NAMESPACE, SCHEDULER, &[AUDIENCE], None).await?)?;
    let kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, SCHEDULER, None).await?;
    let dashboard = format!("127.0.0.1:{}", free_port()?);
    let program = harness
        .tessera()?
        .arguments(["scheduler", "--health-listen=off"])
        .argument(format!("--certificates-in={NAMESPACE}"))
        .argument(format!("--lease-namespace={NAMESPACE}"))
        .argument(format!("--listen=127.0.0.1:{}", free_port()?))
        .argument(format!("--dashboard-listen={dashboard}"))
        .argument(format!("--agent-token={}", token.display()))
        .argument(format!("--kubeconfig={}", kubeconfig.display()));
    Ok((harness.start("tessera-scheduler", program)?, dashboard))
}
