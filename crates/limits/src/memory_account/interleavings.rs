//! Every order in which the steps of several processes can fall, on a ledger of three slots and one GPU.

use loom::sync::Arc;
use loom::thread;

use super::*;

const GPU: GpuSlot = GpuSlot::FIRST;

fn empty() -> Arc<MemoryAccount> {
    let ledger = MemoryAccount {
        format: AtomicU64::new(FORMAT),
        used_slots: AtomicU32::new(0),
        pacers: PerGpu::from_fn(|_| SharedPacer::new()),
        slots: std::array::from_fn(|_| Slot {
            owner: AtomicU32::new(0),
            process: AtomicU32::new(0),
            gone: AtomicU32::new(0),
            held: PerGpu::from_fn(|_| AtomicU64::new(0)),
            tentative: PerGpu::from_fn(|_| AtomicU64::new(0)),
            denied: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            awaiting_measurement: AtomicU32::new(0),
            demand: PerGpu::from_fn(|_| GpuDemand { wants: AtomicU32::new(0), drained: AtomicU32::new(0) }),
        }),
    };
    Arc::new(ledger)
}

fn explore(scenario: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    // More switches than this within one order find nothing that fewer do not, and take for ever.
    model.preemption_bound = Some(3);
    model.check(scenario);
}

/// Of two that want what only one may have, never both get it.
#[test]
fn two_never_both_pass() {
    explore(|| {
        let ledger = empty();
        let slots: Vec<_> = (1..=2).map(|process| ledger.claim(process, process, |_| {}).unwrap()).collect();
        let other = slots[1];
        let racer = {
            let ledger = ledger.clone();
            thread::spawn(move || ledger.charge(other, GPU, 600, 1000).is_ok())
        };
        let mine = ledger.charge(slots[0], GPU, 600, 1000).is_ok();
        let theirs = racer.join().unwrap();
        assert!(!(mine && theirs));
        assert!(ledger.held(GPU) <= 1000);
    });
}

/// What is given back while another takes is never counted below what is held.
#[test]
fn a_refund_lets_another_in_and_no_more() {
    explore(|| {
        let ledger = empty();
        let (one, two) = (ledger.claim(1, 1, |_| {}).unwrap(), ledger.claim(2, 2, |_| {}).unwrap());
        ledger.charge(one, GPU, 800, 1000).unwrap();
        let giver = {
            let ledger = ledger.clone();
            thread::spawn(move || {
                ledger.refund(one, GPU, 800);
                ledger.charge(one, GPU, 500, 1000).is_ok()
            })
        };
        let got = ledger.charge(two, GPU, 600, 1000).is_ok();
        let again = giver.join().unwrap();
        assert!(!(got && again));
        assert_eq!(ledger.held(GPU), 600 * u64::from(got) + 500 * u64::from(again));
    });
}

/// The kernel marks the dead at any moment: what they hold counts until they are gone, what they only asked for does not.
#[test]
fn a_death_at_any_moment_lets_nobody_pass_the_limit() {
    explore(|| {
        let ledger = empty();
        let (one, two) = (ledger.claim(1, 1, |_| {}).unwrap(), ledger.claim(2, 2, |_| {}).unwrap());
        ledger.charge(one, GPU, 600, 1000).unwrap();
        let killer = {
            let ledger = ledger.clone();
            thread::spawn(move || {
                ledger.slot(one).owner.fetch_or(OWNER_DIED, Ordering::SeqCst);
                ledger.sweep(|_| true);
            })
        };
        let early = ledger.charge(two, GPU, 600, 1000).is_ok();
        killer.join().unwrap();
        if !early {
            assert_eq!(ledger.charge(two, GPU, 600, 1000), Ok(()), "the memory of the dead is free");
        }
        assert_eq!(ledger.held(GPU), 600);
    });
}

/// Two that come at once get slots of their own, also where one of them was another's.
#[test]
fn claims_at_once_get_different_slots() {
    explore(|| {
        let ledger = empty();
        let dead = ledger.claim(9, 9, |_| {}).unwrap();
        ledger.slot(dead).owner.fetch_or(OWNER_DIED, Ordering::SeqCst);
        ledger.sweep(|_| true);
        let other = {
            let ledger = ledger.clone();
            thread::spawn(move || ledger.claim(2, 2, |_| {}).unwrap())
        };
        let mine = ledger.claim(1, 1, |_| {}).unwrap();
        assert_ne!(mine, other.join().unwrap());
    });
}
