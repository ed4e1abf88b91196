//! The account file of a container: every process of the container may write it, the agent reads it, and the
//! arbiter decides by it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_arbiter::{GpuArbiter, Share, TenantReport};
use tessera_fuzz::Grant;
use tessera_limits::memory_account::{AccountSnapshot, ProcessIdentity};
use tessera_limits::{Bytes, GpuSlot, MemoryAccount, PerGpu, files};

/// A process of the container: process id, memory charged, wanted GPUs and the last drained window.
type Process = (u32, u64, u16, u32);

fuzz_target!(|input: (Vec<Process>, Vec<(u32, u32)>, Option<u32>, &[u8])| {
    let (processes, changes, length, foreign) = input;
    // Foreign bytes, a file of our own writer, the same file with changed words, and a truncated one.
    let mut file = Grant::with(|grant| {
        grant.clear_account();
        for (process, bytes, wants, drained) in processes {
            let Some(slot) =
                grant.account.claim(ProcessIdentity { id: process, started_ticks: 0 }, process, |_| {})
            else {
                continue;
            };
            grant.account.charge_anyway(slot, GpuSlot::FIRST, Bytes(bytes));
            for (gpu, demand) in GpuSlot::all().zip(&grant.account.slot(slot).demand) {
                demand.wants.store(u32::from(wants >> gpu.index() & 1), std::sync::atomic::Ordering::Relaxed);
                demand.drained.store(drained, std::sync::atomic::Ordering::Relaxed);
            }
        }
        grant.read(&files::account_path(grant.path()))
    });
    let mut arbiter = GpuArbiter::default();
    for id in [0, 1] {
        arbiter.set(id, Share { compute_percent: 50, compute_ceiling_percent: 50, by_throughput: false });
    }
    let mut now = 1_000_000_000;
    let mut check = |file: &[u8]| {
        let snapshot = AccountSnapshot::parse(file);
        let slots = snapshot.slot_count();
        assert!(slots * 64 <= file.len(), "slots beyond the file");
        assert!(snapshot.process_usage().count() <= slots && snapshot.live_processes().count() <= slots);
        let _ = PerGpu::from_fn(|gpu: GpuSlot| {
            let demand = snapshot.demand(gpu, 1);
            assert!(demand.drained <= demand.wanting && demand.wanting as usize <= slots);
            assert!(demand.wanting == 0 || !snapshot.is_idle());
            (snapshot.busy(gpu), snapshot.held(gpu))
        });
        // The arbiter goes on: the other tenant always wants the GPU and gets windows.
        let report = |id| match id {
            0 => TenantReport {
                wanting: snapshot.demand(GpuSlot::FIRST, 1).wanting,
                drained: snapshot.demand(GpuSlot::FIRST, 1).drained,
                busy_ns: snapshot.busy(GpuSlot::FIRST),
            },
            _ => TenantReport { wanting: 1, drained: 1, busy_ns: 0 },
        };
        let before = arbiter.usage(1).windows;
        for _ in 0..200 {
            arbiter.step(now, report);
            now += 5_000_000;
        }
        assert!(arbiter.usage(1).windows > before, "the other tenant gets no window");
    };
    check(foreign);
    check(&file);
    // Most changes are in the head and the first slots, where they matter most.
    let words = file.len() / size_of::<u32>();
    for (place, word) in changes {
        let place = place as usize % if place % 2 == 0 { words } else { words.min(512) } * size_of::<u32>();
        file[place..place + size_of::<u32>()].copy_from_slice(&word.to_ne_bytes());
    }
    check(&file);
    check(&file[..length.map_or(file.len(), |length| length as usize % (size_of::<MemoryAccount>() + 1))]);
});
