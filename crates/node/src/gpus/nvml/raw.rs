//! NVML calls that the wrapper does not offer: process lists whose entries may be longer than
//! documented, samples with one call instead of two (each takes milliseconds), and the IDs of MIG
//! instances.

#![allow(unsafe_code, reason = "calls a C library found at run time")]

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t, nvmlProcessInfo_t, nvmlReturn_t};

/// Fill pattern of the buffer, to detect where the driver has not written.
const FILL: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// Size of a process entry in words of eight bytes: PID with padding, memory, two instance IDs.
/// Some drivers add a fourth word.
const SHORT_ENTRY_WORDS: usize = 3;
const LONG_ENTRY_WORDS: usize = 4;

/// Size of a GPU sample in words: time and value.
const SAMPLE_WORDS: usize = 2;
/// Size of a process sample in words: PID, time, and four percentages of 32 bits.
const PROCESS_SAMPLE_WORDS: usize = 4;

/// Return code for a buffer that is too small.
const INSUFFICIENT_SIZE: nvmlReturn_t = 7;
/// Return code for no new samples.
const NOT_FOUND: nvmlReturn_t = 6;

/// Type of the samples of GPU utilization.
const GPU_UTILIZATION: u32 = 1;

/// Largest supported number of entries. No host runs more processes on one GPU.
const MAX_ENTRIES: usize = 1 << 16;

/// A second handle of NVML, because the wrapper keeps its own private. Loading a loaded library is
/// free.
pub(super) struct Raw {
    library: NvmlLib,
}

impl std::fmt::Debug for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Raw")
    }
}

/// One entry of a process list.
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
        // SAFETY: the wrapper has already loaded and initialized this library, so loading it again
        // runs no initializers.
        let library = unsafe { NvmlLib::new("libnvidia-ml.so.1") }.ok()?;
        Some(Self { library })
    }

    /// Returns all compute, graphics and MPS processes on a GPU, or `None` if the driver cannot
    /// list them.
    pub(super) fn processes(&self, device: &Device<'_>) -> Option<Vec<Entry>> {
        let library = &self.library;
        let compute = library.nvmlDeviceGetComputeRunningProcesses_v3.as_ref().map(|list| *list as List);
        // Drivers before R510 only have the second version, which has the same entries.
        let compute = compute
            .or_else(|_| library.nvmlDeviceGetComputeRunningProcesses_v2.as_ref().map(|list| *list as List));
        let graphics = library.nvmlDeviceGetGraphicsRunningProcesses_v3.as_ref().map(|list| *list as List);
        let mps = library.nvmlDeviceGetMPSComputeRunningProcesses_v3.as_ref().map(|list| *list as List);
        // Only the compute list is required. A GPU without graphics or MPS may reject the others.
        let [compute, graphics, mps] =
            [compute, graphics, mps].map(|list| list.ok().and_then(|list| self::list(list, device)));
        let mut all = compute?;
        all.extend(graphics.into_iter().flatten());
        all.extend(mps.into_iter().flatten());
        Some(all)
    }

    /// Returns the samples of GPU utilization since a time: their time and percentage. Returns
    /// `None` if the driver keeps no samples.
    pub(super) fn utilization(&self, device: &Device<'_>, since: u64) -> Option<Vec<(u64, f64)>> {
        let call = self.library.nvmlDeviceGetSamples.as_ref().ok()?;
        // SAFETY: the handle is used only while `device` is borrowed.
        let device = unsafe { device.handle() };
        let mut kind = 0;
        let (words, count) = read_list(SAMPLE_WORDS, |count, buffer| {
            // SAFETY: the device is alive, and the buffer has room for `count` samples of two
            // words, the size that the driver defines.
            unsafe { call(device, GPU_UTILIZATION, since, &raw mut kind, count, buffer.cast()) }
        })?;
        let sample = |words: &[u64]| Some((*words.first()?, number(kind, *words.get(1)?)?));
        Some(words.chunks(SAMPLE_WORDS).take(count).filter_map(sample).collect())
    }

    /// Returns the utilization of each process since a time: PID, time of its last sample, and
    /// percentage. Returns `None` if the driver does not report it.
    pub(super) fn process_utilization(
        &self,
        device: &Device<'_>,
        since: u64,
    ) -> Option<Vec<(u32, u64, u32)>> {
        let call = self.library.nvmlDeviceGetProcessUtilization.as_ref().ok()?;
        // SAFETY: the handle is used only while `device` is borrowed.
        let device = unsafe { device.handle() };
        let (words, count) = read_list(PROCESS_SAMPLE_WORDS, |count, buffer| {
            // SAFETY: the device is alive, and the buffer has room for `count` samples of four
            // words, the size that the driver defines.
            unsafe { call(device, buffer.cast(), count, since) }
        })?;
        let sample = |words: &[u64]| match *words {
            [pid, moment, used, _] => Some((low(pid), moment, low(used))),
            _ => None,
        };
        Some(words.chunks(PROCESS_SAMPLE_WORDS).take(count).filter_map(sample).collect())
    }

    /// Returns the GPU instance ID and the compute instance ID of a MIG device.
    pub(super) fn instances(&self, part: &Device<'_>) -> (Option<u32>, Option<u32>) {
        let gpu = self.library.nvmlDeviceGetGpuInstanceId.as_ref().ok();
        let compute = self.library.nvmlDeviceGetComputeInstanceId.as_ref().ok();
        (gpu.and_then(|call| instance_id(*call, part)), compute.and_then(|call| instance_id(*call, part)))
    }
}

fn instance_id(call: Number, part: &Device<'_>) -> Option<u32> {
    let mut number = 0;
    // SAFETY: the handle is used only while `part` is borrowed.
    let part = unsafe { part.handle() };
    // SAFETY: the device is alive, and `number` is a local variable that outlives the call.
    let code = unsafe { call(part, &raw mut number) };
    (code == 0).then_some(number)
}

fn list(call: List, device: &Device<'_>) -> Option<Vec<Entry>> {
    // SAFETY: the handle is used only while `device` is borrowed.
    let device = unsafe { device.handle() };
    let (words, count) = read_list(LONG_ENTRY_WORDS, |count, buffer| {
        // SAFETY: the device is alive, and the buffer has room for `count` entries of the longest
        // known form.
        unsafe { call(device, count, buffer.cast()) }
    })?;
    Some(entries(&words, count))
}

/// Calls the driver with a buffer for entries of `length` words, and with a larger buffer while it
/// is too small. Returns the buffer and the number of entries. The call receives a pointer to the
/// capacity, which it replaces by the number of entries, and a pointer to the buffer.
fn read_list(
    length: usize,
    mut call: impl FnMut(*mut u32, *mut u64) -> nvmlReturn_t,
) -> Option<(Vec<u64>, usize)> {
    let mut room = 128;
    while room <= MAX_ENTRIES {
        let mut words = vec![FILL; room * length];
        let mut count = u32::try_from(room).ok()?;
        match call(&raw mut count, words.as_mut_ptr()) {
            0 => return Some((words, (count as usize).min(room))),
            NOT_FOUND => return Some((Vec::new(), 0)),
            // More processes may start before the next call.
            INSUFFICIENT_SIZE => room = (count as usize).max(room) * 2,
            _ => return None,
        }
    }
    None
}

fn low(word: u64) -> u32 {
    u32::try_from(word & u64::from(u32::MAX)).unwrap_or(u32::MAX)
}

/// Returns the value of a sample according to the type that the driver reports.
fn number(kind: u32, word: u64) -> Option<f64> {
    match kind {
        0 => Some(f64::from_bits(word)),
        1 => Some(f64::from(low(word))),
        2 | 3 => u32::try_from(word).ok().map(f64::from),
        _ => None,
    }
}

/// Reads `count` entries from a buffer that was initialized with [`FILL`]. The entry size follows
/// from how far the driver wrote.
fn entries(words: &[u64], count: usize) -> Vec<Entry> {
    let beyond = words.get(SHORT_ENTRY_WORDS * count..LONG_ENTRY_WORDS * count).unwrap_or_default();
    let length = if beyond.iter().all(|word| *word == FILL) { SHORT_ENTRY_WORDS } else { LONG_ENTRY_WORDS };
    let entry = |words: &[u64]| {
        let [first, bytes, instances, ..] = *words else { return None };
        Some(Entry {
            pid: low(first),
            // All bits are set if the driver does not report the size.
            bytes: Some(bytes).filter(|bytes| *bytes != u64::MAX),
            instance: Some(low(instances)).filter(|number| *number != u32::MAX),
        })
    };
    words.chunks(length).take(count).filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a buffer as a driver fills it. Some drivers clear the padding, others leave it
    /// unchanged.
    fn buffer(all: &[&[u64]]) -> Vec<u64> {
        let mut words: Vec<u64> = all.iter().flat_map(|entry| entry.iter().copied()).collect();
        words.resize(128 * LONG_ENTRY_WORDS, FILL);
        words
    }

    #[test]
    fn grows_the_buffer_until_all_entries_fit() {
        let mut rooms = Vec::new();
        let found = read_list(1, |count, buffer| {
            // SAFETY: `read_list` passes a pointer to a live local variable, which only this call
            // uses.
            let count = unsafe { &mut *count };
            rooms.push(*count);
            if *count < 300 {
                *count = 300;
                return INSUFFICIENT_SIZE;
            }
            *count = 1;
            // SAFETY: the buffer has room for at least 300 words.
            unsafe { buffer.write(7) };
            0
        });
        assert_eq!(found.map(|(words, count)| (words[0], words[1], count)), Some((7, FILL, 1)));
        assert_eq!(rooms, [128, 600]);
        assert_eq!(read_list(2, |_, _| NOT_FOUND), Some((Vec::new(), 0)));
        assert_eq!(read_list(2, |_, _| 3), None);
        assert_eq!(read_list(2, |_, _| INSUFFICIENT_SIZE), None, "the buffer has a maximum size");
    }

    #[test]
    fn reads_sample_values_by_type() {
        assert_eq!(number(0, 12.5f64.to_bits()), Some(12.5));
        assert_eq!(number(1, (FILL << 32) | 99), Some(99.0), "the driver does not write the upper half");
        assert_eq!((number(3, 7), number(3, u64::MAX), number(9, 1)), (Some(7.0), None, None));
    }

    #[test]
    fn reads_entries_of_either_size() {
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
