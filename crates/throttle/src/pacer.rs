//! Holds one container to its share of a GPU's time, without an arbiter.
//!
//! The account is one moment in time. Work moves it ahead by busy time / share, and real time follows.
//! When the account is a window's length ahead, launches stop; when real time has caught up, launches
//! proceed. So a late wake-up, or a kernel that ran over, is repaid automatically, and no sleep needs an
//! exact length.

use crate::nanos::Nanos;

/// Work that is done at a stretch, between two stops.
pub const QUANTUM: Nanos = Nanos::from_millis(20);

/// The account of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pacer {
    account: Nanos,
}

impl Pacer {
    /// Returns an account that stands at a moment.
    #[must_use]
    pub const fn at(account: Nanos) -> Self {
        Self { account }
    }

    /// Charges the time from `from` to `to`, in which the GPU was busy, at a share of `percent`.
    pub fn charge(&mut self, from: Nanos, to: Nanos, percent: u32) {
        self.charge_after(Nanos::ZERO, from, to, percent);
    }

    /// Charges a busy time before which other tenants kept this one waiting for `kept`. That waiting
    /// time stays available to this tenant.
    pub fn charge_after(&mut self, kept: Nanos, from: Nanos, to: Nanos, percent: u32) {
        let (percent, busy) = (u64::from(percent.clamp(1, 100)), to - from);
        // Unused time is not saved up, except for half a period: an unlucky stretch may be made good.
        let oldest = from - (period(percent) / 2 + kept);
        self.account = self.account.max(oldest) + busy * 100 / percent;
    }

    /// Returns true if launches must stop.
    #[must_use]
    pub fn is_spent(&self, now: Nanos, percent: u32) -> bool {
        let percent = u64::from(percent.clamp(1, 100));
        percent < 100 && self.account > now + (period(percent) - QUANTUM)
    }

    /// Returns the moment from which launches may proceed.
    #[must_use]
    pub fn opens_at(&self) -> Nanos {
        self.account
    }

    /// Clears debts and savings, because the limit has changed.
    pub fn reset(&mut self, now: Nanos) {
        self.account = now;
    }
}

/// Returns how long it takes until a quantum is paid for.
fn period(percent: u64) -> Nanos {
    QUANTUM * 100 / percent
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(millis: u64) -> Nanos {
        Nanos::from_millis(millis)
    }

    /// Runs back-to-back kernels of `kernel` under the pacer, polled every `tick`, and woken up to
    /// `late` too late. Returns the busy time of each second.
    fn seconds(percent: u32, kernel: Nanos, tick: Nanos, late: Nanos, count: u64) -> Vec<Nanos> {
        let (mut pacer, mut now, mut busy) = (Pacer::default(), Nanos::from_secs(1), vec![Nanos::ZERO; 10]);
        let begin = now;
        pacer.reset(now);
        while now < begin + Nanos::from_secs(count) {
            let from = now;
            let step = kernel.max(kernel * (tick.0 / kernel.0));
            now += step;
            pacer.charge(from, now, percent);
            if let Some(second) = busy.get_mut(usize::try_from((from - begin).0 / 1_000_000_000).unwrap()) {
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
        fn the_share_is_held(percent in 5..=95u32, kernel in 5_000..30_000_000u64, late in 0..2_000_000u64) {
            let seconds = seconds(percent, Nanos(kernel), Nanos::from_micros(500), Nanos(late), 10);
            let points = |busy: Nanos| busy.0 as f64 / 1e7;
            let all = points(seconds.iter().copied().sum()) / 10.0;
            prop_assert!((all - f64::from(percent)).abs() < 1.0, "{all} over 10 s for {percent}");
            for second in seconds {
                // One window or one kernel may lie on either side of the end of a second.
                let slack = 3.0 + points(Nanos(kernel).max(QUANTUM));
                prop_assert!((points(second) - f64::from(percent)).abs() < slack, "{} in a second for {percent}", points(second));
            }
        }
    }

    #[test]
    fn idle_time_is_not_saved_up() {
        let mut pacer = Pacer::default();
        pacer.charge(ms(1_000), ms(1_001), 25);
        pacer.charge(ms(9_000), ms(9_020), 25);
        assert!(!pacer.is_spent(ms(9_020), 25), "half a period may be made good");
        pacer.charge(ms(9_020), ms(9_041), 25);
        assert!(pacer.is_spent(ms(9_041), 25));
    }

    #[test]
    fn a_whole_gpu_is_never_stopped() {
        let mut pacer = Pacer::default();
        pacer.charge(Nanos::ZERO, Nanos::from_secs(60), 100);
        assert!(!pacer.is_spent(Nanos(1), 100));
    }
}
