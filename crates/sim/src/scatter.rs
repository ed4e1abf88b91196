//! Deterministic pseudo-random numbers.

/// Hashes a number to 64 bits with SplitMix64.
#[must_use]
pub fn scatter(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Hashes a text to 64 bits.
pub(crate) fn of_text(text: &str) -> u64 {
    text.bytes().fold(0, |number, byte| scatter(number ^ u64::from(byte)))
}

/// Returns a container ID: 64 hexadecimal digits derived from `text`.
pub(crate) fn long_id(text: &str) -> String {
    let seed = of_text(text);
    (0..4).map(|part| format!("{:016x}", scatter(seed ^ part))).collect()
}
