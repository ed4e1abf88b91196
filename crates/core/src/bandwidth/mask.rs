//! Sets of GPUs as plain masks, for loops over all sets.

/// Returns the positions of the one-bits of a mask, lowest first.
pub(super) fn bits(mut mask: u64) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        (mask != 0).then(|| {
            let lowest = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            lowest
        })
    })
}

/// Returns the index of a set in a table over all sets.
pub(super) fn index(mask: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "tables are kept for at most 16 GPUs")]
    let index = mask as usize;
    index
}
