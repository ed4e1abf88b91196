//! Windows under an arbiter: which launches wait for a window, what the library reports to the
//! arbiter, and which time it charges.

use std::process::Command;
use std::time::Duration;

use tessera_limits::{files, futex};

use crate::support::{Arbiter, Container, Tenant, until, write_at};

/// A program that pauses releases its window. Its next launch waits for another window, because
/// another container may be using the GPU.
#[test]
fn work_after_a_pause_waits_for_a_window() {
    let container = Container::with(4096, 50);
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("dlsym");
    let mut account = container.account();
    for round in 0..10 {
        until(|| account.want() == 0);
        let before = account.waits();
        assert_ne!(tenant.ask("run sync 10 1"), "0");
        assert!(account.waits() > before, "round {round}: nobody waited");
    }
}

/// The library charges no time for a pause, even if many threads reach the gate while the monitor
/// thread polls.
#[test]
fn pauses_are_not_charged() {
    let container = Container::with(4096, 50);
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("proc");
    let mut account = container.account();
    // Pauses shorter than this number of nanoseconds count as part of the work.
    let gap = 1_000_000;
    for round in 0..600 {
        until(|| account.want() == 0);
        let (before, begin) = (account.busy(), futex::now());
        std::thread::sleep(Duration::from_millis(2));
        let pause = futex::now() - begin;
        assert!(tenant.ask("threads 16 1 0").ends_with(" 0"));
        until(|| account.want() == 0);
        let (busy, passed) = (account.busy() - before, futex::now() - begin);
        assert!(
            busy <= passed - pause + gap,
            "round {round}: {busy} ns busy in {passed}, {pause} of it a pause"
        );
    }
}

/// The monitor thread notices the end of work with a delay. Requests of 0.1 ms are not charged for
/// that delay.
#[test]
fn short_requests_are_not_charged_for_late_polls() {
    let container = Container::with(4096, 90);
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("dlsym");
    let begin = futex::now();
    for _ in 0..300 {
        assert_eq!(tenant.ask("threads 1 10 0"), "10 0");
        std::thread::sleep(Duration::from_millis(3));
    }
    let mut account = container.account();
    let percent = account.busy() as f64 * 100.0 / (futex::now() - begin) as f64;
    println!("requests of 0.1 ms with pauses of 3 ms: {percent:.1} % of the time is charged");
    assert!(percent < 20.0, "{percent:.1} %");
}

/// After a program has destroyed a stream during a capture, the monitor thread still polls for the
/// end of later work.
#[test]
fn the_end_of_work_after_an_abandoned_capture_is_noticed() {
    let container = Container::with(4096, 50);
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("link");
    assert_eq!(tenant.ask("abandon"), "0");
    assert_eq!(tenant.ask("threads 1 10 0"), "10 0");
    let mut account = container.account();
    let ends = (0..2_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        account.want() == 0
    });
    assert!(ends);
}

/// During a capture the library records no fence behind earlier work. It notices the end of that
/// work all the same.
#[test]
fn the_end_of_work_before_a_long_capture_is_noticed() {
    for has_arbiter in [true, false] {
        let container = Container::with(4096, 50);
        let _arbiter = has_arbiter.then(|| Arbiter::start(&[&container]));
        let mut tenant = container.begun("dlsym");
        // These launches make the cost known. Work of such a low cost gets no fence at once.
        assert_eq!(tenant.ask("threads 1 10 0"), "10 0");
        let mut account = container.account();
        until(|| account.want() == 0);
        assert_eq!(tenant.ask("linger x 10"), "0");
        std::thread::sleep(Duration::from_millis(1_500));
        assert_eq!(account.want(), 0, "it has long ended");
        let before = account.busy();
        assert_eq!(tenant.ask("hurry x 10"), "0");
        until(|| account.busy() > before);
        let charged = account.busy() - before;
        assert!(charged < 1_000_000_000, "{charged} ns are charged for nothing, {has_arbiter}");
    }
}

/// A process whose work ended after the arbiter died does not request a window from the next
/// arbiter.
#[test]
fn demand_ends_with_the_work_after_the_arbiter_died() {
    let container = Container::with(4096, 50);
    let arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("link");
    let mut account = container.account();
    tenant.tell("run sync 500 2000");
    until(|| account.want() == 1);
    drop(arbiter);
    tenant.answer();
    // The monitor thread may sleep for a second.
    let forgets = (0..3_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        account.want() != 1
    });
    assert!(forgets);
}

/// A program that works while its limit is lifted is not charged for that time afterwards.
#[test]
fn time_without_a_limit_is_not_charged() {
    let container = Container::with(4096, 50);
    let mut tenant = container.begun("dlsym");
    let mut account = container.account();
    tenant.tell("threads 1 100 6000");
    until(|| account.busy() > 0);
    container.limit(4096, 100);
    std::thread::sleep(Duration::from_millis(3_000));
    let before = account.busy();
    container.limit(4096, 50);
    until(|| account.busy() > before);
    let charged = account.busy() - before;
    assert!(charged < 1_000_000_000, "{charged} ns at the first look");
    tenant.answer();
}

/// A process that was stopped, as a paused container is, did not use the GPU in that time.
#[test]
fn time_of_a_stopped_process_is_not_charged() {
    let container = Container::with(4096, 50);
    let mut tenant = container.begun("proc");
    let mut account = container.account();
    let signal = |name: &str, tenant: &Tenant| {
        let process = tenant.child.id().to_string();
        assert!(Command::new("kill").args([name, &process]).status().unwrap().success());
    };
    tenant.tell("threads 3 200 6000");
    for round in 0..5 {
        std::thread::sleep(Duration::from_millis(100 + round));
        signal("-STOP", &tenant);
        let before = account.busy();
        std::thread::sleep(Duration::from_millis(1_000));
        signal("-CONT", &tenant);
        until(|| account.busy() > before);
        let charged = account.busy() - before;
        assert!(charged < 500_000_000, "{charged} ns at the first look");
    }
}

/// The arbiter has its own account and lets a container catch up on time that others kept from it.
/// The library's account does not know of that, and may be far ahead when the arbiter dies.
#[test]
fn debt_from_the_time_of_an_arbiter_ends_when_it_dies() {
    let container = Container::with(4096, 50);
    let arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("link");
    let mut account = container.account();
    tenant.tell("threads 1 500 4000");
    until(|| account.busy() > 0);
    let in_an_hour = futex::now() + 3_600_000_000_000;
    write_at(&files::account_path(&container.grant()), ACCOUNT, &in_an_hour.to_ne_bytes());
    drop(arbiter);
    // The library notices the missing heartbeat only after this time.
    std::thread::sleep(Duration::from_millis(1_000));
    let before = account.busy();
    let goes_on = (0..2_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        account.busy() > before
    });
    assert!(goes_on);
}

/// Byte offset of the first GPU's account in the account file.
const ACCOUNT: u64 = 24;

/// While work on one GPU waits for a window, work on another GPU starts without a delay.
#[test]
fn work_does_not_wait_for_the_window_of_another_gpu() {
    let container = Container::with_gpus(&[(4096, 10), (4096, 50)], "0,1");
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.start("proc");
    let answer = tenant.ask("gpus x 1000 1000");
    let (count, status) = answer.split_once(' ').unwrap();
    assert_eq!(status, "0");
    println!("{count} requests in a second beside a GPU that waits most of the time");
    // With a common wait, nine of ten requests would wait for up to 100 ms.
    assert!(count.parse::<u64>().unwrap() > 60, "{count}");
}
