//! A whole GPU in a container on plain runc, without a container runtime of NVIDIA's.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, ensure};

use super::{
    bench::{Bench, START},
    host::output,
    pods::GpuPod,
};
use crate::harness::Harness;

/// The C library of the host and nothing else, so that everything of the driver comes from the agent.
const C_LIBRARY: [&str; 7] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
];

/// Device nodes that a container with one GPU may have.
const DEVICES: [&str; 5] = ["nvidia0", "nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"];

const SCRIPT: &str = "for device in /dev/nvidia*; do echo device ${device#/dev/}; done; \
    /usr/local/nvidia/bin/nvidia-smi -L; /usr/local/nvidia/bin/nvidia-smi >/dev/null && echo works; \
    exec sleep 100000";

pub(super) async fn run(harness: &Harness) -> Result<()> {
    let bench = Bench::start(harness, &[]).await?;
    let libraries = c_library(harness)?;
    let listed = output(Command::new("nvidia-smi").arg("-L"))?;
    for (name, compute_percent) in [("whole", 100), ("share", 30)] {
        let pod = GpuPod::script(name, SCRIPT)
            .mounting(&libraries, "/lib64")
            .mounting(&libraries, "/lib/x86_64-linux-gnu");
        let pod = match compute_percent {
            100 => pod.asking("tencent.com/vcuda-core", 100),
            _ => pod.share(compute_percent, 40),
        };
        bench.run(&pod).await?;
        bench
            .wait_for_line(name, "that nvidia-smi works", START, |line| (line == "works").then_some(()))
            .await?;
        let lines = bench.lines(name).await?;
        let devices: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("device ")).collect();
        let other = devices.iter().find(|device| !DEVICES.contains(device));
        ensure!(other.is_none(), "{name} has {other:?} in /dev: {devices:?}");
        ensure!(devices.contains(&"nvidia0") && devices.contains(&"nvidiactl"), "{devices:?}");
        let inside: Vec<&str> =
            lines.iter().map(String::as_str).filter(|line| line.starts_with("GPU ")).collect();
        ensure!(inside.join("\n") == listed.trim(), "{name} sees {inside:?}, the host {listed:?}");
        harness.note(&format!("{name}: {devices:?}; nvidia-smi of the agent says {}", inside.join(" ")));
        bench.stage.delete(name).await?;
    }

    let pod = GpuPod::rates("pytorch", "matmul", &bench.host.python)?.asking("nvidia.com/gpu", 1);
    bench.run(&pod).await?;
    bench.wait_until_ready(&["pytorch"]).await?;
    let rate = bench.next_rates(&["pytorch"], 2).await?[0];
    harness.note(&format!("PyTorch computes on nvidia.com/gpu: {rate:.1} steps per second"));
    bench.wait_until_empty().await
}

/// Copies the C library of this host to a directory of its own.
fn c_library(harness: &Harness) -> Result<PathBuf> {
    let directory = harness.state("c-library")?;
    for name in C_LIBRARY {
        let places = ["/lib/x86_64-linux-gnu", "/lib64", "/lib"].map(|place| Path::new(place).join(name));
        if let Some(file) = places.iter().find(|file| file.exists()) {
            fs::copy(file, directory.join(name))?;
        }
    }
    ensure!(directory.join("libc.so.6").exists(), "the C library of this host was not found");
    Ok(directory)
}
