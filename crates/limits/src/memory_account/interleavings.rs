//! Explores every interleaving of the steps of several processes, on an account of three slots and
//! one GPU.

use loom::sync::Arc;
use loom::thread;

use super::*;

const GPU: GpuSlot = GpuSlot::FIRST;
const LIMIT: Bytes = Bytes(1000);

fn empty() -> Arc<MemoryAccount> {
    let account = MemoryAccount {
        format: AtomicU64::new(FORMAT),
        used_slots: AtomicU32::new(0),
        last_end_ms: AtomicU32::new(0),
        pacers: PerGpu::from_fn(|_| SharedPacer::new()),
        slots: std::array::from_fn(|_| Slot {
            owner: AtomicU32::new(0),
            process: AtomicU32::new(0),
            gone: AtomicU32::new(0),
            held: PerGpu::from_fn(|_| AtomicBytes::new(Bytes::ZERO)),
            tentative: PerGpu::from_fn(|_| AtomicBytes::new(Bytes::ZERO)),
            denied: AtomicBytes::new(Bytes::ZERO),
            waited: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            awaiting_measurement: AtomicU32::new(0),
            started: AtomicU64::new(0),
            end: AtomicU64::new(0),
            demand: PerGpu::from_fn(|_| GpuDemand { wants: AtomicU32::new(0), drained: AtomicU32::new(0) }),
        }),
    };
    Arc::new(account)
}

fn claim(account: &MemoryAccount, id: u32) -> SlotIndex {
    account.claim(ProcessIdentity { id, started_ticks: 0 }, id, |_| {}).unwrap()
}

/// Releases the memory of all processes that the kernel has marked.
fn reclaim(account: &MemoryAccount) {
    for now_ns in [1, 1 + 250_000_000] {
        account.sweep(ProcessIdentity { id: 99, started_ticks: 0 }, now_ns, |_| true);
    }
}

fn explore(scenario: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    // A higher bound has found no further failures and makes the exploration too slow.
    model.preemption_bound = Some(3);
    model.check(scenario);
}

/// Two processes race for memory that only one of them can get.
#[test]
fn two_racing_charges_never_both_succeed() {
    explore(|| {
        let account = empty();
        let slots: Vec<_> = (1..=2).map(|process| claim(&account, process)).collect();
        let other = slots[1];
        let racer = {
            let account = account.clone();
            thread::spawn(move || account.charge(other, GPU, Bytes(600), LIMIT).is_ok())
        };
        let mine = account.charge(slots[0], GPU, Bytes(600), LIMIT).is_ok();
        let theirs = racer.join().unwrap();
        assert!(!(mine && theirs));
        assert!(account.held(GPU) <= LIMIT);
    });
}

/// A refund concurrent with a charge never lets the sum fall below the memory that is held.
#[test]
fn a_refund_admits_another_charge_but_not_two() {
    explore(|| {
        let account = empty();
        let (one, two) = (claim(&account, 1), claim(&account, 2));
        account.charge(one, GPU, Bytes(800), LIMIT).unwrap();
        let giver = {
            let account = account.clone();
            thread::spawn(move || {
                account.refund(one, GPU, Bytes(800));
                account.charge(one, GPU, Bytes(500), LIMIT).is_ok()
            })
        };
        let got = account.charge(two, GPU, Bytes(600), LIMIT).is_ok();
        let again = giver.join().unwrap();
        assert!(!(got && again));
        assert_eq!(account.held(GPU), Bytes(600 * u64::from(got) + 500 * u64::from(again)));
    });
}

/// The kernel can mark a dead process at any time. Its charge counts until its memory is reclaimed;
/// its announcement does not count.
#[test]
fn a_death_at_any_time_lets_no_charge_exceed_the_limit() {
    explore(|| {
        let account = empty();
        let (one, two) = (claim(&account, 1), claim(&account, 2));
        account.charge(one, GPU, Bytes(600), LIMIT).unwrap();
        let killer = {
            let account = account.clone();
            thread::spawn(move || {
                account.slot(one).owner.fetch_or(OWNER_DIED, Ordering::SeqCst);
                reclaim(&account);
            })
        };
        let early = account.charge(two, GPU, Bytes(600), LIMIT).is_ok();
        killer.join().unwrap();
        if !early {
            assert_eq!(
                account.charge(two, GPU, Bytes(600), LIMIT),
                Ok(()),
                "the memory of the dead process is free"
            );
        }
        assert_eq!(account.held(GPU), Bytes(600));
    });
}

/// One of the two claimed slots had an owner before.
#[test]
fn concurrent_claims_get_different_slots() {
    explore(|| {
        let account = empty();
        let dead = claim(&account, 9);
        account.slot(dead).owner.fetch_or(OWNER_DIED, Ordering::SeqCst);
        reclaim(&account);
        let other = {
            let account = account.clone();
            thread::spawn(move || claim(&account, 2))
        };
        let mine = claim(&account, 1);
        assert_ne!(mine, other.join().unwrap());
    });
}
