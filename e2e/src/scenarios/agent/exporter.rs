//! Usage of real containers on simulated GPUs. The cgroups of a real kubelet identify the
//! containers.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{EnvVar, Pod};
use serde_json::{Value, json};
use tessera_wire::tessera::node_use::{self, NodeUse};

use super::{
    pods::{Container, asking},
    stage::{SOON, Stage},
};

/// Environment variable with the name of the container, which does not depend on cgroups.
const WHO: &str = "TESSERA_E2E_WHO";

pub(super) async fn run(stage: &Stage) -> Result<()> {
    let share = [("tencent.com/vcuda-core", "20"), ("tencent.com/vcuda-memory", "20")];
    let first = asking(
        "first",
        &[
            Container::sidecar("proxy", &share),
            Container::main("one", &share),
            Container::main("two", &share),
        ],
    );
    let second = asking("second", &[Container::main("main", &share)]);
    let mut free = asking("free", &[Container::main("main", &[])]);
    if let Some(spec) = &mut free.spec {
        spec.node_name = Some(stage.node.name.clone());
    }
    stage.create_bound(named(first), &[("proxy", &[2]), ("one", &[2]), ("two", &[6])]).await?;
    stage.create_bound(named(second), &[("main", &[2])]).await?;
    stage.create(named(free)).await?;
    for name in ["first", "second", "free"] {
        stage.cluster.wait_for_phase(name, "Running", SOON).await?;
    }

    // All containers but two are on GPU 2. One is on GPU 6, the one without a grant on GPU 5, and
    // this process on GPU 0.
    let placed = [
        ("first/proxy", 2, 1000, 10),
        ("first/one", 2, 2000, 20),
        ("first/two", 6, 3000, 30),
        ("second/main", 2, 4000, 40),
        ("free/main", 5, 500, 5),
    ];
    let pids = stage
        .harness
        .wait_for("the processes of all containers", SOON, async || {
            let pids = processes()?;
            Ok(placed.iter().all(|(who, ..)| pids.contains_key(*who)).then_some(pids))
        })
        .await?;
    let mut lines = vec![line(std::process::id(), 0, 700, 0)];
    lines.extend(placed.iter().map(|(who, gpu, memory, busy)| line(pids[*who], *gpu, *memory, *busy)));
    fs::write(format!("{}.processes", stage.gpus.display()), lines.join("\n"))?;

    let seen = stage
        .harness
        .wait_for("all processes to be counted", SOON, async || {
            let seen: NodeUse = serde_json::from_str(&stage.page(node_use::PATH).await?)?;
            for (who, gpu, memory, busy) in placed {
                check(&seen, who, gpu, memory, busy)?;
            }
            Ok(Some(seen))
        })
        .await?;
    ensure!(seen.containers.len() == placed.len(), "more containers than there are: {:?}", seen.containers);
    ensure!(seen.gpus[0].memory_used_mib == Some(764), "GPU 0: {:?}", seen.gpus[0]);
    stage.harness.note("five containers of three pods: each process is counted for its own container");

    // A process counts as escaped after several samples. So do the other shells that have a share, because they
    // are linked statically and run without the library.
    let text = stage
        .harness
        .wait_for("the process without a grant to count as escaped", SOON, async || {
            let text = stage.page("/metrics").await?;
            let is_it = |line: &str| {
                line.starts_with("tessera_container_escaped_processes{")
                    && line.contains("pod=\"free\"")
                    && line.contains("gpu=\"5\"")
                    && line.ends_with(" 1")
            };
            ensure!(text.lines().any(is_it), "it does not count");
            Ok(Some(text))
        })
        .await?;
    ensure!(text.contains("part=\"host\"} 734003200"), "this process is not counted for the host: {text}");
    stage
        .harness
        .note("a process without a grant is reported, a process outside of pods counts for the host");

    let usage: Value = serde_json::from_str(&stage.page("/usage").await?)?;
    let uid = stage.pod("second").await?.metadata.uid;
    let device = &usage["usage"][&uid]["stat"]["main"]["dev"][0];
    ensure!(device["pids"] == json!([pids["second/main"]]), "usage: {device}");
    ensure!(device["mem"] == json!(4000), "usage: {device}");

    stage.delete("second").await?;
    stage
        .harness
        .wait_for("the series of a deleted pod to go", SOON, async || {
            Ok((!stage.page("/metrics").await?.contains("\"second\"")).then_some(()))
        })
        .await?;
    stage.harness.note("series end with their pod");
    Ok(())
}

/// Sets the name of every container in its environment.
fn named(mut pod: Pod) -> Pod {
    let name = pod.metadata.name.clone().unwrap_or_default();
    let spec = pod.spec.iter_mut();
    for container in
        spec.flat_map(|spec| spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()))
    {
        let who = EnvVar {
            name: WHO.into(),
            value: Some(format!("{name}/{}", container.name)),
            ..EnvVar::default()
        };
        container.env.get_or_insert_default().push(who);
    }
    pod
}

/// Returns the processes with a name in their environment. Each container runs one.
fn processes() -> Result<BTreeMap<String, u32>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        // The process may be gone by now.
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let texts = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        for text in texts {
            if let Some(who) = text.strip_prefix(&format!("{WHO}=")) {
                found.insert(who.to_owned(), pid);
            }
        }
    }
    Ok(found)
}

fn line(pid: u32, gpu: u8, memory: u64, busy: u32) -> String {
    json!({ "pid": pid, "gpu": gpu, "memoryMiB": memory, "busyPercent": busy }).to_string()
}

fn check(seen: &NodeUse, who: &str, gpu: u8, memory: u64, busy: u32) -> Result<()> {
    let (pod, container) = who.split_once('/').context("no name")?;
    let found = seen.containers.iter().find(|found| found.pod == pod && found.container == container);
    let share = found.and_then(|found| found.gpus.iter().find(|share| share.index == gpu));
    let share = share.with_context(|| format!("{who} is not shown on GPU {gpu}"))?;
    ensure!(share.memory_used_mib == Some(memory), "{who}: {share:?}");
    ensure!(share.busy_percent == Some(f64::from(busy)), "{who}: {share:?}");
    ensure!(share.granted_percent.is_some() == (pod != "free"), "{who}: {share:?}");
    Ok(())
}
