use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::*;

const GPU: GpuSlot = GpuSlot::FIRST;
const OTHER_GPU: GpuSlot = GpuSlot::SECOND;
const LIMIT: Bytes = Bytes(1000);

/// Returns the account that a new file maps to.
fn empty() -> Arc<MemoryAccount> {
    // SAFETY: `MemoryAccount` consists of atomic integers only, for which zero bytes are a valid
    // value.
    let account: Box<MemoryAccount> = unsafe { Box::new_zeroed().assume_init() };
    Arc::from(account)
}

fn process(id: u32) -> ProcessIdentity {
    ProcessIdentity { id, started_ticks: 1_000 + u64::from(id) }
}

fn claim(account: &MemoryAccount, id: u32) -> SlotIndex {
    account.claim(process(id), id, |_| {}).unwrap()
}

/// A process that has no slot.
const OBSERVER: ProcessIdentity = ProcessIdentity { id: 99, started_ticks: 99 };
const MS: u64 = 1_000_000;

/// Sweeps twice, with enough time in between for the driver to reclaim the memory of processes that
/// have ended.
fn reclaim(account: &MemoryAccount, has_ended: impl Fn(u32) -> bool) {
    for now_ns in [5 * MS, 255 * MS] {
        account.sweep(OBSERVER, now_ns, |process| has_ended(process.id));
    }
}

/// Marks the slot as the kernel does when the owner's thread ends.
fn kill(account: &MemoryAccount, slot: SlotIndex) {
    account.slot(slot).owner.store(OWNER_DIED, Ordering::SeqCst);
}

#[test]
fn charges_up_to_the_limit_and_refunds() {
    let account = empty();
    let (one, two) = (claim(&account, 1), claim(&account, 2));
    assert_eq!(account.charge(one, GPU, Bytes(600), LIMIT), Ok(()));
    assert_eq!(account.charge(two, GPU, Bytes(600), LIMIT), Err(OverLimit));
    assert_eq!(account.charge(two, GPU, Bytes(400), LIMIT), Ok(()));
    assert_eq!(account.charge(two, OTHER_GPU, Bytes(600), LIMIT), Ok(()), "another GPU");
    assert_eq!(account.held(GPU), Bytes(1000));
    account.refund(one, GPU, Bytes(600));
    assert_eq!(account.held(GPU), Bytes(400));
}

#[test]
fn sums_saturate_instead_of_wrapping() {
    let account = empty();
    let (one, two) = (claim(&account, 1), claim(&account, 2));
    assert_eq!(account.charge(one, GPU, Bytes::MAX, LIMIT), Err(OverLimit));
    account.charge_anyway(one, GPU, Bytes::MAX);
    account.charge_anyway(two, GPU, Bytes::MAX);
    assert_eq!(account.charge(two, GPU, Bytes(1), LIMIT), Err(OverLimit));
    account.refund(one, GPU, Bytes::MAX);
    account.refund(two, GPU, Bytes::MAX);
    account.refund(two, GPU, Bytes(5));
    assert_eq!(account.held(GPU), Bytes(0));
}

#[test]
fn an_exited_process_is_charged_until_its_memory_is_reclaimed() {
    let account = empty();
    let (one, two) = (claim(&account, 1), claim(&account, 2));
    account.charge(one, GPU, Bytes(600), LIMIT).unwrap();
    kill(&account, one);
    account.sweep(OBSERVER, 0, |_| false);
    assert_eq!(
        account.charge(two, GPU, Bytes(600), LIMIT),
        Err(OverLimit),
        "the driver has not reclaimed the memory yet"
    );
    reclaim(&account, |process| process == 1);
    assert_eq!(account.charge(two, GPU, Bytes(600), LIMIT), Ok(()));
    assert_eq!(claim(&account, 3), one, "the slot is claimed again");
    assert_eq!(account.slot(one).held(GPU), Bytes(0));
}

/// Each observer asks once and ends, as nvidia-smi does. The time of the end is in the account.
#[test]
fn observers_that_ask_once_release_the_memory_of_a_dead_process() {
    let account = empty();
    let one = claim(&account, 1);
    account.charge(one, GPU, Bytes(600), LIMIT).unwrap();
    kill(&account, one);
    let has_ended = |process: ProcessIdentity| process.id == 1;
    account.sweep(OBSERVER, 5 * MS, has_ended);
    assert_eq!(account.held_without_ended(GPU), Bytes::ZERO, "free memory is right at the first question");
    assert_eq!(account.held(GPU), Bytes(600), "but the driver may still be reclaiming it");
    account.sweep(OBSERVER, 254 * MS, has_ended);
    assert_eq!(account.held(GPU), Bytes(600));
    account.sweep(OBSERVER, 255 * MS, has_ended);
    assert_eq!(account.held(GPU), Bytes::ZERO);
    let since = |time| account.has_end_since(time, 255 * MS);
    assert!(since(4 * MS) && !since(6 * MS));
}

#[test]
fn a_process_that_is_still_exiting_holds_its_memory() {
    let account = empty();
    let one = claim(&account, 1);
    account.charge(one, GPU, Bytes(600), LIMIT).unwrap();
    kill(&account, one);
    let second = Duration::from_secs(1);
    account.sweep(OBSERVER, 10 * MS, |_| false);
    assert_eq!(account.held_without_ended(GPU), Bytes(600));
    assert!(
        account.is_awaiting_exit(GPU, 1_009 * MS, second)
            && !account.is_awaiting_exit(GPU, 1_010 * MS, second)
    );
    account.sweep(OBSERVER, 20 * MS, |_| true);
    assert!(!account.is_awaiting_exit(GPU, 20 * MS, second));
    account.sweep(OBSERVER, 269 * MS, |_| true);
    assert_eq!(account.held(GPU), Bytes(600), "the time counts from the end, not from the first look");
    account.sweep(OBSERVER, 270 * MS, |_| true);
    assert_eq!(account.held(GPU), Bytes::ZERO);
}

/// `execve` ends the threads of a process and closes the driver's files, but keeps the process.
#[test]
fn a_process_that_runs_another_program_holds_nothing_of_the_first_one() {
    let account = empty();
    let one = claim(&account, 1);
    account.charge(one, GPU, Bytes(600), LIMIT).unwrap();
    kill(&account, one);
    account.sweep(OBSERVER, 10 * MS, |_| false);
    account.sweep(OBSERVER, 3_009 * MS, |_| false);
    assert_eq!(account.held(GPU), Bytes(600), "it may be a slow exit");
    account.sweep(OBSERVER, 3_010 * MS, |_| false);
    assert_eq!(account.held(GPU), Bytes::ZERO);

    let two = claim(&account, 2);
    account.charge(two, GPU, Bytes(600), LIMIT).unwrap();
    kill(&account, two);
    account.sweep(process(2), 20 * MS, |_| false);
    assert_eq!(account.held(GPU), Bytes::ZERO, "the process itself knows it at once");
}

/// The new owner of a slot has the process id of the last one.
#[test]
fn a_reused_process_id_is_another_process() {
    let account = empty();
    let one = claim(&account, 1);
    kill(&account, one);
    reclaim(&account, |_| true);
    let again = ProcessIdentity { id: 1, started_ticks: 9_000 };
    assert_eq!(account.claim(again, 1, |_| {}), Some(one));
    account.charge(one, GPU, Bytes(600), LIMIT).unwrap();
    kill(&account, one);
    assert_eq!(account.slot(one).owner(), SlotOwner::Exiting(again), "its memory is not reclaimed yet");
    assert_eq!(
        account.held_without_ended(GPU),
        Bytes(600),
        "the time of the last owner's end does not count"
    );
    account.sweep(process(1), 300 * MS, |_| false);
    assert_eq!(account.held(GPU), Bytes(600), "a process of the same id is not the owner");
}

#[test]
fn times_may_wrap_around() {
    let account = empty();
    let one = claim(&account, 1);
    account.charge(one, GPU, Bytes(600), LIMIT).unwrap();
    kill(&account, one);
    let wrap = (1 << 31) * MS;
    account.sweep(OBSERVER, wrap - 100 * MS, |_| true);
    let now = wrap + MS;
    assert!(account.has_end_since(wrap - 101 * MS, now) && !account.has_end_since(now, now));
    for days in [1, 12, 13, 20, 24, 30] {
        let now = wrap + days * 86_400_000 * MS;
        assert!(!account.has_end_since(now - 1000 * MS, now), "the end was {days} days ago");
    }
    account.sweep(OBSERVER, wrap + 149 * MS, |_| true);
    assert_eq!(account.held(GPU), Bytes(600));
    account.sweep(OBSERVER, wrap + 150 * MS, |_| true);
    assert_eq!(account.held(GPU), Bytes::ZERO);
}

#[test]
fn a_process_killed_during_claim_leaves_a_slot_that_can_be_claimed() {
    let account = empty();
    let one = claim(&account, 1);
    account.charge(one, GPU, Bytes(600), LIMIT).unwrap();
    kill(&account, one);
    reclaim(&account, |_| true);
    // The second process is killed right after it has taken the owner word.
    account.slot(one).owner.store(2, Ordering::SeqCst);
    kill(&account, one);
    assert_eq!(account.held(GPU), Bytes(0));
    assert_eq!(claim(&account, 3), one);
}

#[test]
fn the_announcement_of_a_dead_process_does_not_count() {
    let account = empty();
    let (one, two) = (claim(&account, 1), claim(&account, 2));
    account.slot(one).tentative[GPU].store(Bytes(900), Ordering::SeqCst);
    kill(&account, one);
    assert_eq!(account.charge(two, GPU, Bytes(600), LIMIT), Ok(()));
}

#[test]
fn an_invalid_slot_count_is_limited_to_the_existing_slots() {
    let account = empty();
    let one = claim(&account, 1);
    account.used_slots.store(u32::MAX, Ordering::SeqCst);
    assert_eq!(account.slots().len(), SLOTS);
    assert_eq!(account.charge(one, GPU, Bytes(10), LIMIT), Ok(()));
}

#[test]
fn claim_returns_none_if_all_slots_are_taken() {
    let account = empty();
    for process in 1..=SLOTS {
        claim(&account, u32::try_from(process).unwrap());
    }
    assert_eq!(account.claim(process(9_999), 9_999, |_| {}), None);
}

/// Four processes repeatedly race for memory that only one of them can get. In each round exactly
/// one charge succeeds.
#[test]
fn exactly_one_of_several_racing_charges_succeeds() {
    const ROUNDS: u32 = 2_000;
    let account = empty();
    let barrier = std::sync::Barrier::new(4);
    let holders = AtomicU32::new(0);
    let wrong = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for process in 1..=4 {
            let (account, barrier, holders, wrong) = (&account, &barrier, &holders, &wrong);
            scope.spawn(move || {
                let me = claim(account, process);
                for _ in 0..ROUNDS {
                    barrier.wait();
                    let passed = account.charge(me, GPU, Bytes(600), LIMIT).is_ok();
                    holders.fetch_add(u32::from(passed), Ordering::SeqCst);
                    barrier.wait();
                    if holders.load(Ordering::SeqCst) != 1 {
                        wrong.store(true, Ordering::SeqCst);
                    }
                    barrier.wait();
                    if passed {
                        account.refund(me, GPU, Bytes(600));
                        holders.store(0, Ordering::SeqCst);
                    }
                }
            });
        }
    });
    assert!(!wrong.load(Ordering::SeqCst));
    assert_eq!(account.held(GPU), Bytes(0));
}

#[test]
fn a_snapshot_contains_the_usage_of_each_process() {
    let account = empty();
    let (one, two, three) = (claim(&account, 11), claim(&account, 12), claim(&account, 13));
    for (slot, bytes) in [(one, 5), (two, 6), (three, 7)] {
        account.charge(slot, OTHER_GPU, Bytes(bytes), Bytes(100)).unwrap();
    }
    account.slot(one).denied.store(Bytes(3), Ordering::SeqCst);
    account.slot(one).waited.store(4, Ordering::SeqCst);
    kill(&account, two);
    kill(&account, three);
    reclaim(&account, |process| process == 13);
    // SAFETY: the account is alive and no other thread changes it while the slice exists.
    let bytes = unsafe {
        std::slice::from_raw_parts(
            std::ptr::from_ref::<MemoryAccount>(&account).cast::<u8>(),
            size_of::<MemoryAccount>(),
        )
    };
    let snapshot = AccountSnapshot::parse(bytes);
    let usage: Vec<_> = snapshot.process_usage().collect();
    let alive = usage[0].unwrap();
    assert_eq!(
        (alive.process, alive.is_alive, alive.held[OTHER_GPU], alive.denied, alive.waited),
        (11, true, Bytes(5), Bytes(3), 4)
    );
    let exiting = usage[1].unwrap();
    assert_eq!((exiting.process, exiting.is_alive, exiting.held[OTHER_GPU]), (12, false, Bytes(6)));
    assert_eq!(usage[2], None, "the memory of the third process is reclaimed");
}
