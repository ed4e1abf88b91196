//! A test cluster: an API server in memory, the real scheduler over HTTP, and a loop that calls it
//! as kube-scheduler does.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, PoisonError, RwLockWriteGuard};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use tessera_cluster::lease::LeaseTiming;
use tessera_scheduler::dashboard::login::Login;
use tessera_scheduler::dashboard::usage::{HistoryPoint, UsageLog};
use tessera_scheduler::run::{Membership, lead};
use tessera_scheduler::server::{ALL, App, PAGES, pages, router, serve_all};
use tessera_scheduler::state::{SchedulerSettings, State};
use tessera_sim::apiserver::ApiServer;
use tessera_wire::tessera::node_use::NodeUse;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

use crate::webdriver::request;

const QUICK: LeaseTiming = LeaseTiming {
    // The lease is long, so that a busy machine does not make the scheduler lose it during a test.
    duration: Duration::from_secs(90),
    renew_within: Duration::from_secs(60),
    retry: Duration::from_millis(100),
};

/// Time of samples in the future, in milliseconds since 1970. Rounds of the scheduler do not forget their pods.
const NEVER_FORGOTTEN: u64 = u64::MAX / 2;

/// An API server and a scheduler.
pub(crate) struct Cluster {
    pub(crate) api: ApiServer,
    pub(crate) replica: Replica,
}

/// One replica of the scheduler.
pub(crate) struct Replica {
    app: Arc<App>,
    pub(crate) authority: String,
    /// The threads of the server. Shutting the runtime down closes all connections, as the end of a
    /// process does.
    server: Option<Runtime>,
    leading: JoinHandle<()>,
}

/// A hardware model of a node.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) model: &'static str,
    pub(crate) memory: u64,
    pub(crate) gpu_count: usize,
    /// Returns the link between two GPUs: the PCIe level and the number of NVLinks.
    pub(crate) link: fn(usize, usize) -> (&'static str, u8),
}

fn same_socket(a: usize, b: usize, half: usize) -> &'static str {
    if a / half == b / half { "NODE" } else { "SYS" }
}

pub(crate) const H100: Kind = Kind {
    model: "NVIDIA H100 80GB HBM3",
    memory: 81_559,
    gpu_count: 8,
    link: |a, b| (same_socket(a, b, 4), 18),
};

/// A node with eight GPUs in a hybrid cube mesh.
pub(crate) const V100: Kind = Kind {
    model: "Tesla V100-SXM2-32GB",
    memory: 32_510,
    gpu_count: 8,
    link: |a, b| {
        const DOUBLE: [(usize, usize); 8] = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];
        const SINGLE: [(usize, usize); 8] = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)];
        let nvlinks = if DOUBLE.contains(&(a, b)) { 2 } else { u8::from(SINGLE.contains(&(a, b))) };
        (if a / 2 == b / 2 { "PIX" } else { same_socket(a, b, 4) }, nvlinks)
    },
};

pub(crate) const T4: Kind = Kind {
    model: "Tesla T4",
    memory: 15_360,
    gpu_count: 4,
    link: |a, b| (if a / 2 == b / 2 { "PHB" } else { "SYS" }, 0),
};

pub(crate) fn node(name: &str, kind: Kind) -> Value {
    let gpus: Vec<Value> = (0..kind.gpu_count)
        .map(|index| {
            json!({"uuid": format!("GPU-{name}-{index:04}"), "minor": index, "model": kind.model,
                   "memoryMiB": kind.memory, "numa": index * 2 / kind.gpu_count})
        })
        .collect();
    let pairs = (0..kind.gpu_count).flat_map(|a| (a + 1..kind.gpu_count).map(move |b| (a, b)));
    let links: Vec<Value> = pairs
        .map(|(a, b)| {
            let (pcie, nvlinks) = (kind.link)(a, b);
            json!([a, b, pcie, nvlinks])
        })
        .collect();
    let (gpu_count, memory) = (kind.gpu_count as u64, kind.memory * kind.gpu_count as u64);
    let resources = json!({
        "cpu": (16 * gpu_count).to_string(), "memory": format!("{}Gi", 64 * gpu_count), "pods": "250",
        "nvidia.com/gpu": gpu_count.to_string(), "aliyun.com/gpu": gpu_count.to_string(),
        "aliyun.com/gpu-mem": (memory / 1024).to_string(),
        "tencent.com/vcuda-core": (100 * gpu_count).to_string(),
        "tencent.com/vcuda-memory": (memory / 256).to_string(),
    });
    let inventory = json!({ "memoryUnit": "GiB", "gpus": gpus, "links": links }).to_string();
    json!({
        "metadata": { "name": name, "annotations": { "tessera.dev/inventory": inventory },
                      "labels": { "model": kind.model, "pool": "public" } },
        "status": { "capacity": resources, "allocatable": resources },
    })
}

pub(crate) fn pod(namespace: &str, name: &str, limits: Value) -> Value {
    json!({
        "metadata": { "name": name, "namespace": namespace },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": limits, "requests": limits } }] },
    })
}

pub(crate) fn whole(gpu_count: u64) -> Value {
    json!({"nvidia.com/gpu": gpu_count.to_string(), "cpu": (8 * gpu_count).to_string()})
}

pub(crate) fn share(percent: u64, mib: u64) -> Value {
    json!({"tencent.com/vcuda-core": percent.to_string(), "tencent.com/vcuda-memory": (mib / 256).to_string(), "cpu": "2"})
}

pub(crate) fn memory(gib: u64) -> Value {
    json!({"aliyun.com/gpu-mem": gib.to_string(), "cpu": "2"})
}

impl Replica {
    pub(crate) async fn start(api: &ApiServer, identity: &str) -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        let quota = r#"{"QuotaConfigMapName":"gpuquota","QuotaConfigMapNamespace":"kube-system","GPUModelLabel":"model","GPUPoolLabel":"pool"}"#;
        let settings = SchedulerSettings {
            quota: Some(tessera_wire::foreign::quota::parse_settings(quota)?),
            dra: true,
            ..SchedulerSettings::default()
        };
        let client = tessera_cluster::connect_to(&api.url())?;
        let app = Arc::new(App::new(State::new(settings.clone()), client));
        let membership = Membership {
            identity: identity.to_owned(),
            namespace: "kube-system".to_owned(),
            lease: "tessera-scheduler".to_owned(),
            timing: QUICK,
            pages: None,
            verbs: None,
            is_behind_service: false,
            neighbour: None,
        };
        let leading =
            tokio::spawn(lead(Arc::clone(&app), settings, membership, None, std::future::pending()));
        let authority = listener.local_addr()?.to_string();
        Ok(Self { server: Some(listen(listener, &app)?), app, authority, leading })
    }

    pub(crate) fn url(&self, page: &str) -> String {
        format!("http://{}/{page}", self.authority)
    }

    /// Serves the pages once more, with a login that asks this API server. Returns their address.
    pub(crate) async fn with_login(&self, reviews: &str) -> Result<String> {
        let login = Login::new(tessera_cluster::connect_to(reviews)?, false);
        let pages = pages(Arc::clone(&self.app), 1 << 20, &[], Some(login));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/", listener.local_addr()?);
        tokio::spawn(serve_all(vec![(listener, pages, PAGES, None)]));
        Ok(url)
    }

    /// Closes all connections and stops the server.
    pub(crate) fn hang_up(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown_background();
        }
    }

    /// Starts the server again at the same address.
    pub(crate) fn answer_again(&mut self) -> Result<()> {
        self.server = Some(listen(std::net::TcpListener::bind(&self.authority)?, &self.app)?);
        Ok(())
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // The page is still open and would log an error for a broken connection. The runtime
        // therefore lives until the process ends.
        std::mem::forget(self.server.take());
        self.leading.abort();
    }
}

fn listen(listener: std::net::TcpListener, app: &Arc<App>) -> Result<Runtime> {
    listener.set_nonblocking(true)?;
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let router = router(Arc::clone(app), 1 << 20, &[], None);
    runtime.spawn(async move {
        let listener = TcpListener::from_std(listener)?;
        serve_all(vec![(listener, router, ALL, None)]).await
    });
    Ok(runtime)
}

impl Cluster {
    pub(crate) async fn start(nodes: impl IntoIterator<Item = Value>) -> Result<Self> {
        let api = ApiServer::start().await?;
        for node in nodes {
            made(api.create("/api/v1/nodes", node))?;
        }
        let quota = json!({"team-vision": {"percent": 2400, "memoryMiB": 900_000, "guaranteed": {"percent": 200}},
                           "team-lab": {"quota": {"Tesla T4": 2, "Tesla V100-SXM2-32GB": 8}, "pool": ["public"]}});
        let map = json!({"metadata": {"name": "gpuquota", "namespace": "kube-system"}, "data": {"gpu_quota": quota.to_string()}});
        made(api.create("/api/v1/namespaces/kube-system/configmaps", map))?;
        let replica = Replica::start(&api, "scheduler-0").await?;
        let begun = Instant::now();
        while !replica.app.is_ready() {
            if begun.elapsed() > Duration::from_secs(60) {
                bail!("the scheduler never became ready");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Self { api, replica })
    }

    /// Creates a pod and leaves it waiting.
    pub(crate) fn make(&self, pod: &Value) -> Result<Value> {
        let namespace = pod["metadata"]["namespace"].as_str().context("a namespace")?;
        made(self.api.create(&format!("/api/v1/namespaces/{namespace}/pods"), pod.clone()))
    }

    /// Schedules a pod as kube-scheduler does: filter, prioritize, bind. Returns its node, or
    /// `None` if it fits nowhere.
    pub(crate) async fn schedule(&self, pod: &Value) -> Result<Option<String>> {
        self.schedule_among("", pod).await
    }

    async fn schedule_among(&self, prefix: &str, pod: &Value) -> Result<Option<String>> {
        let nodes = self.api.list("/api/v1/nodes");
        let names = nodes.iter().filter_map(|node| node["metadata"]["name"].as_str());
        let names: Vec<&str> = names.filter(|name| name.starts_with(prefix)).collect();
        let mut question = json!({"Pod": pod, "NodeNames": names});
        let filtered = self.post("/scheduler/filter", &question).await?;
        question["NodeNames"] = filtered["NodeNames"].clone();
        let graded = self.post("/scheduler/prioritize", &question).await?;
        // A node without a score counts as zero.
        let grade = |name: &Value| {
            let found = graded.as_array()?.iter().find(|host| host["Host"] == *name)?;
            found["Score"].as_i64()
        };
        let fitting = filtered["NodeNames"].as_array().cloned().unwrap_or_default();
        let best = fitting.into_iter().rev().max_by_key(|name| grade(name).unwrap_or(0));
        let Some(best) = best else { return Ok(None) };
        let best = best.as_str().context("a name")?;
        self.bind(pod, best).await?;
        Ok(Some(best.to_owned()))
    }

    /// Creates a pod that fits nowhere and reports the reasons of the nodes on it, as kube-scheduler does.
    pub(crate) async fn make_waiting(&self, pod: &Value) -> Result<()> {
        let made = self.make(pod)?;
        let nodes = self.api.list("/api/v1/nodes");
        let names: Vec<&Value> = nodes.iter().map(|node| &node["metadata"]["name"]).collect();
        let filtered = self.post("/scheduler/filter", &json!({"Pod": made, "NodeNames": names})).await?;
        let reasons = ["FailedNodes", "FailedAndUnresolvableNodes"].into_iter();
        let reasons = reasons.filter_map(|part| filtered[part].as_object()).flat_map(|part| part.values());
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        reasons.filter_map(Value::as_str).for_each(|reason| *counts.entry(reason).or_default() += 1);
        let counts: Vec<String> = counts.iter().map(|(reason, nodes)| format!("{nodes} {reason}")).collect();
        let message = format!("0/{} nodes are available: {}.", names.len(), counts.join(", "));
        let metadata = &made["metadata"];
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": message, "lastTransitionTime": metadata["creationTimestamp"]});
        let name = |key: &str| metadata[key].as_str().unwrap_or_default();
        let path = format!("/api/v1/namespaces/{}/pods/{}/status", name("namespace"), name("name"));
        let status = json!({"status": {"phase": "Pending", "conditions": [condition]}});
        self::made(self.api.patch(&path, &status)).map(drop)
    }

    /// Binds a pod to a node.
    pub(crate) async fn bind(&self, pod: &Value, node: &str) -> Result<()> {
        let metadata = &pod["metadata"];
        let args = json!({"PodName": metadata["name"], "PodNamespace": metadata["namespace"],
                          "PodUID": metadata["uid"], "Node": node});
        let bound = self.post("/scheduler/bind", &args).await?;
        match bound["Error"].as_str() {
            Some("") | None => Ok(()),
            Some(error) => bail!("not bound: {error}"),
        }
    }

    /// Creates and schedules a pod.
    pub(crate) async fn run(&self, pod: &Value) -> Result<Option<String>> {
        self.run_among("", pod).await
    }

    /// Lets the scheduler know what pods use, as if agents had answered for the last hours: `busy` returns the percent
    /// of one GPU that a pod has computed for the last hour.
    pub(crate) fn set_use(&self, busy: impl Fn(&Value) -> Option<f64>) {
        const HOUR: u64 = 3_600_000;
        let (now, all, holders, used) = self.answers(busy);
        let mut log = self.usage();
        for (number, at) in (now - 5 * HOUR..now).step_by(300_000).enumerate() {
            let wave = (number as f64 / 7.0).sin() / 4.0;
            log.observe(at, &holders, &used);
            let busy = all * (0.75 + wave) / 100.0;
            let held = 60.0 + 12.0 * wave;
            log.add_point(HistoryPoint { unix_millis: at, held, used: Some(busy), unknown_pods: 0 });
        }
        log.observe(NEVER_FORGOTTEN, &holders, &used);
    }

    /// Lets the scheduler know what pods use, as if it had begun to lead just now and agents had answered once.
    pub(crate) fn begin_observing(&self, busy: f64) {
        let (now, _, holders, used) = self.answers(|_| Some(busy));
        let mut log = self.usage();
        *log = UsageLog::default();
        log.observe(now, &holders, &used);
        log.observe(NEVER_FORGOTTEN, &holders, &used);
    }

    fn usage(&self) -> RwLockWriteGuard<'_, UsageLog> {
        self.replica.app.dashboard.usage.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current time in milliseconds since 1970, the sum of the percents, the UIDs of all pods, and the answer
    /// of an agent about them.
    fn answers(&self, busy: impl Fn(&Value) -> Option<f64>) -> (u64, f64, HashSet<String>, NodeUse) {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let container = |pod: &Value| {
            let share = json!({"uuid": "GPU", "index": 0, "busyPercent": busy(pod)?, "memoryUsedMiB": 4096});
            let name = &pod["metadata"];
            Some(
                json!({"namespace": name["namespace"], "pod": name["name"], "uid": name["uid"], "container": "main", "gpus": [share]}),
            )
        };
        let containers: Vec<Value> = self.api.list("/api/v1/pods").iter().filter_map(container).collect();
        let all: f64 = containers.iter().filter_map(|one| one["gpus"][0]["busyPercent"].as_f64()).sum();
        let uids = containers.iter().filter_map(|one| one["uid"].as_str());
        let holders = uids.map(str::to_owned).collect();
        let used = serde_json::from_value(json!({"gpus": [], "containers": containers})).unwrap_or_default();
        (now, all, holders, used)
    }

    /// Creates a pod and schedules it on a node whose name starts with `prefix`, as a node selector
    /// would.
    pub(crate) async fn run_among(&self, prefix: &str, pod: &Value) -> Result<Option<String>> {
        let pod = self.make(pod)?;
        self.schedule_among(prefix, &pod).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let (_, answer) = request(&self.replica.authority, "POST", path, Some(body.to_string())).await?;
        Ok(serde_json::from_slice(&answer)?)
    }
}

pub(crate) fn made(outcome: Result<Value, Value>) -> Result<Value> {
    outcome.map_err(|problem| anyhow::anyhow!("{problem}"))
}

/// Starts an agent that always reports the same usage. Returns its address.
pub(crate) async fn agent(used: Value) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let router = Router::new().route("/v1/use", get(move || async move { Json(used) }));
    tokio::spawn(async move { drop(axum::serve(listener, router).await) });
    Ok(url)
}
