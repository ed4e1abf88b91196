//! The limits of one container, as values and as the words in which the control file stores them.

use std::fmt;

use crate::{Bytes, GpuSlot, MAX_GPUS};

/// The limits of a container on each of its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GrantLimits {
    /// Number of the change; a greater number is newer.
    pub generation: u64,
    /// What a percentage of compute means.
    pub meaning: ShareMeaning,
    /// The GPUs of the grant, at most [`MAX_GPUS`].
    pub gpus: Vec<GpuLimit>,
}

/// The 16 bytes of a GPU's UUID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct UuidBytes(pub [u8; 16]);

/// The limits of a container on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuLimit {
    /// UUID of the GPU.
    pub uuid: UuidBytes,
    /// Limit of device memory, including contexts, or [`GpuLimit::WHOLE`] for no limit.
    pub memory: Bytes,
    /// Memory that one context takes on this GPU, as measured by the agent, or 0 if unknown.
    pub context: Bytes,
    /// Guaranteed percentage of the GPU's time. 0 grants only time that other containers leave
    /// unused.
    pub compute_percent: u32,
    /// Largest percentage that the container may use while others leave time unused. Equal to
    /// `compute_percent` for a hard share.
    pub compute_ceiling_percent: u32,
}

/// What a percentage of compute means. Work that is limited by the GPU's power runs faster in short
/// windows than alone, so the two meanings differ by up to a fifth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShareMeaning {
    /// A percentage of the GPU's time.
    #[default]
    Time,
    /// A percentage of the throughput that the same work would reach alone on the GPU.
    Throughput,
}

/// The reason why stored limits cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidLimits {
    /// The file has another format or is too short.
    Format,
    /// The checksum does not match the words.
    Checksum,
    /// There are more than [`MAX_GPUS`] GPUs, or a percentage is above 100 or above its ceiling.
    Range,
}

/// Number of words in one copy of the limits.
pub const WORDS: usize = 3 + MAX_GPUS * GPU_WORDS + 1;
const GPU_WORDS: usize = 5;

impl GpuLimit {
    /// Value of `memory` that grants all memory of the GPU.
    pub const WHOLE: Bytes = Bytes::MAX;

    /// Returns whether the library must throttle launches on this GPU.
    #[must_use]
    pub fn limits_compute(&self) -> bool {
        self.compute_ceiling_percent < 100 || self.compute_percent < 100
    }
}

impl GrantLimits {
    /// Returns the slot of the GPU with this UUID, if the grant contains it.
    #[must_use]
    pub fn slot_of(&self, uuid: UuidBytes) -> Option<GpuSlot> {
        self.gpus.iter().position(|gpu| gpu.uuid == uuid).and_then(GpuSlot::new)
    }

    /// Returns the words to store. GPUs beyond [`MAX_GPUS`] are left out.
    #[must_use]
    pub fn to_words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let gpus = &self.gpus[..self.gpus.len().min(MAX_GPUS)];
        words[0] = self.generation;
        words[1] = u64::from(self.meaning == ShareMeaning::Throughput);
        words[2] = gpus.len() as u64;
        for (gpu, words) in gpus.iter().zip(words[3..].chunks_exact_mut(GPU_WORDS)) {
            words.copy_from_slice(&[
                half(&gpu.uuid.0[..8]),
                half(&gpu.uuid.0[8..]),
                gpu.memory.0,
                gpu.context.0,
                u64::from(gpu.compute_percent) | u64::from(gpu.compute_ceiling_percent) << 32,
            ]);
        }
        seal(&mut words);
        words
    }

    /// Parses the limits stored in `words`.
    ///
    /// # Errors
    /// [`InvalidLimits`] if the words were not written by [`GrantLimits::to_words`].
    pub fn from_words(words: &[u64; WORDS]) -> Result<Self, InvalidLimits> {
        if checksum(&words[..WORDS - 1]) != words[WORDS - 1] {
            return Err(InvalidLimits::Checksum);
        }
        let count =
            usize::try_from(words[2]).ok().filter(|&count| count <= MAX_GPUS).ok_or(InvalidLimits::Range)?;
        let gpus =
            words[3..].chunks_exact(GPU_WORDS).take(count).map(gpu_from_words).collect::<Result<_, _>>()?;
        let meaning = if words[1] == 0 { ShareMeaning::Time } else { ShareMeaning::Throughput };
        Ok(Self { generation: words[0], meaning, gpus })
    }
}

impl fmt::Display for InvalidLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Format => "the file is not a control file of this version",
            Self::Checksum => "the limits are damaged: their checksum does not match",
            Self::Range => "the limits contain a value that is out of range",
        })
    }
}

impl std::error::Error for InvalidLimits {}

impl UuidBytes {
    /// Parses `GPU-0123abcd-…`, or the 32 hexadecimal digits without the prefix.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits: String = text.trim_start_matches("GPU-").chars().filter(|digit| *digit != '-').collect();
        let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
        Some(Self(number.to_be_bytes()))
    }
}

/// Writes the UUID as the driver does: `GPU-0123abcd-…`.
impl fmt::Display for UuidBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{:032x}", u128::from_be_bytes(self.0));
        let (a, b, c, d, e) = (&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]);
        write!(f, "GPU-{a}-{b}-{c}-{d}-{e}")
    }
}

/// Writes the checksum of the words before it into the last word.
pub fn seal(words: &mut [u64; WORDS]) {
    words[WORDS - 1] = checksum(&words[..WORDS - 1]);
}

fn gpu_from_words(words: &[u64]) -> Result<GpuLimit, InvalidLimits> {
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&words[0].to_le_bytes());
    uuid[8..].copy_from_slice(&words[1].to_le_bytes());
    let percent =
        |word: u64| u32::try_from(word).ok().filter(|&percent| percent <= 100).ok_or(InvalidLimits::Range);
    let (compute_percent, compute_ceiling_percent) =
        (percent(words[4] & u64::from(u32::MAX))?, percent(words[4] >> 32)?);
    if compute_percent > compute_ceiling_percent {
        return Err(InvalidLimits::Range);
    }
    Ok(GpuLimit {
        uuid: UuidBytes(uuid),
        memory: Bytes(words[2]),
        context: Bytes(words[3]),
        compute_percent,
        compute_ceiling_percent,
    })
}

fn half(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Returns the FNV-1a hash of the words. Its offset basis makes an all-zero copy invalid.
fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        word.to_le_bytes()
            .iter()
            .fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn limits() -> impl Strategy<Value = GrantLimits> {
        let gpu = (any::<[u8; 16]>(), any::<u64>(), any::<u64>(), 0..=100u32, 0..=100u32).prop_map(
            |(uuid, memory, context, a, b)| GpuLimit {
                uuid: UuidBytes(uuid),
                memory: Bytes(memory),
                context: Bytes(context),
                compute_percent: a.min(b),
                compute_ceiling_percent: a.max(b),
            },
        );
        (any::<u64>(), any::<bool>(), proptest::collection::vec(gpu, 0..=MAX_GPUS)).prop_map(
            |(generation, throughput, gpus)| GrantLimits {
                generation,
                meaning: if throughput { ShareMeaning::Throughput } else { ShareMeaning::Time },
                gpus,
            },
        )
    }

    proptest! {
        #[test]
        fn limits_survive_the_conversion_to_words(limits in limits()) {
            prop_assert_eq!(GrantLimits::from_words(&limits.to_words()), Ok(limits));
        }

        #[test]
        fn detects_any_changed_bit(limits in limits(), word in 0..WORDS, bit in 0..64) {
            let mut words = limits.to_words();
            words[word] ^= 1u64 << bit;
            prop_assert_eq!(GrantLimits::from_words(&words), Err(InvalidLimits::Checksum));
        }
    }

    #[test]
    fn parses_and_writes_the_uuids_of_gpus() {
        let uuid = UuidBytes::parse("GPU-ae203a00-9cff-8fd7-6dda-679e742f9a4d").unwrap();
        assert_eq!(u128::from_be_bytes(uuid.0), 0xae20_3a00_9cff_8fd7_6dda_679e_742f_9a4d);
        assert_eq!(uuid.to_string(), "GPU-ae203a00-9cff-8fd7-6dda-679e742f9a4d");
        for invalid in ["", "GPU-ae203a00", "lost-3", "MIG-ae203a00-9cff-8fd7-6dda-679e742f9a4d"] {
            assert_eq!(UuidBytes::parse(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn rejects_words_of_an_empty_file() {
        assert_eq!(GrantLimits::from_words(&[0; WORDS]), Err(InvalidLimits::Checksum));
    }
}
