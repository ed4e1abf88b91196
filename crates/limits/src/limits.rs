//! The limits of one container, as values and as the words they are stored in.

use std::fmt;

use crate::CARDS;

/// What a container may use of each of its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Counts changes: a greater one is newer.
    pub generation: u64,
    /// What a percentage of compute means.
    pub meaning: Meaning,
    /// At most [`CARDS`] of them.
    pub cards: Vec<GpuLimit>,
}

/// What a container may use of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuLimit {
    /// The 16 bytes of the GPU's UUID.
    pub uuid: [u8; 16],
    /// Bytes of device memory, contexts included; [`GpuLimit::WHOLE`] for no limit.
    pub memory: u64,
    /// What one context takes on this GPU, measured by the agent; 0 where it is not known.
    pub context: u64,
    /// Percent of the GPU's time that is guaranteed; 0 for what others leave.
    pub compute_percent: u32,
    /// Percent that may be used while others leave it; equal to `compute_percent` for a hard share.
    pub ceiling: u32,
}

/// What "30 %" promises. Work that is limited by the GPU's power runs faster in short windows than it does alone, so
/// the two differ by up to a fifth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Meaning {
    /// 30 % of the GPU's time.
    #[default]
    Time,
    /// 30 % of what the same work would reach alone on the GPU.
    Throughput,
}

/// Why stored limits cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The words do not add up to their checksum.
    Checksum,
    /// More GPUs than a container can hold, or a percentage above 100.
    Range,
}

/// How many words one copy of the limits takes.
pub const WORDS: usize = 3 + CARDS * GPU_WORDS + 1;
const GPU_WORDS: usize = 5;

impl GpuLimit {
    /// As much memory as the GPU has.
    pub const WHOLE: u64 = u64::MAX;

    /// Whether the library must hold back launches for this GPU.
    #[must_use]
    pub fn limits_compute(&self) -> bool {
        self.ceiling < 100 || self.compute_percent < 100
    }
}

impl Limits {
    /// The GPU with this UUID, by its place in [`Limits::cards`].
    #[must_use]
    pub fn card(&self, uuid: &[u8; 16]) -> Option<usize> {
        self.cards.iter().position(|card| &card.uuid == uuid)
    }

    /// The words to store. GPUs beyond [`CARDS`] are left out.
    #[must_use]
    pub fn to_words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let cards = &self.cards[..self.cards.len().min(CARDS)];
        words[0] = self.generation;
        words[1] = u64::from(self.meaning == Meaning::Throughput);
        words[2] = cards.len() as u64;
        for (card, words) in cards.iter().zip(words[3..].chunks_exact_mut(GPU_WORDS)) {
            words.copy_from_slice(&[
                half(&card.uuid[..8]),
                half(&card.uuid[8..]),
                card.memory,
                card.context,
                u64::from(card.compute_percent) | u64::from(card.ceiling) << 32,
            ]);
        }
        words[WORDS - 1] = checksum(&words[..WORDS - 1]);
        words
    }

    /// The limits stored in `words`.
    ///
    /// # Errors
    /// When the words were not written by [`Limits::to_words`].
    pub fn from_words(words: &[u64; WORDS]) -> Result<Self, Damage> {
        if checksum(&words[..WORDS - 1]) != words[WORDS - 1] {
            return Err(Damage::Checksum);
        }
        let count = usize::try_from(words[2]).ok().filter(|&count| count <= CARDS).ok_or(Damage::Range)?;
        let cards =
            words[3..].chunks_exact(GPU_WORDS).take(count).map(gpu_from_words).collect::<Result<_, _>>()?;
        let meaning = if words[1] == 0 { Meaning::Time } else { Meaning::Throughput };
        Ok(Self { generation: words[0], meaning, cards })
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Checksum => "the limits are damaged",
            Self::Range => "the limits hold values that cannot be",
        })
    }
}

/// The bytes of a GPU's name: `GPU-0123abcd-…`, or the digits alone.
#[must_use]
pub fn uuid_bytes(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim_start_matches("GPU-").chars().filter(|digit| *digit != '-').collect();
    u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32).map(u128::to_be_bytes)
}

/// The name of a GPU with these bytes.
#[must_use]
pub fn uuid_text(bytes: &[u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(*bytes));
    let (a, b, c, d, e) = (&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]);
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

fn gpu_from_words(words: &[u64]) -> Result<GpuLimit, Damage> {
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&words[0].to_le_bytes());
    uuid[8..].copy_from_slice(&words[1].to_le_bytes());
    let percent = |word: u64| u32::try_from(word).ok().filter(|&percent| percent <= 100).ok_or(Damage::Range);
    let (compute_percent, ceiling) = (percent(words[4] & u64::from(u32::MAX))?, percent(words[4] >> 32)?);
    if compute_percent > ceiling {
        return Err(Damage::Range);
    }
    Ok(GpuLimit { uuid, memory: words[2], context: words[3], compute_percent, ceiling })
}

fn half(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// FNV-1a over the words, started so that all zeros are damaged too.
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

    fn limits() -> impl Strategy<Value = Limits> {
        let card = (any::<[u8; 16]>(), any::<u64>(), any::<u64>(), 0..=100u32, 0..=100u32).prop_map(
            |(uuid, memory, context, a, b)| GpuLimit {
                uuid,
                memory,
                context,
                compute_percent: a.min(b),
                ceiling: a.max(b),
            },
        );
        (any::<u64>(), any::<bool>(), proptest::collection::vec(card, 0..=CARDS)).prop_map(
            |(generation, throughput, cards)| Limits {
                generation,
                meaning: if throughput { Meaning::Throughput } else { Meaning::Time },
                cards,
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(limits in limits()) {
            prop_assert_eq!(Limits::from_words(&limits.to_words()), Ok(limits));
        }

        #[test]
        fn any_changed_bit_is_noticed(limits in limits(), word in 0..WORDS, bit in 0..64) {
            let mut words = limits.to_words();
            words[word] ^= 1u64 << bit;
            prop_assert_eq!(Limits::from_words(&words), Err(Damage::Checksum));
        }
    }

    #[test]
    fn names_of_gpus() {
        let bytes = uuid_bytes("GPU-ae203a00-9cff-8fd7-6dda-679e742f9a4d");
        assert_eq!(bytes.map(u128::from_be_bytes), Some(0xae20_3a00_9cff_8fd7_6dda_679e_742f_9a4d));
        assert_eq!(bytes.map(|bytes| uuid_text(&bytes)).unwrap(), "GPU-ae203a00-9cff-8fd7-6dda-679e742f9a4d");
        for none in ["", "GPU-ae203a00", "lost-3", "MIG-ae203a00-9cff-8fd7-6dda-679e742f9a4d"] {
            assert_eq!(uuid_bytes(none), None, "{none}");
        }
    }

    #[test]
    fn an_empty_file_is_damaged() {
        assert_eq!(Limits::from_words(&[0; WORDS]), Err(Damage::Checksum));
    }
}
