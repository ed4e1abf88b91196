//! How a container alone holds itself to its share of time.
//!
//! The account is one point in time. Work moves it ahead by busy time / share; real time follows. When the account is a
//! window's length ahead, launches stop, and when time has caught up they go on. So a late wake-up or a kernel that ran
//! over is repaid by itself, and no sleep needs an exact length.

use crate::atomic::{AtomicU64, Ordering};

/// How much work is done at a stretch, in nanoseconds.
pub const QUANTUM: u64 = 20_000_000;

/// The account of one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pacer {
    account: u64,
}

impl Pacer {
    /// The GPU was busy for us from `from` to `to`, at a share of `percent`.
    pub fn charge(&mut self, from: u64, to: u64, percent: u32) {
        self.charge_after(0, from, to, percent);
    }

    /// The same, after others kept us waiting for `kept`: that time is still ours.
    pub fn charge_after(&mut self, kept: u64, from: u64, to: u64, percent: u32) {
        let (percent, busy) = (u64::from(percent.clamp(1, 100)), to.saturating_sub(from));
        // Time not used is not saved up, but for half a period: an unlucky stretch may be made good.
        let oldest = from.saturating_sub(period(percent) / 2 + kept);
        self.account = self.account.max(oldest).saturating_add(busy.saturating_mul(100) / percent);
    }

    /// Whether launches must stop.
    #[must_use]
    pub fn is_spent(&self, now: u64, percent: u32) -> bool {
        let percent = u64::from(percent.clamp(1, 100));
        percent < 100 && self.account > now + period(percent) - QUANTUM
    }

    /// When launches may go on.
    #[must_use]
    pub fn opens_at(&self) -> u64 {
        self.account
    }

    /// Forgets debts and credits: the limit has changed.
    pub fn reset(&mut self, now: u64) {
        self.account = now;
    }
}

/// The account of one GPU for all processes of a container: what they do at the same time counts once.
///
/// It lies in a file that the container may write. So each process keeps a [`Pacer`] of its own as well, and alone never passes its
/// share, whatever is written here.
#[repr(C)]
#[derive(Debug)]
pub struct SharedPacer {
    /// Until when busy time has been charged.
    charged: AtomicU64,
    account: AtomicU64,
    /// Nanoseconds of busy time so far, for the arbiter.
    busy: AtomicU64,
}

impl SharedPacer {
    /// The GPU was busy for one of the processes. What another has charged already is left out; they charge every millisecond or
    /// so, so that is about when both were busy.
    pub fn charge(&self, from: u64, to: u64, percent: u32) {
        let from = from.max(self.charged.fetch_max(to, Ordering::SeqCst));
        if from < to {
            self.busy.fetch_add(to - from, Ordering::Release);
            let charged = |account| {
                let mut pacer = Pacer { account };
                pacer.charge(from, to, percent);
                Some(pacer.account)
            };
            let _ = self.account.fetch_update(Ordering::SeqCst, Ordering::SeqCst, charged);
        }
    }

    /// The account as it is now.
    #[must_use]
    pub fn read(&self) -> Pacer {
        Pacer { account: self.account.load(Ordering::SeqCst) }
    }

    /// Forgets debts: the limit has changed.
    pub fn reset(&self, now: u64) {
        self.account.fetch_min(now, Ordering::SeqCst);
    }

    #[cfg(test)]
    pub(crate) fn new() -> Self {
        Self { charged: AtomicU64::new(0), account: AtomicU64::new(0), busy: AtomicU64::new(0) }
    }
}

/// Where in a [`SharedPacer`] its busy time lies.
pub(crate) const BUSY_PLACE: usize = std::mem::offset_of!(SharedPacer, busy);

/// How long it takes until a quantum has been paid for.
fn period(percent: u64) -> u64 {
    QUANTUM * 100 / percent
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    /// Back-to-back kernels of `kernel` under the pacer, looked at every `tick` and woken up to `late` late. The busy
    /// time of each second.
    fn seconds(percent: u32, kernel: u64, tick: u64, late: u64, count: usize) -> Vec<u64> {
        let (mut pacer, mut now, mut busy) = (Pacer::default(), 1_000 * MS, vec![0; count]);
        let begin = now;
        pacer.reset(now);
        while now < begin + count as u64 * 1_000 * MS {
            // Open: whole kernels, noticed at ticks.
            let from = now;
            let step = kernel.max(tick / kernel * kernel);
            now += step;
            pacer.charge(from, now, percent);
            if let Some(second) = busy.get_mut(usize::try_from((from - begin) / (1_000 * MS)).unwrap()) {
                *second += step;
            }
            if pacer.is_spent(now, percent) {
                now = now.max(pacer.opens_at()) + late;
            }
        }
        busy
    }

    proptest! {
        #[test]
        fn the_share_holds(percent in 5..=95u32, kernel in 5_000..30 * MS, late in 0..2 * MS) {
            let seconds = seconds(percent, kernel, MS / 2, late, 10);
            let points = |busy: u64| busy as f64 / 1e7;
            let all = points(seconds.iter().sum()) / 10.0;
            prop_assert!((all - f64::from(percent)).abs() < 2.0, "{all} over 10 s for {percent}");
            for second in seconds {
                // One window or one kernel may lie on either side of a second's end.
                let slack = 3.0 + points(kernel.max(QUANTUM));
                prop_assert!((points(second) - f64::from(percent)).abs() < slack, "{} in a second for {percent}", points(second));
            }
        }
    }

    #[test]
    fn idle_time_is_not_saved_up() {
        let mut pacer = Pacer::default();
        pacer.charge(1_000 * MS, 1_001 * MS, 25);
        pacer.charge(9_000 * MS, 9_020 * MS, 25);
        assert!(!pacer.is_spent(9_020 * MS, 25), "half a period may be made good");
        pacer.charge(9_020 * MS, 9_041 * MS, 25);
        assert!(pacer.is_spent(9_041 * MS, 25));
    }

    /// Processes that are busy in turn or together, each charging what it saw since it looked last.
    #[test]
    fn what_processes_do_at_the_same_time_counts_once() {
        let (together, in_turn) = (SharedPacer::new(), SharedPacer::new());
        for step in 1_000..2_000 {
            let (from, to) = (step * MS, (step + 1) * MS);
            together.charge(from, to, 50);
            together.charge(from - MS / 3, to - MS / 3, 50);
            in_turn.charge(from, to - MS / 2, 50);
            in_turn.charge(from + MS / 2, to, 50);
        }
        for shared in [together, in_turn] {
            let ahead = (shared.read().opens_at() - 2_000 * MS) / MS;
            assert!(
                (979..=1_001).contains(&ahead),
                "a second of work at a half is two of time, not {ahead} ms"
            );
            let busy = shared.busy.load(Ordering::SeqCst) / MS;
            assert!((999..=1_001).contains(&busy), "and {busy} ms of it are told");
        }
    }

    #[test]
    fn nonsense_in_a_shared_account_is_no_panic_and_a_changed_limit_forgets_debts() {
        let shared = SharedPacer {
            charged: AtomicU64::new(u64::MAX),
            account: AtomicU64::new(u64::MAX),
            busy: AtomicU64::new(u64::MAX),
        };
        shared.charge(1, 2, 50);
        assert_eq!(shared.read().opens_at(), u64::MAX);
        shared.reset(5);
        assert_eq!(shared.read().opens_at(), 5);
        shared.reset(9);
        assert_eq!(shared.read().opens_at(), 5, "credit is no debt");
    }

    #[test]
    fn a_whole_gpu_is_never_stopped() {
        let mut pacer = Pacer::default();
        pacer.charge(0, 60_000 * MS, 100);
        assert!(!pacer.is_spent(1, 100));
    }
}
