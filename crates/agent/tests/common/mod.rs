//! A node made of the real agent, the embedded kubelet, simulated GPUs and an in-memory API server.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

pub(crate) mod load;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{StreamExt as _, stream::BoxStream};
use serde_json::json;
use tessera_agent::{
    controller::{AgentSettings, InstalledLibrary, Isolation, NodePatch, WithoutLibrary, WriteError},
    exporter::families::MetricsOptions,
    shell::{Cluster, ClusterEvent, Ports, Sampling, run},
};
use tessera_cluster::{
    PodNotice,
    node_agent::{PodEvent, WriteFailure},
};
use tessera_core::{
    grant::{ContainerGrant, Hold},
    units::{GpuIndex, PodUid},
};
use tessera_node::{
    device_plugin::RegistrationMode,
    gpus::{Gpus, Simulated},
};
use tessera_sim::kubelet::{Checkpoint, Kubelet};
use tessera_wire::{
    foreign::{
        dialect::{Dialect, MemoryUnit},
        objects::{ContainerStatus, Pod},
    },
    kubelet::{container_response::InjectionSettings, device_id::Resource},
    tessera::grant,
};
use tokio::{net::TcpListener, runtime::Handle, sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

/// An API server in memory.
#[derive(Default)]
pub(crate) struct Api {
    pods: Mutex<BTreeMap<String, Pod>>,
    pub(crate) node: Mutex<NodePatch>,
    pub(crate) unhealthy: Mutex<Option<Vec<u8>>>,
    pub(crate) notices: Mutex<Vec<PodNotice>>,
    watchers: Mutex<Vec<mpsc::UnboundedSender<ClusterEvent>>>,
}

impl Api {
    pub(crate) fn apply(&self, pod: Pod) {
        self.pods.lock().unwrap().insert(pod.metadata.uid.clone(), pod.clone());
        self.notify(ClusterEvent::Pod(PodEvent::Applied(Box::new(pod))));
    }

    pub(crate) fn delete(&self, uid: &str) {
        self.pods.lock().unwrap().remove(uid);
        self.notify(ClusterEvent::Pod(PodEvent::Deleted(uid.to_owned())));
    }

    pub(crate) fn pod(&self, uid: &str) -> Pod {
        self.pods.lock().unwrap()[uid].clone()
    }

    #[allow(dead_code, reason = "not every user of this module ends all pods")]
    pub(crate) fn uids(&self) -> Vec<String> {
        self.pods.lock().unwrap().keys().cloned().collect()
    }

    pub(crate) fn set_phase(&self, uid: &str, phase: &str) {
        let mut pod = self.pod(uid);
        pod.status.phase = phase.into();
        pod.status.start_time = Some("2026-11-15T05:00:00Z".into());
        self.apply(pod);
    }

    /// Sets the container IDs in the pod's status, as the kubelet does for running containers.
    #[allow(dead_code, reason = "not every user of this module shows processes")]
    pub(crate) fn set_containers(&self, uid: &str, containers: &[(&str, &str)]) {
        let mut pod = self.pod(uid);
        let status = |(name, id): &(&str, &str)| ContainerStatus {
            name: (*name).into(),
            id: format!("containerd://{id}"),
            ..ContainerStatus::default()
        };
        pod.status.container_statuses = containers.iter().map(status).collect();
        self.apply(pod);
    }

    fn all(&self) -> Vec<Pod> {
        self.pods.lock().unwrap().values().cloned().collect()
    }

    fn notify(&self, event: ClusterEvent) {
        self.watchers.lock().unwrap().retain(|watcher| watcher.send(event.clone()).is_ok());
    }
}

impl Cluster for Api {
    fn watch(&self) -> BoxStream<'static, ClusterEvent> {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let _listening = sender.send(ClusterEvent::Node(Some(Box::default())));
        let _listening = sender.send(ClusterEvent::Pod(PodEvent::All(self.all())));
        self.watchers.lock().unwrap().push(sender);
        futures::stream::poll_fn(move |context| receiver.poll_recv(context)).boxed()
    }

    async fn read_pods(&self) -> Result<Vec<Pod>, WriteFailure> {
        Ok(self.all())
    }

    async fn patch_pod(
        &self,
        _namespace: &str,
        _name: &str,
        uid: &PodUid,
        annotations: &BTreeMap<String, String>,
    ) -> Result<(), WriteError> {
        let mut pod = self.pods.lock().unwrap().get(&uid.0).cloned().ok_or(WriteError::Gone)?;
        pod.metadata.annotations.extend(annotations.clone());
        self.apply(pod);
        Ok(())
    }

    async fn patch_node(&self, patch: &NodePatch) -> Result<(), WriteFailure> {
        *self.node.lock().unwrap() = patch.clone();
        Ok(())
    }

    async fn write_pod_event(&self, notice: &PodNotice) -> Result<(), WriteFailure> {
        self.notices.lock().unwrap().push(notice.clone());
        Ok(())
    }

    async fn set_unhealthy(&self, gpus: &[u8]) -> Result<(), WriteFailure> {
        *self.unhealthy.lock().unwrap() = Some(gpus.to_vec());
        Ok(())
    }
}

/// The way in which plugins are registered.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RegistrationWay {
    Registry,
    Socket,
}

pub(crate) struct World {
    pub(crate) api: Arc<Api>,
    pub(crate) kubelet: Option<Kubelet>,
    agent: Option<(CancellationToken, JoinHandle<()>)>,
    gpus: Arc<dyn Gpus>,
    way: RegistrationWay,
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) metrics: MetricsOptions,
    /// Time between two samples of a GPU.
    pub(crate) sample_interval: Duration,
    /// Runtime of the agent.
    pub(crate) runtime: Handle,
    pub(crate) directory: tempfile::TempDir,
}

impl World {
    pub(crate) async fn new(way: RegistrationWay) -> Self {
        Self::with_metrics(way, None, MetricsOptions::default()).await
    }

    /// Returns a world whose agent serves pages.
    #[allow(dead_code, reason = "not every user of this module needs pages")]
    pub(crate) async fn listening(way: RegistrationWay, listen: Option<SocketAddr>) -> Self {
        Self::with_metrics(way, listen, MetricsOptions::default()).await
    }

    /// Returns a world whose agent serves pages with these metrics.
    pub(crate) async fn with_metrics(
        way: RegistrationWay,
        listen: Option<SocketAddr>,
        metrics: MetricsOptions,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("gpus"), eight_gpus()).unwrap();
        let gpus = Arc::new(Simulated::new(directory.path().join("gpus")));
        let world = Self::started((gpus, Duration::from_millis(20)), directory, way, listen, metrics);
        world.wait_until_served().await;
        world
    }

    /// Returns a world with the given GPUs instead of eight simulated ones.
    #[allow(dead_code, reason = "not every user of this module has a GPU")]
    pub(crate) fn on(gpus: Arc<dyn Gpus>, way: RegistrationWay, listen: Option<SocketAddr>) -> Self {
        Self::started(
            (gpus, Duration::from_secs(1)),
            tempfile::tempdir().unwrap(),
            way,
            listen,
            MetricsOptions::default(),
        )
    }

    fn started(
        (gpus, sample_interval): (Arc<dyn Gpus>, Duration),
        directory: tempfile::TempDir,
        way: RegistrationWay,
        listen: Option<SocketAddr>,
        metrics: MetricsOptions,
    ) -> Self {
        let mut world = Self {
            api: Arc::default(),
            kubelet: None,
            agent: None,
            gpus,
            way,
            listen,
            metrics,
            sample_interval,
            runtime: Handle::current(),
            directory,
        };
        world.start_kubelet(Checkpoint::default());
        world.start_agent();
        world
    }

    fn root(&self) -> PathBuf {
        self.directory.path().join("kubelet")
    }

    pub(crate) fn grants(&self) -> PathBuf {
        self.directory.path().join("grants")
    }

    pub(crate) fn events(&self) -> PathBuf {
        self.directory.path().join("gpus.events")
    }

    pub(crate) fn start_kubelet(&mut self, checkpoint: Checkpoint) {
        self.kubelet = Some(Kubelet::start(self.root(), checkpoint, 3).unwrap());
    }

    pub(crate) fn kubelet(&self) -> &Kubelet {
        self.kubelet.as_ref().unwrap()
    }

    pub(crate) fn start_agent(&mut self) {
        let mut settings = settings(&self.grants());
        settings.registration = match self.way {
            RegistrationWay::Registry => {
                RegistrationMode::PluginsRegistry(self.root().join("plugins_registry"))
            }
            RegistrationWay::Socket => RegistrationMode::KubeletSocket(self.root().join("device-plugins")),
        };
        let address = self.listen;
        let mut ports = Ports {
            gpus: self.gpus.clone(),
            watch_health: true,
            cluster: self.api.clone(),
            pod_resources: self.root().join("pod-resources/kubelet.sock"),
            listen: None,
            sampling: Sampling {
                interval: self.sample_interval,
                proc_root: self.directory.path().join("proc"),
                metrics: self.metrics.clone(),
                ..Sampling::default()
            },
        };
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let task = self.runtime.spawn(async move {
            if let Some(address) = address {
                ports.listen = Some(TcpListener::bind(address).await.unwrap());
            }
            run(settings, ports, stopped).await.unwrap();
        });
        self.agent = Some((stop, task));
    }

    /// Stops the agent as a signal would.
    pub(crate) async fn stop_agent(&mut self) {
        let (stop, task) = self.agent.take().unwrap();
        stop.cancel();
        with_timeout("the agent to end", task).await.unwrap();
    }

    pub(crate) async fn wait_until_served(&self) {
        for (resource, amount) in
            [(Resource::NvidiaGpu, 8), (Resource::GpuMemory, 640), (Resource::VcudaCore, 800)]
        {
            self.until(&format!("{resource}"), || self.kubelet().allocatable(resource.name()) == amount)
                .await;
        }
        for resource in [Resource::AliyunGpu, Resource::VcudaMemory] {
            self.until(&format!("{resource}"), || self.kubelet().allocatable(resource.name()) > 0).await;
        }
    }

    /// Waits until a condition holds.
    pub(crate) async fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        with_timeout(what, async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }

    /// Binds a pod to the node, with a grant for a GPU if one is given.
    pub(crate) fn bind(&self, name: &str, limits: &[(&str, &str)], gpu: Option<u8>) -> Pod {
        let limits: BTreeMap<&str, &str> = limits.iter().copied().collect();
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": name, "namespace": "team", "uid": format!("uid-{name}") },
            "spec": { "containers": [{ "name": "main", "resources": { "limits": limits } }] },
            "status": { "phase": "Pending" },
        }))
        .unwrap();
        if let Some(gpu) = gpu {
            let claim = pod.spec.claims(MemoryUnit::GiB).unwrap().remove(0);
            let gpus = vec![(GpuIndex(gpu), Hold::of(claim.request))];
            let granted = [ContainerGrant { container: "main".into(), role: claim.role, holds: gpus }];
            pod.metadata.annotations =
                grant::annotations(&pod.spec, &granted, &core_node(), MemoryUnit::GiB, 1).unwrap();
        }
        self.api.apply(pod.clone());
        pod
    }

    /// Admits and starts a pod.
    pub(crate) async fn run(&self, pod: &Pod) -> Result<tessera_sim::kubelet::Admitted, String> {
        let given = self.kubelet().admit(pod).await.map_err(|error| error.to_string())?;
        self.kubelet().start_containers(pod).await.map_err(|error| error.to_string())?;
        self.api.set_phase(&pod.metadata.uid, "Running");
        Ok(given)
    }
}

pub(crate) fn settings(grants: &Path) -> AgentSettings {
    AgentSettings {
        node: "node-1".into(),
        dialects: Dialect::ALL.to_vec(),
        memory_unit: MemoryUnit::GiB,
        policy: "tessera".parse().unwrap(),
        injection: InjectionSettings::default(),
        registration: RegistrationMode::PluginsRegistry("/var/lib/kubelet/plugins_registry".into()),
        isolation: Isolation {
            library: Ok(InstalledLibrary {
                folder: grants.join(".library").display().to_string(),
                by_cdi: false,
            }),
            without_library: WithoutLibrary::Refuse,
            allow_opt_out: false,
            meaning: tessera_limits::limits::ShareMeaning::Time,
            kill_escaped: false,
        },
        grants: grants.display().to_string(),
        instance_type: Some("test.8xlarge".into()),
        labels: BTreeMap::new(),
        quiet_time: Duration::from_secs(1),
        ignored_xids: BTreeSet::new(),
        advertise: None,
    }
}

pub(crate) fn eight_gpus() -> String {
    let gpu = |index: u8| {
        json!({
            "uuid": uuid(index), "minor": index, "model": "NVIDIA A100-SXM4-80GB", "memoryMiB": 81_920,
        })
    };
    json!({ "memoryUnit": "GiB", "gpus": (0..8).map(gpu).collect::<Vec<_>>(), "links": [] }).to_string()
}

pub(crate) fn uuid(gpu: u8) -> String {
    format!("GPU-{gpu:08x}-0000-4000-8000-000000000000")
}

pub(crate) fn core_node() -> tessera_core::node::Node {
    let inventory = tessera_wire::tessera::inventory::parse(&eight_gpus()).unwrap();
    let (cpu, memory) = (tessera_core::units::MilliCpu::ZERO, tessera_core::units::MiB::ZERO);
    tessera_core::node::Node::new("node-1".into(), inventory.gpus, inventory.topology, cpu, memory).unwrap()
}

/// Waits for a future and panics after 30 seconds.
pub(crate) async fn with_timeout<F: Future>(what: &str, future: F) -> F::Output {
    let waited = tokio::time::timeout(Duration::from_secs(30), future).await;
    waited.unwrap_or_else(|_| panic!("waited too long for {what}"))
}
