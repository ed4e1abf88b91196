//! How much faster work runs in windows than it would alone.
//!
//! A GPU limited by its power cap clocks higher in short windows, because the cap acts on an average over some 100 ms.
//! The GPU's average power tells: what it draws in the windows, compared with the cap, gives the factor by which time must
//! be charged so that a share means throughput. Fitted on an H200 with bf16 matrix products, where the factor came out
//! within 0.01 at shares from 25 to 90 %; other GPUs may need their own constants.

use std::collections::VecDeque;

/// What of a GPU decides the factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerModel {
    /// Watts between the windows.
    pub idle: f64,
    /// Watts that the cap allows on average.
    pub cap: f64,
    /// How steeply power grows with speed.
    pub exponent: f64,
}

/// Learns the factor of one GPU from its power.
#[derive(Debug)]
pub struct PowerFactor {
    model: PowerModel,
    /// The last second: when, and the nanoseconds the GPU was busy by then.
    busy: VecDeque<(u64, u64)>,
    factor: f64,
}

/// What the driver's average is taken over, in nanoseconds.
const SPAN: u64 = 1_000_000_000;

/// How often the power is asked for while the GPU works: as often as the driver has something new.
pub const SAMPLE_INTERVAL_NS: u64 = 100_000_000;

/// More was never seen; a wrong reading must not stop a tenant.
const MOST: f64 = 1.3;

/// How much of a new reading is taken over: it shares nine tenths of its second with the one before.
const SMOOTHING: f64 = 0.15;

impl PowerModel {
    /// An H200 (or a GPU taken for one) with an enforced power limit.
    #[must_use]
    pub fn with_limit(watts: f64) -> Self {
        Self { idle: 0.175 * watts, cap: 0.985 * watts, exponent: 2.25 }
    }

    /// The factor at an average power, when the GPU was busy for a part of the time.
    #[must_use]
    pub fn factor(&self, average: f64, busy: f64) -> f64 {
        // Next to nothing ran: no reading.
        if busy < 0.02 {
            return 1.0;
        }
        let in_windows = (average - (1.0 - busy) * self.idle) / busy;
        let over = (in_windows - self.idle) / (self.cap - self.idle);
        if over <= 1.0 { 1.0 } else { over.powf(1.0 / self.exponent).min(MOST) }
    }
}

impl PowerFactor {
    /// Nothing is known yet: time counts as it is.
    #[must_use]
    pub fn new(model: PowerModel) -> Self {
        Self { model, busy: VecDeque::new(), factor: 1.0 }
    }

    /// Takes a reading: the watts of the last second on average, and how long the GPU has been busy so far. Returns the
    /// factor.
    pub fn sample(&mut self, at: u64, watts: f64, busy: u64) -> f64 {
        // After a break nothing is known of the busy time of the last second.
        if self.busy.back().is_some_and(|(last, _)| at.saturating_sub(*last) > SPAN / 2) {
            self.busy.clear();
        }
        self.busy.push_back((at, busy));
        while self.busy.get(1).is_some_and(|(second, _)| at.saturating_sub(*second) >= SPAN) {
            self.busy.pop_front();
        }
        let (since, before) = self.busy[0];
        let span = at.saturating_sub(since);
        if span >= SPAN {
            let part = (busy.saturating_sub(before) as f64 / span as f64).min(1.0);
            self.factor += SMOOTHING * (self.model.factor(watts, part) - self.factor);
        }
        self.factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An H200 of 700 W.
    fn model() -> PowerModel {
        PowerModel::with_limit(700.0)
    }

    #[test]
    fn cool_work_is_charged_as_it_is() {
        assert_eq!(model().factor(160.0, 1.0), 1.0);
        assert_eq!(model().factor(689.0, 1.0), 1.0, "at the cap and always busy: its own clock");
        assert_eq!(model().factor(145.0, 0.0), 1.0);
        assert_eq!(model().factor(5_000.0, 0.5), MOST);
    }

    /// Average power at a share of the time, and the throughput reached in it by the same work's throughput alone: what
    /// an H200 did with matrix products.
    #[test]
    fn hot_work_in_windows_is_charged_as_much_as_it_runs_faster() {
        for (watts, share, throughput) in [
            (323.0, 0.25, 1401.3 / 4795.8),
            (524.2, 0.50, 2803.4 / 4795.8),
            (683.5, 0.75, 4041.6 / 4795.8),
            (688.3, 0.90, 4509.7 / 4795.8),
            (528.0, 0.50, 2811.1 / 4793.9),
            (687.5, 0.90, 4511.0 / 4793.9),
            (517.0, 0.50, 43.9 / 76.0),
        ] {
            let (factor, faster) = (model().factor(watts, share), throughput / share);
            assert!((factor - faster).abs() < 0.012, "{share} of the time: {factor} for {faster}");
        }
    }

    #[test]
    fn the_factor_follows_the_power_and_settles() {
        let (mut factor, mut busy, mut read) = (PowerFactor::new(model()), 0, 1.0);
        let mut readings = |factor: &mut PowerFactor, steps: std::ops::Range<u64>, watts| {
            for step in steps {
                read = factor.sample(step * SAMPLE_INTERVAL_NS, watts, busy);
                busy += SAMPLE_INTERVAL_NS / 2;
            }
            read
        };
        assert_eq!(readings(&mut factor, 0..10, 524.0), 1.0, "a second must have passed");
        let hot = readings(&mut factor, 10..60, 524.0);
        assert!((1.16..1.17).contains(&hot), "{hot}");
        let cool = readings(&mut factor, 60..120, 150.0);
        assert!(cool < 1.01, "{cool}");
        assert_eq!(readings(&mut factor, 200..210, 524.0), cool, "nothing is known of the second before");
    }
}
