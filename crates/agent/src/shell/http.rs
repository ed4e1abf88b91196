//! The agent's pages.

use std::{collections::BTreeMap, fmt::Write as _, future::Future, io, net::SocketAddr, sync::Arc};

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use serde::Serialize;
use tessera_core::{
    gpu::Health,
    grant::Hold,
    units::{GpuIndex, MiB},
};
use tessera_node::gpus::{CardActivity, Gpus};
use tessera_wire::tree;
use tokio::{net::TcpListener, sync::oneshot};
use tokio_util::sync::CancellationToken;

use super::{Message, Messages};
use crate::machine::View;

#[derive(Clone)]
struct Pages {
    messages: Messages,
    gpus: Arc<dyn Gpus>,
}

/// Listens, and comes back with the work of serving.
pub(super) async fn serve(
    address: SocketAddr,
    messages: Messages,
    gpus: Arc<dyn Gpus>,
    stop: CancellationToken,
) -> io::Result<impl Future<Output = ()> + Send> {
    let listener = TcpListener::bind(address).await?;
    let router = Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/version", get(version))
        .route("/graph", get(graph))
        .route("/usage", get(usage))
        .route("/metrics", get(metrics))
        .route("/metric", get(metrics))
        .with_state(Pages { messages, gpus });
    Ok(async move {
        let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
        if let Err(error) = served.await {
            tracing::error!(%error, "pages are no longer served");
        }
    })
}

impl Pages {
    async fn view(&self) -> Result<View, StatusCode> {
        let (answer, waiting) = oneshot::channel();
        self.messages.send(Message::Inspect(answer)).map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
        waiting.await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)
    }

    async fn activity(&self) -> Vec<CardActivity> {
        let gpus = self.gpus.clone();
        let asked = tokio::task::spawn_blocking(move || gpus.activity().unwrap_or_default());
        asked.await.unwrap_or_default()
    }
}

async fn healthz(State(pages): State<Pages>) -> Result<&'static str, StatusCode> {
    pages.view().await.map(|_| "ok\n")
}

async fn readyz(State(pages): State<Pages>) -> Result<(StatusCode, String), StatusCode> {
    let view = pages.view().await?;
    let waits = if let Some(reason) = &view.missing {
        format!("no GPUs: {reason}\n")
    } else if view.node.is_none() {
        "looking for GPUs\n".to_owned()
    } else if !view.pods_known {
        "the API server has not told the pods of this node yet\n".to_owned()
    } else if !view.listed {
        "the kubelet has not told its pod resources yet\n".to_owned()
    } else {
        return Ok((StatusCode::OK, "ok\n".to_owned()));
    };
    Ok((StatusCode::SERVICE_UNAVAILABLE, waits))
}

async fn version() -> Json<BTreeMap<&'static str, &'static str>> {
    Json(BTreeMap::from([("version", env!("CARGO_PKG_VERSION"))]))
}

async fn graph(State(pages): State<Pages>) -> Result<Json<BTreeMap<&'static str, String>>, StatusCode> {
    let node = pages.view().await?.node.ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    let activity = |card: CardActivity| tree::Activity {
        pids: card.processes.iter().map(|(pid, _)| *pid).collect(),
        used: card.used,
    };
    let activity: Vec<tree::Activity> = pages.activity().await.into_iter().map(activity).collect();
    Ok(Json(BTreeMap::from([("graph", tree::print(&node, &activity))])))
}

/// What gpu-manager answers to `/usage`, in its words. Zeros are left out, as there.
#[derive(Default, Serialize)]
struct Usage {
    usage: BTreeMap<String, PodUsage>,
}

#[derive(Default, Serialize)]
struct PodUsage {
    stat: BTreeMap<String, Devices>,
    #[serde(skip_serializing_if = "String::is_empty")]
    project: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    cluster: String,
    spec: BTreeMap<String, Spec>,
}

#[derive(Default, Serialize)]
struct Devices {
    dev: Vec<DeviceUsage>,
}

#[derive(Default, Serialize)]
struct DeviceUsage {
    #[serde(skip_serializing_if = "String::is_empty")]
    id: String,
    card_idx: String,
    device_mem: u64,
}

#[derive(Default, Serialize)]
struct Spec {
    gpu: f64,
    mem: u64,
}

async fn usage(State(pages): State<Pages>) -> Result<Json<Usage>, StatusCode> {
    let view = pages.view().await?;
    let memory = |card: u8| {
        let node = view.node.as_ref();
        node.and_then(|node| node.node().gpu(GpuIndex(card))).map_or(MiB::ZERO, |gpu| gpu.memory)
    };
    let mut usage = Usage::default();
    for held in &view.containers {
        let pod = usage.usage.entry(held.uid.to_string()).or_default();
        pod.project.clone_from(&held.namespace);
        pod.cluster.clone_from(&held.cluster);
        let device = |(card, _): &(u8, Hold)| DeviceUsage {
            id: view.pci.get(usize::from(*card)).cloned().unwrap_or_default(),
            card_idx: card.to_string(),
            device_mem: memory(*card).0,
        };
        let spec = held.cards.iter().fold(Spec::default(), |spec, (card, hold)| match hold {
            Hold::Whole => Spec { gpu: spec.gpu + 1.0, mem: spec.mem + memory(*card).0 },
            Hold::Part { cores, memory } => {
                Spec { gpu: spec.gpu + f64::from(cores.0) / 100.0, mem: spec.mem + memory.0 }
            }
        });
        pod.stat.insert(held.container.clone(), Devices { dev: held.cards.iter().map(device).collect() });
        pod.spec.insert(held.container.clone(), spec);
    }
    Ok(Json(usage))
}

async fn metrics(State(pages): State<Pages>) -> Result<impl IntoResponse, StatusCode> {
    let text = metrics_text(&pages.view().await?);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}

fn metrics_text(view: &View) -> String {
    let mut text = String::new();
    let mut family = |name: &str, help: &str, samples: Vec<(String, u64)>| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (labels, value) in samples {
            let _ = writeln!(text, "{name}{{{labels}}} {value}");
        }
    };
    let gpus = || view.node.iter().flat_map(|node| node.node().gpus().iter().map(move |gpu| (node, gpu)));
    let label = |gpu: &tessera_core::gpu::Gpu| format!("gpu=\"{}\",uuid=\"{}\"", gpu.index, gpu.uuid);
    family(
        "tessera_gpu_healthy",
        "Whether the GPU may be granted.",
        gpus().map(|(_, gpu)| (label(gpu), u64::from(gpu.health == Health::Healthy))).collect(),
    );
    family(
        "tessera_gpu_allocatable_cores_percent",
        "Compute of the GPU that nobody holds.",
        gpus().map(|(node, gpu)| (label(gpu), u64::from(node.room(gpu.index).cores.0))).collect(),
    );
    family(
        "tessera_gpu_allocatable_memory_bytes",
        "Memory of the GPU that nobody holds.",
        gpus().map(|(node, gpu)| (label(gpu), node.room(gpu.index).memory.0 << 20)).collect(),
    );
    family(
        "tessera_gpu_overbooked",
        "Whether the GPU carries more than it has.",
        gpus().map(|(_, gpu)| (label(gpu), u64::from(view.overbooked.contains(&gpu.index.0)))).collect(),
    );
    let holders = view.containers.iter().flat_map(|held| {
        held.cards.iter().map(move |(card, hold)| {
            let cores = match hold {
                Hold::Whole => 100,
                Hold::Part { cores, .. } => u64::from(cores.0),
            };
            let labels = format!(
                "namespace=\"{}\",pod=\"{}\",container=\"{}\",gpu=\"{card}\"",
                held.namespace, held.pod, held.container
            );
            (labels, cores)
        })
    });
    family("tessera_container_cores_percent", "Compute the container holds.", holders.collect());
    text
}
