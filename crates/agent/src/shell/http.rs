//! HTTP pages of the agent, and the probes of the kubelet.

mod access;
pub(super) mod display;
mod metrics;

use std::{collections::BTreeMap, future::Future, sync::Arc, time::Duration};

use axum::{Json, Router, extract::State, http::StatusCode, routing::get};
use tessera_core::units::MiB;
use tessera_serve::{ConnectionLimits, ServeOptions, Tls};
use tessera_wire::{
    foreign::gpu_tree,
    tessera::node_use::{self, NodeUse},
};
use tokio::{net::TcpListener, sync::oneshot};
use tokio_util::sync::CancellationToken;

pub use self::access::{AccessError, PagesAccess};
use super::{Message, Messages, sampler::Sampler};
use crate::{
    controller::{NotReady, View},
    exporter::{self, GpuManagerUsage, GpuSnapshot, Snapshot},
};

/// Limits of the pages: each connection needs up to 200 KiB with TLS, and the agent has 128 MiB.
const LIMITS: ConnectionLimits = ConnectionLimits {
    total: 128,
    per_peer: 32,
    head_timeout: Duration::from_secs(5),
    idle_timeout: Duration::from_secs(30),
};

/// Limits of the probes. The kubelet uses one connection for each.
const PROBE_LIMITS: ConnectionLimits = ConnectionLimits {
    total: 32,
    per_peer: 16,
    head_timeout: Duration::from_secs(2),
    idle_timeout: Duration::from_secs(2),
};

/// Listener of the pages, and who may read them.
#[derive(Debug)]
pub struct PagesPort {
    /// Where the pages are served.
    pub listener: TcpListener,
    /// Who may read them.
    pub access: PagesAccess,
}

#[derive(Clone)]
struct Pages {
    messages: Messages,
    sampler: Arc<Sampler>,
    /// Certificate with which the pages are served, if they are.
    certificate: Option<Tls>,
}

/// Serves the pages until `stop`.
pub(super) fn serve(
    PagesPort { listener, access }: PagesPort,
    messages: Messages,
    sampler: Arc<Sampler>,
    stop: CancellationToken,
) -> impl Future<Output = ()> + Send {
    let router = Router::new()
        .route("/", get(index))
        .fallback(async || (StatusCode::NOT_FOUND, index().await))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/version", get(version))
        .route("/graph", get(graph))
        .route("/usage", get(usage))
        .route(node_use::PATH, get(in_use))
        .merge(metrics::routes())
        .with_state(Pages { messages, sampler, certificate: access.certificate() });
    let (router, tls) = access.protect(router);
    run(listener, router, ServeOptions { limits: LIMITS, tls }, stop)
}

/// Serves the kubelet's probes until `stop`. They need no token, because a kubelet has none.
pub(super) fn serve_probes(
    listener: TcpListener,
    messages: Messages,
    sampler: Arc<Sampler>,
    stop: CancellationToken,
) -> impl Future<Output = ()> + Send {
    let router = Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(Pages { messages, sampler, certificate: None });
    run(listener, router, ServeOptions { limits: PROBE_LIMITS, tls: None }, stop)
}

async fn run(listener: TcpListener, router: Router, options: ServeOptions, stop: CancellationToken) {
    let served = tessera_serve::serve(listener, router, options);
    if let Some(Err(error)) = stop.run_until_cancelled(served).await {
        tracing::error!(%error, "the HTTP server failed; the agent's pages are not served until it restarts");
    }
}

impl Pages {
    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Message) -> Result<T, StatusCode> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(request(reply)).map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
        answer.await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)
    }

    async fn readiness(&self) -> Result<Result<(), NotReady>, StatusCode> {
        self.ask(Message::IsReady).await
    }

    async fn view(&self) -> Result<View, StatusCode> {
        self.ask(Message::Inspect).await
    }

    async fn snapshot(&self) -> Result<Snapshot, StatusCode> {
        let certificates = self.certificate.as_ref().map(Tls::expiries).unwrap_or_default();
        Ok(Snapshot { certificates, ..self.sampler.snapshot(&self.view().await?) })
    }
}

/// Lists the pages.
async fn index() -> &'static str {
    "\
Tessera agent of this node. Pages:
/metrics        metrics for Prometheus
/metrics/nodes  pods with their GPUs
/v1/use         grants and usage by GPU and container, as JSON
/metric         metrics in the form of gpu-manager
/usage          the same as JSON
/graph          GPUs as a tree, in the form of gpu-manager
/readyz         whether the agent can serve pods, and what is missing
/healthz        whether the agent answers
/version        version of the agent
"
}

/// Returns `ok` if the main loop of the agent answers.
async fn healthz(State(pages): State<Pages>) -> Result<&'static str, StatusCode> {
    pages.readiness().await.map(|_| "ok\n")
}

async fn readyz(State(pages): State<Pages>) -> Result<(StatusCode, String), StatusCode> {
    Ok(match pages.readiness().await? {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(waits) => (StatusCode::SERVICE_UNAVAILABLE, format!("{waits}\n")),
    })
}

async fn version() -> Json<BTreeMap<&'static str, &'static str>> {
    Json(BTreeMap::from([("version", env!("CARGO_PKG_VERSION"))]))
}

async fn graph(State(pages): State<Pages>) -> Result<Json<BTreeMap<&'static str, String>>, StatusCode> {
    Ok(Json(BTreeMap::from([("graph", tree(&pages).await?)])))
}

/// Returns the GPUs as a tree.
async fn tree(pages: &Pages) -> Result<String, StatusCode> {
    let view = pages.view().await?;
    let activity = |gpu: &GpuSnapshot| {
        let Some(reading) = &gpu.reading else { return gpu_tree::GpuActivity::default() };
        gpu_tree::GpuActivity {
            pids: reading.pids.iter().flatten().copied().collect(),
            used: MiB(reading.used_bytes().unwrap_or(0) >> 20),
        }
    };
    let activity: Vec<gpu_tree::GpuActivity> =
        pages.sampler.snapshot(&view).gpus.iter().map(activity).collect();
    let node = view.node.ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    Ok(gpu_tree::print(&node, &activity))
}

async fn usage(State(pages): State<Pages>) -> Result<Json<GpuManagerUsage>, StatusCode> {
    Ok(Json(exporter::gpu_manager_usage(&pages.snapshot().await?)))
}

async fn in_use(State(pages): State<Pages>) -> Result<Json<NodeUse>, StatusCode> {
    Ok(Json(exporter::node_use(&pages.snapshot().await?)))
}
