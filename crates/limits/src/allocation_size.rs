//! How much device memory the driver takes for a request.
//!
//! The driver takes memory from the GPU in blocks of 2 MiB. A request for 3 MiB takes 4 MiB. The
//! first request for 1000 bytes takes 2 MiB, which later small requests share. Measured on an H200
//! with driver 580.

/// Unit in which the driver takes memory from the GPU.
pub const BLOCK_BYTES: u64 = 2 << 20;

/// Requests below this size share blocks.
const SMALL_LIMIT_BYTES: u64 = 1 << 20;

/// The driver rounds small requests up to multiples of this size.
const SMALL_GRANULARITY_BYTES: u64 = 512;

/// Charge for one context if the agent has not measured its size. The largest measured context
/// takes 518 MiB, on an H200.
pub const DEFAULT_CONTEXT_BYTES: u64 = 528 << 20;

/// The size of a request, by how the driver serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationSize {
    /// Bytes that share blocks with other small requests.
    Small(u64),
    /// Bytes in blocks that no other request shares.
    Blocks(u64),
}

/// All small allocations of one process on one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct SmallAllocations {
    bytes: u64,
    charged: u64,
}

impl AllocationSize {
    /// Returns how the driver serves a request for `bytes`.
    #[must_use]
    pub fn of(bytes: u64) -> Self {
        if bytes < SMALL_LIMIT_BYTES {
            Self::Small(bytes.next_multiple_of(SMALL_GRANULARITY_BYTES))
        } else {
            Self::Blocks(round_up_to_blocks(bytes))
        }
    }
}

impl SmallAllocations {
    /// Returns the bytes that must be charged before another small allocation of `bytes`.
    #[must_use]
    pub fn additional_charge(&self, bytes: u64) -> u64 {
        Self::blocks_for(self.bytes + bytes).saturating_sub(self.charged)
    }

    /// Returns the size of the blocks that hold `bytes` of small allocations. On an H200, half a
    /// percent of these blocks stays unused.
    fn blocks_for(bytes: u64) -> u64 {
        round_up_to_blocks(bytes + bytes / 128)
    }

    /// Adds an allocation for which `charged` bytes were charged.
    pub fn add(&mut self, bytes: u64, charged: u64) {
        self.bytes += bytes;
        self.charged += charged;
    }

    /// Removes an allocation and returns the bytes to refund. Blocks that other small allocations
    /// need stay charged.
    #[must_use]
    pub fn remove(&mut self, bytes: u64) -> u64 {
        self.bytes = self.bytes.saturating_sub(bytes);
        let refund = self.charged.saturating_sub(Self::blocks_for(self.bytes));
        self.charged -= refund;
        refund
    }
}

/// Rounds `bytes` up to whole blocks.
#[must_use]
pub fn round_up_to_blocks(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX)
}

/// Returns the free and total bytes that a container with this limit sees, never more than the GPU
/// has.
#[must_use]
pub fn visible_memory(limit: u64, held: u64, gpu_total: u64, gpu_free: u64) -> (u64, u64) {
    let total = limit.min(gpu_total);
    (total.saturating_sub(held).min(gpu_free), total)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn large_requests_take_whole_blocks() {
        assert_eq!(AllocationSize::of(3 << 20), AllocationSize::Blocks(4 << 20));
        assert_eq!(AllocationSize::of(1 << 30), AllocationSize::Blocks(1 << 30));
        assert_eq!(AllocationSize::of(u64::MAX), AllocationSize::Blocks(u64::MAX));
        assert_eq!(AllocationSize::of(1000), AllocationSize::Small(1024));
    }

    #[test]
    fn a_container_never_sees_more_memory_than_the_gpu_has() {
        assert_eq!(visible_memory(100, 30, 1000, 900), (70, 100));
        assert_eq!(visible_memory(100, 30, 1000, 50), (50, 100));
        assert_eq!(visible_memory(100, 300, 1000, 900), (0, 100));
        assert_eq!(visible_memory(u64::MAX, 30, 1000, 970), (970, 1000));
    }

    proptest! {
        /// The charge always covers the small allocations, and all of it is refunded in the end.
        #[test]
        fn the_charge_covers_small_allocations(sizes in proptest::collection::vec(1..SMALL_LIMIT_BYTES, 0..200)) {
            let (mut allocations, mut charged, mut held) = (SmallAllocations::default(), 0, 0);
            for &size in &sizes {
                let additional_charge = allocations.additional_charge(size);
                allocations.add(size, additional_charge);
                charged += additional_charge;
                held += size;
                prop_assert!(charged >= held && charged < held + held / 100 + BLOCK_BYTES);
            }
            for &size in &sizes {
                charged -= allocations.remove(size);
                held -= size;
                prop_assert!(charged >= held);
            }
            prop_assert_eq!(charged, 0);
        }
    }
}
