//! How much device memory the driver takes for a request.
//!
//! The driver takes memory from the GPU in blocks of 2 MiB. A request for 3 MiB takes 4 MiB. The
//! first request for 1000 bytes takes 2 MiB, which later small requests share. Measured on an H200
//! with driver 580.

use crate::Bytes;

/// Unit in which the driver takes memory from the GPU.
pub const BLOCK: Bytes = Bytes::from_mib(2);

/// Requests below this size share blocks.
const SMALL_LIMIT: Bytes = Bytes::from_mib(1);

/// The driver rounds small requests up to multiples of this size.
const SMALL_GRANULARITY: Bytes = Bytes(512);

/// Charge for one context if the agent has not measured its size. The largest measured context
/// takes 518 MiB, on an H200.
pub const DEFAULT_CONTEXT: Bytes = Bytes::from_mib(528);

/// The size of a request, by how the driver serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationSize {
    /// Memory that shares blocks with other small requests.
    Small(Bytes),
    /// Blocks that no other request shares.
    Blocks(Bytes),
}

/// All small allocations of one process on one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct SmallAllocations {
    bytes: Bytes,
    charged: Bytes,
}

impl AllocationSize {
    /// Returns how the driver serves a request for `bytes`.
    #[must_use]
    pub fn of(bytes: Bytes) -> Self {
        if bytes < SMALL_LIMIT {
            Self::Small(bytes.round_up_to(SMALL_GRANULARITY))
        } else {
            Self::Blocks(round_up_to_blocks(bytes))
        }
    }
}

impl SmallAllocations {
    /// Returns what must be charged before another small allocation of `bytes`.
    #[must_use]
    pub fn additional_charge(&self, bytes: Bytes) -> Bytes {
        Self::blocks_for(self.bytes + bytes) - self.charged
    }

    /// Returns the size of the blocks that hold `bytes` of small allocations. On an H200, half a
    /// percent of these blocks stays unused.
    fn blocks_for(bytes: Bytes) -> Bytes {
        round_up_to_blocks(bytes + Bytes(bytes.0 / 128))
    }

    /// Adds an allocation for which `charged` was charged.
    pub fn add(&mut self, bytes: Bytes, charged: Bytes) {
        self.bytes += bytes;
        self.charged += charged;
    }

    /// Removes an allocation and returns what to refund. Blocks that other small allocations need stay
    /// charged.
    #[must_use]
    pub fn remove(&mut self, bytes: Bytes) -> Bytes {
        self.bytes = self.bytes - bytes;
        let refund = self.charged - Self::blocks_for(self.bytes);
        self.charged = self.charged - refund;
        refund
    }
}

/// Rounds `bytes` up to whole blocks.
#[must_use]
pub fn round_up_to_blocks(bytes: Bytes) -> Bytes {
    bytes.round_up_to(BLOCK)
}

/// Free and total memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeAndTotal {
    /// Memory that can still be allocated.
    pub free: Bytes,
    /// All memory.
    pub total: Bytes,
}

/// Returns the memory that a container with this limit sees, never more than the GPU has.
#[must_use]
pub fn visible_memory(limit: Bytes, held: Bytes, gpu: FreeAndTotal) -> FreeAndTotal {
    let total = limit.min(gpu.total);
    FreeAndTotal { free: (total - held).min(gpu.free), total }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn large_requests_take_whole_blocks() {
        let mib = Bytes::from_mib;
        assert_eq!(AllocationSize::of(mib(3)), AllocationSize::Blocks(mib(4)));
        assert_eq!(AllocationSize::of(mib(1024)), AllocationSize::Blocks(mib(1024)));
        assert_eq!(AllocationSize::of(Bytes::MAX), AllocationSize::Blocks(Bytes::MAX));
        assert_eq!(AllocationSize::of(Bytes(1000)), AllocationSize::Small(Bytes(1024)));
    }

    #[test]
    fn a_container_never_sees_more_memory_than_the_gpu_has() {
        let memory = |free, total| FreeAndTotal { free: Bytes(free), total: Bytes(total) };
        assert_eq!(visible_memory(Bytes(100), Bytes(30), memory(900, 1000)), memory(70, 100));
        assert_eq!(visible_memory(Bytes(100), Bytes(30), memory(50, 1000)), memory(50, 100));
        assert_eq!(visible_memory(Bytes(100), Bytes(300), memory(900, 1000)), memory(0, 100));
        assert_eq!(visible_memory(Bytes::MAX, Bytes(30), memory(970, 1000)), memory(970, 1000));
    }

    proptest! {
        /// The charge always covers the small allocations, and all of it is refunded in the end.
        #[test]
        fn the_charge_covers_small_allocations(sizes in proptest::collection::vec(1..SMALL_LIMIT.0, 0..200)) {
            let (mut allocations, mut charged, mut held) = (SmallAllocations::default(), Bytes::ZERO, Bytes::ZERO);
            for &size in &sizes {
                let additional_charge = allocations.additional_charge(Bytes(size));
                allocations.add(Bytes(size), additional_charge);
                charged += additional_charge;
                held += Bytes(size);
                prop_assert!(charged >= held && charged < held + Bytes(held.0 / 100) + BLOCK);
            }
            for &size in &sizes {
                charged = charged - allocations.remove(Bytes(size));
                held = held - Bytes(size);
                prop_assert!(charged >= held);
            }
            prop_assert_eq!(charged, Bytes::ZERO);
        }
    }
}
