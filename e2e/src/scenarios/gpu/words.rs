//! The same shares in other words: by HAMi's resource names, and by claims of dynamic resource allocation.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    bench::{Bare, Bench},
    pods::GpuPod,
};
use crate::{harness::Harness, scenarios::agent::HAMI};

/// Seconds of each measurement, and of a program alone.
const SECONDS: usize = 8;
const BARE_SECONDS: usize = 4;

/// Allowed deviation from a share.
const SHARE_POINTS: f64 = 2.0;

/// A program with its share of one GPU.
struct Tenant {
    name: &'static str,
    kind: &'static str,
    compute_percent: u64,
    memory_mib: u64,
}

const TENANTS: [Tenant; 2] = [
    Tenant { name: "training", kind: "large", compute_percent: 60, memory_mib: 46_080 },
    Tenant { name: "inference", kind: "inference", compute_percent: 30, memory_mib: 30_720 },
];

pub(super) async fn hami(harness: &Harness) -> Result<()> {
    let bench = Bench::start(harness, &[HAMI]).await?;
    let bares = bares(&bench).await?;
    for tenant in &TENANTS {
        let pod = GpuPod::rates(tenant.name, tenant.kind, &bench.host.python)?
            .asking("nvidia.com/gpu", 1)
            .asking("nvidia.com/gpumem", tenant.memory_mib)
            .asking("nvidia.com/gpucores", tenant.compute_percent);
        bench.run(&pod).await?;
    }
    are_held(&bench, bares).await
}

pub(super) async fn claims(harness: &Harness) -> Result<()> {
    let bench = Bench::start_with_claims(harness).await?;
    let bares = bares(&bench).await?;
    for tenant in &TENANTS {
        let amounts = json!({
            "cores": tenant.compute_percent.to_string(),
            "memory": format!("{}Mi", tenant.memory_mib),
        });
        let request = json!({ "name": "gpu", "exactly": {
            "deviceClassName": "tessera",
            "capacity": { "requests": amounts },
        } });
        let spec = json!({ "devices": { "requests": [request] } });
        bench.stage.cluster.create_resource("ResourceClaim", tenant.name, spec).await?;
        let pod = GpuPod::rates(tenant.name, tenant.kind, &bench.host.python)?.claiming(tenant.name);
        bench.run(&pod).await?;
    }
    are_held(&bench, bares).await
}

async fn bares(bench: &Bench) -> Result<[Bare; 2]> {
    let [first, second] = &TENANTS;
    Ok([bench.bare(first.kind, BARE_SECONDS).await?, bench.bare(second.kind, BARE_SECONDS).await?])
}

/// Checks that both programs get their shares of time, and no more memory than they asked for.
async fn are_held(bench: &Bench, bares: [Bare; 2]) -> Result<()> {
    let names = TENANTS.map(|tenant| tenant.name);
    bench.wait_until_ready(&names).await?;
    let rates = bench.next_rates(&names, SECONDS).await?;
    for ((tenant, bare), rate) in TENANTS.iter().zip(bares).zip(rates) {
        let Tenant { name, compute_percent, memory_mib, .. } = tenant;
        let percent = bare.percent(rate);
        let (total_mib, _) = bench.memory_inside(name).await?;
        let on_gpu_mib: u64 = bench.on_gpu(name).await?.iter().map(|(_, mib)| mib).sum();
        bench.harness.note(&format!(
            "{name} at {compute_percent}: {percent:.1} % of the GPU's time; nvidia-smi inside shows {total_mib} MiB, \
             the driver counts {on_gpu_mib} MiB"
        ));
        ensure!(total_mib == *memory_mib, "nvidia-smi in {name} shows {total_mib} of {memory_mib} MiB");
        ensure!(
            (1..=*memory_mib).contains(&on_gpu_mib),
            "the driver counts {on_gpu_mib} of {memory_mib} MiB"
        );
        #[expect(clippy::cast_precision_loss, reason = "a percentage")]
        let off = percent - *compute_percent as f64;
        ensure!(off.abs() <= SHARE_POINTS, "{name} got {percent:.1} % instead of {compute_percent}");
    }
    bench.wait_until_empty().await
}
