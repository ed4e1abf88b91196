//! How much faster work runs in windows than it would run alone.
//!
//! A GPU that is limited by its power cap clocks higher in short windows, because the cap acts on
//! an average over about 100 ms. The power that the GPU draws in the windows, compared with the
//! cap, gives the factor by which time must be charged so that a share means throughput. The model
//! was fitted on an H200 with bf16 matrix products, where the factor was within 0.01 at shares from
//! 25 to 90 %. Other GPUs may need their own constants.

use std::collections::VecDeque;

/// The properties of a GPU that determine its power factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerModel {
    /// Power in watts between the windows.
    pub idle: f64,
    /// Average power in watts that the cap allows.
    pub cap: f64,
    /// Exponent with which power grows with speed.
    pub exponent: f64,
}

/// The power factor of one GPU, estimated from samples of its power.
#[derive(Debug)]
pub struct PowerFactor {
    model: PowerModel,
    /// Samples of the last second: the time, and the busy nanoseconds of the GPU until then.
    busy: VecDeque<(u64, u64)>,
    factor: f64,
}

/// Span in nanoseconds over which the driver averages the power.
const AVERAGING_SPAN_NS: u64 = 1_000_000_000;

/// Interval in nanoseconds between two power samples of a busy GPU. The driver updates its value
/// this often.
pub const SAMPLE_INTERVAL_NS: u64 = 100_000_000;

/// Upper bound of the factor, so that a wrong sample cannot stop a tenant. No measured factor was
/// higher.
const MAX_FACTOR: f64 = 1.3;

/// Weight of a new sample. It is low, because two successive samples share nine tenths of their
/// second.
const SMOOTHING: f64 = 0.15;

impl PowerModel {
    /// Returns the model of an H200 with this enforced power limit. Other GPUs are treated as an
    /// H200.
    #[must_use]
    pub fn with_limit(watts: f64) -> Self {
        Self { idle: 0.175 * watts, cap: 0.985 * watts, exponent: 2.25 }
    }

    /// Returns the factor at an average power in watts, if the GPU was busy for the fraction `busy`
    /// of the time.
    #[must_use]
    pub fn factor(&self, average: f64, busy: f64) -> f64 {
        // A GPU that was nearly idle allows no estimate.
        if busy < 0.02 {
            return 1.0;
        }
        let in_windows = (average - (1.0 - busy) * self.idle) / busy;
        let over = (in_windows - self.idle) / (self.cap - self.idle);
        if over <= 1.0 { 1.0 } else { over.powf(1.0 / self.exponent).min(MAX_FACTOR) }
    }
}

impl PowerFactor {
    /// Creates an estimate that starts with a factor of 1.
    #[must_use]
    pub fn new(model: PowerModel) -> Self {
        Self { model, busy: VecDeque::new(), factor: 1.0 }
    }

    /// Adds a sample and returns the new factor. `watts` is the average of the last second, and
    /// `busy` is the total busy time of the GPU in nanoseconds.
    pub fn sample(&mut self, at: u64, watts: f64, busy: u64) -> f64 {
        // After a gap the busy time of the last second is unknown.
        if self.busy.back().is_some_and(|(last, _)| at.saturating_sub(*last) > AVERAGING_SPAN_NS / 2) {
            self.busy.clear();
        }
        self.busy.push_back((at, busy));
        while self.busy.get(1).is_some_and(|(second, _)| at.saturating_sub(*second) >= AVERAGING_SPAN_NS) {
            self.busy.pop_front();
        }
        let (since, before) = self.busy[0];
        let span = at.saturating_sub(since);
        if span >= AVERAGING_SPAN_NS {
            let fraction = (busy.saturating_sub(before) as f64 / span as f64).min(1.0);
            self.factor += SMOOTHING * (self.model.factor(watts, fraction) - self.factor);
        }
        self.factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the model of an H200 of 700 W.
    fn model() -> PowerModel {
        PowerModel::with_limit(700.0)
    }

    #[test]
    fn the_factor_is_one_below_the_power_cap() {
        assert_eq!(model().factor(160.0, 1.0), 1.0);
        assert_eq!(
            model().factor(689.0, 1.0),
            1.0,
            "a GPU that is always busy at the cap has no higher clock in windows"
        );
        assert_eq!(model().factor(145.0, 0.0), 1.0);
        assert_eq!(model().factor(5_000.0, 0.5), MAX_FACTOR);
    }

    /// Each row has the average power, the share of time, and the throughput relative to the same
    /// work alone, as measured on an H200 with matrix products.
    #[test]
    fn the_factor_equals_the_measured_speed_up_in_windows() {
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
    fn the_factor_follows_the_power() {
        let (mut factor, mut busy, mut read) = (PowerFactor::new(model()), 0, 1.0);
        let mut readings = |factor: &mut PowerFactor, steps: std::ops::Range<u64>, watts| {
            for step in steps {
                read = factor.sample(step * SAMPLE_INTERVAL_NS, watts, busy);
                busy += SAMPLE_INTERVAL_NS / 2;
            }
            read
        };
        assert_eq!(readings(&mut factor, 0..10, 524.0), 1.0, "the first second yields no estimate");
        let hot = readings(&mut factor, 10..60, 524.0);
        assert!((1.16..1.17).contains(&hot), "{hot}");
        let cool = readings(&mut factor, 60..120, 150.0);
        assert!(cool < 1.01, "{cool}");
        assert_eq!(
            readings(&mut factor, 200..210, 524.0),
            cool,
            "the busy time of the previous second is unknown"
        );
    }
}
