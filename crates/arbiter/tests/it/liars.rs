//! Whatever a tenant reports, an honest neighbour gets its share.

use proptest::prelude::*;
use tessera_arbiter::Share;

use crate::world::{
    BusyClaim, Lie, MICROSECOND_NS, MILLISECOND_NS, Program, SECOND_NS, Script, Tenant, hard, percent, run,
    soft,
};

/// Time over which an honest tenant must get its share.
const RUN_NS: u64 = 10 * SECOND_NS;

/// Percentage points that an honest tenant may lose beside tenants that lie.
const MAX_LOSS: f64 = 2.0;

const GREEDY: Program =
    Program { kernel_ns: 200 * MICROSECOND_NS, delay_ns: 0, burst_ns: u64::MAX, pause_ns: 0 };

/// A report of demand for a while.
const WANTS: Lie = Lie {
    wanting: 1,
    drained: 0,
    busy: BusyClaim::Constant(0),
    length_ns: 50 * MICROSECOND_NS,
    keeps_waking: false,
};

/// A report that there is no work.
const DENIES: Lie = Lie { wanting: 0, ..WANTS };

/// Runs lying tenants beside an honest one that has a hard share of the rest. Returns the percentage of the
/// time for which their windows were open and the honest one was busy.
fn beside_honest(liars: &[(Share, Script)], program: Program) -> (f64, f64) {
    let rest = 100 - liars.iter().map(|(share, _)| share.compute_percent).sum::<u32>();
    let tenants = liars.iter().map(|(share, script)| (*share, Tenant::Liar(script.clone())));
    let got = run(&tenants.chain([(hard(rest), Tenant::Honest(program))]).collect::<Vec<_>>(), RUN_NS);
    let open_ns = got[..liars.len()].iter().map(|liar| liar.open_ns).sum();
    (percent(open_ns, RUN_NS), percent(got[liars.len()].busy_ns, RUN_NS))
}

/// Returns a script that uses a window for a while, returns it and wants the next one.
fn returns_after(length_ns: u64) -> Script {
    Script { lies: vec![Lie { length_ns, ..WANTS }, DENIES], follows_windows: true }
}

/// A tenant that returns each window early can report half of the window as idle.
#[test]
fn a_tenant_that_returns_windows_early_gets_no_more_than_its_share() {
    for own in [10, 30, 50] {
        for length_ms in [1, 2, 4, 8] {
            for share in [hard(own), soft(own)] {
                let liar = (share, returns_after(length_ms * MILLISECOND_NS));
                let (open, busy) = beside_honest(&[liar], GREEDY);
                let name = format!("{share:?}, windows of {length_ms} ms: {open:.1} and {busy:.1}");
                assert!(busy > f64::from(100 - own) - MAX_LOSS && open < f64::from(own) + MAX_LOSS, "{name}");
            }
        }
    }
}

/// A slow switch makes every cut expensive, so the honest tenant is compared with itself beside an honest
/// tenant.
#[test]
fn a_tenant_that_arrives_again_and_again_does_not_cut_the_windows_of_another() {
    for delay_us in [0, 100, 200, 400] {
        let program = Program { delay_ns: delay_us * MICROSECOND_NS, ..GREEDY };
        let honest = [5, 95].map(|share| (hard(share), Tenant::Honest(program)));
        let expected = percent(run(&honest, RUN_NS)[1].busy_ns, RUN_NS);
        for period_us in [100, 500, 1_000, 2_000] {
            let wants = Lie { length_ns: period_us * MICROSECOND_NS / 2, ..WANTS };
            let script = Script { lies: vec![wants, Lie { wanting: 0, ..wants }], follows_windows: false };
            let (_, busy) = beside_honest(&[(hard(5), script)], program);
            assert!(
                busy > expected - MAX_LOSS,
                "{busy:.1} of {expected:.1} %, {delay_us} us, {period_us} us"
            );
        }
    }
}

/// A tenant that pauses keeps what it is owed, so it may try to be owed more by pausing.
#[test]
fn a_tenant_that_comes_and_goes_gets_no_more_than_its_share() {
    for (wants_ms, rests_ms) in [(1, 1), (5, 1), (19, 1), (21, 3), (60, 3), (60, 60), (400, 20), (1_000, 900)]
    {
        let wants = Lie { length_ns: wants_ms * MILLISECOND_NS, ..WANTS };
        let rests = Lie { length_ns: rests_ms * MILLISECOND_NS, wanting: 0, ..WANTS };
        for follows_windows in [false, true] {
            let script = Script { lies: vec![wants, rests], follows_windows };
            for share in [10, 30, 50].into_iter().flat_map(|own| [hard(own), soft(own)]) {
                let (open, busy) = beside_honest(&[(share, script.clone())], GREEDY);
                let rest = f64::from(100 - share.compute_percent);
                assert!(
                    busy > rest - MAX_LOSS,
                    "{busy:.1} of {rest} %, {open:.1} % for {share:?}: {script:?}"
                );
            }
        }
    }
}

/// Work that runs after the end of its window blocks others, and whether it still runs is a claim, too.
#[test]
fn tenants_that_keep_their_windows_do_not_block_another_for_long() {
    let scripts =
        [(600_000, 0), (265, 1), (265, 100), (100, 1), (30, 1), (269, 3_000)].map(|(holds, rests)| {
            let holds = Lie { length_ns: holds * MILLISECOND_NS, ..WANTS };
            let rests = (rests > 0).then_some(Lie { length_ns: rests * MILLISECOND_NS, ..DENIES });
            Script { lies: [holds].into_iter().chain(rests).collect(), follows_windows: true }
        });
    for count in [1, 2, 5] {
        for (own, script) in
            [0, 1, 5, 10].into_iter().flat_map(|own| scripts.iter().map(move |script| (own, script)))
        {
            for share in [hard(own), soft(own)] {
                let (_, busy) = beside_honest(&vec![(share, script.clone()); count], GREEDY);
                let rest = 100 - own * u32::try_from(count).unwrap();
                assert!(
                    busy > f64::from(rest) - MAX_LOSS,
                    "{busy:.1} of {rest} % beside {count} of {share:?}: {script:?}"
                );
            }
        }
    }
}

/// A tenant that pauses is not compensated for the pause, but for the time before in which others made it
/// wait.
#[test]
fn a_tenant_that_pauses_gets_its_share_beside_one_that_keeps_its_windows() {
    let program = Program { burst_ns: 68 * MILLISECOND_NS, pause_ns: 3 * MILLISECOND_NS, ..GREEDY };
    let keeps = Lie { length_ns: 386 * MILLISECOND_NS, ..WANTS };
    let returns = Lie { drained: 1, length_ns: 23 * MILLISECOND_NS, ..WANTS };
    let script = Script { lies: vec![keeps, returns], follows_windows: false };
    for own in [10, 30, 48] {
        let honest = (hard(100 - own), Tenant::Honest(program));
        let got = run(&[(hard(own), Tenant::Liar(script.clone())), honest], RUN_NS)[1];
        // All pauses may lie where the other tenant is not.
        let least = percent(got.wanted_ns, RUN_NS) - f64::from(own) - MAX_LOSS;
        let busy = percent(got.busy_ns, RUN_NS);
        assert!(busy >= least, "{busy:.1} % beside {own} %, at least {least:.1} %");
    }
}

fn lies() -> impl Strategy<Value = Lie> {
    let busy = prop_oneof![
        Just(BusyClaim::Constant(0)),
        Just(BusyClaim::Constant(u64::MAX)),
        any::<u64>().prop_map(BusyClaim::Constant),
        Just(BusyClaim::Always),
    ];
    let length_us = prop_oneof![1..2_000u64, 1..30_000u64, 1..600_000u64];
    (0..4u32, 0..4u32, busy, length_us, any::<bool>()).prop_map(
        |(wanting, drained, busy, length_us, keeps_waking)| Lie {
            wanting,
            drained,
            busy,
            length_ns: length_us * MICROSECOND_NS,
            keeps_waking,
        },
    )
}

fn scripts() -> impl Strategy<Value = Script> {
    (prop::collection::vec(lies(), 1..5), any::<bool>())
        .prop_map(|(lies, follows_windows)| Script { lies, follows_windows })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn an_honest_tenant_gets_its_share_beside_any_reports(
        liars in prop::collection::vec((scripts(), 0..=60u32, any::<bool>()), 1..4),
        is_soft in any::<bool>(), kernel_us in 20..5_000u64, delay_us in 0..200u64,
    ) {
        let taken: u32 = liars.iter().map(|liar| liar.1).sum();
        prop_assume!(taken <= 95);
        let share = |percent, is_soft| if is_soft { soft(percent) } else { hard(percent) };
        let program =
            Program { kernel_ns: kernel_us * MICROSECOND_NS, delay_ns: delay_us * MICROSECOND_NS, ..GREEDY };
        let honest = (share(100 - taken, is_soft), Tenant::Honest(program));
        let others = liars.iter().map(|liar| (share(liar.1, liar.2), Tenant::Honest(program)));
        let baseline = run(&others.chain([honest.clone()]).collect::<Vec<_>>(), RUN_NS);
        let liars = liars.into_iter().map(|liar| (share(liar.1, liar.2), Tenant::Liar(liar.0)));
        let got = run(&liars.chain([honest]).collect::<Vec<_>>(), RUN_NS);
        let expected = percent(baseline.last().unwrap().busy_ns, RUN_NS).min(f64::from(100 - taken));
        let got = percent(got.last().unwrap().busy_ns, RUN_NS);
        // With slow switches, shares of 100 % in sum cannot all be reached, not even among honest tenants.
        prop_assert!(got >= expected - MAX_LOSS, "{got:.2} % of {expected:.2} %");
    }
}
