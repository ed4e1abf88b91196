//! Sets of GPUs on a DGX-1: first fit of kube-scheduler alone against the correction when a pod is bound.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::api::DeleteParams;
use tessera_core::{
    gpu::Gpu,
    gpu_set::GpuSet,
    request::LinkSensitivity,
    topology::Topology,
    units::{GpuIndex, MiB},
};
use tessera_sim::topology::{StreamJob, StreamPolicy, bandwidth_share, jobs};
use tessera_wire::{
    foreign::{dialect::MemoryUnit, smi_matrix},
    tessera::{
        dra::{DRIVER, gpu_of_device},
        inventory::{self, Inventory},
        preferences::TRAFFIC,
    },
};

use super::{Pair, Site, claiming, replaced_claims, whole_gpus};
use crate::{harness::virtual_node, scenarios::scheduler::SOON};

const GPUS: usize = 8;
const JOBS: usize = 200;

/// Share of the best bandwidth that the correction must reach.
const GOAL: f64 = 0.88;

const DGX1: &str = include_str!("../../../../../crates/tessera/tests/fixtures/dgx1.txt");

pub(super) async fn run(site: &Site) -> Result<()> {
    let topology = smi_matrix::parse(DGX1)?.topology;
    site.add_nodes(&[node("dgx-1", &topology)]).await?;
    let stream = jobs(GPUS, JOBS, 0);

    let alone = site.cluster.start_scheduler("sets-alone", serde_json::json!({}))?;
    let first_fit = bandwidth(site, "alone", &topology, &stream).await?;
    alone.kill()?;
    let pair = Pair::start(site, "sets").await?;
    let corrected = bandwidth(site, "with", &topology, &stream).await?;
    let replaced = replaced_claims(&pair.replica).await?;
    pair.stop().await?;

    let simulated = bandwidth_share(&topology, StreamPolicy::Claims, JOBS, 1)?;
    site.harness.note(&format!(
        "sets of a DGX-1, {JOBS} jobs: {first_fit:.3} of the best bandwidth by kube-scheduler alone, \
         {corrected:.3} with {replaced} claims corrected; {simulated:.3} in the simulation"
    ));
    ensure!(corrected >= GOAL, "the sets reach {corrected:.3} of the best bandwidth");
    ensure!((corrected - simulated).abs() < 0.01, "the scheduler chooses other sets than the simulation");
    site.clear().await
}

/// Runs the jobs in strict order and returns the mean share of the best bandwidth of those that depend on links.
async fn bandwidth(site: &Site, prefix: &str, topology: &Topology, stream: &[StreamJob]) -> Result<f64> {
    let (mut now, mut free) = (0, GPUS);
    let mut running: Vec<(u32, usize, String)> = Vec::new();
    let (mut shares, mut measured) = (0.0, 0.0);
    for (number, job) in stream.iter().enumerate() {
        while free < usize::from(job.size) {
            now = running.iter().map(|(end, ..)| *end).min().context("no job runs")?;
            for (_, size, name) in running.extract_if(.., |(end, ..)| *end <= now) {
                end_job(site, &name).await?;
                free += size;
            }
        }
        let name = format!("{prefix}-{number}");
        site.cluster.create_resource("ResourceClaim", &name, whole_gpus(job.size.into())).await?;
        let mut pod = claiming(&name)?;
        if job.traffic == LinkSensitivity::Insensitive {
            let annotations = pod.metadata.annotations.get_or_insert_default();
            annotations.insert(TRAFFIC.to_owned(), "insensitive".to_owned());
        }
        site.make(&pod).await?;
        site.bound(&name).await?;
        let claim = site.cluster.claim(&name).await?;
        let gpus: GpuSet = claim.results(DRIVER).filter_map(|result| gpu_of_device(&result.device)).collect();
        ensure!(gpus.len() == usize::from(job.size), "{name} has {gpus}");
        if job.traffic == LinkSensitivity::Sensitive {
            shares += topology.bandwidth_model().share(gpus);
            measured += 1.0;
        }
        free -= usize::from(job.size);
        running.push((now + job.ticks, usize::from(job.size), name));
    }
    site.delete_pods_and_claims().await?;
    Ok(shares / measured)
}

/// Deletes a pod and its claim, and waits until the claim is released.
async fn end_job(site: &Site, name: &str) -> Result<()> {
    site.cluster.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
    let claims = site.cluster.resources("ResourceClaim");
    claims.delete(name, &DeleteParams::default()).await?;
    site.harness
        .wait_for(&format!("claim {name} to be gone"), SOON, async || {
            Ok(claims.get_opt(name).await?.is_none().then_some(()))
        })
        .await
}

/// Returns a virtual node whose GPUs have these links and serve claims only.
pub(super) fn node(name: &str, topology: &Topology) -> Node {
    let gpu = |index: GpuIndex| Gpu {
        numa: topology.numa(index),
        ..Gpu::new(index, format!("GPU-{name}-{index}").as_str().into(), "V100".into(), MiB(16_384))
    };
    let inventory = Inventory {
        gpus: topology.gpus().iter().map(gpu).collect(),
        topology: topology.clone(),
        memory_unit: MemoryUnit::GiB,
        nvidia_slots: None,
        whole_gpus_only: false,
        withheld: Vec::new(),
    };
    let mut node = virtual_node(name);
    node.metadata.annotations = Some([(inventory::KEY.to_owned(), inventory::print(&inventory))].into());
    node
}
