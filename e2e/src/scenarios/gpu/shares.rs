//! Training, inference and a container with memory alone, beside each other on one GPU.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::{
    bench::{Bare, Bench, START},
    pods::GpuPod,
    usage::{Between, Page, Power},
};
use crate::harness::Harness;

/// Seconds of each measurement, and of a program alone.
const SECONDS: usize = 10;
const BARE_SECONDS: usize = 6;

/// Allowed deviations.
const SHARE_POINTS: f64 = 2.0;
const EXPORTER_POINTS: f64 = 3.0;
const EXPORTER_MEMORY: f64 = 0.01;
const ENERGY: f64 = 0.05;

/// A pod with its share of time, its memory and what it reaches alone.
struct Tenant {
    pod: &'static str,
    compute_percent: u64,
    blocks: u64,
    bare: Bare,
}

/// Memory of the pod that asks for memory alone.
const HOLDER: &str = "memory";
const HOLDER_GIB: u64 = 8;

pub(super) async fn run(harness: &Harness) -> Result<()> {
    let bench = Bench::start(harness, &[]).await?;
    let tenants = [
        Tenant {
            pod: "training",
            compute_percent: 60,
            blocks: 180,
            bare: bench.bare("large", BARE_SECONDS).await?,
        },
        Tenant {
            pod: "inference",
            compute_percent: 30,
            blocks: 120,
            bare: bench.bare("inference", BARE_SECONDS).await?,
        },
    ];
    for (tenant, kind) in tenants.iter().zip(["large", "inference"]) {
        let pod = GpuPod::rates(tenant.pod, kind, &bench.host.python)?;
        bench.run(&pod.share(tenant.compute_percent, tenant.blocks)).await?;
    }
    a_share_of_memory(&bench).await?;
    bench.wait_until_ready(&["training", "inference"]).await?;
    hard_shares(&bench, &tenants).await?;
    memory_inside(&bench, &tenants).await?;
    a_new_ceiling(&bench, &tenants).await?;
    bench.wait_until_empty().await?;
    harness.note("the driver shows an empty GPU after the last pod");
    Ok(())
}

/// A container with memory alone allocates until it is refused, and keeps what it has.
async fn a_share_of_memory(bench: &Bench) -> Result<()> {
    let script = "$PYTHON /e2e/take.py torch 256 1000000 1000 2>&1";
    let pod = GpuPod::python(HOLDER, script, &bench.host.python)?.asking("aliyun.com/gpu-mem", HOLDER_GIB);
    bench.run(&pod).await?;
    let numbers =
        |line: &str| -> Option<Vec<u64>> { line.split(' ').map(|word| word.parse().ok()).collect() };
    let taken = bench.wait_for_line(HOLDER, "what it got", START, numbers).await?;
    let [got_mib, status, _free, total_mib, _left] = taken.as_slice() else {
        anyhow::bail!("{HOLDER} printed {taken:?}");
    };
    let limit_mib = HOLDER_GIB * 1024;
    ensure!((*total_mib, *status) == (limit_mib, 2), "{HOLDER} sees {total_mib} MiB, status {status}");
    let on_gpu_mib: u64 = bench.on_gpu(HOLDER).await?.iter().map(|(_, mib)| mib).sum();
    ensure!(on_gpu_mib <= limit_mib, "the driver counts {on_gpu_mib} MiB of {limit_mib} MiB");
    ensure!(*got_mib + 1024 > limit_mib, "only {got_mib} of {limit_mib} MiB were granted");
    bench.harness.note(&format!(
        "{HOLDER} got {got_mib} of {limit_mib} MiB, then was refused; the driver counts {on_gpu_mib} MiB"
    ));
    Ok(())
}

async fn hard_shares(bench: &Bench, tenants: &[Tenant; 2]) -> Result<()> {
    let power = Power::watch();
    let first = Page::read(bench).await?;
    let rates = bench.next_rates(&["training", "inference"], SECONDS).await?;
    let between = Between { first, last: Page::read(bench).await? };
    let watts = power.mean().await?;
    for (tenant, rate) in tenants.iter().zip(&rates) {
        bench.harness.note(&format!(
            "{} has {:.1} % of the GPU's time",
            tenant.pod,
            tenant.bare.percent(*rate)
        ));
    }
    for (tenant, rate) in tenants.iter().zip(rates) {
        let Tenant { pod, compute_percent, bare, .. } = tenant;
        let percent = bare.percent(rate);
        let exported = 100.0 * between.rate("tessera_container_busy_seconds_total", Some(pod))?;
        let throttled = between.rate("tessera_container_throttled_seconds_total", Some(pod))?;
        bench.harness.note(&format!(
            "{pod} at {compute_percent}: {percent:.1} % of the GPU's time, {:.1} % of its rate alone; \
             by the exporter {exported:.1} %, throttled {throttled:.2} s per second",
            100.0 * rate / bare.rate,
        ));
        #[expect(clippy::cast_precision_loss, reason = "a percentage")]
        let off = percent - *compute_percent as f64;
        ensure!(off.abs() <= SHARE_POINTS, "{pod} got {percent:.1} % instead of {compute_percent}");
        ensure!(
            (exported - percent).abs() <= EXPORTER_POINTS,
            "the exporter says {exported:.1}, not {percent:.1}"
        );
        ensure!(throttled > 0.0, "{pod} was never throttled");
    }
    for (gpu, containers, remainder) in [
        (
            "tessera_gpu_busy_seconds_total",
            "tessera_container_busy_seconds_total",
            "tessera_gpu_busy_remainder_seconds_total",
        ),
        (
            "tessera_gpu_energy_joules_total",
            "tessera_container_energy_joules_total",
            "tessera_gpu_energy_remainder_joules_total",
        ),
    ] {
        between.adds_up(gpu, containers, remainder)?;
    }
    let exported = between.rate("tessera_gpu_energy_joules_total", None)?;
    bench
        .harness
        .note(&format!("energy: {exported:.0} J per second by the exporter, {watts:.0} W by nvidia-smi"));
    ensure!((exported - watts).abs() <= ENERGY * watts, "the exporter's energy is wrong");
    Ok(())
}

/// nvidia-smi in each container shows the container's memory, and the exporter agrees with the driver.
async fn memory_inside(bench: &Bench, tenants: &[Tenant; 2]) -> Result<()> {
    let page = Page::read(bench).await?;
    for Tenant { pod, blocks, .. } in tenants {
        let limit_mib = blocks * 256;
        let (total_mib, used_mib) = bench.memory_inside(pod).await?;
        ensure!(total_mib == limit_mib, "nvidia-smi in {pod} shows {total_mib} of {limit_mib} MiB");
        let on_gpu_mib: u64 = bench.on_gpu(pod).await?.iter().map(|(_, mib)| mib).sum();
        ensure!(on_gpu_mib <= limit_mib, "the driver counts {on_gpu_mib} MiB of {limit_mib} MiB");
        #[expect(clippy::cast_precision_loss, reason = "MiB of one GPU")]
        let counted_mib = on_gpu_mib as f64;
        let exported_mib = page
            .sum("tessera_container_memory_used_bytes", Some(pod))
            .with_context(|| format!("the exporter knows no memory of {pod}"))?
            / f64::from(1 << 20);
        ensure!(
            (exported_mib - counted_mib).abs() <= EXPORTER_MEMORY * counted_mib,
            "{pod}: the exporter says {exported_mib} MiB, the driver {counted_mib} MiB"
        );
        bench.harness.note(&format!(
            "{pod}: nvidia-smi inside says {used_mib} of {total_mib} MiB; the driver counts {on_gpu_mib} MiB, \
             the exporter {exported_mib:.0} MiB"
        ));
    }
    let all = page.sum("tessera_container_memory_used_bytes", None).unwrap_or_default()
        + page.sum("tessera_gpu_memory_remainder_bytes", None).unwrap_or_default();
    let used = page.sum("tessera_gpu_memory_used_bytes", None).context("no memory of the GPU")?;
    ensure!((all - used).abs() < 1.0, "the parts of the memory are {all} bytes, the GPU's {used}");
    Ok(())
}

/// The ceiling of training is lifted while it runs, so that it takes what inference leaves.
async fn a_new_ceiling(bench: &Bench, tenants: &[Tenant; 2]) -> Result<()> {
    let namespaces: Api<Namespace> = Api::all(bench.stage.cluster.client());
    let label = json!({ "metadata": { "labels": { "tessera.dev/ceiling-changes": "allowed" } } });
    namespaces.patch("default", &PatchParams::default(), &Patch::Merge(label)).await?;
    let lift = json!({ "metadata": { "annotations": { "tencent.com/vcuda-core-limit": "100" } } });
    let pods = bench.stage.cluster.pods();
    let lifted =
        async || Ok(pods.patch("training", &PatchParams::default(), &Patch::Merge(&lift)).await.ok());
    let within = Duration::from_secs(30);
    bench.harness.wait_for("the label of the namespace to take effect", within, lifted).await?;
    let uid = bench.stage.pod("training").await?.metadata.uid;
    let is_new =
        async || Ok((bench.stage.limits(&uid, "main")?.gpus[0].compute_ceiling_percent == 100).then_some(()));
    bench.harness.wait_for("the new ceiling", within, is_new).await?;
    let rates = bench.next_rates(&["training", "inference"], SECONDS).await?;
    let [training, inference] = [0, 1].map(|place| tenants[place].bare.percent(rates[place]));
    bench.harness.note(&format!(
        "with a ceiling of 100, training gets {training:.1} % beside inference with {inference:.1} %"
    ));
    ensure!((inference - 30.0).abs() <= SHARE_POINTS, "inference got {inference:.1} % instead of 30");
    ensure!(training >= 66.0, "training got {training:.1} % of the 70 % that are left");
    Ok(())
}
