//! Size-limited file systems in memory (tmpfs).

use std::{
    ffi::CString,
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::Path,
};

use rustix::mount::{MountFlags, mount, mount_remount};

/// Type of a tmpfs in `statfs`, as linux/magic.h defines it.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// What [`ensure`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mounting {
    /// The directory had no file system of its own, and has one now.
    Mounted,
    /// The directory already had a tmpfs, which keeps its files and has the given size now.
    Resized,
}

/// Mounts a tmpfs of this size at a directory, which is created if it is missing, or resizes the
/// tmpfs that is there. Only root may enter the directory.
///
/// # Errors
/// Fails without the right to mount, and if a smaller size would not hold the files.
pub fn ensure(directory: &Path, size_mib: u64) -> io::Result<Mounting> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let options = CString::new(format!("size={size_mib}m,mode=0700"))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    if is_mounted(directory) {
        mount_remount(directory, flags, options.as_c_str())?;
        return Ok(Mounting::Resized);
    }
    mount("tessera", directory, "tmpfs", flags, options.as_c_str())?;
    Ok(Mounting::Mounted)
}

/// Returns whether a tmpfs is mounted at this directory.
#[must_use]
pub fn is_mounted(directory: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).ok();
    let has_own_device = directory
        .parent()
        .is_some_and(|parent| device(directory).is_some_and(|own| device(parent) != Some(own)));
    has_own_device && rustix::fs::statfs(directory).is_ok_and(|found| found.f_type == TMPFS_MAGIC)
}

/// Returns the size of the file system of a path in MiB.
///
/// # Errors
/// Fails if the path does not exist.
pub fn size_mib(path: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(path)?;
    Ok((found.f_blocks * found.f_frsize) >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_directory_is_not_mounted() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_mounted(folder.path()));
        assert!(!is_mounted(&folder.path().join("missing")));
    }
}
