//! The size of account files, which containers can write.

use std::{fs::File, os::unix::fs::MetadataExt as _};

use tessera_limits::memory_account::MemoryAccount;

/// Size of an account file in bytes.
const SIZE: u64 = size_of::<MemoryAccount>() as u64;

/// Space beyond its content that a file may occupy. File systems count whole blocks and blocks of their own.
const OVERHEAD: u64 = 64 << 10;

/// Bytes in one unit of `st_blocks`.
const BLOCK: u64 = 512;

/// Cuts a file that is larger than an account, or occupies more space. Returns how large it was.
///
/// A container can reserve space beyond the end of its file. Setting the length releases that space, also where the
/// length stays the same.
pub(super) fn cut(file: &File) -> Option<u64> {
    let metadata = file.metadata().ok()?;
    let (length, occupied) = (metadata.len(), metadata.blocks() * BLOCK);
    if length <= SIZE && occupied <= SIZE + OVERHEAD {
        return None;
    }
    let _failed = file.set_len(length.min(SIZE));
    Some(length.max(occupied))
}
