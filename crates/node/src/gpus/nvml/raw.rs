//! What the wrapper does not offer: process lists whose entries may be longer than documented, samples with one call instead of two
//! (each takes milliseconds), and the numbers of a cut-up GPU's parts.

#![allow(unsafe_code, reason = "calls a C library found at run time")]

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t, nvmlProcessInfo_t, nvmlReturn_t};

/// Stands in the buffer where the driver has not written.
const FILL: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// Words of eight bytes in an entry: number and padding, memory, two instances; some drivers add one more.
const SHORT: usize = 3;
const LONG: usize = 4;

/// Words in a sample of a GPU: moment, value; and in one of a process: number, moment, four percentages of 32 bits.
const SAMPLE: usize = 2;
const PROCESS_SAMPLE: usize = 4;

/// The driver says that the buffer is too small,
const INSUFFICIENT_SIZE: nvmlReturn_t = 7;
/// or that there is nothing new.
const NOT_FOUND: nvmlReturn_t = 6;

/// The samples that tell how long kernels ran.
const GPU_UTILIZATION: u32 = 1;

/// No machine runs more processes on one GPU.
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

    /// All processes on a GPU that compute, draw, or compute through MPS. `None` where the driver cannot tell.
    pub(super) fn processes(&self, device: &Device<'_>) -> Option<Vec<Entry>> {
        let library = &self.library;
        let compute = library.nvmlDeviceGetComputeRunningProcesses_v3.as_ref().map(|list| *list as List);
        // Drivers before R510 have the second version only, with the same entries.
        let compute = compute
            .or_else(|_| library.nvmlDeviceGetComputeRunningProcesses_v2.as_ref().map(|list| *list as List));
        let graphics = library.nvmlDeviceGetGraphicsRunningProcesses_v3.as_ref().map(|list| *list as List);
        let mps = library.nvmlDeviceGetMPSComputeRunningProcesses_v3.as_ref().map(|list| *list as List);
        // The first matters; a GPU for computing may refuse the others.
        let [compute, graphics, mps] =
            [compute, graphics, mps].map(|list| list.ok().and_then(|list| self::list(list, device)));
        let mut all = compute?;
        all.extend(graphics.into_iter().flatten());
        all.extend(mps.into_iter().flatten());
        Some(all)
    }

    /// The part of the time in which kernels ran, in samples since a moment: when each was taken, and percent. `None` where the driver
    /// keeps none.
    pub(super) fn utilization(&self, device: &Device<'_>, since: u64) -> Option<Vec<(u64, f64)>> {
        let ask = self.library.nvmlDeviceGetSamples.as_ref().ok()?;
        // SAFETY: the handle is not used beyond the device's life.
        let device = unsafe { device.handle() };
        let mut kind = 0;
        let (words, count) = answer(SAMPLE, |count, buffer| {
            // SAFETY: a live device; the buffer holds `count` samples of two words, as the driver defines them.
            unsafe { ask(device, GPU_UTILIZATION, since, &raw mut kind, count, buffer.cast()) }
        })?;
        let sample = |words: &[u64]| Some((*words.first()?, number(kind, *words.get(1)?)?));
        Some(words.chunks(SAMPLE).take(count).filter_map(sample).collect())
    }

    /// For how much of the time since a moment each process's kernels ran: its number, when its last sample was taken, percent. `None`
    /// where the driver does not tell.
    pub(super) fn process_utilization(
        &self,
        device: &Device<'_>,
        since: u64,
    ) -> Option<Vec<(u32, u64, u32)>> {
        let ask = self.library.nvmlDeviceGetProcessUtilization.as_ref().ok()?;
        // SAFETY: the handle is not used beyond the device's life.
        let device = unsafe { device.handle() };
        let (words, count) = answer(PROCESS_SAMPLE, |count, buffer| {
            // SAFETY: a live device; the buffer holds `count` samples of four words, as the driver defines them.
            unsafe { ask(device, buffer.cast(), count, since) }
        })?;
        let sample = |words: &[u64]| match *words {
            [pid, moment, used, _] => Some((low(pid), moment, low(used))),
            _ => None,
        };
        Some(words.chunks(PROCESS_SAMPLE).take(count).filter_map(sample).collect())
    }

    /// The numbers of a part of a GPU.
    pub(super) fn instances(&self, part: &Device<'_>) -> (Option<u32>, Option<u32>) {
        let gpu = self.library.nvmlDeviceGetGpuInstanceId.as_ref().ok();
        let compute = self.library.nvmlDeviceGetComputeInstanceId.as_ref().ok();
        (gpu.and_then(|ask| place(*ask, part)), compute.and_then(|ask| place(*ask, part)))
    }
}

fn place(ask: Number, part: &Device<'_>) -> Option<u32> {
    let mut number = 0;
    // SAFETY: the handle is not used beyond the device's life.
    let part = unsafe { part.handle() };
    // SAFETY: a live device; the number is ours.
    let code = unsafe { ask(part, &raw mut number) };
    (code == 0).then_some(number)
}

fn list(ask: List, device: &Device<'_>) -> Option<Vec<Entry>> {
    // SAFETY: the handle is not used beyond the device's life.
    let device = unsafe { device.handle() };
    let (words, count) = answer(LONG, |count, buffer| {
        // SAFETY: a live device; the buffer holds `count` entries of the longest form known.
        unsafe { ask(device, count, buffer.cast()) }
    })?;
    Some(entries(&words, count))
}

/// Asks with a buffer for entries of `length` words, and with a larger one for as long as it is too small. Returns it, and how many
/// entries are in it. The call gets the place of their number, which says how many there may be, and the buffer.
fn answer(
    length: usize,
    mut ask: impl FnMut(*mut u32, *mut u64) -> nvmlReturn_t,
) -> Option<(Vec<u64>, usize)> {
    let mut room = 128;
    while room <= MOST {
        let mut words = vec![FILL; room * length];
        let mut count = u32::try_from(room).ok()?;
        match ask(&raw mut count, words.as_mut_ptr()) {
            0 => return Some((words, (count as usize).min(room))),
            NOT_FOUND => return Some((Vec::new(), 0)),
            // More may come until we ask again.
            INSUFFICIENT_SIZE => room = (count as usize).max(room) * 2,
            _ => return None,
        }
    }
    None
}

fn low(word: u64) -> u32 {
    u32::try_from(word & u64::from(u32::MAX)).unwrap_or(u32::MAX)
}

/// A value of a sample, by the type the driver says it has.
fn number(kind: u32, word: u64) -> Option<f64> {
    match kind {
        0 => Some(f64::from_bits(word)),
        1 => Some(f64::from(low(word))),
        2 | 3 => u32::try_from(word).ok().map(f64::from),
        _ => None,
    }
}

/// Reads `count` entries from a buffer that was filled with [`FILL`] before. How long they are shows in how far the driver wrote.
fn entries(words: &[u64], count: usize) -> Vec<Entry> {
    let beyond = words.get(SHORT * count..LONG * count).unwrap_or_default();
    let length = if beyond.iter().all(|word| *word == FILL) { SHORT } else { LONG };
    let entry = |words: &[u64]| {
        let [first, bytes, instances, ..] = *words else { return None };
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
        words.resize(128 * LONG, FILL);
        words
    }

    #[test]
    fn a_buffer_grows_until_all_fit_and_nothing_new_is_no_error() {
        let mut rooms = Vec::new();
        let found = answer(1, |count, buffer| {
            // SAFETY: `answer` lends its number for this call.
            let count = unsafe { &mut *count };
            rooms.push(*count);
            if *count < 300 {
                *count = 300;
                return INSUFFICIENT_SIZE;
            }
            *count = 1;
            // SAFETY: there is room for more than one word.
            unsafe { buffer.write(7) };
            0
        });
        assert_eq!(found.map(|(words, count)| (words[0], words[1], count)), Some((7, FILL, 1)));
        assert_eq!(rooms, [128, 600]);
        assert_eq!(answer(2, |_, _| NOT_FOUND), Some((Vec::new(), 0)));
        assert_eq!(answer(2, |_, _| 3), None);
        assert_eq!(answer(2, |_, _| INSUFFICIENT_SIZE), None, "never enough");
    }

    #[test]
    fn values_of_samples_by_their_type() {
        assert_eq!(number(0, 12.5f64.to_bits()), Some(12.5));
        assert_eq!(number(1, (FILL << 32) | 99), Some(99.0), "the upper half is not written");
        assert_eq!((number(3, 7), number(3, u64::MAX), number(9, 1)), (Some(7.0), None, None));
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
