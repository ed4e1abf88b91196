//! The whole agent on a real GPU. The test checks shares of compute time, memory limits by the
//! driver's own count, values of the exporter, and the detection of a process without the library.
//!
//! It needs a GPU without other users. Environment variables name the programs: LIBRARY
//! (libtessera.so), WORK (gpu/work.c, compiled), TAKE and PART (gpu/take.py and gpu/part.py, which
//! need PyTorch).

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "the test prints what it measured")]

#[path = "../common/mod.rs"]
mod common;
mod escapes;
mod simulated_driver;

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use common::{RegistrationWay, World, fixtures::container_id};
use tessera_core::gpu::GpuUuid;
use tessera_node::gpus::{Gpus, Nvml};

/// Requests of the two pods: percent of the GPU, and units of 256 MiB.
const ASKED: [(&str, u32, u64); 2] = [("left", 30, 32), ("right", 60, 32)];

/// Duration of the work of a pod.
const SECONDS: u64 = 8;

fn part(name: &str) -> PathBuf {
    std::env::var_os(name)
        .unwrap_or_else(|| panic!("{name} is not set: see the comment at the top of this file"))
        .into()
}

/// Starts a program in the cgroup of a pod's container. With `limited`, it runs with the library
/// and the grant.
fn start(world: &World, pod: usize, limited: bool, program: &mut Command) -> Child {
    if limited {
        let grant = world.grants().join(format!("uid-{}/main", ASKED[pod].0));
        program.env("LD_PRELOAD", part("LIBRARY")).env("TESSERA_GRANT", grant);
    }
    start_in_container(world, u32::try_from(pod).unwrap(), program)
}

/// Starts a program in the cgroup of the container with this number. The rest of what the agent reads
/// about the process comes from the kernel.
fn start_in_container(world: &World, number: u32, program: &mut Command) -> Child {
    let child = program.stdout(Stdio::piped()).spawn().unwrap();
    let (own, real) =
        (world.directory.path().join(format!("proc/{}", child.id())), format!("/proc/{}", child.id()));
    fs::create_dir_all(&own).unwrap();
    for file in ["stat", "comm", "status", "maps", "task"] {
        std::os::unix::fs::symlink(format!("{real}/{file}"), own.join(file)).unwrap();
    }
    let container = container_id(number);
    fs::write(own.join("cgroup"), format!("0::/../cri-containerd-{container}.scope\n")).unwrap();
    child
}

fn words(child: Child) -> Vec<String> {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().split_whitespace().map(str::to_owned).collect()
}

fn work(world: &World, pod: usize, limited: bool) -> Child {
    start(world, pod, limited, Command::new(part("WORK")).args(["big", &SECONDS.to_string()]))
}

/// Returns the CPU seconds of this process by thread name.
fn threads() -> BTreeMap<String, f64> {
    let mut used = BTreeMap::new();
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let read = |file: &str| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let nanoseconds: f64 = read("schedstat").split(' ').next().unwrap_or("0").parse().unwrap_or(0.0);
        *used.entry(read("comm").trim().to_owned()).or_default() += nanoseconds / 1e9;
    }
    used
}

/// Returns the value of a container's family.
fn value(page: &str, family: &str, pod: &str) -> f64 {
    let begin = format!("{family}{{namespace=\"team\",pod=\"{pod}\"");
    let line = page.lines().find(|line| line.starts_with(&begin));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(f64::NAN)
}

/// Runs two containers below their shares and checks that the exporter counts the work of each.
async fn busy_time_is_that_of_the_work_done(world: &World) {
    let part = |parts: &[&str]| {
        let mut program = Command::new("python3");
        program.arg(part("PART")).args(parts);
        program
    };
    let alone = words(part(&["3", "0.5"]).stdout(Stdio::piped()).spawn().unwrap())[0].clone();
    let counted = async || {
        // The driver reports busy time late. After some more samples, the exporter has divided that
        // of earlier work.
        world.gpus.sampled(5).await;
        let text = world.page("/metrics").await;
        ASKED.map(|(name, ..)| value(&text, "tessera_container_busy_seconds_total", name))
    };
    let before = counted().await;
    let seconds = 20.0;
    let parts = [(0, "0.15"), (1, "0.4")];
    let running =
        parts.map(|(pod, share)| start(world, pod, true, &mut part(&[&seconds.to_string(), share, &alone])));
    let known = tokio::task::spawn_blocking(|| running.map(|child| words(child)[1].parse::<f64>().unwrap()));
    let (known, after) = (known.await.unwrap(), counted().await);
    for (place, (name, ..)) in ASKED.iter().enumerate() {
        let found = 100.0 * (after[place] - before[place]) / seconds;
        println!("{name}: computed for {:.1} % of the time; the exporter counted {found:.1} %", known[place]);
        assert!((found - known[place]).abs() < 5.0, "{name}: {found} of {}", known[place]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_get_what_they_are_granted() {
    let gpus = Arc::new(Nvml::default());
    let gpu: GpuUuid = gpus.discover().unwrap().gpus[0].uuid.clone();
    let world = World::on(gpus.clone(), RegistrationWay::Registry).await;
    world.until_allocatable("tencent.com/vcuda-core", 100).await;
    for (number, (name, compute_percent, units)) in (0u32..).zip(ASKED) {
        let limits = [
            ("tencent.com/vcuda-core", compute_percent.to_string()),
            ("tencent.com/vcuda-memory", units.to_string()),
        ];
        let limits = limits.each_ref().map(|(resource, amount)| (*resource, amount.as_str()));
        let pod = world.bind(name, &limits, None);
        world.run(&pod).await.unwrap();
        world.api.set_containers(&pod.metadata.uid, &[("main", &container_id(number))]);
    }

    busy_time_is_that_of_the_work_done(&world).await;

    // The agent has measured the context of the first process in each container.
    for (name, ..) in ASKED {
        let grant = world.grants().join(format!("uid-{name}/main"));
        let limits = tessera_limits::files::open_control(&grant).unwrap().read().unwrap();
        let context = limits.gpus[0].context.whole_mib();
        println!("{name}: a context takes {context} MiB");
        assert!(context > 0, "{name}: the context was not measured");
    }

    // Both containers run at once, each limited to its share.
    let running = [0, 1].map(|pod| work(&world, pod, true));
    // The programs work for a fixed time. The threads are measured in the second half of it.
    let half = Duration::from_secs(SECONDS) / 2;
    tokio::time::sleep(half).await;
    let (since, before) = (Instant::now(), threads());
    tokio::time::sleep(half).await;
    let (after, seconds) = (threads(), since.elapsed().as_secs_f64());
    let text = world.page("/metrics").await;
    let shares = running.map(|child| words(child)[2].parse::<f64>().unwrap());
    for ((name, compute_percent, _), share) in ASKED.iter().zip(shares) {
        let busy = 100.0 * value(&text, "tessera_container_busy_ratio", name);
        println!(
            "{name}: asked {compute_percent}, got {share:.2} % of the GPU's time; the exporter says {busy:.1} %"
        );
        assert!((share - f64::from(*compute_percent)).abs() < 2.0, "{name}: {share}");
        assert!((busy - f64::from(*compute_percent)).abs() < 5.0, "{name}: {busy}");
    }
    for (name, end) in &after {
        let percent = 100.0 * (end - before.get(name).unwrap_or(&0.0)) / seconds;
        println!("thread {name}: {percent:.2} % of a core");
    }

    // A PyTorch program allocates memory until it is rejected.
    let mut taker = Command::new("python3");
    let taker = start(&world, 0, true, taker.arg(part("TAKE")).args(["torch", "64", "12000"]));
    let (process, ended) = (taker.id(), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let done = ended.clone();
    let watcher = tokio::task::spawn_blocking(move || {
        let mut most = 0;
        while !done.load(std::sync::atomic::Ordering::Relaxed) {
            let all = gpus.processes(&gpu).unwrap_or_default();
            let ours = all.iter().filter(|one| one.pid == process).filter_map(|one| one.bytes);
            most = most.max(ours.sum::<u64>() >> 20);
            // The driver reports no event when a process allocates memory.
            std::thread::sleep(Duration::from_millis(5));
        }
        most
    });
    let said = tokio::task::spawn_blocking(move || words(taker)).await.unwrap();
    ended.store(true, std::sync::atomic::Ordering::Relaxed);
    let (most, limit) = (watcher.await.unwrap(), ASKED[0].2 * 256);
    println!("memory: limit {limit} MiB, PyTorch got {} MiB, most by the driver's count {most} MiB", said[0]);
    assert!(most <= limit && most > limit - 256, "{most} of {limit}");

    // A process runs without the library.
    let mut escaped = work(&world, 1, false);
    world.api.until_noticed("GpuShareEscaped").await;
    println!("{}", world.api.notices.lock().unwrap().last().unwrap().message);
    escaped.kill().unwrap();
    escaped.wait().unwrap();
}
