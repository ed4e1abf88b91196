//! Whatever a container writes into its account file, the arbiter goes on and the neighbour gets its share.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use tessera_arbiter::Service;
use tessera_limits::files::{self, StaticMapping};
use tessera_limits::memory_account::{ProcessIdentity, SlotIndex};
use tessera_limits::{Bytes, Control, GpuLimit, GpuSlot, GrantLimits, MemoryAccount, UuidBytes};
use tessera_throttle::Nanos;
use tessera_throttle::controller::Charge;

use crate::world::{MILLISECOND_NS, SECOND_NS, percent};

const GPU: GpuSlot = GpuSlot::FIRST;
const RUN_NS: u64 = 10 * SECOND_NS;
const STEP_NS: u64 = MILLISECOND_NS;

/// The share of each container. The rest is for steps that are a millisecond late.
const PERCENT: u32 = 40;

/// Bytes of a file in which a container writes: the head and the first slots.
const TARGET_BYTES: u64 = 4_096;

/// A change of an account file.
#[derive(Clone, Debug)]
enum Change {
    Word(u64, u32),
    Bytes(u64, Vec<u8>),
    Truncate(u64),
    /// Restores the length, with zeros.
    Extend,
}

/// A container that computes whenever its window is open.
struct Neighbour {
    control: StaticMapping<Control>,
    account: StaticMapping<MemoryAccount>,
    slot: SlotIndex,
    got_ns: u64,
}

impl Neighbour {
    fn start(grant: &Path) -> Self {
        let (control, account) = (files::open_control(grant).unwrap(), files::open_account(grant).unwrap());
        let slot = account.claim(ProcessIdentity { id: 1, started_ticks: 0 }, 1, |_| {}).unwrap();
        Self { control, account, slot, got_ns: 0 }
    }

    /// Computes for a step, and reports.
    fn run(&mut self, now: u64) {
        let window = self.control.window(GPU).read();
        let is_open = window.deadline > now;
        if is_open {
            self.got_ns += STEP_NS;
            let (from, to) = (Nanos(now), Nanos(now + STEP_NS));
            self.account.pacer(GPU).charge(Charge { from, to, busy: to - from, percent: PERCENT });
        }
        let demand = &self.account.slot(self.slot).demand[GPU];
        demand.drained.store(window.number.wrapping_sub(u32::from(is_open)), Ordering::Relaxed);
        demand.wants.store(1, Ordering::Relaxed);
    }
}

fn limits() -> GrantLimits {
    let gpu = GpuLimit {
        uuid: UuidBytes([7; 16]),
        memory: Bytes(1 << 30),
        context: Bytes::ZERO,
        compute_percent: PERCENT,
        compute_ceiling_percent: PERCENT,
    };
    GrantLimits { generation: 1, gpus: vec![gpu], ..GrantLimits::default() }
}

fn apply(file: &File, change: &Change) {
    match change {
        Change::Word(place, word) => {
            file.write_all_at(&word.to_ne_bytes(), place % (TARGET_BYTES / 4) * 4).unwrap()
        }
        Change::Bytes(offset, bytes) => file.write_all_at(bytes, offset % TARGET_BYTES).unwrap(),
        Change::Truncate(length) => file.set_len(length % TARGET_BYTES).unwrap(),
        Change::Extend => file.set_len(size_of::<MemoryAccount>() as u64).unwrap(),
    }
}

/// Returns the percentage of the GPU's time that the neighbour gets while a container changes its account.
/// Each change comes so many milliseconds after the one before, and the sequence starts over at its end.
fn share_beside(changes: &[(u64, Change)], processes: u32) -> f64 {
    let root = tempfile::tempdir().unwrap();
    let [hostile, honest] = ["hostile", "honest"].map(|name| root.path().join(name));
    let mut service = Service::default();
    for grant in [&hostile, &honest] {
        files::update_grant(grant, &limits()).unwrap();
        service.add(grant).unwrap();
    }
    // A valid account first, so that changes reach what the arbiter reads.
    let account = files::open_account(&hostile).unwrap();
    for process in 1..=processes {
        let slot = account.claim(ProcessIdentity { id: process, started_ticks: 0 }, process, |_| {}).unwrap();
        account.slot(slot).demand[GPU].wants.store(1, Ordering::Relaxed);
    }
    let file = OpenOptions::new().write(true).open(files::account_path(&hostile)).unwrap();
    let mut neighbour = Neighbour::start(&honest);
    let begin = 1_000 * SECOND_NS;
    let (mut next_change, mut sequence) = (begin, changes.iter().cycle());
    for now in (begin..begin + RUN_NS).step_by(usize::try_from(STEP_NS).unwrap()) {
        while next_change <= now {
            let (pause_ms, change) = sequence.next().unwrap();
            apply(&file, change);
            next_change += (pause_ms + 1) * MILLISECOND_NS;
        }
        service.step(now);
        neighbour.run(now);
    }
    percent(neighbour.got_ns, RUN_NS)
}

fn changes() -> impl Strategy<Value = Change> {
    let word = prop_oneof![Just(0), Just(1), Just(u32::MAX), Just(0x4000_0000), any::<u32>(), 0..2_000u32];
    prop_oneof![
        4 => (any::<u64>(), word).prop_map(|(place, word)| Change::Word(place, word)),
        2 => (any::<u64>(), prop::collection::vec(any::<u8>(), 0..600))
            .prop_map(|(offset, bytes)| Change::Bytes(offset, bytes)),
        1 => any::<u64>().prop_map(Change::Truncate),
        2 => Just(Change::Extend),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_neighbour_gets_its_share_beside_any_account(
        changes in prop::collection::vec((0..300u64, changes()), 1..40), processes in 0..8u32,
    ) {
        let got = share_beside(&changes, processes);
        prop_assert!(got >= f64::from(PERCENT) - 2.0, "{got:.1} %");
    }
}

/// The number of slots is beyond the file, process ids are 0 and negative, and times are in the future.
#[test]
fn a_neighbour_gets_its_share_beside_an_absurd_account() {
    // The words of the head: format, number of slots, and the account of the first GPU.
    let head = (0..12).map(|place| (0, Change::Word(place, u32::MAX)));
    let slots = (0..1_000).map(|place| (0, Change::Word(place, if place % 2 == 0 { 0 } else { u32::MAX })));
    for changes in [head.collect::<Vec<_>>(), slots.collect()] {
        let got = share_beside(&changes, 512);
        assert!(got >= f64::from(PERCENT) - 2.0, "{got:.1} %");
    }
}
