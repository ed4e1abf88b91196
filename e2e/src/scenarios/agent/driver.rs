//! Containers on plain runc: the agent gives them the driver of a stand-in host.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{HostPathVolumeSource, Pod, Volume, VolumeMount};
use kube::api::LogParams;
use serde_json::json;

use super::{
    pods::{Container, asking},
    stage::{SOON, Stage},
};
use crate::harness::Harness;

/// A library that reports its version, and a program that asks for it as nvidia-smi does.
const LIBRARY: &str = "const char *nvmlVersion(void) { return VERSION; }";
const PROGRAM: &str = "#include <stdio.h>\nconst char *nvmlVersion(void);\nint main(void) { printf(\"driver %s\\n\", nvmlVersion()); }";

/// The program of the test pod in gpu-manager's documentation.
const SCRIPT: &str = "/usr/local/nvidia/bin/nvidia-smi; exec sleep 100000";

/// A device of every host that containers do not get by themselves.
const EXTRA_DEVICE: &str = "/dev/fuse";

pub(super) async fn run(harness: &Harness) -> Result<()> {
    let (host, driver) = (harness.state("host")?, harness.state("driver")?.join("nvidia"));
    install(&host, "580.95")?;
    let of_gpu_manager = files_of_gpu_manager(harness)?;
    let stage = Stage::start_with(harness, "auto", &[format!("--driver-root={}", host.display())]).await?;
    let directory = [format!("--driver-directory={}", driver.display())];
    restart_with(&stage, &directory).await?;
    // The first one has the request of the documented test pod.
    let shares = [("whole", "100", "30"), ("share", "30", "4")];
    for (name, compute_percent, blocks) in shares {
        stage.create_bound(pod(name, compute_percent, blocks)?, &[("main", &[0])]).await?;
        prints(&stage, name, "driver 580.95").await?;
        stage.delete(name).await?;
    }
    harness
        .note("containers with whole GPUs and with shares run nvidia-smi of the host's driver on plain runc");

    stage.create_bound(pod("running", "30", "4")?, &[("main", &[0])]).await?;
    prints(&stage, "running", "driver 580.95").await?;
    install(&host, "590.10")?;
    restart_with(&stage, &directory).await?;
    stage.create_bound(pod("new", "30", "4")?, &[("main", &[0])]).await?;
    prints(&stage, "new", "driver 590.10").await?;
    let old = driver.with_extension("old").join("lib64/libnvidia-ml.so.580.95");
    ensure!(old.exists(), "the running container has lost its driver: {} is missing", old.display());
    harness
        .note("after an update of the driver new containers get the new one, and running ones keep theirs");
    stage.delete_all().await?;

    restart_with(&stage, &of_gpu_manager).await?;
    for ((name, compute_percent, blocks), volume) in shares.into_iter().zip(["origin", "nvidia"]) {
        let script = format!(
            "/usr/local/nvidia/bin/nvidia-smi; test -c {EXTRA_DEVICE} && echo has the device; \
             grep -c /volumes/{volume} /proc/self/mountinfo; exec sleep 100000"
        );
        let name = format!("{name}-of-gpu-manager");
        stage.create_bound(running(&name, &script, compute_percent, blocks)?, &[("main", &[0])]).await?;
        prints(&stage, &name, "driver 590.10\nhas the device\n1").await?;
        stage.delete(&name).await?;
    }
    harness.note("with gpu-manager's files containers get their volume and the extra device");
    Ok(())
}

/// Starts the agent again with more flags.
async fn restart_with(stage: &Stage, flags: &[String]) -> Result<()> {
    stage.agent.kill()?;
    stage.agent.start_again_with(flags)?;
    stage.wait_until_served().await
}

/// Writes gpu-manager's files, with a volume for containers with shares and one for whole GPUs. Returns the flags that
/// name them.
fn files_of_gpu_manager(harness: &Harness) -> Result<[String; 2]> {
    let (files, base) = (harness.state("gpu-manager")?, harness.state("volumes")?);
    let components = json!({ "binaries": ["nvidia-smi"], "libraries": ["libnvidia-ml.so"] });
    let volume = |name: &str| json!({ "name": name, "base": base, "mode": "ro", "components": components });
    let write = |name: &str, content: serde_json::Value| -> Result<String> {
        let file = files.join(name);
        fs::write(&file, content.to_string())?;
        Ok(file.display().to_string())
    };
    let volumes = write("volume.conf", json!({ "volume": [volume("nvidia"), volume("origin")] }))?;
    let extra = write("extra-config.json", json!({ "default": { "devices": [EXTRA_DEVICE] } }))?;
    Ok([format!("--volume-config={volumes}"), format!("--extra-config={extra}")])
}

/// Installs a driver in a directory that stands for the root of a host.
fn install(host: &Path, version: &str) -> Result<()> {
    for directory in ["etc", "usr/bin", "usr/lib"] {
        fs::create_dir_all(host.join(directory))?;
    }
    fs::write(host.join("etc/ld.so.conf"), "/usr/lib\n")?;
    let source = |name: &str, text: &str| -> Result<PathBuf> {
        let file = host.join(name);
        fs::write(&file, text)?;
        Ok(file)
    };
    let (library, program) = (source("library.c", LIBRARY)?, source("program.c", PROGRAM)?);
    let file = host.join(format!("usr/lib/libnvidia-ml.so.{version}"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-Wl,-soname,libnvidia-ml.so.1"]).arg(format!("-DVERSION=\"{version}\""));
    succeed(compiler.arg("-o").arg(&file).arg(library))?;
    let smi = host.join("usr/bin/nvidia-smi");
    succeed(Command::new("cc").arg("-o").arg(smi).arg(program).arg(&file))?;
    // Writes the cache and the links of a real host.
    succeed(Command::new("/usr/sbin/ldconfig").arg("-r").arg(host))
}

fn succeed(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn pod(name: &str, compute_percent: &str, blocks: &str) -> Result<Pod> {
    running(name, SCRIPT, compute_percent, blocks)
}

/// Returns a pod with the C library of this host and nothing of a driver.
fn running(name: &str, script: &str, compute_percent: &str, blocks: &str) -> Result<Pod> {
    let resources = [("tencent.com/vcuda-core", compute_percent), ("tencent.com/vcuda-memory", blocks)];
    let mut pod = asking(name, &[Container::running("main", script, &resources)]);
    let folders = [
        ("loader", "/usr/lib64", "/lib64"),
        ("libraries", "/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu"),
    ];
    let spec = pod.spec.as_mut().context("a pod without a specification")?;
    let volume = |(name, path, _): &(&str, &str, &str)| Volume {
        name: (*name).to_owned(),
        host_path: Some(HostPathVolumeSource { path: (*path).to_owned(), type_: None }),
        ..Volume::default()
    };
    let mount = |(name, _, place): &(&str, &str, &str)| VolumeMount {
        name: (*name).to_owned(),
        mount_path: (*place).to_owned(),
        ..VolumeMount::default()
    };
    spec.volumes = Some(folders.iter().map(volume).collect());
    for container in &mut spec.containers {
        container.volume_mounts = Some(folders.iter().map(mount).collect());
    }
    Ok(pod)
}

/// Waits for the output of a pod.
async fn prints(stage: &Stage, name: &str, expected: &str) -> Result<()> {
    let printed = async || {
        let log = stage.cluster.pods().logs(name, &LogParams::default()).await?;
        ensure!(log.trim() == expected, "pod {name} printed {log:?}, expected {expected:?}");
        Ok(Some(()))
    };
    stage.harness.wait_for(&format!("pod {name} to print {expected:?}"), SOON, printed).await
}
