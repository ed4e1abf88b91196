//! The place of a GPU in a grant, and arrays with one element for each place.

use std::ops::Index;

/// Largest number of GPUs that one container may hold.
pub const MAX_GPUS: usize = if cfg!(loom) { 1 } else { 16 };

/// The place of a GPU in a container's grant, always below [`MAX_GPUS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuSlot(u8);

/// One `T` for each GPU of a grant, with the memory layout of a plain array.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerGpu<T>([T; MAX_GPUS]);

impl GpuSlot {
    /// The place of the first GPU.
    pub const FIRST: Self = Self(0);

    #[cfg(all(test, not(loom)))]
    pub(crate) const SECOND: Self = Self(1);

    /// Returns the place with this index, or `None` if no grant has that many GPUs.
    #[must_use]
    pub fn new(index: usize) -> Option<Self> {
        u8::try_from(index).ok().filter(|_| index < MAX_GPUS).map(Self)
    }

    /// Returns all places in ascending order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..MAX_GPUS).filter_map(Self::new)
    }

    /// Returns the place as an index into an array of [`MAX_GPUS`] elements.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl<T> PerGpu<T> {
    /// Creates each element with `element`.
    #[must_use]
    pub fn from_fn(mut element: impl FnMut(GpuSlot) -> T) -> Self {
        // The fallback is never used: the index is below `MAX_GPUS`.
        Self(std::array::from_fn(|index| element(GpuSlot::new(index).unwrap_or(GpuSlot::FIRST))))
    }

    /// Returns the elements in the order of the places.
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }

    /// Returns the elements in the order of the places, for writing.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.0.iter_mut()
    }
}

impl<T: Default> Default for PerGpu<T> {
    fn default() -> Self {
        Self::from_fn(|_| T::default())
    }
}

impl<T> Index<GpuSlot> for PerGpu<T> {
    type Output = T;

    fn index(&self, gpu: GpuSlot) -> &T {
        &self.0[gpu.index()]
    }
}

impl<T> std::ops::IndexMut<GpuSlot> for PerGpu<T> {
    fn index_mut(&mut self, gpu: GpuSlot) -> &mut T {
        &mut self.0[gpu.index()]
    }
}

impl<'a, T> IntoIterator for &'a PerGpu<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_slot_beyond_the_last_gpu_does_not_exist() {
        assert_eq!(GpuSlot::new(0), Some(GpuSlot::FIRST));
        assert_eq!(GpuSlot::new(MAX_GPUS), None);
        assert_eq!(GpuSlot::all().map(GpuSlot::index).collect::<Vec<_>>(), (0..MAX_GPUS).collect::<Vec<_>>());
    }

    #[test]
    fn elements_are_found_by_their_slot() {
        let elements = PerGpu::from_fn(GpuSlot::index);
        assert!(GpuSlot::all().all(|gpu| elements[gpu] == gpu.index()));
    }
}
