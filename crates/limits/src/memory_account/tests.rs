use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::*;

const GPU: GpuSlot = GpuSlot::FIRST;
const OTHER_GPU: GpuSlot = GpuSlot::SECOND;

/// What a new file maps to.
fn empty() -> Arc<MemoryAccount> {
    // SAFETY: the ledger is made of atomic numbers only, for which all zeros are a value.
    let ledger: Box<MemoryAccount> = unsafe { Box::new_zeroed().assume_init() };
    Arc::from(ledger)
}

fn claim(ledger: &MemoryAccount, process: u32) -> SlotIndex {
    ledger.claim(process, process, |_| {}).unwrap()
}

/// What the kernel does to the word of a thread that ends.
fn kill(ledger: &MemoryAccount, slot: SlotIndex) {
    ledger.slot(slot).owner.store(OWNER_DIED, Ordering::SeqCst);
}

#[test]
fn memory_is_held_up_to_the_limit_and_given_back() {
    let ledger = empty();
    let (one, two) = (claim(&ledger, 1), claim(&ledger, 2));
    assert_eq!(ledger.charge(one, GPU, 600, 1000), Ok(()));
    assert_eq!(ledger.charge(two, GPU, 600, 1000), Err(OverLimit));
    assert_eq!(ledger.charge(two, GPU, 400, 1000), Ok(()));
    assert_eq!(ledger.charge(two, OTHER_GPU, 600, 1000), Ok(()), "another GPU");
    assert_eq!(ledger.held(GPU), 1000);
    ledger.refund(one, GPU, 600);
    assert_eq!(ledger.held(GPU), 400);
}

#[test]
fn huge_numbers_do_not_wrap() {
    let ledger = empty();
    let (one, two) = (claim(&ledger, 1), claim(&ledger, 2));
    assert_eq!(ledger.charge(one, GPU, u64::MAX, 1000), Err(OverLimit));
    ledger.charge_anyway(one, GPU, u64::MAX);
    ledger.charge_anyway(two, GPU, u64::MAX);
    assert_eq!(ledger.charge(two, GPU, 1, 1000), Err(OverLimit));
    ledger.refund(one, GPU, u64::MAX);
    ledger.refund(two, GPU, u64::MAX);
    ledger.refund(two, GPU, 5);
    assert_eq!(ledger.held(GPU), 0);
}

#[test]
fn the_dead_hold_until_they_are_gone() {
    let ledger = empty();
    let (one, two) = (claim(&ledger, 1), claim(&ledger, 2));
    ledger.charge(one, GPU, 600, 1000).unwrap();
    kill(&ledger, one);
    ledger.sweep(|_| false);
    assert_eq!(ledger.charge(two, GPU, 600, 1000), Err(OverLimit), "the driver still has it");
    ledger.sweep(|process| process == 1);
    assert_eq!(ledger.charge(two, GPU, 600, 1000), Ok(()));
    assert_eq!(claim(&ledger, 3), one, "the slot is used again");
    assert_eq!(ledger.slot(one).held(GPU), 0);
}

#[test]
fn a_claimer_killed_half_way_leaves_a_slot_for_others() {
    let ledger = empty();
    let one = claim(&ledger, 1);
    ledger.charge(one, GPU, 600, 1000).unwrap();
    kill(&ledger, one);
    ledger.sweep(|_| true);
    // Killed right after it took the word.
    ledger.slot(one).owner.store(2, Ordering::SeqCst);
    kill(&ledger, one);
    assert_eq!(ledger.held(GPU), 0);
    assert_eq!(claim(&ledger, 3), one);
}

#[test]
fn an_announcement_of_the_dead_stops_nobody() {
    let ledger = empty();
    let (one, two) = (claim(&ledger, 1), claim(&ledger, 2));
    ledger.slot(one).tentative[GPU].store(900, Ordering::SeqCst);
    kill(&ledger, one);
    assert_eq!(ledger.charge(two, GPU, 600, 1000), Ok(()));
}

#[test]
fn nonsense_in_the_file_is_bounded() {
    let ledger = empty();
    let one = claim(&ledger, 1);
    ledger.used_slots.store(u32::MAX, Ordering::SeqCst);
    assert_eq!(ledger.slots().len(), SLOTS);
    assert_eq!(ledger.charge(one, GPU, 10, 1000), Ok(()));
}

#[test]
fn all_slots_taken_is_told() {
    let ledger = empty();
    for process in 1..=SLOTS {
        claim(&ledger, u32::try_from(process).unwrap());
    }
    assert_eq!(ledger.claim(9_999, 9_999, |_| {}), None);
}

/// Four processes race for room that only one of them may have, over and over: never two, and never nobody.
#[test]
fn of_those_who_race_exactly_one_passes() {
    const ROUNDS: u32 = 2_000;
    let ledger = empty();
    let barrier = std::sync::Barrier::new(4);
    let holders = AtomicU32::new(0);
    let wrong = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for process in 1..=4 {
            let (ledger, barrier, holders, wrong) = (&ledger, &barrier, &holders, &wrong);
            scope.spawn(move || {
                let me = claim(ledger, process);
                for _ in 0..ROUNDS {
                    barrier.wait();
                    let passed = ledger.charge(me, GPU, 600, 1000).is_ok();
                    holders.fetch_add(u32::from(passed), Ordering::SeqCst);
                    barrier.wait();
                    if holders.load(Ordering::SeqCst) != 1 {
                        wrong.store(true, Ordering::SeqCst);
                    }
                    barrier.wait();
                    if passed {
                        ledger.refund(me, GPU, 600);
                        holders.store(0, Ordering::SeqCst);
                    }
                }
            });
        }
    });
    assert!(!wrong.load(Ordering::SeqCst));
    assert_eq!(ledger.held(GPU), 0);
}

#[test]
fn the_agent_reads_what_each_process_says() {
    let ledger = empty();
    let (one, two, three) = (claim(&ledger, 11), claim(&ledger, 12), claim(&ledger, 13));
    for (slot, bytes) in [(one, 5), (two, 6), (three, 7)] {
        ledger.charge(slot, OTHER_GPU, bytes, 100).unwrap();
    }
    ledger.slot(one).denied.store(3, Ordering::SeqCst);
    ledger.slot(one).waited.store(4, Ordering::SeqCst);
    kill(&ledger, two);
    kill(&ledger, three);
    ledger.sweep(|process| process == 13);
    // SAFETY: the bytes of a ledger that nobody changes meanwhile.
    let bytes = unsafe {
        std::slice::from_raw_parts(
            std::ptr::from_ref::<MemoryAccount>(&ledger).cast::<u8>(),
            size_of::<MemoryAccount>(),
        )
    };
    let mut demands = AccountSnapshot::default();
    demands.read(|into, place| {
        let from = &bytes[usize::try_from(place).unwrap()..];
        let length = into.len().min(from.len());
        into[..length].copy_from_slice(&from[..length]);
        Ok(length)
    });
    let said: Vec<_> = demands.process_usage().collect();
    let alive = said[0].unwrap();
    assert_eq!(
        (alive.process, alive.is_alive, alive.held[OTHER_GPU], alive.denied, alive.waited),
        (11, true, 5, 3, 4)
    );
    let ending = said[1].unwrap();
    assert_eq!((ending.process, ending.is_alive, ending.held[OTHER_GPU]), (12, false, 6));
    assert_eq!(said[2], None, "gone");
}
