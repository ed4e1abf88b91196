//! How much faster work runs in windows than it would alone.
//!
//! A card limited by its power cap clocks higher in short windows, because the cap acts on an average over some 100 ms.
//! The energy counter tells: power in the windows, compared with the cap, gives the factor by which time must be charged
//! so that a share means throughput. Fitted on an H200 with bf16 matrix products; other cards need their own constants.

use std::collections::VecDeque;

/// What of a card decides the factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerModel {
    /// Watts without work.
    pub idle: f64,
    /// Watts that the cap allows on average.
    pub cap: f64,
    /// How steeply power grows with speed.
    pub exponent: f64,
}

/// Learns the factor of one card from its energy counter.
#[derive(Debug)]
pub struct PowerFactor {
    model: PowerModel,
    samples: VecDeque<Sample>,
    factor: f64,
    /// When to read the counter next.
    next: u64,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Nanoseconds.
    at: u64,
    millijoules: u64,
    /// Nanoseconds the card was busy so far.
    busy: u64,
}

/// The counter moves every 100 ms; over this long its steps matter little.
const SPAN: u64 = 1_200_000_000;

/// More was never seen; a wrong reading must not stop a tenant.
const MOST: f64 = 1.3;

/// How much of a new reading is taken over.
const SMOOTHING: f64 = 0.5;

/// Reading the counter costs milliseconds of CPU: while readings change something it is read this often,
const CHANGING: u64 = 500_000_000;
/// and else this often.
const STEADY: u64 = 1_000_000_000;
/// A change by less is none.
const CHANGE: f64 = 0.02;

impl PowerModel {
    /// An H200 (or a card taken for one) with an enforced power limit.
    #[must_use]
    pub fn with_limit(watts: f64) -> Self {
        Self { idle: 145.0, cap: 0.985 * watts, exponent: 2.25 }
    }

    /// The factor at an average power, when the card was busy for a part of the time.
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
        Self { model, samples: VecDeque::new(), factor: 1.0, next: 0 }
    }

    /// Whether the counter should be read.
    #[must_use]
    pub fn is_due(&self, now: u64) -> bool {
        now >= self.next
    }

    /// Takes a reading; returns the factor.
    pub fn sample(&mut self, at: u64, millijoules: u64, busy: u64) -> f64 {
        self.samples.push_back(Sample { at, millijoules, busy });
        while self.samples.len() > 2 && at.saturating_sub(self.samples[1].at) >= SPAN {
            self.samples.pop_front();
        }
        self.next = at + CHANGING;
        let first = self.samples[0];
        let span = at.saturating_sub(first.at);
        if span < SPAN / 4 {
            return self.factor;
        }
        let seconds = span as f64 / 1e9;
        let average = millijoules.saturating_sub(first.millijoules) as f64 / 1e3 / seconds;
        let part = (busy.saturating_sub(first.busy) as f64 / span as f64).min(1.0);
        let change = self.model.factor(average, part) - self.factor;
        self.next = at + if change.abs() < CHANGE { STEADY } else { CHANGING };
        self.factor += SMOOTHING * change;
        self.factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: PowerModel = PowerModel { idle: 145.0, cap: 690.0, exponent: 2.25 };

    #[test]
    fn cool_work_is_charged_as_it_is() {
        assert_eq!(MODEL.factor(160.0, 1.0), 1.0);
        assert_eq!(MODEL.factor(690.0, 1.0), 1.0, "at the cap and always busy: its own clock");
        assert_eq!(MODEL.factor(145.0, 0.0), 1.0);
    }

    #[test]
    fn hot_work_in_windows_is_charged_more() {
        // Half of the time at 930 W.
        let factor = MODEL.factor((930.0 + 145.0) / 2.0, 0.5);
        assert!((1.15..1.20).contains(&factor), "{factor}");
        assert_eq!(MODEL.factor(5_000.0, 0.5), MOST);
    }

    #[test]
    fn the_factor_follows_the_counter_and_settles() {
        let mut factor = PowerFactor::new(MODEL);
        let (mut energy, mut busy) = (0, 0);
        let mut read = 1.0;
        let mut readings = 0;
        for step in 0..100 {
            if factor.is_due(step * 100_000_000) {
                read = factor.sample(step * 100_000_000, energy, busy);
                readings += 1;
            }
            energy += 53_750;
            busy += 50_000_000;
        }
        assert!(readings < 30, "steady work is read less often: {readings}");
        assert!((1.15..1.20).contains(&read), "{read}");
        for step in 100..140 {
            read = factor.sample(step * 100_000_000, energy, busy);
            energy += 15_000;
            busy += 50_000_000;
        }
        assert!(read < 1.01, "{read}");
    }
}
