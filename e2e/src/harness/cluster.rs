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

/// The first address of the service range: what pods know the API server as.
const SERVICE_RANGE: &str = "10.96.0.0/16";
const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);

/// Requests in flight when many objects are made. More only queue up in the API server.
const CONCURRENT_REQUESTS: usize = 32;

/// Longer than any scenario, seconds.
const TOKEN_LIFETIME: u32 = 24 * 3600;

/// Which optional parts to start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    /// kube-scheduler in its standard configuration.
    pub(crate) scheduler: bool,
    /// kube-controller-manager.
    pub(crate) controllers: bool,
}

impl Parts {
    pub(crate) const ALL: Self = Self { scheduler: true, controllers: true };
}

/// A running control plane. Dropping it ends it.
pub(crate) struct Cluster {
    pub(super) harness: Harness,
    pub(super) authority: Authority,
    /// The API server's address.
    server: String,
    client: Client,
    token_keys: SigningKeys,
    pub(crate) scheduler: Option<Component>,
    pub(crate) controllers: Option<Component>,
    pub(crate) api_server: Component,
    pub(crate) etcd: Component,
}

impl Cluster {
    /// Starts the parts and waits until pods can be made.
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

    /// A client that may do everything.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// The pods of the namespace that scenarios use.
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::default_namespaced(self.client())
    }

    /// A kubeconfig for a user of this name in this group, with no more rights than those have.
    pub(crate) fn kubeconfig(&self, user: &str, group: &str) -> Result<PathBuf> {
        self.authority.kubeconfig(&self.server, user, group)
    }

    /// A kubeconfig with the token that a pod of this service account of `kube-system` has on this node.
    pub(crate) async fn service_account_kubeconfig(&self, account: &str, node: &str) -> Result<PathBuf> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), "kube-system");
        let bound = serde_json::json!({ "spec": {
            "audiences": [],
            "expirationSeconds": TOKEN_LIFETIME,
            "boundObjectRef": { "apiVersion": "v1", "kind": "Node", "name": node },
        } });
        let request = serde_json::from_value(bound)?;
        let made = accounts.create_token_request(account, &PostParams::default(), &request).await?;
        let token = made.status.context("a token request without an answer")?.token;
        self.authority.kubeconfig_of_token(&self.server, account, &token)
    }

    /// Adds a node that runs pods. `number` sets its networks apart from those of others.
    pub(crate) async fn add_node(&self, number: u8) -> Result<RealNode> {
        RealNode::start(self, number).await
    }

    /// Adds nodes that exist only as objects: pods can be placed on them, nothing runs there.
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

    /// Waits until the pod's phase is this one.
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

    /// Pods are refused until the namespace has one.
    async fn wait_for_service_account(&self) -> Result<()> {
        let accounts: Api<ServiceAccount> = Api::default_namespaced(self.client());
        self.harness
            .wait_for("the default service account", Duration::from_secs(60), async || {
                Ok(accounts.get_opt("default").await?)
            })
            .await?;
        Ok(())
    }

    /// Normally the controller manager's work.
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
            // Virtual nodes send no heartbeat: they would be declared dead.
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
        // The data lives as long as the scenario: it need not survive a power cut.
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
        // Not used, but other parts look for it and complain.
        format!("--requestheader-client-ca-file={}", authority.certificate().display()),
        "--requestheader-allowed-names=nobody".into(),
        format!("--service-account-key-file={}", token_keys.public.display()),
        format!("--service-account-signing-key-file={}", token_keys.private.display()),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-cluster-ip-range={SERVICE_RANGE}"),
        "--authorization-mode=Node,RBAC".into(),
        "--kubelet-preferred-address-types=InternalIP".into(),
        "--allow-privileged=true".into(),
        // It marks every new node as not ready, and without the node lifecycle controller nobody would take that back.
        "--disable-admission-plugins=TaintNodesByCondition".into(),
    ]);
    harness.start("kube-apiserver", program)
}
