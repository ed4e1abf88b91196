//! Memory and CPU of the agent with as many pods as a node holds.

use std::{fs, time::Duration};

use anyhow::{Context, Result, ensure};
use tessera_sim::threads::ThreadTimes;
use tokio::time::sleep;

use super::{
    allocations,
    pods::{Container, asking},
    stage::{SOON, Stage},
};

const PODS: usize = 100;

/// Largest accepted resident memory.
const MAX_RESIDENT_KIB: u32 = 30 << 10;

/// Largest accepted CPU usage of the idle agent, in percent of one core.
const MAX_IDLE_PERCENT: f64 = 1.0;

/// Duration of the measurement of the idle agent.
const IDLE: Duration = Duration::from_secs(20);

/// Clock ticks per second, in which the kernel counts CPU time.
const TICKS_PER_SECOND: f64 = 100.0;

pub(super) async fn run(stage: &Stage) -> Result<()> {
    let share = [("tencent.com/vcuda-core", "7"), ("tencent.com/vcuda-memory", "20")];
    for number in 0..PODS {
        let gpu = u8::try_from(number % 8)?;
        let pod = asking(&format!("pod-{number}"), &[Container::main("main", &share)]);
        stage.create_bound(pod, &[("main", &[gpu])]).await?;
    }
    for number in 0..PODS {
        stage.cluster.wait_for_phase(&format!("pod-{number}"), "Running", SOON * 4).await?;
    }
    allocations::check(stage).await?;
    let agent = stage.agent.id().context("the agent does not run")?;
    stage.harness.note(&format!("{PODS} pods run; the agent is idle for {} s", IDLE.as_secs()));
    let (before, threads_before) = (ticks(agent)?, ThreadTimes::of(agent)?);
    sleep(IDLE).await;
    let busy = (ticks(agent)? - before) / TICKS_PER_SECOND / IDLE.as_secs_f64() * 100.0;
    stage
        .harness
        .note(&format!("CPU usage by thread: {}", ThreadTimes::of(agent)?.since(&threads_before, IDLE)));
    // There are two processes per pod, and metrics are scraped.
    let line = |pid: usize| format!(r#"{{"pid":{pid},"gpu":{},"memoryMiB":1000,"busyPercent":1}}"#, pid % 8);
    let lines: Vec<String> = (1..=2 * PODS).map(line).collect();
    fs::write(format!("{}.processes", stage.gpus.display()), lines.join("\n"))?;
    stage
        .harness
        .wait_for("the processes to be counted", SOON, async || {
            Ok(stage.page("/metrics").await?.contains("tessera_gpu_processes{gpu=\"7\"").then_some(()))
        })
        .await?;
    let scraped = stage.page("/metrics").await?.len();
    let (resident, own) = (kib(agent, "VmRSS:")?, kib(agent, "RssAnon:")?);
    let mib = |kib: u32| f64::from(kib) / 1024.0;
    stage.harness.note(&format!(
        "{PODS} pods: {:.1} MiB resident, of which {:.1} are not the program itself; {busy:.2} % of a core while idle; \
         a scrape has {scraped} bytes",
        mib(resident),
        mib(own)
    ));
    ensure!(resident <= MAX_RESIDENT_KIB, "the agent uses {resident} KiB");
    ensure!(busy < MAX_IDLE_PERCENT, "the idle agent uses {busy} % of a core");
    Ok(())
}

/// Returns a field of the memory of a process, in KiB.
fn kib(process: u32, field: &str) -> Result<u32> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("no such field")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// Returns the CPU time of a process so far, in ticks.
fn ticks(process: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    let (_, fields) = stat.rsplit_once(") ").context("no fields")?;
    let fields: Vec<&str> = fields.split(' ').collect();
    let time = |field: usize| -> Result<f64> { Ok(fields.get(field).context("too short")?.parse()?) };
    // Fields 14 and 15 are utime and stime, counted from 1 with the two fields before the
    // parenthesis.
    Ok(time(11)? + time(12)?)
}
