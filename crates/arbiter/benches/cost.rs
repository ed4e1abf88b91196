//! Measures the CPU time of the arbiter's loop beside containers that do nothing, that compute, and that
//! write into all slots of their accounts and send thousands of wake-ups per second.

#![allow(missing_docs, unused_crate_dependencies, reason = "a program")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for people")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tessera_arbiter::Service;
use tessera_limits::files::ArbiterWakeup;
use tessera_limits::memory_account::ProcessIdentity;
use tessera_limits::{Bytes, GpuLimit, GpuSlot, GrantLimits, UuidBytes, files, futex};

const CONTAINERS: u32 = 8;
const RUN: Duration = Duration::from_secs(4);

/// Interval between two wake-ups of a hostile container. Containers that send more take the cores from the
/// arbiter on a small machine, and cost it less.
const HOSTILE_INTERVAL: Duration = Duration::from_micros(200);

/// How the processes of a container behave.
#[derive(Clone, Copy)]
struct Behaviour {
    name: &'static str,
    /// Slots that the container claims.
    slots: u32,
    /// Time between two reports, each with a wake-up, or `None` for a container that wants nothing.
    interval: Option<Duration>,
}

fn main() {
    println!("{CONTAINERS} containers, {} s each", RUN.as_secs());
    for behaviour in [
        Behaviour { name: "idle", slots: 1, interval: None },
        Behaviour { name: "1 process", slots: 1, interval: Some(Duration::from_millis(10)) },
        Behaviour { name: "64 processes", slots: 64, interval: Some(Duration::from_millis(1)) },
        Behaviour { name: "hostile, 1 slot", slots: 1, interval: Some(HOSTILE_INTERVAL) },
        Behaviour { name: "hostile, 512 slots", slots: 512, interval: Some(HOSTILE_INTERVAL) },
    ] {
        let (share, steps) = measure(behaviour);
        println!("{:>20}: {share:6.2} % of a core, {steps:>6.0} steps per second", behaviour.name);
    }
}

/// Returns the percentage of a core that the arbiter uses, and its steps per second.
fn measure(behaviour: Behaviour) -> (f64, f64) {
    let root = tempfile::tempdir().unwrap();
    let directories: Vec<PathBuf> =
        (0..CONTAINERS).map(|number| root.path().join(number.to_string())).collect();
    let gpu = GpuLimit {
        uuid: UuidBytes([7; 16]),
        memory: Bytes(1 << 30),
        context: Bytes::ZERO,
        compute_percent: 10,
        compute_ceiling_percent: 10,
    };
    let limits = GrantLimits { generation: 1, gpus: vec![gpu], ..GrantLimits::default() };
    let mut service = Service::default();
    for directory in &directories {
        files::update_grant(directory, &limits).unwrap();
        service.add(directory).unwrap();
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for directory in &directories {
            let is_over = &is_over;
            scope.spawn(move || report(directory, behaviour, is_over));
        }
        // The threads of the containers share the cores with the arbiter, whose own CPU time counts.
        let (begin, cpu_before, mut steps) = (Instant::now(), cpu_time(), 0u32);
        while begin.elapsed() < RUN {
            let next = service.step(futex::now());
            service.wait(next);
            steps += 1;
        }
        let (cpu, passed) = (cpu_time() - cpu_before, begin.elapsed());
        is_over.store(true, Ordering::Relaxed);
        (100.0 * cpu.as_secs_f64() / passed.as_secs_f64(), f64::from(steps) / passed.as_secs_f64())
    })
}

/// Reports demand and drained windows until the measurement is over.
fn report(directory: &std::path::Path, behaviour: Behaviour, is_over: &AtomicBool) {
    let (account, control) =
        (files::open_account(directory).unwrap(), files::open_control(directory).unwrap());
    let slots: Vec<_> = (1..=behaviour.slots)
        .map(|process| {
            account.claim(ProcessIdentity { id: process, started_ticks: 0 }, process, |_| {}).unwrap()
        })
        .collect();
    let wakeup = ArbiterWakeup::of(directory);
    while !is_over.load(Ordering::Relaxed) {
        let Some(interval) = behaviour.interval else {
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        let number = control.window(GpuSlot::FIRST).read().number;
        for &slot in &slots {
            let demand = &account.slot(slot).demand[GpuSlot::FIRST];
            demand.wants.store(1, Ordering::Relaxed);
            demand.drained.store(number, Ordering::Relaxed);
        }
        wakeup.notify();
        std::thread::sleep(interval);
    }
}

/// Returns the CPU time of the calling thread.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}
