//! The account file of a container: every process of the container may write it, the agent reads it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_limits::memory_account::AccountSnapshot;
use tessera_limits::{GpuSlot, PerGpu};

fuzz_target!(|file: &[u8]| {
    let snapshot = AccountSnapshot::parse(file);
    let _ = (snapshot.process_usage().count(), snapshot.live_processes().count(), snapshot.is_idle());
    let _ = PerGpu::from_fn(|gpu: GpuSlot| (snapshot.demand(gpu, 1), snapshot.busy(gpu), snapshot.held(gpu)));
});
