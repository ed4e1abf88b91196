//! The real kube-scheduler with `tessera scheduler` as its extender, configured as shipped in `deploy/`.

mod admission;
mod audit;
mod capacity;
mod certificates;
mod claims;
mod defragment;
mod dialects;
mod evictions;
mod examples;
mod filter_only;
mod front;
mod gangs;
mod gate;
mod hami;
mod inspect;
mod install;
mod kills;
mod other_plugin;
mod pairs;
mod pods;
mod queues;
mod random;
mod replay;
mod throughput;
mod together;

use std::{fs, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Event, Node, Pod, Secret};
use kube::{
    Api,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::json;

use self::front::Front;
use crate::harness::{Cluster, Component, Harness, Parts, deploy, free_port};

pub(crate) use self::{
    capacity::run as capacity, claims::both_offers, claims::run as claims, defragment::run as defragment,
    dialects::run as dialects, evictions::run as evictions, examples::run as examples,
    filter_only::run as filter_only, gangs::run as gangs, hami::run as hami, inspect::run as inspect,
    install::run as install, kills::run as kills, other_plugin::run as other_plugin, pairs::run as pairs,
    queues::run as queues, random::run as random, replay::run as replay, throughput::run as throughput,
    together::run as together,
};

const SOON: Duration = Duration::from_secs(40);

/// Number of concurrent deletions.
const CONCURRENT_DELETIONS: usize = 32;

/// User of the scheduler, to which `deploy/scheduler/rbac.yaml` grants rights.
const USER: &str = "system:serviceaccount:kube-system:tessera-scheduler";

/// Secret with the certificate of kube-scheduler, of `deploy/scheduler/certificates.yaml`.
const CLIENT_SECRET: &str = "tessera-kube-scheduler-tls";

/// A cluster whose pods are placed by kube-scheduler and one replica, both configured as shipped.
pub(in crate::scenarios) struct Scheduling {
    site: Site,
    pub(in crate::scenarios) replica: Replica,
    _kube_scheduler: Component,
    _front: Front,
}

impl Scheduling {
    /// Starts both schedulers on an existing cluster.
    pub(in crate::scenarios) async fn start(harness: &Harness, cluster: Arc<Cluster>) -> Result<Self> {
        let site = Site::of(harness, cluster).await?;
        dialects::make_priorities(&site).await?;
        let replica = site.replica("tessera-scheduler", None)?;
        site.ready(&replica).await?;
        let front = Front::start(vec![replica.addresses]).await?;
        let kube_scheduler = site.kube_scheduler(&front).await?;
        Ok(Self { site, replica, _kube_scheduler: kube_scheduler, _front: front })
    }

    /// Waits until the replica is ready.
    pub(in crate::scenarios) async fn ready(&self) -> Result<()> {
        self.site.ready(&self.replica).await
    }
}

/// A cluster with GPU nodes and everything of `deploy/scheduler` except for the pods.
struct Site {
    harness: Harness,
    cluster: Arc<Cluster>,
}

/// A process of `tessera scheduler`.
pub(in crate::scenarios) struct Replica {
    pub(in crate::scenarios) component: Component,
    addresses: Addresses,
}

/// The listeners of a replica.
#[derive(Clone, Copy)]
struct Addresses {
    /// The verbs, with mutual TLS.
    verbs: SocketAddr,
    /// The dashboard and the metrics.
    pages: SocketAddr,
    /// The probes.
    health: SocketAddr,
}

impl Site {
    async fn start(harness: &Harness, nodes: impl Iterator<Item = Node>) -> Result<Self> {
        let cluster = Cluster::start(harness, Parts { scheduler: false, controllers: false }).await?;
        cluster.create_all(&Api::<Node>::all(cluster.client()), nodes).await?;
        Self::of(harness, Arc::new(cluster)).await
    }

    /// Uses an existing cluster.
    async fn of(harness: &Harness, cluster: Arc<Cluster>) -> Result<Self> {
        let site = Self { harness: harness.clone(), cluster };
        site.apply("rbac.yaml").await?;
        site.apply("certificates.yaml").await?;
        Ok(site)
    }

    /// Creates the objects of a file in `deploy/scheduler`.
    async fn apply(&self, file: &str) -> Result<()> {
        self.cluster.create_shipped(&format!("scheduler/{file}")).await
    }

    /// Deletes all pods, so that the next measurement begins with empty nodes.
    async fn delete_all_pods(&self) -> Result<()> {
        let (pods, at_once) = (self.cluster.pods(), DeleteParams::default().grace_period(0));
        let present = pods.list_metadata(&ListParams::default()).await?.items;
        let deletions = present.iter().map(|pod| async {
            pods.delete(pod.metadata.name.as_deref().unwrap_or_default(), &at_once).await.map(drop)
        });
        stream::iter(deletions).buffer_unordered(CONCURRENT_DELETIONS).try_collect::<()>().await?;
        Ok(())
    }

    /// Starts a replica that uses the API server, or a proxy in front of it.
    fn replica(&self, name: &str, kubeconfig: Option<&Path>) -> Result<Replica> {
        self.replica_with(name, kubeconfig, &[])
    }

    /// Starts a replica with further flags.
    fn replica_with(&self, name: &str, kubeconfig: Option<&Path>, flags: &[&str]) -> Result<Replica> {
        let own = self.cluster.kubeconfig(USER, "e2e")?;
        let free = || Ok::<_, anyhow::Error>(SocketAddr::from(([127, 0, 0, 1], free_port()?)));
        let addresses = Addresses { verbs: free()?, pages: free()?, health: free()? };
        let quota = self.harness.state(name)?.join("quota.json");
        fs::write(&quota, r#"{"GPUModelLabel":"gpu-model","GPUPoolLabel":"gpu-pool"}"#)?;
        let program = self.harness.tessera()?.arguments([
            "scheduler".to_owned(),
            "--certificates-in=kube-system".to_owned(),
            format!("--listen={}", addresses.verbs),
            format!("--dashboard-listen={}", addresses.pages),
            format!("--health-listen={}", addresses.health),
            format!("--kubeconfig={}", kubeconfig.unwrap_or(&own).display()),
            format!("--quota-config={}", quota.display()),
        ]);
        Ok(Replica { component: self.harness.start(name, program.arguments(flags))?, addresses })
    }

    async fn ready(&self, replica: &Replica) -> Result<()> {
        self.harness
            .wait_for("the replica to be ready", SOON, async || {
                Ok(front::is_ready(replica.addresses.health).await.then_some(()))
            })
            .await
    }

    /// Starts kube-scheduler with the shipped configuration, in which only the addresses are
    /// replaced.
    async fn kube_scheduler(&self, front: &Front) -> Result<Component> {
        self.shipped_kube_scheduler("kube-scheduler", front.address).await
    }

    /// Starts kube-scheduler under this name with the shipped configuration and an extender at this
    /// address.
    async fn shipped_kube_scheduler(&self, name: &str, extender: SocketAddr) -> Result<Component> {
        self.edited_kube_scheduler(name, extender, "").await
    }

    /// Does the same with further lines in the configuration.
    async fn edited_kube_scheduler(
        &self,
        name: &str,
        extender: SocketAddr,
        lines: &str,
    ) -> Result<Component> {
        let (configuration, kubeconfig) = self.shipped_configuration()?;
        self.start_kube_scheduler(name, configuration + lines, &kubeconfig, extender).await
    }

    /// Returns the shipped configuration of kube-scheduler with a kubeconfig of this cluster, and the kubeconfig.
    fn shipped_configuration(&self) -> Result<(String, String)> {
        let shipped = fs::read_to_string(deploy().join("scheduler/kube-scheduler-edit.yaml"))?;
        let kubeconfig = self.cluster.kubeconfig("system:kube-scheduler", "e2e")?.display().to_string();
        let configuration = shipped
            .replace("/etc/kubernetes/scheduler.conf", &format!("{kubeconfig}\n  qps: 5000\n  burst: 5000"))
            .replace("leaderElect: true", "leaderElect: false");
        Ok((configuration, kubeconfig))
    }

    /// Starts a kube-scheduler with a shipped configuration, the address of our Service, and the certificate in the
    /// Secret.
    async fn start_kube_scheduler(
        &self,
        name: &str,
        configuration: String,
        kubeconfig: &str,
        extender: SocketAddr,
    ) -> Result<Component> {
        let (service, files) =
            ("https://tessera-scheduler.kube-system.svc:12345", "/etc/kubernetes/tessera/");
        for text in [service, files] {
            ensure!(configuration.contains(text), "the shipped configuration does not name {text}");
        }
        let directory = self.harness.state(&format!("{name}-certificates"))?;
        self.copy_certificates(&directory).await?;
        let configuration = configuration
            .replace(service, &format!("https://{extender}"))
            .replace(files, &format!("{}/", directory.display()));
        self.cluster.start_configured_scheduler(name, &configuration, kubeconfig)
    }

    /// Copies the certificate of kube-scheduler from its Secret to files. The scheduler writes it soon after it has
    /// started.
    async fn copy_certificates(&self, directory: &Path) -> Result<()> {
        let written = async || Ok(self.secret(CLIENT_SECRET).await?.data);
        let data = self.harness.wait_for("kube-scheduler's certificate in its Secret", SOON, written).await?;
        for file in ["ca.crt", "tls.crt", "tls.key"] {
            fs::write(directory.join(file), &data.get(file).context(file)?.0)?;
        }
        Ok(())
    }

    async fn secret(&self, name: &str) -> Result<Secret> {
        Ok(Api::<Secret>::namespaced(self.cluster.client(), "kube-system").get(name).await?)
    }

    async fn make(&self, pod: &Pod) -> Result<()> {
        self.cluster.pods().create(&PostParams::default(), pod).await?;
        Ok(())
    }

    /// Waits until the pod has a node.
    async fn bound(&self, name: &str) -> Result<Pod> {
        let pods = self.cluster.pods();
        let mut last = String::new();
        let outcome = self
            .harness
            .wait_for(&format!("{name} to be bound"), SOON, async || {
                let pod = pods.get(name).await?;
                last = serde_json::to_string(&pod.status)?;
                Ok(pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()).is_some().then_some(pod))
            })
            .await;
        outcome.with_context(|| format!("its last status was {last}"))
    }

    /// Waits until the pod is rejected with this text.
    async fn refused(&self, name: &str, text: &str) -> Result<()> {
        let pods = self.cluster.pods();
        let mut last = String::new();
        let outcome = self
            .harness
            .wait_for(&format!("{name} to be refused"), SOON, async || {
                let status = pods.get(name).await?.status.unwrap_or_default();
                let condition =
                    status.conditions.unwrap_or_default().into_iter().find(|c| c.type_ == "PodScheduled");
                last = condition.and_then(|condition| condition.message).unwrap_or_default();
                Ok(last.contains(text).then_some(()))
            })
            .await;
        outcome.with_context(|| format!("the last message was {last:?}"))?;
        self.harness.note(&format!("{name}: {last}"));
        Ok(())
    }

    /// Waits for an event about the pod, as `kubectl describe` shows it.
    async fn event_about(&self, name: &str, reason: &str) -> Result<Event> {
        let events: Api<Event> = Api::default_namespaced(self.cluster.client());
        let about = ListParams::default().fields(&format!("involvedObject.name={name},reason={reason}"));
        self.harness
            .wait_for(&format!("an event {reason} about {name}"), SOON, async || {
                Ok(events.list(&about).await?.items.into_iter().next())
            })
            .await
    }

    /// Ends a pod, as its kubelet would.
    async fn end(&self, name: &str) -> Result<()> {
        let patch = json!({ "status": { "phase": "Succeeded" } });
        let patch = kube::api::Patch::Merge(&patch);
        self.cluster.pods().patch_status(name, &kube::api::PatchParams::default(), &patch).await?;
        Ok(())
    }
}
