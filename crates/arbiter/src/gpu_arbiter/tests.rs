use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;
const STEP_NS: u64 = MS / 2;
const TENTH_MS: u64 = MS / 10;

/// A tenant of the simulation: wants the GPU by a rule and lets its last kernel end after the
/// window.
struct Program {
    kernel: u64,
    wants: fn(u64) -> bool,
    /// Delay of messages to the program and from it.
    delay: u64,
    deadline: u64,
    /// Time at which the program learns of its window.
    notified_at: u64,
    /// End of the program's last kernel.
    runs_until: u64,
}

impl Program {
    fn always(kernel: u64) -> Self {
        Self { kernel, wants: |_| true, delay: 0, deadline: 0, notified_at: 0, runs_until: 0 }
    }

    fn with_delay(self, delay: u64) -> Self {
        Self { delay, ..self }
    }
}

/// Runs the programs under an arbiter and returns for how many nanoseconds each used the GPU.
fn run(shares: &[Share], programs: &mut [Program], length: u64) -> Vec<u64> {
    let step = if programs.iter().any(|program| program.delay > 0) { TENTH_MS } else { STEP_NS };
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
                let has_drained = it.deadline <= now && it.runs_until + it.delay <= now;
                let drained = u32::from(has_drained) * wanting;
                (id, TenantReport { wanting, drained, busy_ns: had[id] - it.runs_until.saturating_sub(now) })
            })
            .collect();
        for act in arbiter.step(now, |id| seen[&id]) {
            match act {
                WindowAction { tenant, is_new: true, deadline, .. } => {
                    let program = &mut programs[tenant];
                    (program.deadline, program.notified_at) = (deadline, now + program.delay);
                }
                WindowAction { tenant, deadline, .. } => programs[tenant].deadline = deadline,
            }
        }
        for (id, program) in programs.iter_mut().enumerate() {
            // Kernels start only while the window is open, and run to their end.
            let is_open = program.notified_at <= now && program.deadline > now;
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
    fn tenants_with_hard_shares_get_their_shares(
        shares in proptest::collection::vec(5..40u32, 1..4), kernel in MS / 20..15 * MS
    ) {
        prop_assume!(shares.iter().sum::<u32>() <= 95);
        let length = 10_000 * MS;
        let all: Vec<_> = shares.iter().map(|&share| hard(share)).collect();
        let mut programs: Vec<_> = shares.iter().map(|_| Program::always(kernel)).collect();
        for (had, share) in run(&all, &mut programs, length).into_iter().zip(shares) {
            prop_assert!((points(had, length) - f64::from(share)).abs() < 2.0, "{} for {share}", points(had, length));
        }
    }

    #[test]
    fn hard_shares_do_not_depend_on_the_switch_time(
        one in 20..50u32, kernel in MS / 20..2 * MS, delay in 0..8u64
    ) {
        let (length, other) = (5_000 * MS, 90 - one);
        let mut programs = [one, other].map(|_| Program::always(kernel).with_delay(delay * TENTH_MS));
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
fn shares_do_not_depend_on_the_length_of_kernels() {
    let length = 10_000 * MS;
    let had = run(&[hard(30), hard(60)], &mut [Program::always(12 * MS), Program::always(MS / 20)], length);
    assert!((points(had[0], length) - 30.0).abs() < 2.0, "{had:?}");
    assert!((points(had[1], length) - 60.0).abs() < 2.0, "{had:?}");
}

#[test]
fn a_tenant_without_compute_share_gets_the_remaining_time() {
    let length = 5_000 * MS;
    let free = Share { compute_percent: 0, compute_ceiling_percent: 100, by_throughput: false };
    let had = run(&[hard(60), free], &mut [Program::always(MS / 10), Program::always(MS / 10)], length);
    assert!((points(had[0], length) - 60.0).abs() < 2.0, "{had:?}");
    assert!(points(had[1], length) > 30.0, "{had:?}");
}

#[test]
fn a_single_tenant_with_a_soft_share_gets_the_whole_gpu() {
    let length = 2_000 * MS;
    let had = run(&[soft(30)], &mut [Program::always(MS / 10)], length);
    assert!(points(had[0], length) > 98.0, "{had:?}");
}

#[test]
fn a_window_is_cut_for_a_tenant_that_returns_from_idle() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set("greedy", soft(60));
    arbiter.set("guest", soft(30));
    let (mut now, mut deadline) = (1_000 * MS, 0);
    let seen = |now, deadline, guest| {
        move |id: &str| TenantReport {
            wanting: u32::from(guest || id == "greedy"),
            drained: u32::from(id == "greedy" && deadline <= now),
            busy_ns: 0,
        }
    };
    for _ in 0..1_000 {
        for act in arbiter.step(now, seen(now, deadline, false)) {
            let WindowAction { deadline: end, .. } = act;
            deadline = end;
        }
        now += STEP_NS;
    }
    assert!(deadline > now, "the greedy tenant keeps the GPU");
    let begin = now;
    loop {
        let actions = arbiter.step(now, seen(now, deadline, true));
        if actions.iter().any(|act| matches!(act, WindowAction { tenant: "guest", is_new: true, .. })) {
            break;
        }
        for act in actions {
            let WindowAction { deadline: end, .. } = act;
            deadline = end;
        }
        now += STEP_NS;
        assert!(now < begin + 5 * MS, "the window is cut for the guest");
    }
}

#[test]
fn the_window_of_a_removed_tenant_ends() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, hard(50));
    arbiter.set(2, hard(50));
    let all = |_| TenantReport { wanting: 1, drained: 0, busy_ns: 0 };
    assert_eq!(arbiter.step(0, all).len(), 1);
    arbiter.remove(1);
    assert!(matches!(arbiter.step(MS, all)[..], [WindowAction { tenant: 2, is_new: true, .. }]));
}

#[test]
fn a_tenant_that_never_drains_does_not_block_the_others() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, hard(50));
    arbiter.set(2, hard(50));
    let stuck = |id| TenantReport { wanting: 1, drained: u32::from(id == 2), busy_ns: 0 };
    arbiter.step(0, stuck);
    let served = (1..2_000).any(|step| {
        arbiter
            .step(step * STEP_NS, stuck)
            .iter()
            .any(|act| matches!(act, WindowAction { tenant: 2, is_new: true, .. }))
    });
    assert!(served);
}

/// A graph or a copy can run for a second. It is charged like many small kernels.
#[test]
fn work_that_overruns_its_window_is_charged() {
    let length = 60_000 * MS;
    for kernel in [100 * MS, 400 * MS, 1_000 * MS, 4_000 * MS] {
        let alone = run(&[hard(30)], &mut [Program::always(kernel)], length)[0];
        let mut programs = [Program::always(kernel), Program::always(MS / 10)];
        let [long, short] = run(&[hard(30), hard(60)], &mut programs, length)[..] else { panic!() };
        for (had, share) in [(alone, 30.0), (long, 30.0), (short, 60.0)] {
            // One kernel may still run at the end.
            let slack = 2.0 + points(kernel, length);
            assert!(
                (points(had, length) - share).abs() < slack,
                "{kernel}: {} of {share}",
                points(had, length)
            );
        }
    }
}

/// Stuck work may depend on work that waits for a window, so its tenant gets windows regardless of
/// its debt.
#[test]
fn a_tenant_that_never_drains_still_gets_windows() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, hard(10));
    let (mut opened, mut busy) = (Vec::new(), 0);
    for step in 0..120_000 {
        let now = step * STEP_NS;
        let actions = arbiter.step(now, |_| TenantReport { wanting: 1, drained: 0, busy_ns: busy });
        opened.extend(
            actions.iter().any(|act| matches!(act, WindowAction { is_new: true, .. })).then_some(now),
        );
        assert!(arbiter.next_step_at(now).is_some_and(|next| next > now), "the arbiter polls in a busy loop");
        busy += STEP_NS;
    }
    assert!(opened.windows(2).all(|pair| pair[1] - pair[0] < 3_500 * MS) && opened.len() > 15, "{opened:?}");
    // Once the tenant has drained, it repays its debt, but only up to the bound.
    let paid = (120_000..).find(|step| {
        let actions =
            arbiter.step(step * STEP_NS, |_| TenantReport { wanting: 1, drained: 1, busy_ns: busy });
        actions.iter().any(|act| matches!(act, WindowAction { is_new: true, .. }))
    });
    let owed = paid.unwrap() * STEP_NS - 60_000 * MS;
    assert!((5 * MAX_DEBT_NS..15 * MAX_DEBT_NS).contains(&owed), "{} ms", owed / MS);
}

/// The stuck tenant may be a paused container. It gets windows, and the other tenant loses little
/// time.
#[test]
fn a_tenant_that_never_drains_costs_another_tenant_little_time() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, soft(50));
    arbiter.set(2, hard(30));
    let (mut open_until, mut had, length) = (0, 0, 30_000 * MS);
    for now in (0..length).step_by(usize::try_from(STEP_NS).unwrap()) {
        let actions = arbiter.step(now, |id| match id {
            1 => TenantReport { wanting: 1, drained: u32::from(open_until <= now), busy_ns: had },
            _ => TenantReport { wanting: 1, drained: 0, busy_ns: 0 },
        });
        for act in actions {
            if let WindowAction { tenant: 1, deadline, .. } = act {
                open_until = deadline;
            }
        }
        had += if open_until > now { STEP_NS } else { 0 };
    }
    assert!(arbiter.usage(2).windows >= 9, "{} windows in 30 s", arbiter.usage(2).windows);
    assert!(points(had, length) > 96.0, "{} for the other tenant", points(had, length));
}

/// A tenant whose work overran for a minute repays less than a minute.
#[test]
fn the_debt_of_a_tenant_is_bounded_beside_another_tenant() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, soft(50));
    arbiter.set(2, soft(30));
    let (mut open_until, mut had, over) = (0, 0, 60_000 * MS);
    let served = (0..).map(|step| step * STEP_NS).find(|&now| {
        let actions = arbiter.step(now, |id| match id {
            1 => TenantReport { wanting: 1, drained: u32::from(open_until <= now), busy_ns: had },
            _ => TenantReport { wanting: 1, drained: u32::from(now >= over), busy_ns: 0 },
        });
        if let Some(WindowAction { tenant: 1, deadline, .. }) = actions.last() {
            open_until = *deadline;
        }
        had += if open_until > now { STEP_NS } else { 0 };
        now >= over && actions.iter().any(|act| matches!(act, WindowAction { tenant: 2, is_new: true, .. }))
    });
    let waited = (served.unwrap() - over) / MS;
    assert!((2_000..15_000).contains(&waited), "{waited} ms");
}

/// Short requests cut the windows of a tenant that always wants the GPU. That tenant still gets its
/// share.
#[test]
fn a_greedy_tenant_beside_short_requests_gets_its_share() {
    let length = 10_000 * MS;
    let mut requests = Program::always(MS).with_delay(3 * TENTH_MS);
    requests.wants = |now| now % (20 * MS) < 2 * MS;
    let had = run(
        &[hard(60), hard(30)],
        &mut [Program::always(2 * TENTH_MS).with_delay(3 * TENTH_MS), requests],
        length,
    );
    assert!((points(had[0], length) - 60.0).abs() < 1.0, "{}", points(had[0], length));
}

#[test]
fn a_returned_window_ends_even_if_its_tenant_wants_the_gpu_again() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, hard(50));
    let seen = |wanting, drained| move |_| TenantReport { wanting, drained, busy_ns: 0 };
    assert!(matches!(arbiter.step(MS, seen(1, 0))[..], [WindowAction { is_new: true, .. }]));
    // The tenant has finished its work, returned the window and wants the GPU again before the next
    // step.
    let actions = arbiter.step(3 * MS, seen(1, 1));
    let ended = actions[0];
    assert_eq!((ended.tenant, ended.is_new, ended.deadline), (1, false, 3 * MS));
    assert!(
        matches!(actions[1..], [WindowAction { is_new: true, .. }]),
        "a new window, because the account allows it: {actions:?}"
    );
}

#[test]
fn a_process_that_returned_the_window_may_use_it_again_while_others_do() {
    let mut arbiter = GpuArbiter::default();
    arbiter.set(1, soft(50));
    let seen = |wanting, drained| move |_| TenantReport { wanting, drained, busy_ns: 0 };
    let actions = arbiter.step(MS, seen(1, 0));
    assert!(matches!(actions[..], [WindowAction { is_new: true, .. }]), "{actions:?}");
    let actions = arbiter.step(2 * MS, seen(2, 1));
    assert!(matches!(actions[..], [WindowAction { tenant: 1, is_new: false, .. }]), "{actions:?}");
    assert_eq!(arbiter.step(3 * MS, seen(2, 0))[..], []);
}

/// A window of a tenant.
#[derive(Clone, Copy, Debug)]
struct Window {
    tenant: usize,
    begin: u64,
    end: u64,
    /// True if the end was brought forward.
    is_cut: bool,
}

/// Returns the windows of two tenants with hard shares of 40 %, without those of the beginning. The first one reports
/// half of its windows as idle, so that it borrows time, and the second one always computes. The work of both ends
/// `drain` after the end of a window.
fn windows_of_a_borrower(drain: u64) -> Vec<Window> {
    let mut arbiter = GpuArbiter::default();
    (0..2).for_each(|id| arbiter.set(id, hard(40)));
    let (mut windows, mut busy) = (Vec::new(), [0, 0]);
    let mut open: Option<Window> = None;
    for now in (1_000 * MS..3_000 * MS).step_by(usize::try_from(TENTH_MS).unwrap()) {
        let ended = |id: usize| open.is_none_or(|window| window.tenant != id || window.end + drain <= now);
        let report = |id: usize| TenantReport { wanting: 1, drained: ended(id).into(), busy_ns: busy[id] };
        for WindowAction { tenant, is_new, deadline, .. } in arbiter.step(now, report) {
            match &mut open {
                Some(window) if !is_new => {
                    window.is_cut |= deadline < window.end;
                    window.end = deadline;
                }
                _ => {
                    windows.extend(open.replace(Window { tenant, begin: now, end: deadline, is_cut: false }))
                }
            }
        }
        if let Some(window) = open.filter(|window| now < window.end + drain) {
            busy[window.tenant] += TENTH_MS / if window.tenant == 0 { 2 } else { 1 };
        }
    }
    windows.split_off(10)
}

/// The second tenant is at its ceiling while the first one borrows. It claims the window as soon as its account
/// allows. The first one knows that moment in advance, and has little work queued by then.
#[test]
fn a_borrowed_window_ends_when_another_tenant_may_claim_it() {
    let windows = windows_of_a_borrower(0);
    assert!(windows.len() > 30 && windows.iter().all(|window| !window.is_cut), "{windows:?}");
}

/// No time counts for both tenants.
#[test]
fn the_work_of_a_borrowed_window_ends_before_the_next_window() {
    let drain = 2 * MS;
    for pair in windows_of_a_borrower(drain).windows(2) {
        assert!(pair[0].end + drain <= pair[1].begin, "work of both runs: {pair:?}");
    }
}
