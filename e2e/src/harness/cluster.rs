//! The control plane: etcd, API server, controller manager, scheduler.

use std::{
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use kube::{Api, Client, api::PostParams};

use super::{
    Component, Harness, RealNode,
    certificates::{Authority, SigningKeys},
    free_port, virtual_node,
};
use crate::enclosure::NODE_ADDRESS;

/// Range of service addresses. Its first address is the API server for pods.
pub(super) const SERVICE_RANGE: &str = "10.96.0.0/16";
const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);

/// Number of concurrent requests that create objects. More would only queue in the API server.
const CONCURRENT_REQUESTS: usize = 32;

/// Lifetime of tokens in seconds, longer than any scenario.
const TOKEN_LIFETIME_SECONDS: u32 = 24 * 3600;

/// Optional parts of the control plane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    /// Starts kube-scheduler in its standard configuration.
    pub(crate) scheduler: bool,
    /// Starts kube-controller-manager.
    pub(crate) controllers: bool,
}

impl Parts {
    pub(crate) const ALL: Self = Self { scheduler: true, controllers: true };
    pub(crate) const NONE: Self = Self { scheduler: false, controllers: false };
}

/// A running control plane. Dropping it ends it.
pub(crate) struct Cluster {
    pub(super) harness: Harness,
    pub(super) authority: Authority,
    /// URL of the API server.
    server: String,
    client: Client,
    token_keys: SigningKeys,
    pub(crate) scheduler: Option<Component>,
    pub(crate) controllers: Option<Component>,
    pub(crate) api_server: Component,
    pub(crate) etcd: Component,
}

impl Cluster {
    /// Starts the parts and waits until pods can be created.
    pub(crate) async fn start(harness: &Harness, parts: Parts) -> Result<Self> {
        let authority = Authority::create(harness.state("certificates")?)?;
        let token_keys = authority.signing_keys("service-accounts")?;
        let etcd_url = format!("http://127.0.0.1:{}", free_port()?);
        let etcd = start_etcd(harness, &etcd_url)?;
        let port = free_port()?;
        let api_server = start_api_server(harness, &authority, &token_keys, &etcd_url, port)?;

        let server = format!("https://127.0.0.1:{port}");
        let admin = authority.kubeconfig(&server, "admin", "system:masters")?;
        let client = tessera_cluster::connect(Some(&admin)).await?;
        let mut cluster = Self {
            harness: harness.clone(),
            authority,
            server,
            client,
            token_keys,
            scheduler: None,
            controllers: None,
            api_server,
            etcd,
        };
        cluster.wait_until_ready().await?;
        if parts.controllers {
            cluster.controllers = Some(cluster.start_controllers()?);
        } else {
            cluster.create_default_service_account().await?;
        }
        if parts.scheduler {
            cluster.scheduler = Some(cluster.start_scheduler("kube-scheduler", serde_json::json!({}))?);
        }
        cluster.wait_for_service_account().await?;
        harness.note("control plane ready");
        Ok(cluster)
    }

    /// Returns a client with all rights.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns the API of pods in the namespace of the scenarios.
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::default_namespaced(self.client())
    }

    /// Returns a kubeconfig of a user in a group, with the rights of these only.
    pub(crate) fn kubeconfig(&self, user: &str, group: &str) -> Result<PathBuf> {
        self.authority.kubeconfig(&self.server, user, group)
    }

    /// Returns a kubeconfig with a token of this service account, like that of its pod on this node.
    /// Without a node, the token names none.
    pub(crate) async fn service_account_kubeconfig(
        &self,
        namespace: &str,
        account: &str,
        node: Option<&str>,
    ) -> Result<PathBuf> {
        let token = self.service_account_token(namespace, account, &[], node).await?;
        let name = format!("{namespace}-{account}-{}", node.unwrap_or("nowhere"));
        self.authority.kubeconfig_of_token(&self.server, &name, &token)
    }

    /// Returns a token of this service account for these audiences. Without any, it is for the API server.
    pub(crate) async fn service_account_token(
        &self,
        namespace: &str,
        account: &str,
        audiences: &[&str],
        node: Option<&str>,
    ) -> Result<String> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), namespace);
        let mut spec = serde_json::json!({
            "audiences": audiences,
            "expirationSeconds": TOKEN_LIFETIME_SECONDS,
        });
        if let Some(name) = node {
            spec["boundObjectRef"] = serde_json::json!({ "apiVersion": "v1", "kind": "Node", "name": name });
        }
        let request = serde_json::from_value(serde_json::json!({ "spec": spec }))?;
        let made = accounts.create_token_request(account, &PostParams::default(), &request).await?;
        Ok(made.status.context("a token request without an answer")?.token)
    }

    /// Adds a node that runs pods. `number` selects its networks.
    pub(crate) async fn add_node(&self, number: u8) -> Result<RealNode> {
        RealNode::start(self, number).await
    }

    /// Adds nodes that exist only as objects: pods can be bound to them, but nothing runs there.
    pub(crate) async fn add_virtual_nodes(&self, count: usize) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client());
        self.create_all(&nodes, (0..count).map(|index| virtual_node(&format!("virtual-{index:04}")))).await
    }

    /// Creates many objects at once.
    pub(crate) async fn create_all<K>(&self, api: &Api<K>, objects: impl Iterator<Item = K>) -> Result<()>
    where
        K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
    {
        stream::iter(objects)
            .map(|object| async move { api.create(&PostParams::default(), &object).await.map(drop) })
            .buffer_unordered(CONCURRENT_REQUESTS)
            .try_collect::<()>()
            .await
            .context("cannot create the objects")
    }

    /// Waits until the pod has this phase.
    pub(crate) async fn wait_for_phase(&self, name: &str, phase: &str, within: Duration) -> Result<Pod> {
        let pods = self.pods();
        let mut last = String::new();
        let outcome = self
            .harness
            .wait_for(&format!("pod {name} to be {phase}"), within, async || {
                let pod = pods.get(name).await?;
                let status = pod.status.clone().unwrap_or_default();
                last = serde_json::to_string(&status)?;
                Ok((status.phase.as_deref() == Some(phase)).then_some(pod))
            })
            .await;
        outcome.with_context(|| format!("the pod's last status was {last}"))
    }

    async fn wait_until_ready(&self) -> Result<()> {
        self.harness
            .wait_for("the API server to be ready", Duration::from_secs(60), async || {
                let request = axum::http::Request::get("/readyz").body(Vec::new())?;
                Ok((self.client.request_text(request).await? == "ok").then_some(()))
            })
            .await
    }

    /// Waits for the service account of the namespace. The API server rejects pods without it.
    async fn wait_for_service_account(&self) -> Result<()> {
        let accounts: Api<ServiceAccount> = Api::default_namespaced(self.client());
        self.harness
            .wait_for("the default service account", Duration::from_secs(60), async || {
                Ok(accounts.get_opt("default").await?)
            })
            .await?;
        Ok(())
    }

    /// Creates the default service account, which is normally the work of the controller manager.
    async fn create_default_service_account(&self) -> Result<()> {
        let accounts: Api<ServiceAccount> = Api::default_namespaced(self.client());
        let account = serde_json::from_value(serde_json::json!({ "metadata": { "name": "default" } }))?;
        self.harness
            .wait_for("a namespace to make a service account in", Duration::from_secs(30), async || {
                Ok(Some(accounts.create(&PostParams::default(), &account).await?))
            })
            .await?;
        Ok(())
    }

    fn start_controllers(&self) -> Result<Component> {
        let kubeconfig = self.kubeconfig("system:kube-controller-manager", "e2e")?.display().to_string();
        let program = self.harness.kubernetes("kube-controller-manager").arguments([
            format!("--kubeconfig={kubeconfig}"),
            format!("--authentication-kubeconfig={kubeconfig}"),
            format!("--authorization-kubeconfig={kubeconfig}"),
            format!("--service-account-private-key-file={}", self.token_keys.private.display()),
            format!("--root-ca-file={}", self.authority.certificate().display()),
            format!("--secure-port={}", free_port()?),
            "--bind-address=127.0.0.1".into(),
            "--use-service-account-credentials=true".into(),
            "--leader-elect=false".into(),
            // The default of 20 requests per second would limit scenarios with many claims.
            "--kube-api-qps=1000".into(),
            "--kube-api-burst=1000".into(),
            // Virtual nodes send no heartbeat and would be marked as not ready.
            "--controllers=*,-node-lifecycle-controller".into(),
        ]);
        self.harness.start("kube-controller-manager", program)
    }
}

fn start_etcd(harness: &Harness, client_url: &str) -> Result<Component> {
    let peer_url = format!("http://127.0.0.1:{}", free_port()?);
    let program = harness.kubernetes("etcd").arguments([
        format!("--data-dir={}", harness.state("etcd")?.display()),
        format!("--listen-client-urls={client_url}"),
        format!("--advertise-client-urls={client_url}"),
        format!("--listen-peer-urls={peer_url}"),
        format!("--initial-advertise-peer-urls={peer_url}"),
        format!("--initial-cluster=default={peer_url}"),
        "--log-level=warn".into(),
        // The data need not survive a power failure.
        "--unsafe-no-fsync".into(),
    ]);
    harness.start("etcd", program)
}

fn start_api_server(
    harness: &Harness,
    authority: &Authority,
    token_keys: &SigningKeys,
    etcd_url: &str,
    port: u16,
) -> Result<Component> {
    let addresses = [Ipv4Addr::LOCALHOST, NODE_ADDRESS, SERVICE_ADDRESS].map(IpAddr::V4);
    let serving = authority.server("kube-apiserver", &addresses)?;
    let program = harness.kubernetes("kube-apiserver").arguments([
        format!("--etcd-servers={etcd_url}"),
        format!("--secure-port={port}"),
        format!("--advertise-address={NODE_ADDRESS}"),
        format!("--tls-cert-file={}", serving.certificate.display()),
        format!("--tls-private-key-file={}", serving.key.display()),
        format!("--client-ca-file={}", authority.certificate().display()),
        // Other parts read this file and log an error if it is missing.
        format!("--requestheader-client-ca-file={}", authority.certificate().display()),
        "--requestheader-allowed-names=nobody".into(),
        format!("--service-account-key-file={}", token_keys.public.display()),
        format!("--service-account-signing-key-file={}", token_keys.private.display()),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-cluster-ip-range={SERVICE_RANGE}"),
        "--authorization-mode=Node,RBAC".into(),
        "--kubelet-preferred-address-types=InternalIP".into(),
        "--allow-privileged=true".into(),
        // This plugin taints every new node, and only the node lifecycle controller, which does not
        // run here, removes the taint.
        "--disable-admission-plugins=TaintNodesByCondition".into(),
    ]);
    harness.start("kube-apiserver", program)
}
