//! Newtypes for quantities and names, so that the compiler rejects mixed units.

use std::borrow::Borrow;
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

/// Mebibytes of GPU memory or of main memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MiB(pub u64);

/// Percent of one GPU's compute: 100 is the whole GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Percent(pub u32);

/// Thousandths of one CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MilliCpu(pub u64);

/// The index of a GPU on its node, as NVML and `nvidia-smi` number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuIndex(pub u8);

/// The name of a Kubernetes node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(pub String);

/// The UID of a pod, which is never reused, unlike its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(pub String);

/// A number of things, printed with the noun in its singular or plural form: "1 pod", "2 pods".
#[derive(Clone, Copy, Debug)]
pub struct Count<N>(
    /// How many things there are.
    pub N,
    /// What one of them is called. The plural form must end with an additional "s".
    pub &'static str,
);

// === impl Count ===

impl<N: fmt::Display + PartialEq + From<u8>> fmt::Display for Count<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(number, noun) = self;
        write!(f, "{number} {noun}{}", if *number == N::from(1) { "" } else { "s" })
    }
}

// === impl MiB, Percent, MilliCpu ===

impl Percent {
    /// All of one GPU's compute.
    pub const WHOLE: Self = Self(100);
}

macro_rules! quantity {
    ($name:ident, $suffix:literal) => {
        impl $name {
            /// Zero.
            pub const ZERO: Self = Self(0);

            /// Returns the difference, or zero where it would be negative.
            #[must_use]
            pub fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
                parts.fold(Self::ZERO, Add::add)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!("{}", $suffix), self.0)
            }
        }
    };
}

quantity!(MiB, " MiB");
quantity!(Percent, "%");
quantity!(MilliCpu, "m CPU");

// === impl GpuIndex ===

impl GpuIndex {
    /// Returns the index as a position in the node's list of GPUs.
    #[must_use]
    pub fn position(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for GpuIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// === impl NodeName, PodUid ===

macro_rules! name {
    ($name:ident) => {
        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        /// Maps keyed by name can be searched with any text.
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

name!(NodeName);
name!(PodUid);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_printed_with_the_noun_in_its_number() {
        let printed = [0u64, 1, 2].map(|number| Count(number, "idle GPU").to_string());
        assert_eq!(printed, ["0 idle GPUs", "1 idle GPU", "2 idle GPUs"]);
    }
}
