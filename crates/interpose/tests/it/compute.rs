//! Shares of time. The GPU counts the time of kernels itself; how exact a share is on a loaded test machine is not
//! asserted, that is measured on a real GPU.

use std::time::Duration;

use crate::support::{Arbiter, Built, Container, Tenant};

/// Launches of kernels of 1 ms for a while, as the answer tells.
fn launched(container: &Container, door: &str, command: &str) -> u64 {
    let mut tenant = container.begun(door);
    let count = tenant.ask(command).parse().unwrap();
    assert_eq!(tenant.end(), "");
    count
}

#[test]
fn a_limited_program_gets_its_share_by_every_door() {
    for door in ["link", "dlsym", "proc", "default", "next"] {
        for way in ["sync", "deep"] {
            let count = launched(&Container::with(4096, 20), door, &format!("run {way} 1000 1500"));
            // 20 % of 1.5 s are 300 kernels of 1 ms. Never far above; below only as the machine is loaded.
            assert!((10..=390).contains(&count), "{door} {way}: {count}");
        }
    }
}

/// Copies, fills, a thread's own stream, streams that are destroyed while they work: all of it is the GPU's time.
#[test]
fn all_kinds_of_work_are_held_to_the_share() {
    let ways =
        ["up", "own-up", "down", "within", "any-later", "up-later", "own-up-later", "peer-later", "2d"];
    let ways = ways.iter().chain(&["batch-later", "fill", "fill-later", "own", "churn"]);
    for (way, door) in ways.zip(["link", "dlsym", "proc"].into_iter().cycle()) {
        let count = launched(&Container::with(4096, 20), door, &format!("run {way} 1000 500"));
        // 20 % of 0.5 s are 100 pieces of 1 ms; a window and what was queued may lie across the end.
        assert!((10..=160).contains(&count), "{door} {way}: {count}");
    }
}

/// Whoever comes to the GPU next waits until what was queued has ended: that is short, also where a stream is made for each kernel.
#[test]
fn little_is_queued() {
    let container = Container::with(4096, 90);
    let _arbiter = Arbiter::start(&[&container]);
    for way in ["kernel", "churn", "own", "fill-later"] {
        let mut tenant = container.begun("dlsym");
        tenant.tell(&format!("run {way} 200 2000"));
        let mut most = 0;
        for _ in 0..2_000 {
            most = most.max(container.left());
            std::thread::sleep(Duration::from_micros(50));
        }
        assert_ne!(tenant.answer(), "0");
        println!("{way}: {most} ns of work at most");
        assert!((1..5_000_000).contains(&most), "{way}: {most} ns of work at most");
    }
}

/// What a graph cost says nothing about another one that lies where it was.
#[test]
fn little_is_queued_of_a_graph_in_the_place_of_a_short_one() {
    let container = Container::with(4096, 90);
    let mut tenant = container.begun("dlsym");
    tenant.tell("regraph x 5000 200");
    let mut most = 0;
    for _ in 0..1_500 {
        most = most.max(container.left());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(tenant.answer(), "0");
    println!("{most} ns of work at most");
    assert!((1..200_000_000).contains(&most), "{most} ns of work at most");
}

/// Three threads whose kernels run beside each other, at half the GPU's time, against the same without a limit.
#[test]
fn what_overlaps_is_charged_once() {
    let container = Container::with(4096, 50).overlapping();
    let count = |mut tenant: Tenant| -> f64 {
        assert_eq!(tenant.ask("begin"), "0");
        let answer = tenant.ask("threads 3 200 2000");
        let (count, status) = answer.split_once(' ').unwrap();
        assert_eq!(status, "0");
        count.parse().unwrap()
    };
    let (bare, half) = (count(container.start_bare("proc")), count(container.start("proc")));
    println!("three threads beside each other at 50 %: {:.1} % of bare", 100.0 * half / bare);
    // Three times 2 s of kernels of 0.2 ms are 30,000. Each of the three charged would be a sixth of that, none of them all.
    assert!(half <= 17_500.0 && half >= 0.2 * bare, "{half} of {bare}");
}

/// Two processes of one container, without an arbiter, together get what one gets.
#[test]
fn processes_of_one_container_share_its_time() {
    let container = Container::with(4096, 40);
    let mut tenants = [container.begun("proc"), container.begun("link")];
    tenants.iter_mut().for_each(|tenant| tenant.tell("run sync 500 2000"));
    let counts: Vec<u64> = tenants.iter_mut().map(|tenant| tenant.answer().parse().unwrap()).collect();
    // Of the GPU's 4,000 kernels of 0.5 ms in that time.
    let percent = counts.iter().sum::<u64>() as f64 / 40.0;
    println!("two processes at 40 %: {counts:?}, {percent:.1} % of the GPU");
    // Never far above; below only as the machine is loaded.
    assert!(percent < 48.0 && counts.iter().all(|&count| count > 20), "{counts:?}: {percent:.1} %");
}

/// The simulated driver aborts when anything of a context that is gone is used.
#[test]
fn contexts_come_and_go_while_they_work() {
    let mut tenant = Container::with(8192, 20).begun("dlsym");
    let answer = tenant.ask("contexts x 1000 1000");
    let (count, status) = answer.split_once(' ').unwrap();
    assert_eq!(status, "0");
    let count: u64 = count.parse().unwrap();
    // 20 % of 1 s are 200 kernels of 1 ms in all default streams together.
    assert!((10..=290).contains(&count), "{count}");
    assert_eq!(tenant.end(), "");
}

/// Our own thread looks at events all the while, which would ruin a capture if it were not relaxed about them.
#[test]
fn captures_beside_launches_are_not_disturbed() {
    let mut tenant = Container::with(4096, 50).begun("proc");
    assert_eq!(tenant.ask("beside x 300 1000"), "0 0");
}

/// What was launched before a capture in the same stream has no fence yet: our own thread must not put it into the capture.
#[test]
fn a_capture_that_follows_work_is_not_disturbed() {
    let container = Container::with(4096, 50);
    for has_arbiter in [false, true] {
        let _arbiter = has_arbiter.then(|| Arbiter::start(&[&container]));
        assert_eq!(container.begun("dlsym").ask("recapture x 1000"), "0", "{has_arbiter}");
    }
}

#[test]
fn each_gpu_has_its_own_share() {
    let container = Container::with_gpus(&[(4096, 20), (4096, 60)], "1,0");
    let mut tenant = container.start("link");
    let mut launched = |device: u32| -> u64 {
        tenant.ask(&format!("on {device}"));
        assert_eq!(tenant.ask("begin"), "0");
        tenant.ask("run sync 1000 1000").parse().unwrap()
    };
    let (of_60, of_20) = (launched(0), launched(1));
    assert!((10..=690).contains(&of_60) && (10..=270).contains(&of_20), "{of_60} for 60 %, {of_20} for 20 %");
}

/// A thread is kept by work that waits for a kernel, and the thread that would launch it waits at the gate.
#[test]
fn work_that_waits_for_other_work_does_not_hang() {
    for has_arbiter in [false, true] {
        let container = Container::with(4096, 10);
        let _arbiter = has_arbiter.then(|| Arbiter::start(&[&container]));
        let mut tenant = container.begun("proc");
        assert_eq!(tenant.ask("depend"), "0", "{has_arbiter}");
    }
}

#[test]
fn a_whole_gpu_is_not_held_back() {
    let count = launched(&Container::with(4096, 100), "proc", "run deep 1000 200");
    assert!(count > 390, "nothing bounds the queue: {count}");
}

/// A share that may grow has all of the GPU while nobody else wants it. What is queued is bounded all the same.
#[test]
fn a_soft_share_alone_gets_the_gpu() {
    let count = launched(&Container::with_ceiling(4096, 50, 100), "proc", "run deep 1000 300");
    // As much as the loaded machine lets it, and no second more than there is.
    assert!((10..=330).contains(&count), "{count}");
}

#[test]
fn captures_are_left_alone_and_graphs_run() {
    for compute_percent in [20, 100] {
        let container = Container::with(4096, compute_percent);
        let mut tenant = container.begun("proc");
        for _ in 0..10 {
            assert_eq!(tenant.ask("capture x 500"), "0 1", "all ten kernels run with the graph");
        }
    }
}

#[test]
fn a_share_changes_while_a_program_runs() {
    let container = Container::with(4096, 10);
    let mut tenant = container.begun("link");
    tenant.ask("run sync 1000 500");
    container.limit(4096, 100);
    // Noticed within a second; after that nothing bounds the queue.
    tenant.ask("run sync 1000 1200");
    let count: u64 = tenant.ask("run deep 1000 200").parse().unwrap();
    assert!(count > 390, "{count}");
}

/// Two containers on one GPU under an arbiter, which dies and comes back meanwhile.
#[test]
fn tenants_of_an_arbiter_go_on_through_its_restart() {
    let one = Container::with(4096, 30);
    let two = Container::beside(&one, 4096, 60);
    let mut tenants = [one.begun("proc"), two.begun("link")];
    let arbiter = Arbiter::start(&[&one, &two]);
    let mut count = |command: &str| -> Vec<u64> {
        tenants.iter_mut().for_each(|tenant| tenant.tell(command));
        tenants.iter_mut().map(|tenant| tenant.answer().parse().unwrap()).collect()
    };
    let with = count("run sync 500 1500");
    drop(arbiter);
    let without = count("run sync 500 1500");
    let _arbiter = Arbiter::start(&[&one, &two]);
    let again = count("run sync 500 1500");
    for counts in [&with, &without, &again] {
        assert!(counts.iter().all(|&count| count > 0), "{with:?} {without:?} {again:?}");
        // 30 % and 60 % of 1.5 s, with as much again for windows that lie across the ends.
        assert!(counts[0] <= 1_100 && counts[1] <= 2_200, "{with:?} {without:?} {again:?}");
    }
    println!("30/60: with an arbiter {with:?}, without {without:?}, again {again:?} kernels of 0.5 ms");
}

/// What measures on a real GPU measures here, too, with the library and without.
#[test]
fn the_measuring_program_runs() {
    let container = Container::with_ceiling(4096, 50, 100);
    let _arbiter = Arbiter::start(&[&container]);
    let Built { library, work, .. } = Built::get();
    for (kind, seconds, answer) in [
        ("launch", "1", "ns least"),
        ("alloc", "1", "ns least"),
        ("graphs", "1", "ns least"),
        ("request", "0.2", "ms p50"),
    ] {
        for library in [None, Some(library.as_path())] {
            let run = container.program(work, library).args([kind, seconds]).output().unwrap();
            let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
            assert!(run.status.success() && err.is_empty(), "{kind}: {err}");
            assert!(out.starts_with(&format!("{kind} {answer}")), "{kind}: {out}");
        }
    }
}
