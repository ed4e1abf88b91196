//! What this process has taken, by address or handle, so that what is freed is given back in one step.

use std::collections::HashMap;
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
pub struct Books([Mutex<HashMap<(Kind, u64), Record>>; SHARDS]);

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

    fn shard(&self, key: u64) -> MutexGuard<'_, HashMap<(Kind, u64), Record>> {
        // Addresses differ above the 512 bytes of the smallest piece, handles above the 8 of an object.
        let mixed = (key >> 3) ^ (key >> 9) ^ (key >> 21);
        let shard = &self.0[usize::try_from(mixed % SHARDS as u64).unwrap_or(0)];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A number used again by another process must not hold memory for ever.
const LONGEST_END: Duration = Duration::from_secs(3);

/// Whether nothing of a process is left: no entry, or a zombie, whose files (and so device memory) are already closed.
pub fn is_gone(process: u32) -> bool {
    static SEEN: Mutex<Vec<(u32, Instant)>> = Mutex::new(Vec::new());
    let ended = std::fs::read_to_string(format!("/proc/{process}/stat")).map_or(true, |stat| {
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
        matches!(state, Some('Z' | 'X' | 'x'))
    });
    let Ok(mut seen) = SEEN.try_lock() else { return ended };
    if ended {
        seen.retain(|&(known, _)| known != process);
        return true;
    }
    match seen.iter().find(|(known, _)| *known == process) {
        Some((_, since)) => since.elapsed() > LONGEST_END,
        None => {
            seen.push((process, Instant::now()));
            false
        }
    }
}
