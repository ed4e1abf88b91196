//! Instances of a real GPU in MIG mode.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{
    bench::{Bench, START},
    host::{Host, ask_gpu, output},
    pods::GpuPod,
};
use crate::harness::Harness;

const SCRIPT: &str = r#"$PYTHON -c '
import torch
device = torch.cuda.get_device_properties(0)
total = (torch.ones(1 << 20, device="cuda") * 2).sum().item()
print("sees", torch.cuda.device_count(), device.total_memory >> 20, int(total), flush=True)' 2>&1
exec sleep 100000"#;

pub(super) async fn run(harness: &Harness) -> Result<()> {
    let host = Host::find()?;
    if ask_gpu("mig.mode.current")?.trim() != "Disabled" {
        harness.note("not tried: this GPU has no MIG mode, or is in it already");
        return Ok(());
    }
    // `e2e/gpu` ends the mode when nothing uses the GPU any more.
    output(Command::new("nvidia-smi").args(["-i", "0", "-mig", "1"]))?;
    let profiles = two_profiles()?;
    output(Command::new("nvidia-smi").args(["mig", "-i", "0", "-cgi", &profiles.join(","), "-C"]))?;
    let offered =
        profiles.iter().map(|profile| resource(profile)).map(|name| (name, "1".to_owned())).collect();
    let bench = Bench::start_offering(harness, host, offered, &["--mig-strategy=mixed"]).await?;
    let names = ["small", "large"];
    for (name, profile) in names.into_iter().zip(&profiles) {
        let pod = GpuPod::python(name, SCRIPT, &bench.host.python)?.asking(resource(profile), 1);
        bench.run(&pod).await?;
    }
    let mut memory_mib = Vec::new();
    for (name, profile) in names.into_iter().zip(&profiles) {
        let seen = |line: &str| line.strip_prefix("sees ").map(str::to_owned);
        let seen = bench.wait_for_line(name, "what it sees", START, seen).await?;
        let words: Vec<u64> = seen.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [count, memory, sum] = words.as_slice() else { anyhow::bail!("{name} printed {seen:?}") };
        ensure!((*count, *sum) == (1, 2 << 20), "{name} printed {seen:?}");
        memory_mib.push(*memory);
        harness.note(&format!("{name} computes on its instance {profile} with {memory} MiB"));
    }
    ensure!(memory_mib[0] < memory_mib[1], "both see the same instance: {memory_mib:?}");
    let details = bench.inspect("kubectl-inspect-gpu", &["-d"])?;
    harness.note(&format!("kubectl inspect gpu -d:\n{details}"));
    for profile in &profiles {
        ensure!(details.contains(profile.as_str()), "{profile} is not shown");
    }
    bench.stage.delete_all().await
}

/// Returns the names of the two smallest kinds of instances that have compute slices of their own.
fn two_profiles() -> Result<[String; 2]> {
    let text = output(Command::new("nvidia-smi").args(["mig", "-i", "0", "-lgip"]))?;
    let name = |prefix: &str| {
        text.split_whitespace()
            .find(|word| word.starts_with(prefix) && !word.contains('+'))
            .map(str::to_owned)
            .with_context(|| format!("no profile {prefix} in\n{text}"))
    };
    Ok([name("1g.")?, name("2g.")?])
}

/// Returns the resource of a profile, which lives as long as this process.
fn resource(profile: &str) -> &'static str {
    format!("nvidia.com/mig-{profile}").leak()
}
