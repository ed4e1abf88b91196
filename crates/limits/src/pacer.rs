//! How a container alone holds itself to its share of time.
//!
//! The account is one point in time. Work moves it ahead by busy time / share; real time follows. When the account is a
//! window's length ahead, launches stop, and when time has caught up they go on. So a late wake-up or a kernel that ran
//! over is repaid by itself, and no sleep needs an exact length.

/// How much work is done at a stretch, in nanoseconds.
pub const QUANTUM: u64 = 20_000_000;

/// The account of one card.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pacer {
    account: u64,
}

impl Pacer {
    /// The card was busy for us from `from` to `to`, at a share of `percent`.
    pub fn charge(&mut self, from: u64, to: u64, percent: u32) {
        self.charge_after(0, from, to, percent);
    }

    /// The same, after others kept us waiting for `kept`: that time is still ours.
    pub fn charge_after(&mut self, kept: u64, from: u64, to: u64, percent: u32) {
        let (percent, busy) = (u64::from(percent.clamp(1, 100)), to.saturating_sub(from));
        // Time not used is not saved up, but for half a period: an unlucky stretch may be made good.
        let oldest = from.saturating_sub(period(percent) / 2 + kept);
        self.account = self.account.max(oldest) + busy * 100 / percent;
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

    #[test]
    fn a_whole_card_is_never_stopped() {
        let mut pacer = Pacer::default();
        pacer.charge(0, 60_000 * MS, 100);
        assert!(!pacer.is_spent(1, 100));
    }
}
