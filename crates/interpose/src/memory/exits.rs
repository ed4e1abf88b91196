//! Memory of other processes of the container that have ended.
//!
//! The driver reclaims their memory a moment later. Their charge stays in force until then, so that
//! no process is promised memory that is still taken. A report of free memory leaves it out at once,
//! and a request for it waits.

use std::time::Duration;

use tessera_limits::memory_account::{MemoryAccount, ProcessIdentity};
use tessera_limits::process_stat::ProcessStat;
use tessera_limits::{Bytes, GpuSlot, futex};

use crate::grant::{GpuPlace, Process};

/// Longest time for which a question for free memory waits until a killed process has ended.
const MAX_EXIT_WAIT: Duration = Duration::from_millis(1_000);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Returns the identity of this process.
pub fn own_identity() -> ProcessIdentity {
    // The start time stays unknown where `/proc` is not mounted.
    let stat = std::fs::read("/proc/self/stat").ok().and_then(|stat| ProcessStat::parse(&stat));
    ProcessIdentity { id: std::process::id(), started_ticks: stat.map_or(0, |stat| stat.started_ticks) }
}

/// Notes the processes that have ended, and releases the charges of those whose memory the driver
/// has reclaimed.
pub fn sweep(account: &MemoryAccount, me: ProcessIdentity) {
    account.sweep(me, futex::now(), |process| {
        let stat = std::fs::read(format!("/proc/{}/stat", process.id));
        !stat.ok().and_then(|stat| ProcessStat::parse(&stat)).is_some_and(|stat| stat.is_running(process))
    });
}

impl Process {
    /// Notes the processes that have ended, and releases the charges of those whose memory the
    /// driver has reclaimed.
    pub fn sweep(&self) {
        for grant in self.grants() {
            sweep(&grant.account, self.identity);
        }
    }

    /// Returns the memory of a GPU that the container holds, charged or uncharged, once the driver
    /// has reclaimed the memory of ended processes. Waits for processes that are about to end.
    pub fn held(&self, gpu: GpuSlot) -> Bytes {
        self.sweep();
        let GpuPlace { grant, gpu: place } = self.place(gpu);
        while grant.account.is_awaiting_exit(*place, futex::now(), MAX_EXIT_WAIT) {
            std::thread::sleep(POLL_INTERVAL);
            self.sweep();
        }
        self.remeasure_after_exit(gpu);
        grant.account.held_without_ended(*place) + self.uncharged(gpu)
    }

    /// Waits for a new measurement of the uncharged memory if the last one may include processes
    /// that have ended since.
    pub fn remeasure_after_exit(&self, gpu: GpuSlot) {
        let GpuPlace { grant, gpu: place } = self.place(gpu);
        let is_outdated = grant.account.has_end_since(grant.control.measured_at(*place), futex::now());
        if is_outdated && self.uncharged(gpu) > Bytes::ZERO {
            self.wait_for_measurement(gpu);
        }
    }
}
