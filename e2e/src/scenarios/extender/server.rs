//! The extender: answers, binds and records its requests.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context, Result};
use axum::{Json, Router, body::Bytes, extract::State, routing::post};
use serde::de::DeserializeOwned;
use tessera_cluster::Binding;
use tessera_wire::foreign::extender::{
    BindingArgs, BindingResult, ExtenderArgs, FilterResult, HostPriority, NodeList,
};
use tokio::net::TcpListener;

use super::RESOURCE;

/// Annotation with the decision of the extender.
pub(crate) const GRANT: &str = "e2e.tessera.dev/grant";

/// A recorded request.
#[derive(Debug, Clone)]
pub(crate) struct Recorded {
    pub(crate) verb: &'static str,
    pub(crate) body: Bytes,
}

/// A running extender. It ends with the process.
pub(crate) struct Server {
    pub(crate) url: String,
    extender: Arc<Extender>,
}

struct Extender {
    client: kube::Client,
    recorded: Mutex<Vec<Recorded>>,
}

impl Server {
    pub(crate) async fn start(client: kube::Client) -> Result<Self> {
        let extender = Arc::new(Extender { client, recorded: Mutex::default() });
        let router = Router::new()
            .route("/filter", post(filter))
            .route("/prioritize", post(prioritize))
            .route("/bind", post(bind))
            .with_state(extender.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { url, extender })
    }

    /// Returns the requests since the last call.
    pub(crate) fn take_recorded(&self) -> Vec<Recorded> {
        std::mem::take(&mut *self.extender.recorded())
    }
}

impl Extender {
    fn recorded(&self) -> MutexGuard<'_, Vec<Recorded>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the request and parses it.
    fn read<T: DeserializeOwned>(&self, verb: &'static str, body: Bytes) -> Result<T> {
        let parsed = serde_json::from_slice(&body).context(verb);
        self.recorded().push(Recorded { verb, body });
        parsed
    }

    async fn bind(&self, args: BindingArgs) -> Result<()> {
        let grant = format!("0 of {}", args.node);
        let binding = Binding {
            namespace: args.pod_namespace,
            pod: args.pod_name,
            uid: args.pod_uid,
            node: args.node,
            annotations: BTreeMap::from([(GRANT.to_owned(), grant)]),
        };
        binding.send(&self.client).await.context("cannot bind")
    }
}

/// Answers filter. Every node has one GPU with six units, except for the full one.
async fn filter(State(extender): State<Arc<Extender>>, body: Bytes) -> Json<FilterResult> {
    let args: ExtenderArgs = match extender.read("filter", body) {
        Ok(args) => args,
        Err(error) => {
            return Json(FilterResult { error: format!("{error:#}"), ..FilterResult::default() });
        }
    };
    let asked = asked(&args);
    let fits = |name: &str| asked <= if name == "full" { 0 } else { 6 };
    let (fitting, failed): (Vec<_>, Vec<_>) = args.names().map(str::to_owned).partition(|name| fits(name));
    let reason = format!("no GPU with {asked} free");
    let kept = |list: NodeList| NodeList {
        items: list.items.into_iter().filter(|node| fits(&node.metadata.name)).collect(),
    };
    Json(FilterResult {
        node_names: args.node_names.is_some().then_some(fitting),
        nodes: args.nodes.map(kept),
        failed_nodes: failed.into_iter().map(|name| (name, reason.clone())).collect(),
        ..FilterResult::default()
    })
}

async fn prioritize(State(extender): State<Arc<Extender>>, body: Bytes) -> Json<Vec<HostPriority>> {
    let Ok(args) = extender.read::<ExtenderArgs>("prioritize", body) else {
        return Json(Vec::new());
    };
    let score = |name: &str| {
        if name == "fine" { tessera_wire::foreign::extender::MAX_SCORE } else { 0 }
    };
    Json(args.names().map(|name| HostPriority { host: name.into(), score: score(name) }).collect())
}

async fn bind(State(extender): State<Arc<Extender>>, body: Bytes) -> Json<BindingResult> {
    let outcome = match extender.read("bind", body) {
        Ok(args) => extender.bind(args).await,
        Err(error) => Err(error),
    };
    let error = outcome.err().map(|error| format!("{error:#}")).unwrap_or_default();
    Json(BindingResult { error })
}

/// Returns the number of units that the pod requests.
fn asked(args: &ExtenderArgs) -> u32 {
    let amounts =
        args.pod.spec.containers.iter().filter_map(|container| container.resources.limits.get(RESOURCE));
    amounts.filter_map(|amount| amount.0.parse::<u32>().ok()).sum()
}
