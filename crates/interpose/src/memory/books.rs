//! What this process has taken, by address or handle, so that what is freed is given back in one step.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tessera_limits::budget::Piece;

/// What a key stands for; keys of different kinds may be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Pointer,
    Imported,
    Array,
    Mipmap,
    ExternalMemory,
}

#[derive(Clone, Copy, Debug)]
pub struct Record {
    pub card: usize,
    pub piece: Piece,
    /// What it dies with.
    pub context: usize,
}

/// In shards, so that threads seldom meet.
#[derive(Default)]
pub struct Books([Mutex<Shard>; SHARDS]);

type Shard = HashMap<(Kind, u64), Record, BuildHasherDefault<Mixer>>;

/// Addresses and handles are no attack: one multiplication is enough.
#[derive(Default)]
pub struct Mixer(u64);

const SHARDS: usize = 16;

impl Books {
    pub fn insert(&self, kind: Kind, key: u64, record: Record) {
        self.shard(key).insert((kind, key), record);
    }

    pub fn remove(&self, kind: Kind, key: u64) -> Option<Record> {
        self.shard(key).remove(&(kind, key))
    }

    /// Takes everything that belongs to a context off the books.
    pub fn remove_context(&self, context: usize) -> Vec<Record> {
        let mut removed = Vec::new();
        for shard in &self.0 {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            removed.extend(shard.extract_if(|_, record| record.context == context).map(|(_, record)| record));
        }
        removed
    }

    fn shard(&self, key: u64) -> MutexGuard<'_, Shard> {
        // Addresses differ above the 512 bytes of the smallest piece, handles above the 8 of an object.
        let mixed = (key >> 3) ^ (key >> 9) ^ (key >> 21);
        let shard = &self.0[usize::try_from(mixed % SHARDS as u64).unwrap_or(0)];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hasher for Mixer {
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

/// Whether nothing of a process is left: for a while no entry, or a zombie, whose files are closed.
pub fn is_gone(process: u32) -> bool {
    /// Process, when it was first seen here, and whether it had ended then.
    static SEEN: Mutex<Vec<(u32, Instant, bool)>> = Mutex::new(Vec::new());
    let has_ended = std::fs::read_to_string(format!("/proc/{process}/stat")).map_or(true, |stat| {
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
        matches!(state, Some('Z' | 'X' | 'x'))
    });
    let Ok(mut seen) = SEEN.try_lock() else { return false };
    let Some(place) = seen.iter().position(|(known, ..)| *known == process) else {
        seen.push((process, Instant::now(), has_ended));
        return false;
    };
    let (_, since, had_ended) = &mut seen[place];
    if has_ended && !*had_ended {
        (*since, *had_ended) = (Instant::now(), true);
    }
    let is_gone = since.elapsed() > if has_ended { AFTERMATH } else { LONGEST_END };
    if is_gone {
        seen.swap_remove(place);
    }
    is_gone
}
