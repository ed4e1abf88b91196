//! The account of GPU time that all processes of a container share, in the account file.

use tessera_throttle::Nanos;
use tessera_throttle::controller::Charge;
use tessera_throttle::pacer::Pacer;

use crate::atomic::{AtomicU64, Ordering};

/// The account of one GPU for all processes of a container: what they do at the same time counts once.
///
/// It lies in a file that the container may write. So each process keeps a [`Pacer`] of its own as well,
/// and alone never exceeds its share, whatever is written here.
#[repr(C)]
#[derive(Debug)]
pub struct SharedPacer {
    /// Moment up to which time has been charged: busy time of any process moves it ahead, up to the present.
    charged: AtomicU64,
    account: AtomicU64,
    /// Nanoseconds of busy time so far, for the arbiter.
    busy: AtomicU64,
}

impl SharedPacer {
    /// Charges the time for which the GPU was busy for one of the processes. All processes together are charged
    /// for no more time than has passed: what is beyond it, both did at the same time.
    pub fn charge(&self, charge: Charge) {
        let Charge { from, to, busy, percent } = charge;
        let after = |charged: Nanos| charged.max((charged.max(from) + busy).min(to));
        let update = |charged| Some(after(Nanos(charged)).0);
        let before = self.charged.fetch_update(Ordering::SeqCst, Ordering::SeqCst, update);
        let before = Nanos(before.unwrap_or_else(|charged| charged));
        let busy = after(before) - before.max(from);
        if busy > Nanos::ZERO {
            self.busy.fetch_add(busy.0, Ordering::Release);
            let charged = |account| {
                let mut pacer = Pacer::at(Nanos(account));
                pacer.charge(to - busy, to, percent);
                Some(pacer.opens_at().0)
            };
            let _ = self.account.fetch_update(Ordering::SeqCst, Ordering::SeqCst, charged);
        }
    }

    /// Returns the account as it is now.
    #[must_use]
    pub fn read(&self) -> Pacer {
        Pacer::at(Nanos(self.account.load(Ordering::SeqCst)))
    }

    /// Clears debts, because the limit has changed.
    pub fn reset(&self, now: Nanos) {
        self.account.fetch_min(now.0, Ordering::SeqCst);
    }

    #[cfg(test)]
    pub(crate) fn new() -> Self {
        Self { charged: AtomicU64::new(0), account: AtomicU64::new(0), busy: AtomicU64::new(0) }
    }
}

/// Offset of the busy time in a [`SharedPacer`].
pub(crate) const BUSY_PLACE: usize = std::mem::offset_of!(SharedPacer, busy);

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const MS: Nanos = Nanos::from_millis(1);

    /// Returns a charge at a share of a half for a time in which the GPU was always busy.
    fn busy(from: Nanos, to: Nanos) -> Charge {
        Charge { from, to, busy: to - from, percent: 50 }
    }

    /// Two processes are busy in turn or together, and each charges what it saw since its last round.
    #[test]
    fn concurrent_work_of_several_processes_counts_once() {
        let [together, in_turn, in_part] = std::array::from_fn(|_| SharedPacer::new());
        for step in 1_000..2_000 {
            let (from, to) = (MS * step, MS * (step + 1));
            together.charge(busy(from, to));
            together.charge(busy(from - MS / 3, to - MS / 3));
            in_turn.charge(busy(from, to - MS / 2));
            in_turn.charge(busy(from + MS / 2, to));
            in_part.charge(Charge { busy: MS / 8, ..busy(from, to) });
            in_part.charge(Charge { busy: MS / 8 * 7, ..busy(from, to) });
        }
        for shared in [together, in_turn, in_part] {
            let ahead = (shared.read().opens_at() - MS * 2_000).0 / MS.0;
            assert!(
                (979..=1_001).contains(&ahead),
                "a second of work at a half is two seconds of time, not {ahead} ms"
            );
            let busy = shared.busy.load(Ordering::SeqCst) / MS.0;
            assert!((999..=1_001).contains(&busy), "{busy} ms of a second are reported as busy");
        }
    }

    #[test]
    fn invalid_values_do_not_panic_and_a_changed_limit_clears_debts() {
        let shared = SharedPacer {
            charged: AtomicU64::new(u64::MAX),
            account: AtomicU64::new(u64::MAX),
            busy: AtomicU64::new(u64::MAX),
        };
        shared.charge(busy(Nanos(1), Nanos(2)));
        assert_eq!(shared.read().opens_at(), Nanos::MAX);
        shared.reset(Nanos(5));
        assert_eq!(shared.read().opens_at(), Nanos(5));
        shared.reset(Nanos(9));
        assert_eq!(shared.read().opens_at(), Nanos(5), "savings are no debt");
    }
}
