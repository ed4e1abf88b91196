//! A trace of GPU pods replayed on the real kube-scheduler: how much of the GPUs is allocated in the end,
//! with kube-scheduler's samples of nodes and with all nodes checked for every pod.

use std::{
    collections::HashMap,
    fs,
    path::PathBuf,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::TryStreamExt;
use k8s_openapi::{
    api::core::v1::{Node, Pod},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::{
    Api,
    runtime::{WatchStreamExt, watcher},
};
use tessera_cluster::LeanPod;
use tessera_core::{
    request::{Request, Share},
    units::Percent,
};
use tessera_sim::cluster::{Experiment, WorkloadKnowledge, pod::SimPod, trace};

use super::{
    Site,
    pods::{GPU_MEMORY_MIB, asking, gpu_node},
};
use crate::harness::Harness;

/// GPUs that all pods request together, as a multiple of the GPUs of the cluster.
const FILL: f64 = 1.3;

/// The replay ends when no pod was bound for this long: after the longest pause in which kube-scheduler
/// retries pods that found no node.
const QUIET: Duration = Duration::from_secs(25);

/// The most by which samples may lower the allocation, in points.
const MAX_LOSS: f64 = 0.2;

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let experiment = experiment()?;
    let seeds: u64 = std::env::var("TESSERA_E2E_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let site = Site::start(&harness, experiment.nodes.iter().map(|node| virtual_node(node))).await?;
    let (mut sampled, mut full) = (0.0, 0.0);
    for seed in 0..seeds {
        full += replay(&site, &experiment, seed, false).await?;
        sampled += replay(&site, &experiment, seed, true).await?;
    }
    let loss = (full - sampled) / seeds as f64;
    harness.note(&format!("samples cost {loss:.2} points of allocated GPUs, mean of {seeds} seeds"));
    ensure!(loss <= MAX_LOSS, "samples cost {loss:.2} points of allocated GPUs, more than {MAX_LOSS}");
    Ok(())
}

/// Reads the trace in the folder that `TESSERA_E2E_TRACES` names.
fn experiment() -> Result<Experiment> {
    let folder = std::env::var_os("TESSERA_E2E_TRACES").map(PathBuf::from);
    let folder = folder.context("set TESSERA_E2E_TRACES to a folder with the openb trace")?;
    let read = |file: &str| {
        let path = folder.join(file);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let nodes = trace::nodes(&read("openb_node_list_gpu_node.csv")?, |_, _| None)?;
    let pods = trace::pods(&read("openb_pod_list_default.csv")?)?;
    ensure!(pods.iter().all(|pod| pod.request.models.is_empty()), "the replay knows no GPU models");
    Ok(Experiment {
        nodes: nodes.into_iter().map(Arc::new).collect(),
        pods,
        fill: FILL,
        target: WorkloadKnowledge::Learned,
        sample: None,
    })
}

/// Schedules the pods of one seed and returns the allocated GPUs in percent.
async fn replay(site: &Site, experiment: &Experiment, seed: u64, is_sampled: bool) -> Result<f64> {
    let (label, lines) =
        if is_sampled { ("samples", "") } else { ("all-nodes", "percentageOfNodesToScore: 100\n") };
    let name = format!("replay-{seed}-{label}");
    let replica = site.replica(&format!("{name}-extender"), None)?;
    site.ready(&replica).await?;
    let scheduler = site.edited_kube_scheduler(&name, replica.addresses.verbs, lines).await?;
    let arrivals = experiment.arrivals(seed);
    let sizes: HashMap<String, u32> =
        (0..).map(pod_name).zip(arrivals.iter().map(|pod| pod.percent)).collect();
    let begun = Instant::now();
    let watched = bound(site, sizes);
    let api = site.cluster.pods();
    let pods = arrivals.iter().enumerate().map(|(number, pod)| request(number, pod));
    let created = site.cluster.create_all(&api, pods);
    let (_, (allocated, last)) = tokio::try_join!(created, watched)?;
    let percent = f64::from(allocated) / experiment.gpu_count() as f64;
    site.harness.note(&format!(
        "seed {seed}, {label}: {percent:.2} % of GPUs allocated, {} pods, {:.0} s",
        arrivals.len(),
        last.duration_since(begun).as_secs_f64()
    ));
    scheduler.kill()?;
    replica.component.stop().await?;
    site.delete_all_pods().await?;
    Ok(percent)
}

/// Returns the sum of the sizes of bound pods and when the last one was bound.
async fn bound(site: &Site, mut waiting: HashMap<String, u32>) -> Result<(u32, Instant)> {
    let api: Api<LeanPod> = Api::default_namespaced(site.cluster.client());
    let mut states = pin!(watcher(api, watcher::Config::default()).default_backoff().applied_objects());
    let (mut allocated, mut last) = (0, Instant::now());
    while let Ok(next) = tokio::time::timeout(QUIET.saturating_sub(last.elapsed()), states.try_next()).await {
        let pod = next?.context("the watch of pods ended")?;
        let name = pod.metadata.name.unwrap_or_default();
        if !pod.spec.node_name.is_empty()
            && let Some(size) = waiting.remove(&name)
        {
            allocated += size;
            last = Instant::now();
        }
    }
    Ok((allocated, last))
}

fn virtual_node(node: &tessera_core::node::Node) -> Node {
    let mut object = gpu_node(&node.name.to_string(), node.gpus().len() as u64, "GiB");
    if let Some(status) = &mut object.status {
        for resources in [&mut status.capacity, &mut status.allocatable].into_iter().flatten() {
            resources.insert("cpu".into(), Quantity(format!("{}m", node.cpu.0)));
            resources.insert("memory".into(), Quantity(format!("{}Mi", node.memory.0)));
            resources.insert("pods".into(), Quantity("1000".into()));
        }
    }
    object
}

fn request(number: usize, pod: &SimPod) -> Pod {
    let (cpu, memory) = (format!("{}m", pod.request.cpu.0), format!("{}Mi", pod.request.memory.0));
    let mut resources = vec![("cpu", cpu), ("memory", memory)];
    match pod.request.containers.first().and_then(|container| container.request) {
        Some(Request::Share(Share { compute_percent: Percent(percent), .. })) => {
            let memory = u64::from(percent) * GPU_MEMORY_MIB / 256 / 100;
            resources.push(("tencent.com/vcuda-core", percent.to_string()));
            resources.push(("tencent.com/vcuda-memory", memory.max(1).to_string()));
        }
        Some(Request::Whole(count)) => resources.push(("nvidia.com/gpu", count.to_string())),
        None => {}
    }
    let resources: Vec<(&str, &str)> =
        resources.iter().map(|(name, amount)| (*name, amount.as_str())).collect();
    asking(&pod_name(number), &resources)
}

fn pod_name(number: usize) -> String {
    format!("replay-{number:05}")
}
