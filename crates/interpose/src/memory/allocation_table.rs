//! What this process has taken, by address or handle, so that what is freed is given back in one step.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tessera_limits::GpuSlot;
use tessera_limits::allocation_size::AllocationSize;

use crate::grant::Process;

/// What a key stands for; keys of different kinds may be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllocationKind {
    Pointer,
    Imported,
    Array,
    Mipmap,
    ExternalMemory,
    /// For what kernels print, and for what they allocate themselves: by context.
    PrintBuffer,
    Heap,
}

#[derive(Clone, Copy, Debug)]
pub struct AllocationRecord {
    pub gpu: GpuSlot,
    pub piece: AllocationSize,
    /// What it dies with.
    pub context: usize,
    /// How often it was opened again: memory of another process may be.
    pub again: u32,
}

/// In shards, so that threads seldom meet.
pub struct AllocationTable {
    shards: [Mutex<Shard>; SHARDS],
    /// A bit for each key that was ever written down, by its hash: most of what is freed in the order of a stream never was, and is
    /// told so without a lock.
    ever: Box<[AtomicU64]>,
    /// Processes that seemed to end.
    endings: Mutex<Vec<Ending>>,
}

type Shard = HashMap<(AllocationKind, u64), AllocationRecord, BuildHasherDefault<KeyHasher>>;

/// Addresses and handles are no attack: one multiplication is enough.
#[derive(Default)]
pub struct KeyHasher(u64);

const SHARDS: usize = 16;
/// Words of [`AllocationTable::ever`].
const WORDS: usize = 1_024;

impl Default for AllocationTable {
    fn default() -> Self {
        Self {
            shards: Default::default(),
            ever: std::iter::repeat_with(AtomicU64::default).take(WORDS).collect(),
            endings: Mutex::default(),
        }
    }
}

impl AllocationTable {
    /// Writes down; what was there before is gone from the GPU by a way that was not seen.
    #[must_use]
    pub fn insert(
        &self,
        kind: AllocationKind,
        key: u64,
        record: AllocationRecord,
    ) -> Option<AllocationRecord> {
        let (word, bit) = self.bit(key);
        word.fetch_or(bit, Ordering::Relaxed);
        self.shard(key).insert((kind, key), record)
    }

    /// Notes that something is opened once more; false where it is not on the books.
    pub fn open_again(&self, kind: AllocationKind, key: u64) -> bool {
        self.shard(key).get_mut(&(kind, key)).map(|record| record.again += 1).is_some()
    }

    pub fn remove(&self, kind: AllocationKind, key: u64) -> Option<AllocationRecord> {
        let (word, bit) = self.bit(key);
        if word.load(Ordering::Relaxed) & bit == 0 {
            return None;
        }
        self.shard(key).remove(&(kind, key))
    }

    fn bit(&self, key: u64) -> (&AtomicU64, u64) {
        let mut mixer = KeyHasher::default();
        mixer.write_u64(key);
        let hash = mixer.finish() >> 32;
        (&self.ever[(hash / 64) as usize % WORDS], 1 << (hash % 64))
    }

    /// Takes everything that belongs to a context off the books.
    pub fn remove_context(&self, context: usize) -> Vec<AllocationRecord> {
        let mut removed = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            removed.extend(shard.extract_if(|_, record| record.context == context).map(|(_, record)| record));
        }
        removed
    }

    fn shard(&self, key: u64) -> MutexGuard<'_, Shard> {
        // Addresses differ above the 512 bytes of the smallest piece, handles above the 8 of an object.
        let mixed = (key >> 3) ^ (key >> 9) ^ (key >> 21);
        let shard = &self.shards[usize::try_from(mixed % SHARDS as u64).unwrap_or(0)];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number.cast_unsigned() as u64);
    }
}

/// A number used again by another process must not hold memory for ever.
const LONGEST_END: Duration = Duration::from_secs(3);

/// The driver takes memory back a little after the process's files are closed: seen by NVML up to some tens of
/// milliseconds later on an H200 with driver 580.
const AFTERMATH: Duration = Duration::from_millis(250);

/// A process that seemed to end: when it was first seen so, and whether it really had.
#[derive(Debug)]
struct Ending {
    process: u32,
    since: Instant,
    has_ended: bool,
}

impl Process {
    /// Looks after the slots of dead processes.
    pub fn sweep(&self) {
        self.account.sweep(|process| self.memory.allocations.is_gone(process));
    }
}

impl AllocationTable {
    /// Whether nothing of a process is left: for a while no entry, or a zombie, whose files are closed.
    fn is_gone(&self, process: u32) -> bool {
        let has_ended = std::fs::read(format!("/proc/{process}/stat")).map_or(true, |stat| {
            // The state follows the name, which may have brackets of its own.
            let name_end = stat.iter().rposition(|&byte| byte == b')');
            name_end.and_then(|end| stat.get(end + 2)).is_some_and(|state| b"ZXx".contains(state))
        });
        let Ok(mut endings) = self.endings.try_lock() else { return false };
        let Some(place) = endings.iter().position(|known| known.process == process) else {
            endings.push(Ending { process, since: Instant::now(), has_ended });
            return false;
        };
        let ending = &mut endings[place];
        if has_ended && !ending.has_ended {
            (ending.since, ending.has_ended) = (Instant::now(), true);
        }
        let is_gone = ending.since.elapsed() > if has_ended { AFTERMATH } else { LONGEST_END };
        if is_gone {
            endings.swap_remove(place);
        }
        is_gone
    }
}
