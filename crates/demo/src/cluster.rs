//! The cluster of the demo: API server, scheduler, kube-scheduler's loop and nodes.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use tessera_agent::shell::RunError;
use tessera_cluster::lease::LeaseTiming;
use tessera_scheduler::certificates::plan::{self, Stored};
use tessera_scheduler::notices::Notices;
use tessera_scheduler::run::{Membership, lead};
use tessera_scheduler::server::{ALL, App, BODY_LIMIT, VERBS, router, serve_all, verbs};
use tessera_scheduler::state::{SchedulerSettings, State};
use tessera_serve::{ConnectionLimits, Tls, TlsPem};
use tessera_sim::apiserver::ApiServer;
use tessera_sim::http::HttpClient;
use tessera_sim::kube_scheduler::KubeScheduler;
use tessera_wire::{foreign::quota, tessera::inventory};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::audit::GrantAuditor;
use crate::node::{DemoNode, MODEL, POOL, RESERVED, SHARED};
use crate::{DemoError, DemoOptions};

/// A running cluster.
pub(crate) struct Cluster {
    pub(crate) api: Arc<ApiServer>,
    pub(crate) app: Arc<App>,
    pub(crate) scheduler: KubeScheduler,
    pub(crate) nodes: Vec<DemoNode>,
    pub(crate) audit: GrantAuditor,
    /// URL of the scheduler and its dashboard.
    pub(crate) url: String,
    /// The requested address, if another program uses it.
    pub(crate) taken: Option<SocketAddr>,
    pub(crate) directory: tempfile::TempDir,
    leading: JoinHandle<()>,
    serving: JoinHandle<std::io::Result<()>>,
    stop: CancellationToken,
}

/// Timeout of the start. A start takes about a second, but the host may be busy.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(60);

/// Namespaces of the pod stream.
pub(crate) const NAMESPACES: [&str; 3] = ["research", "speech", "vision"];
/// Namespace with a small quota.
pub(crate) const LIMITED_NAMESPACE: &str = "students";

/// Name in the certificate of a kube-scheduler.
const CLIENT_NAME: &str = "tessera-kube-scheduler";

/// Priority class of pods that evict others.
pub(crate) const URGENT: &str = "urgent";
/// Priority class of pods that are evicted first.
pub(crate) const SPARE: &str = "spare-time";

impl Cluster {
    pub(crate) async fn start(options: &DemoOptions) -> Result<Self, DemoError> {
        if options.nodes == 0 {
            return Err(DemoError::NoNodes);
        }
        let directory = tempfile::Builder::new().prefix("tessera-demo-").tempdir();
        let directory = directory.map_err(DemoError::io("make a directory for sockets"))?;
        DemoNode::check_sockets(directory.path(), options.nodes)?;
        let api = Arc::new(ApiServer::start().await.map_err(DemoError::io("start the API server"))?);
        create_objects(&api);
        let audit = GrantAuditor::start(&api);
        let client = tessera_cluster::connect_to(&api.url())?;
        let (listener, taken) = listen(options.listen).await?;
        let address = listener.local_addr().map_err(DemoError::io("listen"))?;
        let url = format!("http://{address}");

        let settings = SchedulerSettings {
            quota: Some(quota::QuotaSettings {
                name: "gpuquota".to_owned(),
                namespace: "kube-system".to_owned(),
                model_label: MODEL.to_owned(),
                pool_label: POOL.to_owned(),
            }),
            ..SchedulerSettings::default()
        };
        let app = App::new(State::new(settings.clone()), client.clone());
        let app = Arc::new(app.with_notices(Notices::start(client.clone())));
        let routes = router(Arc::clone(&app), BODY_LIMIT, &[], None);
        let verbs_with_tls = listen_with_tls(&app).await?;
        let serving = tokio::spawn(serve_all(vec![(listener, routes, ALL, None), verbs_with_tls]));
        let membership = Membership {
            identity: format!("demo_{}", std::process::id()),
            namespace: "kube-system".to_owned(),
            lease: "tessera-scheduler".to_owned(),
            timing: LeaseTiming::default(),
            pages: None,
            verbs: None,
            is_behind_service: false,
            neighbour: None,
        };
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let leading = tokio::spawn(lead(Arc::clone(&app), settings, membership, None, stopped));

        let mut nodes = Vec::with_capacity(options.nodes);
        for number in 0..options.nodes {
            let machine_models = &options.machine_models;
            let machine_model =
                machine_models.get(number % machine_models.len().max(1)).ok_or(DemoError::NoMachineModel)?;
            // The last node is reserved, so that adding nodes changes no other node.
            let is_reserved = options.nodes > 1 && number + 1 == options.nodes;
            let pool = if is_reserved { RESERVED } else { SHARED };
            let node = DemoNode::start(&api, client.clone(), directory.path(), machine_model, number, pool);
            nodes.push(node.await?);
        }
        let scheduler = KubeScheduler::start(Arc::clone(&api), &url)?;
        let cluster =
            Self { api, app, scheduler, nodes, audit, url, taken, directory, leading, serving, stop };
        let Err(error) = cluster.wait_until_up().await else { return Ok(cluster) };
        // The directory may be removed only after all agents have stopped, because they write to
        // it.
        let mut ends = cluster.stop().await.into_iter();
        Err(ends.next().map_or(error, |(agent, source)| DemoError::Agent { agent, source }))
    }

    /// Waits until the scheduler answers and knows the GPUs of every node.
    async fn wait_until_up(&self) -> Result<(), DemoError> {
        let begun = Instant::now();
        let late = |what: &str| DemoError::Late { what: what.to_owned(), within: STARTUP_TIMEOUT };
        let knows_all = || {
            let state = self.app.read();
            state.ledger().nodes().filter(|node| !node.node().gpus().is_empty()).count() == self.nodes.len()
        };
        let serves_all = || {
            let nodes = self.api.list("/api/v1/nodes");
            nodes.iter().all(|node| {
                node["metadata"]["annotations"][inventory::KEY].is_string()
                    && node["status"]["allocatable"]["tencent.com/vcuda-memory"].is_string()
            })
        };
        while !(self.app.is_ready() && knows_all() && serves_all()) {
            if self.nodes.iter().any(DemoNode::has_died) || begun.elapsed() > STARTUP_TIMEOUT {
                return Err(late("the cluster"));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut client = HttpClient::new(&self.url)?;
        let (code, _) = client.send("GET", "/", &[], "").await?;
        if code >= 400 {
            return Err(late("the dashboard"));
        }
        Ok(())
    }

    pub(crate) fn gpu_count(&self) -> usize {
        self.nodes.iter().map(|node| node.gpus.len()).sum()
    }

    /// Returns the number of GPUs of the smallest node.
    pub(crate) fn smallest_node_gpus(&self) -> u64 {
        self.nodes.iter().map(|node| node.gpus.len() as u64).min().unwrap_or_default()
    }

    /// Returns the node reserved for pods that select its pool. A single node is not reserved.
    pub(crate) fn reserved(&self) -> Option<&DemoNode> {
        if self.nodes.len() > 1 { self.nodes.last() } else { None }
    }

    /// Returns the number of GPUs that the pod stream and most steps share.
    pub(crate) fn shared_gpus(&self) -> usize {
        self.gpu_count() - self.reserved().map_or(0, |node| node.gpus.len())
    }

    /// Stops all components, each before those it depends on. Returns the agents that had ended by
    /// themselves, with their errors.
    pub(crate) async fn stop(self) -> Vec<(String, RunError)> {
        self.scheduler.stop().await;
        let nodes: tokio::task::JoinSet<_> = self.nodes.into_iter().map(DemoNode::stop).collect();
        let ends = nodes.join_all().await.into_iter().flatten().collect();
        self.stop.cancel();
        // The scheduler releases its lease before it ends.
        let _ = self.leading.await;
        self.serving.abort();
        drop(self.directory);
        ends
    }
}

/// Opens the verbs with mutual TLS on a free port, as a scheduler in a cluster does. The embedded kube-scheduler calls
/// them without TLS; the certificates are there to be watched.
async fn listen_with_tls(
    app: &Arc<App>,
) -> Result<(TcpListener, axum::Router, ConnectionLimits, Option<Tls>), DemoError> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let planned = plan::renew(&Stored::default(), CLIENT_NAME, now)?;
    let server = planned.server.unwrap_or_default();
    let pem = TlsPem { certificate: server.certificate, key: server.key, authority: server.authority };
    let tls = Tls::for_client(pem, CLIENT_NAME)?;
    app.metrics.set_certificates("verbs", tls.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(DemoError::io("listen with TLS"))?;
    Ok((listener, verbs(Arc::clone(app), BODY_LIMIT), VERBS, Some(tls)))
}

/// Listens on `wanted`, or on another port if that one is in use. Returns `wanted` in that case.
async fn listen(wanted: SocketAddr) -> Result<(TcpListener, Option<SocketAddr>), DemoError> {
    match TcpListener::bind(wanted).await {
        Ok(listener) => Ok((listener, None)),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let other = TcpListener::bind(SocketAddr::new(wanted.ip(), 0)).await;
            Ok((other.map_err(DemoError::io(format!("listen on {}", wanted.ip())))?, Some(wanted)))
        }
        Err(source) => Err(DemoError::io(format!("listen on {wanted}"))(source)),
    }
}

/// Creates the namespaces, the priority classes and the quota of one namespace.
fn create_objects(api: &ApiServer) {
    let create = |path: &str, object: Value| {
        // The server is new, so no object exists already.
        let _ = api.create(path, object);
    };
    for namespace in NAMESPACES.iter().chain([&LIMITED_NAMESPACE]) {
        create("/api/v1/namespaces", json!({ "metadata": { "name": namespace } }));
    }
    for (name, value) in [(URGENT, 1000), (SPARE, -10)] {
        let class = json!({ "metadata": { "name": name }, "value": value });
        create("/apis/scheduling.k8s.io/v1/priorityclasses", class);
    }
    let limits = json!({ LIMITED_NAMESPACE: { "percent": 100, "memoryMiB": 81_920 } });
    let map = json!({ "metadata": { "name": "gpuquota" }, "data": { quota::DATA_KEY: limits.to_string() } });
    create("/api/v1/namespaces/kube-system/configmaps", map);
}
