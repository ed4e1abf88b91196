//! Windows under an arbiter: who waits for one, what is told, what is charged.

use std::process::Command;
use std::time::Duration;

use tessera_limits::{files, futex};

use crate::support::{Arbiter, Container, Tenant, until, write_at};

/// A program that pauses gives its window back: what it launches then waits for another one, as somebody else may have the GPU.
#[test]
fn what_comes_after_a_pause_waits_for_a_window() {
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

/// A pause is nobody's time, also where many come to the gate while our own thread looks.
#[test]
fn pauses_are_not_charged() {
    let container = Container::with(4096, 50);
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("proc");
    let mut account = container.account();
    // What comes within this of an end belongs to the work.
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

/// The end of work is seen some time after it: requests of 0.1 ms are not charged for that.
#[test]
fn short_requests_are_not_charged_for_our_looking_late() {
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

/// A capture that is given up with its stream is no reason never to look for the end of work again.
#[test]
fn work_beside_a_capture_that_was_given_up_has_an_end() {
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

/// While a capture runs no fence is put behind what was launched before. That has an end all the same.
#[test]
fn work_before_a_long_capture_has_an_end() {
    for has_arbiter in [true, false] {
        let container = Container::with(4096, 50);
        let _arbiter = has_arbiter.then(|| Arbiter::start(&[&container]));
        let mut tenant = container.begun("dlsym");
        // What it costs is known by then: so little gets no fence at once.
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

/// What was wanted of an arbiter that has died is not wanted of the next one.
#[test]
fn what_has_ended_without_an_arbiter_is_no_longer_wanted() {
    let container = Container::with(4096, 50);
    let arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("link");
    let mut account = container.account();
    tenant.tell("run sync 500 2000");
    until(|| account.want() == 1);
    drop(arbiter);
    tenant.answer();
    // Its thread may sleep for a second.
    let forgets = (0..3_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        account.want() != 1
    });
    assert!(forgets);
}

/// A program that works all through a time in which its limit was lifted does not owe that time.
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

/// A process that is stopped, as a whole container may be, has not had the GPU meanwhile.
#[test]
fn time_in_which_a_process_was_stopped_is_not_charged() {
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

/// The arbiter has its own account, and lets a tenant make good what others kept from it. The library's account knows nothing of
/// that, and may be far ahead when the arbiter dies.
#[test]
fn debts_of_an_arbiters_time_end_with_it() {
    let container = Container::with(4096, 50);
    let arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("link");
    let mut account = container.account();
    tenant.tell("threads 1 500 4000");
    until(|| account.busy() > 0);
    let in_an_hour = futex::now() + 3_600_000_000_000;
    write_at(&files::account_path(&container.grant()), ACCOUNT, &in_an_hour.to_ne_bytes());
    drop(arbiter);
    // It is not missed before.
    std::thread::sleep(Duration::from_millis(1_000));
    let before = account.busy();
    let goes_on = (0..2_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        account.busy() > before
    });
    assert!(goes_on);
}

/// Where the account of the first GPU lies in its file.
const ACCOUNT: u64 = 24;

/// While work on one GPU waits for a window, requests on another one are heard at once.
#[test]
fn a_gpu_does_not_wait_for_another_ones_window() {
    let container = Container::with_gpus(&[(4096, 10), (4096, 50)], "0,1");
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.start("proc");
    let answer = tenant.ask("gpus x 1000 1000");
    let (count, status) = answer.split_once(' ').unwrap();
    assert_eq!(status, "0");
    println!("{count} requests in a second beside a GPU that waits most of the time");
    // Each would wait for up to 100 ms, nine times in ten.
    assert!(count.parse::<u64>().unwrap() > 60, "{count}");
}
