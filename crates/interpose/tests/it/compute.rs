//! Launches through the real library. The shares themselves are tested on virtual time in the crate
//! `throttle`. These tests check the wiring by what the simulated driver and the account file counted:
//! the library held launches back, charged the container, and lost no work.

use crate::support::{Arbiter, Built, Container, until};

/// Runs 100 kernels of 1 ms, or transfers of that length. Asserts that launches were held back, and that the
/// work was charged to the container.
fn assert_limited(container: &Container, entry: &str, way: &str) {
    let mut tenant = container.begun(entry);
    assert_eq!(tenant.ask(&format!("run {way} 1000 100")), "0", "{entry} {way}");
    let mut account = container.account();
    assert_ne!(account.waits(), 0, "{entry} {way}");
    assert_eq!(container.work_ns(), 100_000_000, "{entry} {way}");
    until(|| account.busy_ns() > 0);
    assert_eq!(tenant.end(), "");
}

#[test]
fn launches_are_limited_through_every_entry_point() {
    for entry in ["link", "dlsym", "proc", "default", "next"] {
        for way in ["sync", "deep"] {
            assert_limited(&Container::with(4096, 20), entry, way);
        }
    }
}

/// Copies, fills, per-thread streams, and streams that are destroyed while they work.
#[test]
fn all_kinds_of_work_are_limited() {
    let ways =
        ["up", "own-up", "down", "within", "any-later", "up-later", "own-up-later", "peer-later", "2d"];
    let ways = ways.iter().chain(&["batch-later", "fill", "fill-later", "own", "churn"]);
    for (way, entry) in ways.zip(["link", "dlsym", "proc"].into_iter().cycle()) {
        assert_limited(&Container::with(4096, 20), entry, way);
    }
}

/// The next tenant waits until queued work has ended. Beside one that comes again and again the queue is short, even
/// where a program creates a stream for each kernel.
#[test]
fn little_is_queued_beside_a_container_that_comes_and_goes() {
    // Many streams together may queue four times as much.
    for (way, bound) in
        [("kernel", 5_000_000), ("churn", 12_000_000), ("own", 5_000_000), ("fill-later", 5_000_000)]
    {
        let (container, other) = (Container::with(4096, 80), Container::with(4096, 10));
        let _arbiter = Arbiter::start(&[&container, &other]);
        let mut comer = other.begun("dlsym");
        assert_eq!(comer.ask("run sync 200 1"), "0");
        let mut stayer = container.begun("dlsym");
        stayer.tell(&format!("run {way} 200 1000"));
        for _ in 0..5 {
            assert_eq!(comer.ask("run sync 200 1"), "0");
        }
        assert_eq!(stayer.answer(), "0");
        let most = container.longest_queue_ns();
        println!("{way}: {most} ns of work at most");
        assert!(most < bound, "{way}: {most} ns of work at most");
    }
}

/// A program alone may be ahead of the GPU, but not without a bound: the limit may change.
#[test]
fn a_container_alone_queues_more() {
    // Many streams together may queue four times as much. On a busy machine they do, before the first ones are polled.
    for (way, bound) in
        [("kernel", 40_000_000), ("churn", 100_000_000), ("own", 40_000_000), ("fill-later", 40_000_000)]
    {
        let container = Container::with(4096, 90);
        let _arbiter = Arbiter::start(&[&container]);
        assert_eq!(container.begun("dlsym").ask(&format!("run {way} 200 1000")), "0");
        let most = container.longest_queue_ns();
        println!("{way}: {most} ns of work at most");
        assert!((8_000_000..bound).contains(&most), "{way}: {most} ns of work at most");
    }
}

/// The cost of a destroyed graph is not used for another graph at the same address.
#[test]
fn little_is_queued_of_a_graph_in_the_place_of_a_short_one() {
    let container = Container::with(4096, 90);
    assert_eq!(container.begun("dlsym").ask("regraph x 5000 100"), "0");
    let most = container.longest_queue_ns();
    println!("{most} ns of work at most");
    // Work of unknown cost is taken for 0.5 ms, and five such graphs are queued before the first has ended.
    // With the cost of the short graph all hundred would be, which is 500 ms.
    assert!(most < 50_000_000, "{most} ns of work at most");
}

/// Two processes of one container charge one account, without an arbiter.
#[test]
fn processes_of_one_container_share_its_time() {
    let container = Container::with(4096, 40);
    let mut tenants = [container.begun("proc"), container.begun("link")];
    tenants.iter_mut().for_each(|tenant| tenant.tell("run sync 500 200"));
    tenants.iter_mut().for_each(|tenant| assert_eq!(tenant.answer(), "0"));
    let mut account = container.account();
    assert_ne!(account.waits(), 0);
    assert_eq!(container.work_ns(), 2 * 100_000_000);
    until(|| account.busy_ns() > 0);
}

/// The simulated driver aborts when the library uses anything of a destroyed context.
#[test]
fn contexts_come_and_go_while_they_work() {
    let mut tenant = Container::with(8192, 20).begun("dlsym");
    assert_eq!(tenant.ask("contexts x 1000 20"), "0");
    assert_eq!(tenant.end(), "");
}

/// The monitor thread polls events all the while. Outside the relaxed mode that would invalidate captures.
#[test]
fn captures_beside_launches_are_not_disturbed() {
    let mut tenant = Container::with(4096, 50).begun("proc");
    assert_eq!(tenant.ask("beside x 300 300"), "0 0");
}

/// Work launched before a capture in the same stream has no fence yet. The monitor thread must not record
/// one into the capture.
#[test]
fn a_capture_that_follows_work_is_not_disturbed() {
    let container = Container::with(4096, 50);
    for has_arbiter in [false, true] {
        let _arbiter = has_arbiter.then(|| Arbiter::start(&[&container]));
        assert_eq!(container.begun("dlsym").ask("recapture x 1000"), "0", "{has_arbiter}");
    }
}

/// The container may use one GPU without a limit, and the other one for a fifth of the time.
#[test]
fn each_gpu_has_its_own_share() {
    let container = Container::with_gpus(&[(4096, 20), (4096, 100)], "1,0");
    let mut tenant = container.start("link");
    let mut account = container.account();
    for (device, is_limited) in [(0, false), (1, true)] {
        tenant.ask(&format!("on {device}"));
        assert_eq!(tenant.ask("begin"), "0");
        assert_eq!(tenant.ask("run deep 1000 100"), "0");
        assert_eq!(account.waits() > 0, is_limited, "device {device}");
    }
}

/// One thread is blocked by work that depends on a kernel, and the thread that launches that kernel waits at
/// the gate.
#[test]
fn work_that_waits_for_other_work_does_not_hang() {
    for has_arbiter in [false, true] {
        let container = Container::with(4096, 10);
        let _arbiter = has_arbiter.then(|| Arbiter::start(&[&container]));
        let mut tenant = container.begun("proc");
        assert_eq!(tenant.ask("depend"), "0");
        // The blocked work has used up the window of 20 ms by then.
        let mut account = container.account();
        until(|| account.busy_ns() > 20_000_000);
        assert_eq!(tenant.ask("release"), "0", "{has_arbiter}");
    }
}

#[test]
fn a_whole_gpu_is_not_held_back() {
    let container = Container::with(4096, 100);
    let mut tenant = container.begun("proc");
    assert_eq!(tenant.ask("run deep 1000 100"), "0");
    assert_eq!(container.account().waits(), 0);
}

/// A soft share may use the whole GPU while no other tenant wants it. Its queue is bounded all the same.
#[test]
fn the_queue_of_a_soft_share_is_bounded() {
    let container = Container::with_ceiling(4096, 50, 100);
    let mut tenant = container.begun("proc");
    assert_eq!(tenant.ask("run deep 1000 100"), "0");
    assert_ne!(container.account().waits(), 0);
}

#[test]
fn captures_are_left_alone_and_graphs_run() {
    for compute_percent in [20, 100] {
        let container = Container::with(4096, compute_percent);
        let mut tenant = container.begun("proc");
        for round in 1..=10 {
            assert_eq!(tenant.ask("capture x 500"), "0");
            assert_eq!(container.work_ns(), round * 5_000_000, "all ten kernels run with the graph");
        }
    }
}

#[test]
fn a_share_changes_while_a_program_runs() {
    let container = Container::with(4096, 10);
    let mut tenant = container.begun("link");
    let mut account = container.account();
    let mut waits_in_a_run = || {
        let before = account.waits();
        assert_eq!(tenant.ask("run deep 1000 50"), "0");
        account.waits() - before
    };
    assert_ne!(waits_in_a_run(), 0);
    container.limit(4096, 100);
    // The monitor thread has not read the new limits yet. From then on no launch waits.
    until(|| waits_in_a_run() == 0);
    container.limit(4096, 10);
    until(|| waits_in_a_run() > 0);
}

/// Two containers share a GPU under an arbiter that is killed and started again.
#[test]
fn tenants_of_an_arbiter_go_on_through_its_restart() {
    let one = Container::with(4096, 30);
    let two = Container::beside(&one, 4096, 60);
    let mut tenants = [one.begun("proc"), two.begun("link")];
    let mut run = || {
        tenants.iter_mut().for_each(|tenant| tenant.tell("run sync 500 400"));
        tenants.iter_mut().for_each(|tenant| assert_eq!(tenant.answer(), "0"));
    };
    let arbiter = Arbiter::start(&[&one, &two]);
    run();
    drop(arbiter);
    run();
    let _arbiter = Arbiter::start(&[&one, &two]);
    run();
    assert_eq!(one.work_ns(), 3 * 2 * 200_000_000);
}

/// The program that measures on a real GPU runs on the simulated one, with the library and without.
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
