use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;
const STEP: u64 = MS / 2;
const TENTH: u64 = MS / 10;

/// A tenant of the simulation: wants by its own rule, drains its kernel after the window.
struct Program {
    kernel: u64,
    wants: fn(u64) -> bool,
    /// How long news takes to it, and from it.
    late: u64,
    deadline: u64,
    /// When it hears of its window.
    hears: u64,
    /// Until when its last kernel runs.
    runs_until: u64,
}

impl Program {
    fn always(kernel: u64) -> Self {
        Self { kernel, wants: |_| true, late: 0, deadline: 0, hears: 0, runs_until: 0 }
    }

    fn late(self, late: u64) -> Self {
        Self { late, ..self }
    }
}

/// Runs programs under an arbiter; the nanoseconds each had the GPU.
fn run(shares: &[Share], programs: &mut [Program], length: u64) -> Vec<u64> {
    let step = if programs.iter().any(|program| program.late > 0) { TENTH } else { STEP };
    let mut arbiter = GpuArbiter::default();
    for (id, &share) in shares.iter().enumerate() {
        arbiter.set(id, share);
    }
    let mut had = vec![0; shares.len()];
    let mut now = 1_000 * MS;
    let end = now + length;
    while now < end {
        let seen: HashMap<usize, TenantReport> = programs
            .iter()
            .enumerate()
            .map(|(id, it)| {
                let wanting = u32::from((it.wants)(now) || it.runs_until > now);
                let has_drained = it.deadline <= now && it.runs_until + it.late <= now;
                let drained = u32::from(has_drained) * wanting;
                (id, TenantReport { wanting, drained, busy_ns: had[id] - it.runs_until.saturating_sub(now) })
            })
            .collect();
        for act in arbiter.step(now, |id| seen[&id]) {
            match act {
                WindowAction::Open { tenant, deadline } => {
                    let program = &mut programs[tenant];
                    (program.deadline, program.hears) = (deadline, now + program.late);
                }
                WindowAction::SetDeadline { tenant, deadline } => programs[tenant].deadline = deadline,
            }
        }
        for (id, program) in programs.iter_mut().enumerate() {
            // Kernels begin while the window is open and run to their end.
            let is_open = program.hears <= now && program.deadline > now;
            while is_open && program.runs_until < now + step && (program.wants)(now) {
                program.runs_until = program.runs_until.max(now) + program.kernel;
                had[id] += program.kernel;
            }
        }
        now += step;
    }
    had
}

fn hard(compute_percent: u32) -> Share {
    Share { compute_percent, compute_ceiling_percent: compute_percent, by_throughput: false }
}

fn soft(compute_percent: u32) -> Share {
    Share { compute_percent, compute_ceiling_percent: 100, by_throughput: false }
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
    fn hard_shares_hold_however_long_a_switch_takes(one in 20..50u32, kernel in MS / 20..2 * MS, late in 0..8u64) {
        let (length, other) = (5_000 * MS, 90 - one);
        let mut programs = [one, other].map(|_| Program::always(kernel).late(late * TENTH));
        let had = run(&[hard(one), hard(other)], &mut programs, length);
        for (had, share) in had.into_iter().zip([one, other]) {
            prop_assert!((points(had, length) - f64::from(share)).abs() < 1.0, "{} for {share}", points(had, length));
        }
    }

    #[test]
    fn soft_shares_divide_the_whole_gpu(one in 10..50u32, other in 10..50u32) {
        let length = 5_000 * MS;
        let mut programs = [Program::always(MS / 10), Program::always(MS / 10)];
        let had = run(&[soft(one), soft(other)], &mut programs, length);
        let sum = points(had[0] + had[1], length);
        let part = points(had[0], had[0] + had[1]);
        prop_assert!(sum > 94.0, "{sum} used");
        prop_assert!((part - points(u64::from(one), u64::from(one + other))).abs() < 2.0, "{part} of the GPU for {one}:{other}");
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
    let free = Share { compute_percent: 0, compute_ceiling_percent: 100, by_throughput: false };
    let had = run(&[hard(60), free], &mut [Program::always(MS / 10), Program::always(MS / 10)], length);
    assert!((points(had[0], length) - 60.0).abs() < 2.0, "{had:?}");
    assert!(points(had[1], length) > 30.0, "{had:?}");
}

#[test]
fn one_alone_with_a_soft_share_has_the_gpu() {
    let length = 2_000 * MS;
    let had = run(&[soft(30)], &mut [Program::always(MS / 10)], length);
    assert!(points(had[0], length) > 98.0, "{had:?}");
}

#[test]
fn a_returning_tenant_is_served_at_once_but_gets_nothing_for_its_absence() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set("hog", soft(60));
    arbiter.set("guest", soft(30));
    let (mut now, mut deadline) = (1_000 * MS, 0);
    let seen = |now, deadline, guest| {
        move |id: &str| TenantReport {
            wanting: u32::from(guest || id == "hog"),
            drained: u32::from(id == "hog" && deadline <= now),
            busy_ns: 0,
        }
    };
    for _ in 0..1_000 {
        for act in arbiter.step(now, seen(now, deadline, false)) {
            let (WindowAction::Open { deadline: end, .. } | WindowAction::SetDeadline { deadline: end, .. }) =
                act;
            deadline = end;
        }
        now += STEP;
    }
    assert!(deadline > now, "the hog goes on");
    let begin = now;
    loop {
        let acts = arbiter.step(now, seen(now, deadline, true));
        if acts.iter().any(|act| matches!(act, WindowAction::Open { tenant: "guest", .. })) {
            break;
        }
        for act in acts {
            let (WindowAction::Open { deadline: end, .. } | WindowAction::SetDeadline { deadline: end, .. }) =
                act;
            deadline = end;
        }
        now += STEP;
        assert!(now < begin + 5 * MS, "the window is cut for the guest");
    }
}

#[test]
fn the_window_of_the_dead_is_taken_back() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, hard(50));
    arbiter.set(2, hard(50));
    let all = |_| TenantReport { wanting: 1, drained: 0, busy_ns: 0 };
    assert_eq!(arbiter.step(0, all).len(), 1);
    arbiter.remove(1);
    assert!(matches!(arbiter.step(MS, all)[..], [WindowAction::Open { tenant: 2, .. }]));
}

#[test]
fn a_tenant_that_never_drains_does_not_stop_the_others() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, hard(50));
    arbiter.set(2, hard(50));
    let stuck = |id| TenantReport { wanting: 1, drained: u32::from(id == 2), busy_ns: 0 };
    arbiter.step(0, stuck);
    let served = (1..2_000).any(|step| {
        arbiter.step(step * STEP, stuck).iter().any(|act| matches!(act, WindowAction::Open { tenant: 2, .. }))
    });
    assert!(served);
}

/// A graph or a copy of a second is one piece of work. It is paid for like many small ones.
#[test]
fn work_that_runs_far_over_its_window_is_paid_for() {
    let length = 60_000 * MS;
    for kernel in [100 * MS, 400 * MS, 1_000 * MS, 4_000 * MS] {
        let alone = run(&[hard(30)], &mut [Program::always(kernel)], length)[0];
        let mut programs = [Program::always(kernel), Program::always(MS / 10)];
        let [long, short] = run(&[hard(30), hard(60)], &mut programs, length)[..] else { panic!() };
        for (had, share) in [(alone, 30.0), (long, 30.0), (short, 60.0)] {
            // One piece may lie across the end.
            let slack = 2.0 + points(kernel, length);
            assert!(
                (points(had, length) - share).abs() < slack,
                "{kernel}: {} of {share}",
                points(had, length)
            );
        }
    }
}

/// What is stuck may wait for work that waits for a window: it gets one, whatever it owes.
#[test]
fn a_tenant_that_never_drains_gets_windows_all_the_same() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, hard(10));
    let (mut opened, mut busy) = (Vec::new(), 0);
    for step in 0..120_000 {
        let now = step * STEP;
        let acts = arbiter.step(now, |_| TenantReport { wanting: 1, drained: 0, busy_ns: busy });
        opened.extend(acts.iter().any(|act| matches!(act, WindowAction::Open { .. })).then_some(now));
        assert!(arbiter.next_step_at(now).is_some_and(|next| next > now), "looks without an end");
        busy += STEP;
    }
    assert!(opened.windows(2).all(|pair| pair[1] - pair[0] < 3_500 * MS) && opened.len() > 15, "{opened:?}");
    // Once it has drained it pays, but not for ever.
    let paid = (120_000..).find(|step| {
        let acts = arbiter.step(step * STEP, |_| TenantReport { wanting: 1, drained: 1, busy_ns: busy });
        acts.iter().any(|act| matches!(act, WindowAction::Open { .. }))
    });
    let owed = paid.unwrap() * STEP - 60_000 * MS;
    assert!((5 * MOST_DEBT..15 * MOST_DEBT).contains(&owed), "{} ms", owed / MS);
}

/// So it does beside one that always wants the GPU, and does not cost that one much of it: a whole container may be paused.
#[test]
fn a_tenant_that_never_drains_goes_on_beside_another_and_costs_it_little() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, soft(50));
    arbiter.set(2, hard(30));
    let (mut open_until, mut had, length) = (0, 0, 30_000 * MS);
    for now in (0..length).step_by(usize::try_from(STEP).unwrap()) {
        let acts = arbiter.step(now, |id| match id {
            1 => TenantReport { wanting: 1, drained: u32::from(open_until <= now), busy_ns: had },
            _ => TenantReport { wanting: 1, drained: 0, busy_ns: 0 },
        });
        for act in acts {
            if let WindowAction::Open { tenant: 1, deadline }
            | WindowAction::SetDeadline { tenant: 1, deadline } = act
            {
                open_until = deadline;
            }
        }
        had += if open_until > now { STEP } else { 0 };
    }
    assert!(arbiter.usage(2).windows >= 9, "{} windows in 30 s", arbiter.usage(2).windows);
    assert!(points(had, length) > 96.0, "{} for the other one", points(had, length));
}

/// What ran over for a minute is paid for, but not for a minute.
#[test]
fn nobody_owes_for_ever_beside_another() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, soft(50));
    arbiter.set(2, soft(30));
    let (mut open_until, mut had, over) = (0, 0, 60_000 * MS);
    let served = (0..).map(|step| step * STEP).find(|&now| {
        let acts = arbiter.step(now, |id| match id {
            1 => TenantReport { wanting: 1, drained: u32::from(open_until <= now), busy_ns: had },
            _ => TenantReport { wanting: 1, drained: u32::from(now >= over), busy_ns: 0 },
        });
        if let Some(
            WindowAction::Open { tenant: 1, deadline } | WindowAction::SetDeadline { tenant: 1, deadline },
        ) = acts.last()
        {
            open_until = *deadline;
        }
        had += if open_until > now { STEP } else { 0 };
        now >= over && acts.iter().any(|act| matches!(act, WindowAction::Open { tenant: 2, .. }))
    });
    let waited = (served.unwrap() - over) / MS;
    assert!((2_000..15_000).contains(&waited), "{waited} ms");
}

/// Whoever says that it was idle all the time gains no more than the longest switch.
#[test]
fn a_tenant_that_denies_its_work_gains_little() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, hard(50));
    let (mut had, mut deadline, length) = (0, 0, 5_000 * MS);
    for step in 1..length / STEP {
        let now = step * STEP;
        for act in arbiter.step(now, |_| TenantReport {
            wanting: 1,
            drained: u32::from(deadline <= now),
            busy_ns: 0,
        }) {
            let (WindowAction::Open { deadline: end, .. } | WindowAction::SetDeadline { deadline: end, .. }) =
                act;
            deadline = end;
        }
        had += if deadline > now { STEP } else { 0 };
    }
    assert!((50.0..56.0).contains(&points(had, length)), "{}", points(had, length));
}

/// Requests cut the windows of a hog, which has its share all the same.
#[test]
fn a_hog_beside_requests_gets_its_share() {
    let length = 10_000 * MS;
    let mut requests = Program::always(MS).late(3 * TENTH);
    requests.wants = |now| now % (20 * MS) < 2 * MS;
    let had = run(&[hard(60), hard(30)], &mut [Program::always(2 * TENTH).late(3 * TENTH), requests], length);
    assert!((points(had[0], length) - 60.0).abs() < 1.0, "{}", points(had[0], length));
}

#[test]
fn a_window_given_back_has_ended_even_if_its_tenant_wants_the_gpu_again() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, hard(50));
    let seen = |wanting, drained| move |_| TenantReport { wanting, drained, busy_ns: 0 };
    assert!(matches!(arbiter.step(MS, seen(1, 0))[..], [WindowAction::Open { .. }]));
    // It had done its work, gave the window back, and came again before anybody looked.
    let acts = arbiter.step(3 * MS, seen(1, 1));
    assert_eq!(acts[0], WindowAction::SetDeadline { tenant: 1, deadline: 3 * MS });
    assert!(
        matches!(acts[1..], [WindowAction::Open { .. }]),
        "another one, as its account allows it: {acts:?}"
    );
}

#[test]
fn a_process_that_gave_the_window_back_is_let_in_again_while_others_of_its_container_go_on() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, soft(50));
    let seen = |wanting, drained| move |_| TenantReport { wanting, drained, busy_ns: 0 };
    let acts = arbiter.step(MS, seen(1, 0));
    let [WindowAction::Open { deadline, .. }] = acts[..] else { panic!("{acts:?}") };
    assert_eq!(arbiter.step(2 * MS, seen(2, 1))[..], [WindowAction::SetDeadline { tenant: 1, deadline }]);
    assert_eq!(arbiter.step(3 * MS, seen(2, 0))[..], []);
}
