//! Windows under an arbiter: which launches wait for a window, what the library reports to the
//! arbiter, and which time it charges. How much time it charges is tested on virtual time in the crate
//! `throttle`.

use tessera_limits::{GpuSlot, files, futex};

use crate::support::{Arbiter, Container, ManualArbiter, until, write_at};

const GPU: GpuSlot = GpuSlot::FIRST;

/// Pauses in nanoseconds that are shorter than this count as work.
const SHORT_PAUSE_NS: u64 = 1_000_000;

#[test]
fn launches_wait_until_the_window_opens() {
    let container = Container::with(4096, 50);
    let arbiter = ManualArbiter::start(&container);
    let mut tenant = container.begun("link");
    let mut account = container.account();
    tenant.tell("run sync 100 10");
    until(|| account.want() == 1);
    assert_eq!(container.work_ns(), 0, "nothing was launched");
    arbiter.serve(GPU, &mut account, || container.work_ns() == 1_000_000);
    assert_eq!(tenant.answer(), "0");
}

/// Another container gets the GPU as soon as the window is reported as drained, so nothing may be launched
/// from then on.
#[test]
fn nothing_is_launched_after_a_closed_window_is_drained() {
    let container = Container::with(4096, 50);
    let arbiter = ManualArbiter::start(&container);
    let mut tenant = container.begun("dlsym");
    let mut account = container.account();
    tenant.tell("threads 3 200 100");
    for round in 0..20 {
        let before = container.work_ns();
        arbiter.serve(GPU, &mut account, || container.work_ns() > before);
        arbiter.close(GPU, &mut account);
        let launched = container.work_ns();
        // All three threads reach the gate, if they have not yet.
        until(|| account.want() == 1);
        assert_eq!(container.work_ns(), launched, "round {round}");
    }
    arbiter.serve(GPU, &mut account, || container.work_ns() == 3000 * 200_000);
    assert_eq!(tenant.answer(), "3000 0");
}

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
        assert_eq!(tenant.ask("run sync 10 10"), "0");
        assert!(account.waits() > before, "round {round}: no launch waited");
    }
}

/// The library charges no time for a pause, even if many threads reach the gate while the monitor
/// thread polls. All charged time is between the begin of the work and the report of its end, or is a
/// short pause before it.
#[test]
fn pauses_are_not_charged() {
    let container = Container::with(4096, 50);
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("proc");
    let mut account = container.account();
    for round in 0..200 {
        until(|| account.want() == 0);
        let (before, begin) = (account.busy_ns(), futex::now());
        assert_eq!(tenant.ask("threads 16 1 1"), "160 0");
        until(|| account.want() == 0);
        let (charged, passed) = (account.busy_ns() - before, futex::now() - begin);
        assert!(charged <= passed + SHORT_PAUSE_NS, "round {round}: {charged} ns charged in {passed}");
    }
}

/// After a program has destroyed a stream during a capture, the monitor thread still polls for the
/// end of later work.
#[test]
fn the_end_of_work_after_an_abandoned_capture_is_noticed() {
    let container = Container::with(4096, 50);
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("link");
    assert_eq!(tenant.ask("abandon"), "0");
    assert_eq!(tenant.ask("threads 1 10 1"), "10 0");
    let mut account = container.account();
    until(|| account.want() == 0);
}

/// During a capture the library records no fence behind earlier work. It notices the end of that
/// work all the same.
#[test]
fn the_end_of_work_before_a_long_capture_is_noticed() {
    let container = Container::with(4096, 50);
    let _arbiter = Arbiter::start(&[&container]);
    let mut tenant = container.begun("dlsym");
    // These launches make the cost known. Work of such a low cost gets no fence at once.
    assert_eq!(tenant.ask("threads 1 10 1"), "10 0");
    let mut account = container.account();
    until(|| account.want() == 0);
    assert_eq!(tenant.ask("linger x 10"), "0");
    until(|| account.want() == 0);
    assert_eq!(tenant.ask("hurry x 10"), "0");
    until(|| account.want() == 0);
}

/// A process whose work ended after the arbiter died does not request a window from the next
/// arbiter.
#[test]
fn demand_ends_with_the_work_after_the_arbiter_died() {
    let container = Container::with(4096, 50);
    let arbiter = ManualArbiter::start(&container);
    let mut tenant = container.begun("link");
    let mut account = container.account();
    tenant.tell("threads 1 500 50");
    arbiter.serve(GPU, &mut account, || container.work_ns() > 0);
    arbiter.stop();
    assert_eq!(tenant.answer(), "500 0");
    until(|| account.want() == 0);
}

/// The arbiter has its own account and lets a container catch up on time that others kept from it.
/// The library's account does not know of that, and may be far ahead when the arbiter dies.
#[test]
fn debt_from_the_time_of_an_arbiter_ends_when_it_dies() {
    let container = Container::with(4096, 50);
    let arbiter = ManualArbiter::start(&container);
    let mut tenant = container.begun("link");
    let mut account = container.account();
    tenant.tell("threads 1 500 100000");
    arbiter.serve(GPU, &mut account, || container.work_ns() > 0);
    let in_an_hour = futex::now() + 3_600_000_000_000;
    write_at(&files::account_path(&container.grant()), ACCOUNT, &in_an_hour.to_ne_bytes());
    arbiter.stop();
    // The library has noticed the death when it withdraws its demand. Work goes on from then on.
    until(|| account.want() == 0);
    let before = container.work_ns();
    until(|| container.work_ns() > before);
    tenant.child.kill().unwrap();
}

/// Byte offset of the first GPU's account in the account file.
const ACCOUNT: u64 = 24;

/// While work on one GPU waits for a window, work on another GPU goes on.
#[test]
fn work_does_not_wait_for_the_window_of_another_gpu() {
    let container = Container::with_gpus(&[(4096, 10), (4096, 50)], "0,1");
    let arbiter = ManualArbiter::start(&container);
    let second = GpuSlot::all().nth(1).unwrap();
    let mut tenant = container.start("proc");
    let mut account = container.account();
    tenant.tell("gpus x 100 50");
    arbiter.serve(second, &mut account, || container.work_of_second_gpu_ns() == 50 * 100_000);
    assert_eq!(tenant.answer(), "0", "copies to the second GPU have ended");
    assert_eq!(container.work_ns(), 0, "the first GPU has got nothing");
    tenant.tell("join");
    arbiter.serve(GPU, &mut account, || container.work_ns() == 10 * 100_000);
    assert_eq!(tenant.answer(), "0");
}
