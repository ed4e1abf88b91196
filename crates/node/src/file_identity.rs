//! Whether a path still leads to the same file.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

/// Identity of a socket file. Inode numbers are reused at once, so the change time is part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl FileIdentity {
    /// Returns the identity of a file, or `None` if it does not exist.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}
