//! Carries out what the [controller](crate::controller) says: tasks, sockets, files and the API
//! server. Decides nothing.

mod account_file;
mod account_reader;
mod arbiter;
mod arbiter_watch;
mod claims;
mod cluster;
mod gpus;
mod grants;
mod http;
mod instance_plugin;
mod library;
mod plugin;
mod sampler;
mod standalone;
mod throttle;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use futures::StreamExt as _;
use tessera_cluster::{Notice, NoticeKind, node_agent::WriteFailure, with_causes};
use tessera_node::{
    device_plugin::{RegistrationMode, ServedPlugin, serve},
    gpus::Gpus,
    open_files,
    pod_resources::{PodResources, PodResourcesError},
    processes::{ProcessSignal, Processes},
};
use tessera_wire::kubelet::device_id::Resource;
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use self::{
    account_reader::AccountReader,
    arbiter::Arbiter,
    claims::{ClaimService, ClaimStore},
    grants::Grants,
    instance_plugin::InstancePlugins,
    plugin::Plugin,
    throttle::Throttle,
};
pub use self::{
    cluster::{Cluster, ClusterEvent},
    grants::grants_memory,
    http::{AccessError, PagesAccess, PagesPort},
    library::install_library,
    sampler::{Sampler, Sampling, sample_gpu},
    standalone::{Standalone, StandaloneError},
};
use crate::controller::{
    Action, Agent, AgentSettings, CallAnswer, CallId, ClaimSettings, ContainerLimits, Event, EventTime,
    NotReady, ShellError, View, Warning,
};

/// Time between two ticks of the controller without other events.
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// External interfaces of an agent.
#[allow(missing_debug_implementations, reason = "implementations of a port need not be Debug")]
pub struct Ports<C> {
    /// GPUs of the host.
    pub gpus: Arc<dyn Gpus>,
    /// True to watch the GPUs for errors.
    pub watch_health: bool,
    /// Client of the API server.
    pub cluster: Arc<C>,
    /// Path of the kubelet's podresources socket.
    pub pod_resources: PathBuf,
    /// The agent's HTTP pages, if they are served.
    pub pages: Option<PagesPort>,
    /// Listener of the kubelet's probes, if they are served.
    pub probes: Option<TcpListener>,
    /// Path of gpu-manager's socket, if it is served.
    pub display_socket: Option<PathBuf>,
    /// Configuration of the sampler.
    pub sampling: Sampling,
    /// Cancelled to end the agent in order: it stops once no pod depends on it at the moment.
    pub leave: CancellationToken,
    /// Called once the pages are served and the agent begins to offer GPUs.
    pub on_start: Box<dyn FnOnce() + Send>,
}

/// Reason why the agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The directory of the grants cannot be created.
    #[error("cannot create the directory {} for grants", path.display())]
    Grants {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread of the agent")]
    Thread(#[source] std::io::Error),
    /// The path of the podresources socket is invalid.
    #[error(transparent)]
    PodResources(#[from] PodResourcesError),
}

/// Message to the main loop.
enum Message {
    Event(Event),
    /// Call of the kubelet, with the channel for the answer.
    Call(Event, CallId, oneshot::Sender<CallAnswer>),
    /// Request for the state of the agent.
    Inspect(oneshot::Sender<View>),
    /// Request for the readiness of the agent.
    IsReady(oneshot::Sender<Result<(), NotReady>>),
}

type Messages = mpsc::UnboundedSender<Message>;

/// Runs an agent until `stop`.
pub async fn run<C: Cluster>(
    settings: AgentSettings,
    ports: Ports<C>,
    stop: CancellationToken,
) -> Result<(), RunError> {
    open_files::raise_limit();
    let (messages, inbox) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    let processes = Processes::at(ports.sampling.proc_root.clone());
    let libraries = settings.isolation.library.as_ref().map(library::library_files).unwrap_or_default();
    let sampler = Sampler::new(ports.gpus.clone(), ports.sampling).with_libraries(libraries);
    let sampler = Arc::new(sampler);
    if let Some(pages) = ports.pages {
        tasks.spawn(http::serve(pages, messages.clone(), sampler.clone(), stop.clone()));
    }
    if let Some(listener) = ports.probes {
        tasks.spawn(http::serve_probes(listener, messages.clone(), sampler.clone(), stop.clone()));
    }
    if let Some(path) = ports.display_socket {
        tasks.spawn(http::display::serve(path, messages.clone(), sampler.clone(), stop.clone()));
    }
    let pod_resources = PodResources::at(&ports.pod_resources)?;
    let path = PathBuf::from(&settings.grants);
    let grants = Grants::at(path.clone()).map_err(|source| RunError::Grants { path, source })?;
    if grants.memory().is_none() {
        tracing::warn!(
            directory = %grants_memory(Path::new(&settings.grants)).display(),
            "no tmpfs is mounted here, so containers with shares can fill the disk of the grants; \
             run tessera mount-grants before the agent, as deploy/agent does"
        );
    }
    let arbiter = Arbiter::start(ports.gpus.clone(), stop.clone()).map_err(RunError::Thread)?;
    let accounts = AccountReader::start(sampler.clone(), arbiter.clone(), messages.clone(), stop.clone())
        .map_err(RunError::Thread)?;
    let throttle = Throttle::start(processes.clone(), stop.clone()).map_err(RunError::Thread)?;
    let mut events = ports.cluster.watch();
    let cluster_messages = messages.clone();
    let stopped = stop.clone();
    tasks.spawn(async move {
        while let Some(Some(event)) = stopped.run_until_cancelled(events.next()).await {
            let _ended = cluster_messages.send(Message::Event(event.into()));
        }
    });
    gpus::watch(ports.gpus.clone(), ports.watch_health, messages.clone(), stop.clone())
        .map_err(RunError::Thread)?;
    let claims = match &settings.claims {
        Some(claims) => {
            let store = ClaimStore::at(Path::new(&settings.grants), claims.cdi_directory.clone())
                .map_err(|source| RunError::Grants { path: PathBuf::from(&settings.grants), source })?;
            let service = Arc::new(ClaimService::new(messages.clone()));
            let (slice_messages, stopped) = (messages.clone(), stop.clone());
            let mut slices = ports.cluster.watch_slice();
            tasks.spawn(async move {
                while let Some(Some(slice)) = stopped.run_until_cancelled(slices.next()).await {
                    let _ended = slice_messages.send(Message::Event(Event::Slice(slice.map(Box::new))));
                }
            });
            Some(ServedClaims { store, service, settings: claims.clone(), is_served: false })
        }
        None => None,
    };
    let shell = Shell {
        claims,
        instance_plugins: InstancePlugins::new(
            settings.injection.clone(),
            settings.registration.clone(),
            messages.clone(),
        ),
        registration: settings.registration.clone(),
        agent: Agent::new(settings),
        cluster: ports.cluster,
        pod_resources,
        grants,
        arbiter,
        accounts,
        throttle,
        processes,
        messages,
        sampler,
        plugins: BTreeMap::new(),
        calls: BTreeMap::new(),
        sampled: None,
        started: Instant::now(),
        tasks,
        leave: ports.leave,
        stop,
    };
    (ports.on_start)();
    shell.run(inbox).await;
    Ok(())
}

fn api_server(error: &WriteFailure) -> ShellError {
    ShellError::ApiServer(with_causes(error))
}

/// The parts of an agent that serves claims.
struct ServedClaims {
    store: ClaimStore,
    service: Arc<ClaimService>,
    settings: ClaimSettings,
    /// Whether the kubelet can find the driver.
    is_served: bool,
}

struct Shell<C> {
    claims: Option<ServedClaims>,
    agent: Agent,
    cluster: Arc<C>,
    registration: RegistrationMode,
    pod_resources: PodResources,
    grants: Grants,
    arbiter: Arbiter,
    accounts: AccountReader,
    throttle: Throttle,
    processes: Processes,
    messages: Messages,
    sampler: Arc<Sampler>,
    plugins: BTreeMap<Resource, Arc<Plugin>>,
    instance_plugins: InstancePlugins,
    /// Channels for the answers to open calls of the kubelet.
    calls: BTreeMap<CallId, oneshot::Sender<CallAnswer>>,
    /// Revision of the pods and GPUs that the sampler has, and when it got them.
    sampled: Option<(u64, Instant)>,
    started: Instant,
    tasks: JoinSet<()>,
    leave: CancellationToken,
    stop: CancellationToken,
}

impl<C: Cluster> Shell<C> {
    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        let (pods, limits) = self.grants.read();
        for one in &limits {
            self.add_grant(one);
        }
        self.handle(Event::GrantsOnDisk(pods, limits));
        if let Some(claims) = &self.claims {
            let prepared = claims.store.read();
            self.handle(Event::ClaimsOnDisk(prepared));
        }
        let mut tick = tokio::time::Instant::now() + TICK_INTERVAL;
        let mut is_leaving = false;
        loop {
            let wake = match self.agent.next_wake() {
                Some(soon) => tick.min(tokio::time::Instant::now() + soon),
                None => tick,
            };
            let message = tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                () = self.leave.cancelled(), if !is_leaving => {
                    is_leaving = true;
                    Some(Message::Event(Event::StopRequested))
                }
                message = inbox.recv() => message,
                () = tokio::time::sleep_until(wake) => {
                    tick = tokio::time::Instant::now() + TICK_INTERVAL;
                    Some(Message::Event(Event::Tick))
                }
            };
            match message {
                Some(Message::Event(event)) => self.handle(event),
                Some(Message::Call(event, id, reply)) => {
                    self.calls.insert(id, reply);
                    self.handle(event);
                }
                Some(Message::Inspect(reply)) => {
                    let _disconnected = reply.send(self.agent.view());
                }
                Some(Message::IsReady(reply)) => {
                    let _disconnected = reply.send(self.agent.readiness());
                }
                None => break,
            }
            self.update_sampler();
            while self.tasks.try_join_next().is_some() {}
        }
        self.stop.cancel();
        self.sampler.stop();
        // The calls are dropped, because a plugin waits for their answers before it stops.
        drop(inbox);
        self.calls.clear();
        while self.tasks.join_next().await.is_some() {}
        self.throttle.end();
    }

    fn handle(&mut self, event: Event) {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = EventTime { elapsed: self.started.elapsed(), unix_nanos: unix.as_nanos() };
        if let Event::Incident(incident) = &event {
            self.sampler.record_incident(incident);
        }
        for action in self.agent.handle(now, event) {
            self.act(action);
        }
    }

    /// Updates the GPUs and pods of the sampler, at most once per tick.
    fn update_sampler(&mut self) {
        let revision = self.agent.revision();
        let is_due = |(known, at): (u64, Instant)| known != revision && at.elapsed() >= TICK_INTERVAL;
        if self.sampled.is_none_or(is_due) {
            self.sampler.update(&self.agent.view());
            self.sampled = Some((revision, Instant::now()));
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Stop => self.stop.cancel(),
            Action::PublishDevices(resource, devices) => self.plugin(resource).publish(devices),
            Action::PublishInstances(offers) => {
                self.instance_plugins.publish(offers, &mut self.tasks, &self.stop);
            }
            Action::Answer(call, answer) => {
                if let Some(reply) = self.calls.remove(&call) {
                    let _disconnected = reply.send(answer);
                }
            }
            Action::Warn(warning) => log(&warning),
            Action::RemoveGrants(uid) => {
                for directory in self.grants.remove(&uid) {
                    self.arbiter.remove(directory.clone());
                    self.accounts.remove(directory);
                }
            }
            Action::ListPodResources => {
                let pod_resources = self.pod_resources.clone();
                let stop = self.stop.clone();
                self.report(async move {
                    // A kubelet that does not answer must not prevent the agent from stopping.
                    let listed = stop.run_until_cancelled(pod_resources.list()).await;
                    let listed = listed
                        .map(|listed| listed.map_err(|error| ShellError::PodResources(with_causes(&error))));
                    Event::PodResourcesListed(
                        listed.unwrap_or_else(|| {
                            Err(ShellError::PodResources("the agent is ending".to_owned()))
                        }),
                    )
                });
            }
            Action::ReadOfferedDevices(resources) => {
                let (pod_resources, messages) = (self.pod_resources.clone(), self.messages.clone());
                let stop = self.stop.clone();
                self.tasks.spawn(async move {
                    let Some(Ok(mut offered)) = stop.run_until_cancelled(pod_resources.offered()).await
                    else {
                        return;
                    };
                    let of = |resource: Resource| Some((resource, offered.remove(resource.name())?));
                    let event = Event::DevicesOffered(resources.into_iter().filter_map(of).collect());
                    let _ended = messages.send(Message::Event(event));
                });
            }
            Action::CreateGrants(call, limits) => {
                let outcome = limits.iter().try_for_each(|limits| {
                    self.grants.create(limits).map_err(|error| ShellError::GrantFile(error.to_string()))?;
                    self.add_grant(limits);
                    Ok(())
                });
                self.report(async move { Event::GrantsCreated(call, outcome) });
            }
            Action::UpdateGrant(limits) => {
                let outcome =
                    self.grants.update(&limits).map_err(|error| ShellError::GrantFile(error.to_string()));
                self.report(async move { Event::GrantUpdated(limits, outcome) });
            }
            Action::SetUncharged { pod, container, gpu, bytes, at } => {
                self.accounts.set_uncharged((pod, container), gpu, bytes, at);
            }
            Action::Kill { pid, started } => {
                if let Err(error) = self.processes.signal(pid, started, ProcessSignal::Kill) {
                    tracing::warn!(pid, %error, "cannot kill a process outside its grant; will retry at the next check");
                }
            }
            Action::Throttle { pid, started, cycle } => self.throttle.set(pid, started, cycle),
            Action::Resume { pid, started } => {
                if let Err(error) = self.processes.signal(pid, started, ProcessSignal::Continue) {
                    tracing::warn!(pid, %error, "cannot resume a process that an earlier agent has stopped; send it SIGCONT");
                }
            }
            Action::RecordPodEvent { uid, namespace, name, reason, message } => {
                let cluster = self.cluster.clone();
                self.tasks.spawn(async move {
                    let (kind, uid, reason) = (NoticeKind::Pod, uid.0, reason.to_owned());
                    let notice = Notice { kind, namespace, name, uid, is_warning: true, reason, message };
                    if let Err(error) = cluster.write_pod_event(&notice).await {
                        let error = with_causes(&error);
                        let Notice { namespace, name, message, .. } = notice;
                        tracing::warn!(
                            pod = %format!("{namespace}/{name}"), event = message, %error,
                            "cannot write a Kubernetes Event for the pod; its owner is not notified"
                        );
                    }
                });
            }
            Action::PublishHealth(health) => self.publish_claim_health(health),
            Action::WriteSlice { node_uid, spec } => {
                let cluster = self.cluster.clone();
                self.report(async move {
                    let written = cluster.write_slice(&node_uid, &spec).await;
                    Event::SliceWritten(written.map(Box::new).map_err(|error| api_server(&error)))
                });
            }
            Action::ReadClaim(claim) => {
                let cluster = self.cluster.clone();
                self.report(async move {
                    let read = cluster.read_claim(&claim.namespace, &claim.name).await;
                    Event::ClaimRead(claim, read.map(Box::new).map_err(|error| api_server(&error)))
                });
            }
            Action::StoreClaim(files) => {
                let outcome = self.store_claim(&files);
                self.report(async move { Event::ClaimStored(files.claim.uid, outcome) });
            }
            Action::RemoveClaim(call, uid) => {
                let outcome = self.remove_claim(&uid);
                self.report(async move { Event::ClaimRemoved(call, outcome) });
            }
            Action::ReadPods => {
                let cluster = self.cluster.clone();
                self.report(async move {
                    Event::PodsRead(cluster.read_pods().await.map_err(|error| api_server(&error)))
                });
            }
            Action::PatchPod { uid, namespace, name, annotations } => {
                let cluster = self.cluster.clone();
                self.report(async move {
                    let outcome = cluster.patch_pod(&namespace, &name, &uid, &annotations).await;
                    Event::PodPatched(uid, outcome)
                });
            }
            Action::PatchNode(patch) => {
                let cluster = self.cluster.clone();
                self.report(async move {
                    Event::NodePatched(cluster.patch_node(&patch).await.map_err(|error| api_server(&error)))
                });
            }
            Action::SetUnhealthy(gpus) => {
                let cluster = self.cluster.clone();
                self.report(async move {
                    Event::UnhealthySet(
                        cluster.set_unhealthy(&gpus).await.map_err(|error| api_server(&error)),
                    )
                });
            }
        }
    }

    /// Starts to assign windows to the container of a grant and to read its account.
    fn add_grant(&self, limits: &ContainerLimits) {
        let directory = self.grants.directory(&limits.pod, &limits.container);
        self.arbiter.add(directory.clone());
        self.accounts.add((limits.pod.clone(), limits.container.clone()), directory);
    }

    /// Runs `work` in a task and sends its result to the controller.
    fn report(&mut self, work: impl Future<Output = Event> + Send + 'static) {
        let messages = self.messages.clone();
        self.tasks.spawn(async move {
            let event = work.await;
            let _ended = messages.send(Message::Event(event));
        });
    }

    /// Returns the plugin of a resource. It is served from its first call on.
    fn plugin(&mut self, resource: Resource) -> Arc<Plugin> {
        if let Some(plugin) = self.plugins.get(&resource) {
            return plugin.clone();
        }
        let plugin = Arc::new(Plugin::new(resource, self.messages.clone()));
        self.plugins.insert(resource, plugin.clone());
        let (registration, stop, served) = (self.registration.clone(), self.stop.clone(), plugin.clone());
        let messages = self.messages.clone();
        self.tasks.spawn(async move {
            while !stop.is_cancelled() {
                let served = ServedPlugin {
                    plugin: served.clone(),
                    resource: resource.name().to_owned(),
                    registration: registration.clone(),
                };
                if let Err(error) = serve(served, stop.clone()).await {
                    // The kubelet may create the directory later.
                    let event = Event::PluginSocketFailed(resource, with_causes(&error));
                    let _ended = messages.send(Message::Event(event));
                    let _stopped = stop.run_until_cancelled(tokio::time::sleep(TICK_INTERVAL)).await;
                }
            }
        });
        plugin
    }
}

/// Logs a warning of the controller with its fields.
fn log(warning: &Warning) {
    let Warning { message, node, pod, container, gpu, detail, error } = warning;
    let field = |value: &Option<String>| value.clone().map(tracing::field::display);
    tracing::warn!(
        node = field(node),
        pod = field(pod),
        container = field(container),
        gpu = field(gpu),
        detail = field(detail),
        error = field(error),
        "{message}"
    );
}
