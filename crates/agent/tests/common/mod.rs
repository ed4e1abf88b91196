//! A node made of the real agent, the embedded kubelet, simulated GPUs and an in-memory API server.

#![allow(dead_code, reason = "each user of this module needs only some of the helpers")]
#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod api;
#[path = "../fixtures/mod.rs"]
pub(crate) mod fixtures;
pub(crate) mod gpus;
pub(crate) mod load;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tessera_agent::{
    controller::{AgentSettings, Isolation},
    exporter::families::MetricsOptions,
    shell::{PagesAccess, PagesPort, Ports, Sampling, run},
};
use tessera_core::{node::Node, request::ContainerRole};
use tessera_node::{
    device_plugin::RegistrationMode,
    gpus::{Gpus, Simulated},
};
use tessera_sim::kubelet::{Admitted, Checkpoint, Kubelet, KubeletError};
use tessera_wire::{foreign::objects::Pod, kubelet::device_id::Resource};
use tokio::{net::TcpListener, runtime::Handle, task::JoinHandle};
use tokio_util::sync::CancellationToken;

pub(crate) use self::api::Api;
use self::gpus::CountedGpus;

/// Time after which a test gives up. Far longer than anything takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

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
    pub(crate) gpus: Arc<CountedGpus>,
    way: RegistrationWay,
    /// Address of the agent's pages.
    pub(crate) address: SocketAddr,
    /// Who may read them.
    access: PagesAccess,
    /// Address of the agent's probes.
    pub(crate) probes: SocketAddr,
    metrics: MetricsOptions,
    /// Time between two samples of a GPU.
    pub(crate) sample_interval: Duration,
    /// How shares are enforced, if not as in the fixtures.
    isolation: Option<Isolation>,
    /// Runtime of the agent.
    pub(crate) runtime: Handle,
    pub(crate) directory: tempfile::TempDir,
}

impl World {
    pub(crate) async fn new(way: RegistrationWay) -> Self {
        Self::with_metrics(way, MetricsOptions::default()).await
    }

    /// Returns a world whose agent serves these metrics.
    pub(crate) async fn with_metrics(way: RegistrationWay, metrics: MetricsOptions) -> Self {
        Self::with_pages(way, metrics, PagesAccess::Open).await
    }

    /// Returns a world whose pages these readers get.
    pub(crate) async fn with_access(way: RegistrationWay, access: PagesAccess) -> Self {
        Self::with_pages(way, MetricsOptions::default(), access).await
    }

    async fn with_pages(way: RegistrationWay, metrics: MetricsOptions, access: PagesAccess) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("gpus"), fixtures::a100s(8).to_string()).unwrap();
        let gpus = CountedGpus::new(Simulated::new(directory.path().join("gpus")));
        let interval = Duration::from_millis(20);
        let world = Self::started(gpus, interval, directory, way, (metrics, access), None).await;
        world.until_served().await;
        world
    }

    /// Returns a world with the given GPUs instead of eight simulated ones.
    pub(crate) async fn on(gpus: Arc<dyn Gpus>, way: RegistrationWay) -> Self {
        Self::isolated(gpus, way, |_| None).await
    }

    /// Returns such a world in which shares are enforced as `isolation` says for the directory of the
    /// grants.
    pub(crate) async fn isolated(
        gpus: Arc<dyn Gpus>,
        way: RegistrationWay,
        isolation: impl FnOnce(&Path) -> Option<Isolation>,
    ) -> Self {
        let (gpus, directory) = (CountedGpus::of(gpus), tempfile::tempdir().unwrap());
        let isolation = isolation(&directory.path().join("grants"));
        let interval = Duration::from_secs(1);
        let pages = (MetricsOptions::default(), PagesAccess::Open);
        Self::started(gpus, interval, directory, way, pages, isolation).await
    }

    async fn started(
        gpus: Arc<CountedGpus>,
        sample_interval: Duration,
        directory: tempfile::TempDir,
        way: RegistrationWay,
        (metrics, access): (MetricsOptions, PagesAccess),
        isolation: Option<Isolation>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let probes = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut world = Self {
            api: Arc::default(),
            kubelet: None,
            agent: None,
            gpus,
            way,
            address: listener.local_addr().unwrap(),
            access,
            probes: probes.local_addr().unwrap(),
            metrics,
            sample_interval,
            isolation,
            runtime: Handle::current(),
            directory,
        };
        world.start_kubelet(Checkpoint::default());
        world.start_agent_on(listener, probes);
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

    /// Starts an agent at the address of the earlier one.
    pub(crate) async fn start_agent(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        let probes = TcpListener::bind(self.probes).await.unwrap();
        self.start_agent_on(listener, probes);
    }

    fn start_agent_on(&mut self, listener: TcpListener, probes: TcpListener) {
        let registration = match self.way {
            RegistrationWay::Registry => {
                RegistrationMode::PluginsRegistry(self.root().join("plugins_registry"))
            }
            RegistrationWay::Socket => RegistrationMode::KubeletSocket(self.root().join("device-plugins")),
        };
        let fixture = fixtures::settings(&self.grants());
        let settings = AgentSettings {
            registration,
            instance_type: Some("test.8xlarge".into()),
            quiet_time: Duration::from_secs(1),
            isolation: self.isolation.clone().unwrap_or_else(|| fixture.isolation.clone()),
            ..fixture
        };
        let sampling = Sampling {
            interval: self.sample_interval,
            proc_root: self.directory.path().join("proc"),
            metrics: self.metrics.clone(),
            ..Sampling::default()
        };
        let (gpus, cluster) = (self.gpus.clone(), self.api.clone());
        let pod_resources = self.root().join("pod-resources/kubelet.sock");
        let display_socket = Some(self.directory.path().join("gpu-manager.sock"));
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let (listener, probes) = (listener.into_std().unwrap(), probes.into_std().unwrap());
        let access = self.access.clone();
        let task = self.runtime.spawn(async move {
            // A listener belongs to the runtime in which it was made.
            let pages = Some(PagesPort { listener: TcpListener::from_std(listener).unwrap(), access });
            let probes = Some(TcpListener::from_std(probes).unwrap());
            let ports = Ports {
                gpus,
                watch_health: true,
                cluster,
                pod_resources,
                pages,
                probes,
                display_socket,
                sampling,
                leave: CancellationToken::new(),
                on_start: Box::new(|| ()),
            };
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

    /// Waits until the kubelet offers the devices of all resources.
    pub(crate) async fn until_served(&self) {
        let amounts = [(Resource::NvidiaGpu, 8), (Resource::GpuMemory, 640), (Resource::VcudaCore, 800)];
        for (resource, amount) in amounts {
            self.until_allocatable(resource.name(), amount).await;
        }
        let is_offered = |resource: Resource| self.kubelet().allocatable(resource.name()) > 0;
        let others = [Resource::AliyunGpu, Resource::VcudaMemory];
        self.until_devices("the other resources", || others.into_iter().all(is_offered)).await;
    }

    /// Waits until the kubelet has this many healthy devices of a resource.
    pub(crate) async fn until_allocatable(&self, resource: &str, amount: usize) {
        let what = format!("{amount} devices of {resource}");
        self.until_devices(&what, || self.kubelet().allocatable(resource) == amount).await;
    }

    /// Waits until a condition on the kubelet's devices holds. It is checked after each change.
    async fn until_devices(&self, what: &str, condition: impl Fn() -> bool) {
        let mut updates = self.kubelet().device_updates();
        with_timeout(what, updates.wait_for(|_| condition())).await.unwrap();
    }

    /// Binds a pod to the node, with a grant for a GPU if one is given.
    pub(crate) fn bind(&self, name: &str, limits: &[(&str, &str)], gpu: Option<u8>) -> Pod {
        let limits = limits.iter().map(|(resource, amount)| (*resource, (*amount).to_owned())).collect();
        let mut pod = fixtures::pod(name, &format!("uid-{name}"), &[("main", ContainerRole::Main, limits)]);
        if let Some(gpu) = gpu {
            fixtures::annotate(&mut pod, &core_node(), |_| Some([gpu]));
        }
        self.api.apply(pod.clone());
        pod
    }

    /// Admits and starts a pod.
    pub(crate) async fn run(&self, pod: &Pod) -> Result<Admitted, KubeletError> {
        let given = self.kubelet().admit(pod).await?;
        self.kubelet().start_containers(pod).await?;
        self.api.set_phase(&pod.metadata.uid, "Running");
        Ok(given)
    }
}

/// Returns the node with eight simulated GPUs.
pub(crate) fn core_node() -> Node {
    fixtures::described_node(&fixtures::a100s(8))
}

/// Waits for a future and panics if it takes too long.
pub(crate) async fn with_timeout<F: Future>(what: &str, future: F) -> F::Output {
    let waited = tokio::time::timeout(TIMEOUT, future).await;
    waited.unwrap_or_else(|_| panic!("waited too long for {what}"))
}
