//! What the wrapper does not offer: process lists whose entries may be longer than documented, and the numbers of a cut-up card's
//! parts.

#![allow(unsafe_code, reason = "calls a C library found at run time")]

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t, nvmlProcessInfo_t, nvmlReturn_t};

/// Stands in the buffer where the driver has not written.
const FILL: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// Words of eight bytes in an entry: number and padding, memory, two instances; some drivers add one more.
const SHORT: usize = 3;
const LONG: usize = 4;

/// The driver says that the buffer is too small.
const INSUFFICIENT_SIZE: nvmlReturn_t = 7;

/// No machine runs more processes on one card.
const MOST: usize = 1 << 16;

/// The driver's library once more: the wrapper keeps its own to itself. Loading it again costs nothing.
pub(super) struct Raw {
    library: NvmlLib,
}

impl std::fmt::Debug for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Raw")
    }
}

/// An entry of a process list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) pid: u32,
    pub(super) bytes: Option<u64>,
    pub(super) instance: Option<u32>,
}

type List = unsafe extern "C" fn(nvmlDevice_t, *mut u32, *mut nvmlProcessInfo_t) -> nvmlReturn_t;
type Number = unsafe extern "C" fn(nvmlDevice_t, *mut u32) -> nvmlReturn_t;

impl Raw {
    pub(super) fn load() -> Option<Self> {
        // SAFETY: the library is NVIDIA's and already loaded and initialised by the wrapper; loading it runs nothing more.
        let library = unsafe { NvmlLib::new("libnvidia-ml.so.1") }.ok()?;
        Some(Self { library })
    }

    /// All processes on a card that compute, draw, or compute through MPS. `None` where the driver cannot tell.
    pub(super) fn processes(&self, device: &Device<'_>) -> Option<Vec<Entry>> {
        let library = &self.library;
        let compute = library.nvmlDeviceGetComputeRunningProcesses_v3.as_ref().map(|list| *list as List);
        // Drivers before R510 have the second version only, with the same entries.
        let compute = compute
            .or_else(|_| library.nvmlDeviceGetComputeRunningProcesses_v2.as_ref().map(|list| *list as List));
        let graphics = library.nvmlDeviceGetGraphicsRunningProcesses_v3.as_ref().map(|list| *list as List);
        let mps = library.nvmlDeviceGetMPSComputeRunningProcesses_v3.as_ref().map(|list| *list as List);
        // The first matters; a card for computing may refuse the others.
        let [compute, graphics, mps] =
            [compute, graphics, mps].map(|list| list.ok().and_then(|list| self::list(list, device)));
        let mut all = compute?;
        all.extend(graphics.into_iter().flatten());
        all.extend(mps.into_iter().flatten());
        Some(all)
    }

    /// The numbers of a part of a card.
    pub(super) fn instances(&self, part: &Device<'_>) -> (Option<u32>, Option<u32>) {
        let gpu = self.library.nvmlDeviceGetGpuInstanceId.as_ref().ok();
        let compute = self.library.nvmlDeviceGetComputeInstanceId.as_ref().ok();
        (gpu.and_then(|ask| number(*ask, part)), compute.and_then(|ask| number(*ask, part)))
    }
}

fn number(ask: Number, device: &Device<'_>) -> Option<u32> {
    // SAFETY: the handle is not used beyond the device's life.
    let device = unsafe { device.handle() };
    let mut number = 0;
    // SAFETY: a live device, and the place for the answer.
    let code = unsafe { ask(device, &raw mut number) };
    (code == 0).then_some(number)
}

fn list(ask: List, device: &Device<'_>) -> Option<Vec<Entry>> {
    // SAFETY: the handle is not used beyond the device's life.
    let device = unsafe { device.handle() };
    let mut room = 64;
    while room <= MOST {
        let mut words = vec![FILL; room * LONG];
        let mut count = u32::try_from(room).ok()?;
        // SAFETY: a live device; the buffer holds `count` entries of the longest form known.
        let code = unsafe { ask(device, &raw mut count, words.as_mut_ptr().cast()) };
        match code {
            0 => return Some(entries(&words, count as usize)),
            // More may come until we ask again.
            INSUFFICIENT_SIZE => room = (count as usize).max(room) * 2,
            _ => return None,
        }
    }
    None
}

/// Reads `count` entries from a buffer that was filled with [`FILL`] before. How long they are shows in how far the driver wrote.
fn entries(words: &[u64], count: usize) -> Vec<Entry> {
    let beyond = words.get(SHORT * count..LONG * count).unwrap_or_default();
    let length = if beyond.iter().all(|word| *word == FILL) { SHORT } else { LONG };
    let entry = |words: &[u64]| {
        let [first, bytes, instances, ..] = *words else { return None };
        let low = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        Some(Entry {
            pid: low(first),
            // All ones: the driver may not or cannot tell.
            bytes: Some(bytes).filter(|bytes| *bytes != u64::MAX),
            instance: Some(low(instances)).filter(|number| *number != u32::MAX),
        })
    };
    words.chunks(length).take(count).filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a driver writes them that leaves the padding as it was, or clears it.
    fn buffer(all: &[&[u64]]) -> Vec<u64> {
        let mut words: Vec<u64> = all.iter().flat_map(|entry| entry.iter().copied()).collect();
        words.resize(64 * LONG, FILL);
        words
    }

    #[test]
    fn entries_of_either_length_are_read() {
        let none = u64::MAX;
        let expected = [
            Entry { pid: 401, bytes: Some(1 << 30), instance: None },
            Entry { pid: 402, bytes: None, instance: Some(3) },
        ];
        let short: [&[u64]; 2] = [&[401 | (FILL << 32), 1 << 30, none], &[402, none, 3]];
        assert_eq!(entries(&buffer(&short), 2), expected);
        let long: [&[u64]; 2] = [&[401, 1 << 30, none, 0], &[402, none, 3, 0]];
        assert_eq!(entries(&buffer(&long), 2), expected);
        assert_eq!(entries(&buffer(&long[..1]), 1), expected[..1]);
        assert_eq!(entries(&buffer(&[]), 0), []);
    }
}
