//! Nanoseconds as a type of their own.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};
use std::sync::atomic::{AtomicU64, Ordering};

/// A number of nanoseconds: a length of time, or a moment on the monotonic clock.
///
/// All operations saturate. Inputs come from files that the container may write, and the library
/// must neither panic nor wrap around.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// No time.
    pub const ZERO: Self = Self(0);
    /// The longest time.
    pub const MAX: Self = Self(u64::MAX);

    /// Returns so many microseconds.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros.saturating_mul(1_000))
    }

    /// Returns so many milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Returns so many seconds.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000_000))
    }

    /// Multiplies in a constant, where `*` is not available.
    #[must_use]
    pub const fn times(self, factor: u64) -> Self {
        Self(self.0.saturating_mul(factor))
    }

    /// Divides in a constant, where `/` is not available. Dividing by 0 returns the whole.
    #[must_use]
    pub const fn over(self, divisor: u64) -> Self {
        Self(match self.0.checked_div(divisor) {
            Some(quotient) => quotient,
            None => self.0,
        })
    }

    /// Returns `self * numerator / denominator`. A denominator of zero counts as one nanosecond.
    #[must_use]
    pub fn scaled(self, numerator: Self, denominator: Self) -> Self {
        Self(self.0.saturating_mul(numerator.0) / denominator.0.max(1))
    }

    /// Returns the value halfway between both.
    #[must_use]
    pub fn midpoint(self, other: Self) -> Self {
        Self(self.0.midpoint(other.0))
    }

    /// Returns the difference, or `None` where `other` is larger.
    #[must_use]
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }
}

impl Add for Nanos {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Nanos {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Nanos {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Mul<u64> for Nanos {
    type Output = Self;

    fn mul(self, factor: u64) -> Self {
        self.times(factor)
    }
}

impl Div<u64> for Nanos {
    type Output = Self;

    fn div(self, divisor: u64) -> Self {
        self.over(divisor)
    }
}

impl Sum for Nanos {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::ZERO, Add::add)
    }
}

/// [`Nanos`] that several threads read and write.
#[derive(Debug, Default)]
pub(crate) struct AtomicNanos(AtomicU64);

impl AtomicNanos {
    pub(crate) const fn new(nanos: Nanos) -> Self {
        Self(AtomicU64::new(nanos.0))
    }

    pub(crate) fn load(&self, order: Ordering) -> Nanos {
        Nanos(self.0.load(order))
    }

    pub(crate) fn store(&self, nanos: Nanos, order: Ordering) {
        self.0.store(nanos.0, order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_saturate() {
        assert_eq!(Nanos(1) - Nanos(2), Nanos::ZERO);
        assert_eq!(Nanos::MAX + Nanos(1), Nanos::MAX);
        assert_eq!(Nanos::MAX * 2, Nanos::MAX);
        assert_eq!(Nanos(5) / 0, Nanos(5));
        assert_eq!(Nanos(6).scaled(Nanos(2), Nanos(0)), Nanos(12));
        assert_eq!(Nanos::from_secs(u64::MAX), Nanos::MAX);
    }
}
