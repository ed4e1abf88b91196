//! Two containers on one GPU, of which the smaller one escapes. Prints the part of the GPU's time that
//! each gets, and what the agent does about it. `gpu/escapes` runs it.
//!
//! With the environment variable SIMULATED_GPU, the GPU is that of the simulated driver.

use std::{
    path::PathBuf,
    process::{Child, Command},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use tessera_agent::{
    controller::{InstalledLibrary, Isolation, OnEscape, WithoutLibrary},
    shell::install_library,
};
use tessera_core::gpu::GpuUuid;
use tessera_limits::limits::ShareMeaning;
use tessera_node::gpus::{Gpus, Nvml, SampleInterval};

use super::{
    common::{RegistrationWay, World, fixtures::container_id},
    part,
    simulated_driver::SimulatedDriver,
    start_in_container,
};

/// Percentages of the GPU's time: the neighbour, and the container that escapes.
const SHARES: [(&str, u32); 2] = [("neighbour", 70), ("tenant", 5)];

/// Time after an action before the shares are measured. The throttle corrects its cycle in this time.
const SETTLE: Duration = Duration::from_secs(9);

/// Time for which the shares are measured.
const MEASURE: Duration = Duration::from_secs(6);

/// The GPUs of this run. The test and the agent have one each, because each keeps its last sample.
fn open(directory: &std::path::Path) -> Arc<dyn Gpus> {
    match std::env::var_os("SIMULATED_GPU") {
        Some(file) => Arc::new(SimulatedDriver::new(PathBuf::from(file), directory)),
        None => Arc::new(Nvml::default()),
    }
}

fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap()
}

/// Returns the percentage of the time in which the GPU computes for each process, by the driver.
async fn shares(gpus: &dyn Gpus, gpu: &GpuUuid, running: &[&Child]) -> Vec<f64> {
    let since = now_us();
    gpus.sample(gpu, SampleInterval { since: 0, now: since }).unwrap();
    tokio::time::sleep(MEASURE).await;
    let work = gpus.sample(gpu, SampleInterval { since, now: now_us() }).unwrap().work;
    let parts = work.processes.unwrap_or_default();
    let part = |child: &&Child| {
        let own = parts.iter().filter(|(pid, _)| *pid == child.id());
        100.0 * own.map(|(_, part)| part).sum::<f64>()
    };
    running.iter().map(part).collect()
}

/// Runs both containers, the second one without the library if `escapes`.
async fn run(gpus: Arc<dyn Gpus>, probe: &dyn Gpus, escapes: bool, on_escape: OnEscape) {
    let gpu = probe.discover().unwrap().gpus[0].uuid.clone();
    let isolation = |grants: &std::path::Path| {
        Some(Isolation {
            library: install_library(&part("LIBRARY"), grants, None),
            without_library: WithoutLibrary::Refuse,
            serve_shares: true,
            allow_opt_out: false,
            allow_ceiling_changes: false,
            lend_memory: true,
            meaning: ShareMeaning::Time,
            on_escape,
        })
    };
    let world = World::isolated(gpus, RegistrationWay::Registry, isolation).await;
    world.until_allocatable("tencent.com/vcuda-core", 100).await;
    let library = world.grants().join(".library").join(InstalledLibrary::FILE);
    let mut running = Vec::new();
    for (number, (name, percent)) in (0u32..).zip(SHARES) {
        let percent = percent.to_string();
        let limits = [("tencent.com/vcuda-core", percent.as_str()), ("tencent.com/vcuda-memory", "32")];
        let pod = world.bind(name, &limits, None);
        world.run(&pod).await.unwrap();
        world.api.set_containers(&pod.metadata.uid, &[("main", &container_id(number))]);
        let mut program = Command::new(part("WORK"));
        program.args(["big", "60"]);
        if number == 0 || !escapes {
            program.env("LD_PRELOAD", &library);
            program.env("TESSERA_GRANT", world.grants().join(format!("uid-{name}/main")));
        }
        running.push(start_in_container(&world, number, &mut program));
    }
    let begin = Instant::now();
    if escapes {
        world.api.until_noticed("GpuShareEscaped").await;
        let message = world.api.notices.lock().unwrap().last().unwrap().message.clone();
        println!("  after {:.1} s: {message}", begin.elapsed().as_secs_f64());
    }
    tokio::time::sleep(SETTLE).await;
    let got = shares(probe, &gpu, &running.iter().collect::<Vec<_>>()).await;
    for ((name, percent), share) in SHARES.iter().zip(&got) {
        println!("  {name}: granted {percent} %, got {share:.1} % of the GPU's time");
    }
    let tenant_ended = running[1].try_wait().unwrap().is_some();
    println!("  the tenant's process {}", if tenant_ended { "was killed" } else { "runs" });
    assert_eq!(tenant_ended, escapes && on_escape == OnEscape::Kill);
    for mut child in running {
        let _ended = child.kill();
        child.wait().unwrap();
    }
    if !escapes {
        let notices = world.api.notices.lock().unwrap();
        assert!(notices.iter().all(|notice| notice.reason != "GpuShareEscaped"), "{notices:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_escaped_container_is_reported_throttled_or_killed() {
    let directory = tempfile::tempdir().unwrap();
    let probe = open(directory.path());
    for (title, escapes, on_escape) in [
        ("both containers with the library", false, OnEscape::Kill),
        ("the tenant escapes, --on-escape report", true, OnEscape::Report),
        ("the tenant escapes, --on-escape throttle", true, OnEscape::Throttle),
        ("the tenant escapes, --on-escape kill", true, OnEscape::Kill),
    ] {
        println!("{title}:");
        run(open(directory.path()), &*probe, escapes, on_escape).await;
    }
}
