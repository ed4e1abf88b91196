//! Carries out what the [controller](crate::controller) says: tasks, sockets, files and the API
//! server. Decides nothing.

mod account_reader;
mod arbiter;
mod cluster;
mod gpus;
mod grants;
mod http;
mod library;
mod plugin;
mod sampler;
mod standalone;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use futures::StreamExt as _;
use tessera_cluster::{PodNotice, with_causes};
use tessera_node::{
    device_plugin::{RegistrationMode, ServedPlugin, serve},
    gpus::Gpus,
    open_files,
    pod_resources::{PodResources, PodResourcesError},
    processes::Processes,
};
use tessera_wire::kubelet::device_id::Resource;
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use self::{account_reader::AccountReader, arbiter::Arbiter, grants::Grants, plugin::Plugin};
pub use self::{
    cluster::{Cluster, ClusterEvent},
    library::install_library,
    sampler::{Sampler, Sampling, sample_gpu},
    standalone::{Standalone, StandaloneError},
};
use crate::controller::{
    Action, Agent, AgentSettings, CallAnswer, CallId, ContainerLimits, Event, EventTime, NotReady,
    ShellError, View, Warning,
};

/// How often time is told when nothing else happens.
const ROUTINE: Duration = Duration::from_secs(1);

/// The outside of an agent.
#[allow(missing_debug_implementations, reason = "a port is whatever is plugged in")]
pub struct Ports<C> {
    /// The GPUs.
    pub gpus: Arc<dyn Gpus>,
    /// Whether GPUs are watched for errors.
    pub watch_health: bool,
    /// The API server.
    pub cluster: Arc<C>,
    /// The kubelet's podresources socket.
    pub pod_resources: PathBuf,
    /// Where pages are served, if anywhere.
    pub listen: Option<TcpListener>,
    /// How the GPUs are looked at.
    pub sampling: Sampling,
}

/// The agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Grants cannot be written.
    #[error("cannot use {} for grants", path.display())]
    Grants {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// The path of the podresources socket is none.
    #[error(transparent)]
    PodResources(#[from] PodResourcesError),
}

/// What the main loop hears.
enum Message {
    Event(Event),
    /// A question of the kubelet, with the one who waits for the answer.
    Call(Event, CallId, oneshot::Sender<CallAnswer>),
    /// Somebody wants to look.
    Inspect(oneshot::Sender<View>),
    /// Somebody wants to know whether pods can be served, or else what is waited for.
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
    let sampler = Arc::new(Sampler::new(ports.gpus.clone(), ports.sampling));
    if let Some(listener) = ports.listen {
        tasks.spawn(http::serve(listener, messages.clone(), sampler.clone(), stop.clone()));
    }
    let pod_resources = PodResources::at(&ports.pod_resources)?;
    let path = PathBuf::from(&settings.grants);
    let grants = Grants::at(path.clone()).map_err(|source| RunError::Grants { path, source })?;
    let arbiter = Arbiter::start(ports.gpus.clone(), stop.clone()).map_err(RunError::Thread)?;
    let accounts = AccountReader::start(sampler.clone(), arbiter.clone(), messages.clone(), stop.clone())
        .map_err(RunError::Thread)?;
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
    let shell = Shell {
        registration: settings.registration.clone(),
        agent: Agent::new(settings),
        cluster: ports.cluster,
        pod_resources,
        grants,
        arbiter,
        accounts,
        processes,
        messages,
        sampler,
        plugins: BTreeMap::new(),
        calls: BTreeMap::new(),
        sampled: None,
        started: Instant::now(),
        tasks,
        stop,
    };
    shell.run(inbox).await;
    Ok(())
}

struct Shell<C> {
    agent: Agent,
    cluster: Arc<C>,
    registration: RegistrationMode,
    pod_resources: PodResources,
    grants: Grants,
    arbiter: Arbiter,
    accounts: AccountReader,
    processes: Processes,
    messages: Messages,
    sampler: Arc<Sampler>,
    plugins: BTreeMap<Resource, Arc<Plugin>>,
    /// Who waits for an answer.
    calls: BTreeMap<CallId, oneshot::Sender<CallAnswer>>,
    /// Which pods and GPUs the sampler knows, and since when.
    sampled: Option<(u64, Instant)>,
    started: Instant,
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl<C: Cluster> Shell<C> {
    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        let (pods, limits) = self.grants.read();
        for one in &limits {
            self.take_in(one);
        }
        self.handle(Event::GrantsOnDisk(pods, limits));
        let mut tick = tokio::time::Instant::now() + ROUTINE;
        loop {
            let wake = match self.agent.next_wake() {
                Some(soon) => tick.min(tokio::time::Instant::now() + soon),
                None => tick,
            };
            let message = tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                message = inbox.recv() => message,
                () = tokio::time::sleep_until(wake) => {
                    tick = tokio::time::Instant::now() + ROUTINE;
                    Some(Message::Event(Event::Tick))
                }
            };
            match message {
                Some(Message::Event(event)) => self.handle(event),
                Some(Message::Call(event, id, waiting)) => {
                    self.calls.insert(id, waiting);
                    self.handle(event);
                }
                Some(Message::Inspect(waiting)) => {
                    let _left = waiting.send(self.agent.view());
                }
                Some(Message::IsReady(waiting)) => {
                    let _left = waiting.send(self.agent.readiness());
                }
                None => break,
            }
            self.tell_sampler();
            while self.tasks.try_join_next().is_some() {}
        }
        self.stop.cancel();
        self.sampler.stop();
        // Nobody will answer any more: a plugin waits for the questions it has passed on before it
        // ends.
        drop(inbox);
        self.calls.clear();
        while self.tasks.join_next().await.is_some() {}
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

    /// Tells the sampler of new GPUs and pods, not more often than it would notice.
    fn tell_sampler(&mut self) {
        let revision = self.agent.revision();
        let is_due = |(known, at): (u64, Instant)| known != revision && at.elapsed() >= ROUTINE;
        if self.sampled.is_none_or(is_due) {
            self.sampler.update(&self.agent.view());
            self.sampled = Some((revision, Instant::now()));
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::PublishDevices(resource, devices) => self.plugin(resource).publish(devices),
            Action::Answer(call, answer) => {
                if let Some(waiting) = self.calls.remove(&call) {
                    let _left = waiting.send(answer);
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
                    // A kubelet that does not answer must not keep the agent from ending.
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
            Action::CreateGrants(call, limits) => {
                let outcome = limits.iter().try_for_each(|limits| {
                    self.grants.create(limits).map_err(|error| ShellError::GrantFile(error.to_string()))?;
                    self.take_in(limits);
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
                if let Err(error) = self.processes.kill(pid, started) {
                    tracing::warn!(pid, %error, "cannot kill a process that uses what it was not given");
                }
            }
            Action::RecordPodEvent { uid, namespace, name, reason, message } => {
                let cluster = self.cluster.clone();
                self.tasks.spawn(async move {
                    let (pod, uid, reason) = (name, uid.0, reason.to_owned());
                    let notice = PodNotice { namespace, pod, uid, is_warning: true, reason, message };
                    if let Err(error) = cluster.write_pod_event(&notice).await {
                        let PodNotice { namespace, pod, message, .. } = notice;
                        tracing::warn!("no event could be written for {namespace}/{pod}, {message}: {error}");
                    }
                });
            }
            Action::ReadPods => {
                let cluster = self.cluster.clone();
                self.report(async move {
                    Event::PodsRead(cluster.read_pods().await.map_err(ShellError::ApiServer))
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
                    Event::NodePatched(cluster.patch_node(&patch).await.map_err(ShellError::ApiServer))
                });
            }
            Action::SetUnhealthy(cards) => {
                let cluster = self.cluster.clone();
                self.report(async move {
                    Event::UnhealthySet(cluster.set_unhealthy(&cards).await.map_err(ShellError::ApiServer))
                });
            }
        }
    }

    /// A grant is there: its container gets windows, and its books are read.
    fn take_in(&self, limits: &ContainerLimits) {
        let directory = self.grants.directory(&limits.pod, &limits.container);
        self.arbiter.add(directory.clone());
        self.accounts.add((limits.pod.clone(), limits.container.clone()), directory);
    }

    /// Does something and tells the machine how it went.
    fn report(&mut self, work: impl Future<Output = Event> + Send + 'static) {
        let messages = self.messages.clone();
        self.tasks.spawn(async move {
            let event = work.await;
            let _ended = messages.send(Message::Event(event));
        });
    }

    /// The plugin of a resource, served from the first time it has devices.
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
                    // The directory may come with the kubelet.
                    let event = Event::PluginSocketFailed(resource, with_causes(&error));
                    let _ended = messages.send(Message::Event(event));
                    let _stopped = stop.run_until_cancelled(tokio::time::sleep(ROUTINE)).await;
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
