//! The library in containers of a real runtime, on the simulated driver. Shares are enforced also
//! while the agent is down.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{EnvVar, Event, HostPathVolumeSource, Namespace, Pod, Volume, VolumeMount};
use kube::{
    Api,
    api::{ListParams, LogParams, Patch, PatchParams},
};
use serde_json::json;
use tessera_limits::{GpuSlot, files, futex};

use super::{
    pods::{Container, asking},
    stage::{SIMULATED, SOON, Stage},
    strict,
};
use crate::harness::Harness;

/// Script that makes the account file of its container large, forever.
const FILL: &str =
    "while true; do dd if=/dev/zero of=/etc/tessera/account bs=1M count=1024 conv=notrunc 2>/dev/null; done";

/// Script that repeats forever: initializes, reads the memory size, allocates pieces of 256 MiB
/// until the limit, and frees them.
pub(super) const ROUNDS: &str = "\
(echo x > /etc/tessera/control) 2>/dev/null || echo read-only
export TESSERA_GRANT=/tmp
while true; do
  echo \"begin
info
fill plain 256
free plain\" | /e2e/tenant dlsym | while read line; do echo -n \"$line / \"; done
  echo
  sleep 0.3
done";

/// Output of a round with 10 GiB: 37 pieces, because a context takes 528 MiB, then out of memory
/// (2).
const LARGE: &str = "0 / 10240 10240 / 37 2 / 0 /";
/// Output of a round with 5 GiB.
pub(super) const SMALL: &str = "0 / 5120 5120 / 17 2 / 0 /";

/// Script that leaves a process with memory behind and ends. After its restart it runs the usual
/// rounds.
const CRASH: &str = "\
if ! test -e /e2e/state/crashed; then
  (echo begin; echo take plain 4000; sleep 1000) | /e2e/tenant link > /e2e/state/crashed &
  while ! test \"$(cat /e2e/state/crashed 2>/dev/null)\" = \"0
0\"; do sleep 0.1; done
  exit 1
fi
";

pub(super) async fn run(stage: &Stage) -> Result<()> {
    let built = build(&stage.harness)?;
    let pod = |name: &str, script: &str, compute_percent: &str, blocks: &str| -> Result<Pod> {
        let share = [("tencent.com/vcuda-core", compute_percent), ("tencent.com/vcuda-memory", blocks)];
        on_simulated_gpu(stage, &built, asking(name, &[Container::running("main", script, &share)]))
    };
    let (large, small) = (LARGE, SMALL);
    stage.create_bound(pod("large", ROUNDS, "30", "40")?, &[("main", &[SIMULATED])]).await?;
    stage.create_bound(pod("small", ROUNDS, "50", "20")?, &[("main", &[SIMULATED])]).await?;
    let both = async |at_least: usize| -> Result<usize> {
        let seen = rounds(stage, "large", large, at_least).await?;
        Ok(seen.max(rounds(stage, "small", small, at_least).await?))
    };
    let seen = both(3).await?;
    let log = stage.cluster.pods().logs("large", &LogParams::default()).await?;
    ensure!(log.starts_with("read-only\n"), "the limits are writable: {log}");
    stage.harness.note("each container sees its share and cannot allocate more");

    let grant = stage.grants.join(stage.pod("large").await?.metadata.uid).join("main");
    let control = files::open_control(&grant)?;
    let arbiter = async |there: bool| {
        let what = if there { "the arbiter to grant windows" } else { "the arbiter's heartbeat to stop" };
        let is = async || Ok((control.has_arbiter(futex::now()) == there).then_some(()));
        stage.harness.wait_for(what, SOON, is).await
    };
    arbiter(true).await?;
    stage.agent.kill()?;
    arbiter(false).await?;
    let seen = both(seen + 4).await?;
    stage.harness.note("the agent is down: the limits are enforced");
    stage.agent.start_again()?;
    arbiter(true).await?;
    let seen = both(seen + 4).await?;
    stage.harness.note("the agent is back: the limits are enforced and windows are granted");

    // The limit of one running container is raised. That of the other one stays.
    stage.wait_until_served().await?;
    let label = json!({ "metadata": { "labels": { "tessera.dev/ceiling-changes": "allowed" } } });
    let namespaces: Api<Namespace> = Api::all(stage.cluster.client());
    namespaces.patch("default", &PatchParams::default(), &Patch::Merge(label)).await?;
    let patch =
        Patch::Merge(json!({ "metadata": { "annotations": { "tencent.com/vcuda-core-limit": "90" } } }));
    let raise = async || Ok(stage.cluster.pods().patch("large", &PatchParams::default(), &patch).await.ok());
    stage.harness.wait_for("the label of the namespace to take effect", SOON, raise).await?;
    let ceilings = async || {
        let of = async |name: &str| -> Result<u32> {
            Ok(stage.limits(&stage.pod(name).await?.metadata.uid, "main")?.gpus[0].compute_ceiling_percent)
        };
        Ok(((of("large").await?, of("small").await?) == (90, 50)).then_some(()))
    };
    stage.harness.wait_for("the ceiling to be raised", SOON, ceilings).await?;
    both(seen + 2).await?;
    stage.harness.note("the ceiling of a running container was raised, that of the other one is unchanged");

    growing_accounts_are_cut(stage).await?;
    escapes_are_reported(stage, pod("idle", "while true; do sleep 1000; done", "5", "4")?).await?;

    let mut crashing = pod("crashing", &format!("{CRASH}{ROUNDS}"), "10", "20")?;
    if let Some(spec) = &mut crashing.spec {
        spec.restart_policy = Some("Always".into());
    }
    stage.create_bound(crashing, &[("main", &[SIMULATED])]).await?;
    rounds(stage, "crashing", small, 2).await?;
    stage.harness.note("a container that crashed with charged memory restarts with an empty account");
    // Little of the GPU's time is left by now.
    strict::run(stage, |name, script| pod(name, script, "2", "20")).await?;
    let uids = [stage.pod("large").await?.metadata.uid, stage.pod("small").await?.metadata.uid];
    stage.delete_all().await?;
    let gone = async || Ok(uids.iter().all(|uid| !stage.grants.join(uid).exists()).then_some(()));
    stage.harness.wait_for("the grants to be gone", SOON, gone).await
}

/// A process without the library appears on the GPU. Its memory reduces the container's limit, and the
/// owner is informed.
async fn escapes_are_reported(stage: &Stage, idle: Pod) -> Result<()> {
    stage.create_bound(idle, &[("main", &[SIMULATED])]).await?;
    stage.cluster.wait_for_phase("idle", "Running", SOON).await?;
    let uid = stage.pod("idle").await?.metadata.uid;
    let control = files::open_control(&stage.grants.join(&uid).join("main"))?;
    let unledgered = async |mib: u64| {
        let is_reported = async || {
            let reported = control.uncharged(GpuSlot::FIRST).whole_mib();
            ensure!(reported == mib, "the container reads {reported} MiB");
            Ok(Some(()))
        };
        stage.harness.wait_for(&format!("the container to read {mib} MiB"), SOON, is_reported).await
    };
    let pid = process_in(&uid)?;
    let shown = show_on_gpu(stage, pid, 300)?;
    unledgered(300).await?;
    // The shell of the image is linked statically, so it has not mapped the library.
    let message = escape_of(stage, "idle").await?;
    ensure!(message.contains("without libtessera.so"), "{message}");
    stage.harness.note(&message);
    let metrics = stage.page("/metrics").await?;
    let is_it = |line: &&str| {
        line.starts_with("tessera_container_escapes_total{") && line.contains("without-library")
    };
    ensure!(metrics.lines().any(|line| is_it(&line) && line.ends_with(" 1")), "not in {metrics}");
    fs::remove_file(&shown)?;
    unledgered(0).await?;
    stage.harness.note("memory outside of the account reduced the limit while it was in use");
    Ok(())
}

/// Makes the simulated driver show a process on the GPU, with this much memory. Returns the file that
/// does so.
pub(super) fn show_on_gpu(stage: &Stage, pid: u32, memory_mib: u64) -> Result<PathBuf> {
    let shown = stage.gpus.with_extension("json.processes");
    let line = format!(r#"{{"pid":{pid},"gpu":{SIMULATED},"memoryMiB":{memory_mib},"busyPercent":1}}"#);
    fs::write(&shown, format!("{line}\n"))?;
    Ok(shown)
}

/// A container fills its account file again and again. Its owner is informed, the file stays in the
/// tmpfs, and new grants are created.
async fn growing_accounts_are_cut(stage: &Stage) -> Result<()> {
    let share = [("tencent.com/vcuda-core", "5"), ("tencent.com/vcuda-memory", "4")];
    let filler = asking("filler", &[Container::running("main", FILL, &share)]);
    stage.create_bound(filler, &[("main", &[0])]).await?;
    let message = event_of(stage, "filler", "AccountFileGrew").await?;
    ensure!(message.starts_with("container main made /etc/tessera/account "), "{message}");
    stage.harness.note(&message);
    let next = asking("next", &[Container::running("main", "sleep 1000", &share)]);
    stage.create_bound(next, &[("main", &[0])]).await?;
    stage.cluster.wait_for_phase("next", "Running", SOON).await?;
    let is_counted = async || {
        let metrics = stage.page("/metrics").await?;
        let of_filler = |line: &&str| {
            line.starts_with("tessera_container_account_overruns_total{") && line.contains("\"filler\"")
        };
        Ok(metrics.lines().find(of_filler).filter(|line| !line.ends_with(" 0")).map(|_| ()))
    };
    stage.harness.wait_for("the metric of cut account files", SOON, is_counted).await?;
    let uid = stage.pod("filler").await?.metadata.uid;
    let place = fs::canonicalize(stage.grants.join(uid))?;
    ensure!(place.starts_with(stage.grants.join(".memory")), "the grant is at {}", place.display());
    stage.delete("filler").await?;
    stage.delete("next").await?;
    stage.harness.note("a container that fills its account file keeps no other container from starting");
    Ok(())
}

/// Waits for the event about an escaped process of a pod.
pub(super) async fn escape_of(stage: &Stage, pod: &str) -> Result<String> {
    event_of(stage, pod, "GpuShareEscaped").await
}

/// Waits for an event of a pod.
async fn event_of(stage: &Stage, pod: &str, reason: &str) -> Result<String> {
    let events: Api<Event> = Api::default_namespaced(stage.cluster.client());
    let reported = async || {
        let events = events.list(&ListParams::default()).await?;
        let of_it = |event: &Event| {
            event.reason.as_deref() == Some(reason) && event.involved_object.name.as_deref() == Some(pod)
        };
        Ok(events.items.into_iter().find(of_it).and_then(|event| event.message))
    };
    stage.harness.wait_for(&format!("the event {reason} of {pod}"), SOON, reported).await
}

/// Returns a PID of a process of a pod.
pub(super) fn process_in(uid: &str) -> Result<u32> {
    let written = [uid.to_owned(), uid.replace('-', "_")];
    for entry in fs::read_dir("/proc")?.flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
        let text = |file: &str| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        if written.iter().any(|uid| text("cgroup").contains(uid)) && text("comm").trim() == "sh" {
            return Ok(pid);
        }
    }
    bail!("no process of pod {uid} was found")
}

/// Waits for rounds of a pod and verifies their output. Returns the number of rounds.
pub(super) async fn rounds(stage: &Stage, name: &str, expected: &str, at_least: usize) -> Result<usize> {
    stage
        .harness
        .wait_for(&format!("{at_least} rounds of {name}"), SOON, async || {
            let log = stage.cluster.pods().logs(name, &LogParams::default()).await?;
            let lines: Vec<String> =
                log.lines().filter(|line| line.contains('/')).map(without_free_memory).collect();
            let other = lines.iter().find(|line| *line != expected);
            ensure!(other.is_none(), "{name} printed {other:?}, expected {expected:?}");
            Ok((lines.len() >= at_least).then_some(lines.len()))
        })
        .await
}

/// Returns a round without its third word. The free memory may still include that of the previous
/// process.
fn without_free_memory(line: &str) -> String {
    let words = line.split_whitespace().enumerate().filter(|(place, _)| *place != 2);
    words.map(|(_, word)| word).collect::<Vec<_>>().join(" ")
}

/// Builds the program and links the simulated driver under its usual names in one directory.
pub(super) fn build(harness: &Harness) -> Result<PathBuf> {
    let folder = harness.state("tenant")?;
    let driver = harness.for_containers("libsimulated_driver.so")?;
    fs::copy(&driver, folder.join("libcuda.so.1"))?;
    // A link, so that the driver is loaded only once under both names.
    std::os::unix::fs::symlink("libcuda.so.1", folder.join("libcuda.so"))?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/interpose/tests/tenant.c");
    let compiled = Command::new("cc")
        .args(["-O1", "-w", "-o"])
        .arg(folder.join("tenant"))
        .arg(source)
        .arg("-L")
        .arg(&folder)
        .args(["-lcuda", "-ldl", "-lpthread"])
        .status()
        .context("no C compiler")?;
    ensure!(compiled.success(), "the program did not compile");
    Ok(folder)
}

/// Mounts the program, the driver, a simulated GPU and the host's C library into a pod.
pub(super) fn on_simulated_gpu(stage: &Stage, built: &Path, mut pod: Pod) -> Result<Pod> {
    let name = pod.metadata.name.clone().unwrap_or_default();
    let state = stage.harness.state(&format!("tenant-{name}"))?;
    let folders = [
        ("built", built.display().to_string(), "/e2e"),
        ("state", state.display().to_string(), "/e2e/state"),
        ("loader", "/usr/lib64".to_owned(), "/lib64"),
        ("libraries", "/usr/lib/x86_64-linux-gnu".to_owned(), "/lib/x86_64-linux-gnu"),
    ];
    fs::create_dir_all(built.join("state"))?;
    let spec = pod.spec.as_mut().context("a pod without a specification")?;
    let volume = |(name, path, _): &(&str, String, &str)| Volume {
        name: (*name).to_owned(),
        host_path: Some(HostPathVolumeSource { path: path.clone(), type_: None }),
        ..Volume::default()
    };
    let mount = |(name, _, place): &(&str, String, &str)| VolumeMount {
        name: (*name).to_owned(),
        mount_path: (*place).to_owned(),
        ..VolumeMount::default()
    };
    let variable = |name: &str, value: &str| EnvVar {
        name: name.to_owned(),
        value: Some(value.to_owned()),
        ..EnvVar::default()
    };
    spec.volumes = Some(folders.iter().map(volume).collect());
    for container in &mut spec.containers {
        container.volume_mounts = Some(folders.iter().map(mount).collect());
        container.env =
            Some(vec![variable("LD_LIBRARY_PATH", "/e2e"), variable("SIMULATED_GPU", "/e2e/state/gpu")]);
    }
    Ok(pod)
}
