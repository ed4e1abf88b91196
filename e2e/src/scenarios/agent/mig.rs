//! MIG instances as resources of their own, and as GPUs.

use std::fs;

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    pods::{Container, asking},
    stage::{SOON, Stage},
};
use crate::harness::Harness;

pub(super) async fn mixed(harness: &Harness) -> Result<()> {
    found_by_nvml(harness)?;
    let stage = Stage::start_with(harness, "auto", &["--mig-strategy=mixed".to_owned()]).await?;
    // The agent finds instances that are created while it runs.
    create_instances(&stage, &[(2, &["1g.10gb", "1g.10gb", "2g.20gb"])])?;
    stage.wait_for_allocatable("nvidia.com/mig-1g.10gb", "2").await?;
    stage.wait_for_allocatable("nvidia.com/mig-2g.20gb", "1").await?;
    stage.wait_for_allocatable("nvidia.com/gpu", "7").await?;
    run(&stage, "first", "nvidia.com/mig-1g.10gb", "MIG-2-0").await?;
    stage.agent.kill()?;
    stage.agent.start_again()?;
    stage.wait_for_allocatable("nvidia.com/mig-1g.10gb", "2").await?;
    stage.wait_until_ready().await?;
    run(&stage, "second", "nvidia.com/mig-1g.10gb", "MIG-2-1").await?;
    run(&stage, "larger", "nvidia.com/mig-2g.20gb", "MIG-2-2").await?;
    let first = stage.pod("first").await?;
    ensure!(first.status.phase == "Running", "the first pod is {}", first.status.phase);
    harness.note("pods got instances of the profiles they asked for, also from a restarted agent");
    for name in ["first", "second", "larger"] {
        stage.delete(name).await?;
    }
    create_instances(&stage, &[])?;
    stage.wait_for_allocatable("nvidia.com/gpu", "8").await?;
    stage.wait_for_allocatable("nvidia.com/mig-1g.10gb", "0").await?;
    harness.note("without MIG mode the GPU is offered again");
    Ok(())
}

pub(super) async fn single(harness: &Harness) -> Result<()> {
    let stage = Stage::start_with(harness, "auto", &["--mig-strategy=single".to_owned()]).await?;
    let profiles: &[&str] = &["1g.10gb", "1g.10gb", "1g.10gb"];
    let all: Vec<(u8, &[&str])> = (0..8).map(|gpu| (gpu, profiles)).collect();
    create_instances(&stage, &all)?;
    stage.wait_for_allocatable("nvidia.com/gpu", "24").await?;
    stage.wait_for_allocatable("tencent.com/vcuda-core", "0").await?;
    run(&stage, "pod", "nvidia.com/gpu", "MIG-").await?;
    harness.note("24 instances of one profile are 24 nvidia.com/gpu");
    Ok(())
}

/// Creates instances of these profiles on GPUs, in place of all others.
fn create_instances(stage: &Stage, gpus: &[(u8, &[&str])]) -> Result<()> {
    let mut lines = String::new();
    for (gpu, profiles) in gpus {
        for (number, profile) in profiles.iter().enumerate() {
            let instance = json!({
                "gpu": gpu, "uuid": format!("MIG-{gpu}-{number}"), "profile": profile, "memoryMiB": 9728,
                "gpuInstance": 7 + number, "computeInstance": 0,
            });
            lines += &format!("{instance}\n");
        }
    }
    fs::write(format!("{}.instances", stage.gpus.display()), lines)?;
    Ok(())
}

/// Runs a pod with one device, and checks which one its container sees.
async fn run(stage: &Stage, name: &str, resource: &str, expected: &str) -> Result<()> {
    let mut pod = asking(name, &[Container::main("main", &[(resource, "1")])]);
    if let Some(spec) = &mut pod.spec {
        spec.node_name = Some(stage.node.name.clone());
    }
    stage.create(pod).await?;
    stage.cluster.wait_for_phase(name, "Running", SOON).await?;
    let log = stage.log(name, "main").await?;
    let seen = log.lines().find_map(|line| line.strip_prefix("NVIDIA_VISIBLE_DEVICES=")).unwrap_or_default();
    ensure!(seen.starts_with(expected), "{name} sees {seen:?}, expected {expected:?}");
    Ok(())
}

/// Checks what `tessera inventory` prints with drivers that report MIG instances or a pending reset.
fn found_by_nvml(harness: &Harness) -> Result<()> {
    let directory = harness.state("simulated-driver")?;
    fs::copy(harness.for_containers("libsimulated_driver.so")?, directory.join("libnvidia-ml.so.1"))?;
    let inventory = |variable: &str, value: &str| -> Result<String> {
        let output = harness
            .tessera()?
            .argument("inventory")
            .environment("LD_LIBRARY_PATH", directory.display().to_string())
            .environment(variable, value)
            .command()
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        Ok(text)
    };
    let line = "NVIDIA Simulated, 81920 MiB, /dev/nvidia0, PCI , NUMA node unknown, awaiting a reset for retired memory";
    for kind in ["pages", "rows"] {
        let text = inventory("SIMULATED_PENDING_RESET", kind)?;
        ensure!(text.contains(line), "{kind}: {line:?} is missing in:\n{text}");
    }
    harness.note("retired memory that waits for a reset is found through NVML");
    let text = inventory("SIMULATED_MIG", "1g.10gb,2g.20gb")?;
    for line in [
        "NVIDIA Simulated, 81920 MiB, /dev/nvidia0, PCI , NUMA node unknown, in MIG mode",
        "  MIG 1g.10gb: MIG-73696d75-6c61-7465-642d-6d6967000000, 10240 MiB, GPU instance 7, compute instance 0 /dev/nvidia0",
        "  MIG 2g.20gb: MIG-73696d75-6c61-7465-642d-6d6967000001, 20480 MiB, GPU instance 8, compute instance 0 /dev/nvidia0",
    ] {
        ensure!(text.contains(line), "{line:?} is missing in:\n{text}");
    }
    harness.note("instances are found through NVML");
    Ok(())
}
