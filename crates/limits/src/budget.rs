//! What the driver really takes when it is asked for some bytes.
//!
//! It hands out blocks of 2 MiB: 3 MiB take 4 MiB of the GPU, and the first 1000 bytes take 2 MiB that later small pieces share. Measured on an H200 with driver 580.

/// The unit in which the driver takes memory from the GPU.
pub const BLOCK: u64 = 2 << 20;

/// Pieces below this size share blocks.
const SMALL: u64 = 1 << 20;

/// Small pieces are cut to multiples of this.
const GRAIN: u64 = 512;

/// What one context takes where the agent has not measured it: a little over the 518 MiB of an H200, the most seen.
pub const CONTEXT: u64 = 528 << 20;

/// An amount asked of the driver, in the way it will be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Shares blocks with others.
    Small(u64),
    /// Has whole blocks of its own.
    Blocks(u64),
}

/// The small pieces of one process on one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct SmallPieces {
    bytes: u64,
    charged: u64,
}

impl Piece {
    /// The piece that `bytes` become.
    #[must_use]
    pub fn of(bytes: u64) -> Self {
        if bytes < SMALL {
            Self::Small(bytes.next_multiple_of(GRAIN))
        } else {
            Self::Blocks(whole_blocks(bytes))
        }
    }
}

impl SmallPieces {
    /// What must be charged before another piece of `bytes` is taken.
    #[must_use]
    pub fn missing(&self, bytes: u64) -> u64 {
        Self::blocks_for(self.bytes + bytes).saturating_sub(self.charged)
    }

    /// The blocks that hold so many bytes of small pieces: not quite full, by half a percent on an H200.
    fn blocks_for(bytes: u64) -> u64 {
        whole_blocks(bytes + bytes / 128)
    }

    /// Takes a piece, for which `charged` was charged.
    pub fn take(&mut self, bytes: u64, charged: u64) {
        self.bytes += bytes;
        self.charged += charged;
    }

    /// Puts a piece back; returns what may be refunded. One block is kept for the next piece, as the driver does.
    #[must_use]
    pub fn put_back(&mut self, bytes: u64) -> u64 {
        self.bytes = self.bytes.saturating_sub(bytes);
        let refund = self.charged.saturating_sub(Self::blocks_for(self.bytes));
        self.charged -= refund;
        refund
    }
}

/// `bytes`, rounded up to blocks.
#[must_use]
pub fn whole_blocks(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX)
}

/// What is left of a GPU: never more than the GPU itself has.
#[must_use]
pub fn shown(limit: u64, held: u64, gpu_total: u64, gpu_free: u64) -> (u64, u64) {
    let total = limit.min(gpu_total);
    (total.saturating_sub(held).min(gpu_free), total)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn large_pieces_take_whole_blocks() {
        assert_eq!(Piece::of(3 << 20), Piece::Blocks(4 << 20));
        assert_eq!(Piece::of(1 << 30), Piece::Blocks(1 << 30));
        assert_eq!(Piece::of(u64::MAX), Piece::Blocks(u64::MAX));
        assert_eq!(Piece::of(1000), Piece::Small(1024));
    }

    #[test]
    fn a_share_never_shows_more_than_the_gpu() {
        assert_eq!(shown(100, 30, 1000, 900), (70, 100));
        assert_eq!(shown(100, 30, 1000, 50), (50, 100));
        assert_eq!(shown(100, 300, 1000, 900), (0, 100));
        assert_eq!(shown(u64::MAX, 30, 1000, 970), (970, 1000));
    }

    proptest! {
        /// Small pieces are always covered by what is charged, and all is given back in the end.
        #[test]
        fn small_pieces_are_covered(sizes in proptest::collection::vec(1..SMALL, 0..200)) {
            let (mut pieces, mut charged, mut held) = (SmallPieces::default(), 0, 0);
            for &size in &sizes {
                let missing = pieces.missing(size);
                pieces.take(size, missing);
                charged += missing;
                held += size;
                prop_assert!(charged >= held && charged < held + held / 100 + BLOCK);
            }
            for &size in &sizes {
                charged -= pieces.put_back(size);
                held -= size;
                prop_assert!(charged >= held);
            }
            prop_assert_eq!(charged, 0);
        }
    }
}
