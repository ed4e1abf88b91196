//! Bytes of device memory as a type of their own.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};

use crate::atomic::{AtomicU64, Ordering};

/// An amount of device memory.
///
/// All operations saturate. Amounts come from programs and from files that the container may write, and
/// the library must neither panic nor wrap around.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Bytes(pub u64);

/// [`Bytes`] that several threads or processes read and write, in the form of a plain word.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct AtomicBytes(AtomicU64);

impl Bytes {
    /// No memory.
    pub const ZERO: Self = Self(0);
    /// The largest amount.
    pub const MAX: Self = Self(u64::MAX);

    /// Returns so many mebibytes.
    #[must_use]
    pub const fn from_mib(mib: u64) -> Self {
        Self(mib.saturating_mul(1 << 20))
    }

    /// Returns the whole mebibytes.
    #[must_use]
    pub const fn whole_mib(self) -> u64 {
        self.0 >> 20
    }

    /// Rounds up to a multiple of `unit`.
    #[must_use]
    pub fn round_up_to(self, unit: Self) -> Self {
        Self(self.0.checked_next_multiple_of(unit.0).unwrap_or(u64::MAX))
    }

    /// Returns the difference, or `None` where `other` is larger.
    #[must_use]
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }
}

impl Add for Bytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0)
    }
}

impl AtomicBytes {
    /// Creates a word with this value.
    #[must_use]
    pub fn new(bytes: Bytes) -> Self {
        Self(AtomicU64::new(bytes.0))
    }

    /// Reads the value.
    pub fn load(&self, order: Ordering) -> Bytes {
        Bytes(self.0.load(order))
    }

    /// Writes the value.
    pub fn store(&self, bytes: Bytes, order: Ordering) {
        self.0.store(bytes.0, order);
    }

    /// Writes the value and returns the one before.
    pub fn swap(&self, bytes: Bytes, order: Ordering) -> Bytes {
        Bytes(self.0.swap(bytes.0, order))
    }

    /// Adds to the value and returns the one before. The sum wraps around, so that a subtraction of the
    /// same amount restores the value.
    pub fn fetch_add(&self, bytes: Bytes, order: Ordering) -> Bytes {
        Bytes(self.0.fetch_add(bytes.0, order))
    }

    /// Subtracts from a value that is known to be as large.
    pub fn fetch_sub(&self, bytes: Bytes, order: Ordering) {
        self.0.fetch_sub(bytes.0, order);
    }

    /// Subtracts from a value that may be smaller: then zero is left.
    pub fn saturating_sub(&self, bytes: Bytes, order: Ordering) {
        let _ = self.0.fetch_update(order, Ordering::Relaxed, |held| Some(held.saturating_sub(bytes.0)));
    }

    /// Subtracts if the value is large enough. Returns true if it was.
    pub fn try_sub(&self, bytes: Bytes, order: Ordering) -> bool {
        self.0.fetch_update(order, Ordering::Relaxed, |held| held.checked_sub(bytes.0)).is_ok()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn operations_saturate() {
        assert_eq!(Bytes(1) - Bytes(2), Bytes::ZERO);
        assert_eq!(Bytes::MAX + Bytes(1), Bytes::MAX);
        assert_eq!(Bytes::from_mib(u64::MAX), Bytes::MAX);
        assert_eq!(Bytes::MAX.round_up_to(Bytes(512)), Bytes::MAX);
        assert_eq!(Bytes(513).round_up_to(Bytes(512)), Bytes(1024));
    }

    #[test]
    fn a_shared_amount_never_wraps_around_below_zero() {
        let held = AtomicBytes::new(Bytes(5));
        assert!(!held.try_sub(Bytes(6), Ordering::SeqCst) && held.try_sub(Bytes(2), Ordering::SeqCst));
        held.saturating_sub(Bytes(4), Ordering::SeqCst);
        assert_eq!(held.load(Ordering::SeqCst), Bytes::ZERO);
    }

    /// The files contain plain words.
    #[test]
    fn a_shared_amount_has_the_form_of_a_number() {
        assert_eq!((size_of::<AtomicBytes>(), align_of::<AtomicBytes>()), (8, 8));
    }
}
