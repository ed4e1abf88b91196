//! The allocation table: what this process has allocated, by address or handle, so that a free
//! releases the right charge.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tessera_limits::GpuSlot;
use tessera_limits::allocation_size::AllocationSize;

/// The kind of object that a key identifies. Keys of different kinds may be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllocationKind {
    Pointer,
    Imported,
    Array,
    Mipmap,
    ExternalMemory,
    /// The buffer for the output of kernels, with its context as key.
    PrintBuffer,
    /// The heap from which kernels allocate, with its context as key.
    Heap,
}

#[derive(Clone, Copy, Debug)]
pub struct AllocationRecord {
    pub gpu: GpuSlot,
    pub size: AllocationSize,
    /// The context whose destruction frees the memory.
    pub context: usize,
    /// Number of times that memory of another process was imported again.
    pub reopened: u32,
}

/// The table, divided into shards so that threads seldom contend for a lock.
pub struct AllocationTable {
    shards: [Mutex<Shard>; SHARDS],
    /// One bit for each hash of a key that was ever recorded. Most stream-ordered frees concern
    /// memory that was never recorded, and this filter detects them without a lock.
    ever_recorded: Box<[AtomicU64]>,
}

type Shard = HashMap<(AllocationKind, u64), AllocationRecord, BuildHasherDefault<KeyHasher>>;

/// Hashes addresses and handles with one multiplication. They are not chosen by an attacker.
#[derive(Default)]
pub struct KeyHasher(u64);

const SHARDS: usize = 16;
/// Number of words in [`AllocationTable::ever_recorded`].
const FILTER_WORDS: usize = 1_024;

impl Default for AllocationTable {
    fn default() -> Self {
        Self {
            shards: Default::default(),
            ever_recorded: std::iter::repeat_with(AtomicU64::default).take(FILTER_WORDS).collect(),
        }
    }
}

impl AllocationTable {
    /// Records an allocation. Returns a previous record of the same key, whose memory was freed in
    /// a way that the library did not see.
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

    /// Counts another import of the same memory. Returns false if the key is not recorded.
    pub fn reopen(&self, kind: AllocationKind, key: u64) -> bool {
        self.shard(key).get_mut(&(kind, key)).map(|record| record.reopened += 1).is_some()
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
        (&self.ever_recorded[(hash / 64) as usize % FILTER_WORDS], 1 << (hash % 64))
    }

    /// Removes and returns all records of a context.
    pub fn remove_context(&self, context: usize) -> Vec<AllocationRecord> {
        let mut removed = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            removed.extend(shard.extract_if(|_, record| record.context == context).map(|(_, record)| record));
        }
        removed
    }

    fn shard(&self, key: u64) -> MutexGuard<'_, Shard> {
        // Addresses differ in the bits above 512, the smallest allocation. Handles differ in the
        // bits above 8.
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
