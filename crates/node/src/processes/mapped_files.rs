//! Which files a process has mapped, by what the kernel shows in `/proc/PID/maps`.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, BufRead as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use super::Processes;

/// Bytes of a list of mappings that are read. The longest list of a program that does not try to make it long has
/// 65,530 lines, which the kernel permits, of about 120 bytes. A tenant can make each line 4 KiB long.
const MAX_MAPS_BYTES: u64 = 32 << 20;

/// A file, by the device and inode that the kernel shows for a mapping. A name would say nothing: a
/// process may map any file under any name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// Major and minor number of the device of the file system.
    pub device: (u32, u32),
    /// Number of the file in its file system.
    pub inode: u64,
}

/// Whether a process has mapped a file as code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// The process has mapped the file.
    Present,
    /// The process has not mapped the file.
    Absent,
    /// The process has mapped a file with the same inode of another device. That may be the same file, in
    /// a file system that reports yet another device.
    Similar,
    /// The process has no memory, because it has ended.
    NoMemory,
}

impl FileId {
    /// Returns the identities under which mappings of a file may appear.
    ///
    /// Usually there is one. Some file systems (btrfs, overlayfs) report another device for a file than
    /// for its mappings, which show the device of the mount.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn of(file: &Path) -> io::Result<BTreeSet<Self>> {
        let metadata = fs::metadata(file)?;
        let (inode, device) = (metadata.ino(), metadata.dev());
        let reported = (rustix::fs::major(device), rustix::fs::minor(device));
        let path = fs::canonicalize(file)?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let devices = std::iter::once(reported).chain(mount_device(&mounts, &path));
        Ok(devices.map(|device| Self { device, inode }).collect())
    }
}

/// Returns the device of the mount that contains `path`, by the content of `/proc/self/mountinfo`.
fn mount_device(mounts: &str, path: &Path) -> Option<(u32, u32)> {
    let mount = |line: &str| {
        let mut words = line.split(' ').skip(2);
        let device = device(words.next()?, 10)?;
        // Blanks in a mount point are written as `\040`. No mount of the agent has one.
        let point = words.nth(1)?;
        path.starts_with(point).then_some((point.len(), device))
    };
    // Of several mounts at one point, the last one is visible.
    mounts.lines().filter_map(mount).max_by_key(|(length, _)| *length).map(|(_, device)| device)
}

/// Reads a device as `major:minor`.
fn device(text: &str, radix: u32) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(':')?;
    Some((u32::from_str_radix(major, radix).ok()?, u32::from_str_radix(minor, radix).ok()?))
}

/// Returns the file of a line of `/proc/PID/maps`, if it is mapped as code. File names may contain any bytes.
fn code_file(line: &[u8]) -> Option<FileId> {
    let mut words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    let mut word = || std::str::from_utf8(words.next()?.trim_ascii_end()).ok();
    let (_, rights, _) = (word()?, word()?, word()?);
    let device = device(word()?, 16)?;
    let inode = word()?.parse().ok()?;
    rights.contains('x').then_some(FileId { device, inode })
}

/// Searches a list of mappings for one of `files`.
fn find(maps: impl io::Read, files: &BTreeSet<FileId>) -> io::Result<Mapping> {
    let mut maps = io::BufReader::new(maps.take(MAX_MAPS_BYTES));
    let (mut found, mut line) = (Mapping::NoMemory, Vec::new());
    while maps.read_until(b'\n', &mut line)? > 0 {
        let mapped = code_file(&line);
        if mapped.is_some_and(|file| files.contains(&file)) {
            return Ok(Mapping::Present);
        }
        if mapped.is_some_and(|file| files.iter().any(|known| known.inode == file.inode)) {
            found = Mapping::Similar;
        } else if found == Mapping::NoMemory {
            found = Mapping::Absent;
        }
        line.clear();
    }
    Ok(found)
}

impl Processes {
    /// Returns whether a process has mapped one of `files` as code.
    ///
    /// # Errors
    /// Fails if the kernel does not let the caller read the mappings. That needs the capability
    /// `SYS_PTRACE` for processes of other containers.
    pub fn mapping(&self, pid: u32, files: &BTreeSet<FileId>) -> io::Result<Mapping> {
        let own = self.root.join(pid.to_string());
        let of_thread =
            |path: &Path| match fs::File::open(path.join("maps")).and_then(|maps| find(maps, files)) {
                Ok(mapping) => Ok(mapping),
                // The process ended before or during the read.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound
                        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) =>
                {
                    Ok(Mapping::NoMemory)
                }
                Err(error) => Err(error),
            };
        let of_process = of_thread(&own)?;
        if of_process != Mapping::NoMemory {
            return Ok(of_process);
        }
        // The first thread of a process may end before the others. It has no memory then.
        let Ok(threads) = fs::read_dir(own.join("task")) else { return Ok(Mapping::NoMemory) };
        for thread in threads.flatten() {
            let mapping = of_thread(&thread.path())?;
            if mapping != Mapping::NoMemory {
                return Ok(mapping);
            }
        }
        Ok(Mapping::NoMemory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d0c8a00000-55d0c8a28000 r--p 00000000 08:01 1311 /usr/bin/python3
7f1c2c000000-7f1c2c021000 rw-p 00000000 00:00 0
7f1c30000000-7f1c30010000 r--p 00000000 103:0a 4711 /usr/lib/tessera/libtessera.so
7f1c30010000-7f1c30060000 r-xp 00010000 103:0a 4711 /usr/lib/tessera/libtessera.so
7f1c31000000-7f1c31001000 r--p 00000000 00:2e 99 /data/a file (deleted)
7ffd5e7f2000-7ffd5e7f4000 r-xp 00000000 00:00 0 [vdso]
";

    fn file(device: (u32, u32), inode: u64) -> BTreeSet<FileId> {
        [FileId { device, inode }].into()
    }

    #[test]
    fn a_mapping_counts_by_device_and_inode_and_only_as_code() {
        let folder = tempfile::tempdir().unwrap();
        let process = folder.path().join("7");
        fs::create_dir_all(process.join("task/9")).unwrap();
        let write = |maps: &str| fs::write(process.join("maps"), maps).unwrap();
        let processes = Processes::at(folder.path().into());
        write(MAPS);
        for (files, is_mapped) in [
            (file((0x103, 0x0a), 4711), Mapping::Present),
            (file((0x103, 0x0b), 4711), Mapping::Similar),
            (file((0x103, 0x0a), 4712), Mapping::Absent),
            (file((8, 1), 1311), Mapping::Absent),
            (BTreeSet::new(), Mapping::Absent),
        ] {
            assert_eq!(processes.mapping(7, &files).unwrap(), is_mapped, "{files:?}");
        }
        write("");
        assert_eq!(
            processes.mapping(7, &BTreeSet::new()).unwrap(),
            Mapping::NoMemory,
            "the process has ended"
        );
        fs::write(process.join("task/9/maps"), MAPS).unwrap();
        let library = file((0x103, 0x0a), 4711);
        assert_eq!(processes.mapping(7, &library).unwrap(), Mapping::Present, "only the first thread ended");
        assert_eq!(processes.mapping(8, &library).unwrap(), Mapping::NoMemory, "no such process");
    }

    /// A tenant names its files as it likes, and may map one file thousands of times.
    #[test]
    fn names_and_lengths_of_lists_hide_nothing() {
        let library = file((0x103, 0x0a), 4711);
        let strange = b"55d0c8a00000-55d0c8a28000 r-xp 00000000 08:01 1311 /data/\xff\xfe name\n";
        assert_eq!(find(&strange[..], &library).unwrap(), Mapping::Absent);
        let both = [&strange[..], MAPS.as_bytes()].concat();
        assert_eq!(find(&both[..], &library).unwrap(), Mapping::Present);
        let endless = io::repeat(b'a');
        assert_eq!(find(endless, &library).unwrap(), Mapping::Absent);
    }

    #[test]
    fn this_process_has_mapped_its_own_program() {
        let own = std::env::current_exe().unwrap();
        let processes = Processes::at("/proc".into());
        let pid = std::process::id();
        assert_eq!(processes.mapping(pid, &FileId::of(&own).unwrap()).unwrap(), Mapping::Present);
        let other = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(processes.mapping(pid, &FileId::of(other.path()).unwrap()).unwrap(), Mapping::Absent);
    }

    #[test]
    fn the_innermost_mount_gives_the_device() {
        let mounts = "\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:45 /var /var/lib rw,relatime shared:2 - btrfs /dev/sdb rw
31 22 0:46 / /var/lib/other rw - tmpfs none rw
";
        assert_eq!(mount_device(mounts, Path::new("/var/lib/tessera/x.so")), Some((0, 45)));
        assert_eq!(mount_device(mounts, Path::new("/var/library")), Some((8, 1)));
        assert_eq!(mount_device("", Path::new("/x")), None);
    }
}
