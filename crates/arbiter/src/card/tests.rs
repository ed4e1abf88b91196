use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;
const STEP: u64 = MS / 2;

/// A tenant of the simulation: wants by its own rule, drains its kernel after the window.
struct Program {
    kernel: u64,
    wants: fn(u64) -> bool,
    deadline: u64,
    /// Until when its last kernel runs.
    runs_until: u64,
}

impl Program {
    fn always(kernel: u64) -> Self {
        Self { kernel, wants: |_| true, deadline: 0, runs_until: 0 }
    }
}

/// Runs programs under an arbiter; the nanoseconds each had the card.
fn run(shares: &[Share], programs: &mut [Program], length: u64) -> Vec<u64> {
    let mut arbiter = CardArbiter::default();
    for (id, &share) in shares.iter().enumerate() {
        arbiter.set(id, share);
    }
    let mut had = vec![0; shares.len()];
    let mut now = 1_000 * MS;
    let end = now + length;
    while now < end {
        let seen: HashMap<usize, Seen> = programs
            .iter()
            .enumerate()
            .map(|(id, it)| {
                (
                    id,
                    Seen { wants: (it.wants)(now) || it.runs_until > now, has_drained: it.runs_until <= now },
                )
            })
            .collect();
        for act in arbiter.step(now, |id| seen[&id]) {
            match act {
                Act::Open { tenant, deadline } | Act::Move { tenant, deadline } => {
                    programs[tenant].deadline = deadline
                }
            }
        }
        for (id, program) in programs.iter_mut().enumerate() {
            // Kernels begin while the window is open and run to their end.
            while program.deadline > now && program.runs_until < now + STEP && (program.wants)(now) {
                program.runs_until = program.runs_until.max(now) + program.kernel;
                had[id] += program.kernel;
            }
        }
        now += STEP;
    }
    had
}

fn hard(cores: u32) -> Share {
    Share { cores, ceiling: cores, by_throughput: false }
}

fn soft(cores: u32) -> Share {
    Share { cores, ceiling: 100, by_throughput: false }
}

fn points(had: u64, length: u64) -> f64 {
    had as f64 * 100.0 / length as f64
}

proptest! {
    #[test]
    fn hard_shares_hold(shares in proptest::collection::vec(5..40u32, 1..4), kernel in MS / 20..15 * MS) {
        prop_assume!(shares.iter().sum::<u32>() <= 95);
        let length = 10_000 * MS;
        let all: Vec<_> = shares.iter().map(|&share| hard(share)).collect();
        let mut programs: Vec<_> = shares.iter().map(|_| Program::always(kernel)).collect();
        for (had, share) in run(&all, &mut programs, length).into_iter().zip(shares) {
            prop_assert!((points(had, length) - f64::from(share)).abs() < 2.0, "{} for {share}", points(had, length));
        }
    }

    #[test]
    fn soft_shares_divide_the_whole_card(one in 10..50u32, other in 10..50u32) {
        let length = 5_000 * MS;
        let mut programs = [Program::always(MS / 10), Program::always(MS / 10)];
        let had = run(&[soft(one), soft(other)], &mut programs, length);
        let sum = points(had[0] + had[1], length);
        let part = points(had[0], had[0] + had[1]);
        prop_assert!(sum > 94.0, "{sum} used");
        prop_assert!((part - points(u64::from(one), u64::from(one + other))).abs() < 2.0, "{part} of the card for {one}:{other}");
    }
}

#[test]
fn unlike_tenants_get_equal_time_for_equal_shares() {
    let length = 10_000 * MS;
    let had = run(&[hard(30), hard(60)], &mut [Program::always(12 * MS), Program::always(MS / 20)], length);
    assert!((points(had[0], length) - 30.0).abs() < 2.0, "{had:?}");
    assert!((points(had[1], length) - 60.0).abs() < 2.0, "{had:?}");
}

#[test]
fn memory_grants_use_what_is_left() {
    let length = 5_000 * MS;
    let free = Share { cores: 0, ceiling: 100, by_throughput: false };
    let had = run(&[hard(60), free], &mut [Program::always(MS / 10), Program::always(MS / 10)], length);
    assert!((points(had[0], length) - 60.0).abs() < 2.0, "{had:?}");
    assert!(points(had[1], length) > 30.0, "{had:?}");
}

#[test]
fn one_alone_with_a_soft_share_has_the_card() {
    let length = 2_000 * MS;
    let had = run(&[soft(30)], &mut [Program::always(MS / 10)], length);
    assert!(points(had[0], length) > 98.0, "{had:?}");
}

#[test]
fn a_returning_tenant_is_served_at_once_but_gets_nothing_for_its_absence() {
    let mut arbiter = CardArbiter::default();
    arbiter.set("hog", soft(60));
    arbiter.set("guest", soft(30));
    let (mut now, mut deadline) = (1_000 * MS, 0);
    let wants = |guest: bool| move |id: &str| Seen { wants: guest || id == "hog", has_drained: true };
    for _ in 0..1_000 {
        for act in arbiter.step(now, wants(false)) {
            let (Act::Open { deadline: end, .. } | Act::Move { deadline: end, .. }) = act;
            deadline = end;
        }
        now += STEP;
    }
    assert!(deadline > now, "the hog goes on");
    let begin = now;
    while !arbiter.step(now, wants(true)).iter().any(|act| matches!(act, Act::Open { tenant: "guest", .. })) {
        now += STEP;
        assert!(now < begin + 5 * MS, "the window is cut for the guest");
    }
}

#[test]
fn the_window_of_the_dead_is_taken_back() {
    let mut arbiter = CardArbiter::default();
    arbiter.set(1, hard(50));
    arbiter.set(2, hard(50));
    let all = |_| Seen { wants: true, has_drained: false };
    assert_eq!(arbiter.step(0, all).len(), 1);
    arbiter.remove(1);
    assert!(matches!(arbiter.step(MS, all)[..], [Act::Open { tenant: 2, .. }]));
}

#[test]
fn a_tenant_that_never_drains_does_not_stop_the_others() {
    let mut arbiter = CardArbiter::default();
    arbiter.set(1, hard(50));
    arbiter.set(2, hard(50));
    let stuck = |id| Seen { wants: true, has_drained: id == 2 };
    arbiter.step(0, stuck);
    let served = (1..2_000).any(|step| {
        arbiter.step(step * STEP, stuck).iter().any(|act| matches!(act, Act::Open { tenant: 2, .. }))
    });
    assert!(served);
}
