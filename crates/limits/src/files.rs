//! The files of a grant. The agent creates them, and the agent and the container's processes open
//! them.
//!
//! ```text
//! <grant>/control   mode 0644; the whole directory is mounted read-only into the container
//! <grant>/bell      mode 0666, a named pipe: a byte in it wakes the arbiter
//! <grant>/account   mode 0666, mounted writable over the same file
//! ```
//!
//! A pipe is writable even below a read-only mount. A process opens the pipe for each write,
//! because a program may close files that it did not open. Any user of the container may write
//! `account`; no other user of the node can reach it, because only the agent has access to the
//! directory above.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::control::Control;
use crate::limits::GrantLimits;
use crate::memory_account::{self, MemoryAccount};
use crate::{Bytes, GpuSlot};

/// Directory in which a container finds its grant: its files, or a directory for the request of a claim.
pub const GRANT_DIRECTORY: &str = "/etc/tessera";

const CONTROL: &str = "control";
/// Name of the account file in a grant directory.
pub const ACCOUNT: &str = "account";
const WAKEUP_PIPE: &str = "bell";

/// Returns the directories of the grants in `root`: `root` itself, or its subdirectories in the order of their names.
///
/// A container with a claim can write to `root` and add directories of its own, but it cannot remove the mounted
/// ones. So no subdirectory is left out, and files of a grant beside subdirectories are an error.
///
/// # Errors
/// An error if `root` cannot be read, or if it holds a grant beside those in subdirectories.
pub fn grants_in(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut directories = Vec::new();
    for entry in std::fs::read_dir(root)? {
        let entry = entry?;
        if !entry.file_type()?.is_file() && entry.path().is_dir() {
            directories.push(entry.path());
        }
    }
    let has_own = control_path(root).symlink_metadata().is_ok();
    directories.sort();
    match (has_own, directories.is_empty()) {
        (_, true) => Ok(vec![root.to_owned()]),
        (false, false) => Ok(directories),
        (true, false) => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "there are files of a grant beside the directories of claims; remove them",
        )),
    }
}

/// The wake-up pipe of a grant, as the container's processes use it.
#[derive(Debug)]
pub struct ArbiterWakeup(PathBuf);

impl ArbiterWakeup {
    /// Returns the wake-up pipe of the grant in `directory`.
    #[must_use]
    pub fn of(directory: &Path) -> Self {
        Self(directory.join(WAKEUP_PIPE))
    }

    /// Wakes the arbiter, if one runs. An error is ignored, because the arbiter also polls from
    /// time to time.
    pub fn notify(&self) {
        if let Ok(mut pipe) = open_pipe(&self.0) {
            let _ = pipe.write_all(&[1]);
        }
    }
}

/// Opens the wake-up pipe of a grant for reading.
///
/// Reading never blocks. The pipe never reports its end, because the returned file is open for
/// writing too.
///
/// # Errors
/// An error if the pipe does not exist or cannot be opened.
pub fn open_wakeup_pipe(grant: &Path) -> io::Result<File> {
    open_pipe(&grant.join(WAKEUP_PIPE))
}

fn open_pipe(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// A file that stays mapped until the process ends. `T` must consist of atomic integers only.
#[derive(Debug)]
pub struct StaticMapping<T: 'static>(&'static T);

impl<T> Clone for StaticMapping<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for StaticMapping<T> {}

impl<T> std::ops::Deref for StaticMapping<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

/// A file that is unmapped when this value is dropped, for the agent, which outlives its
/// containers.
#[derive(Debug)]
pub struct OwnedMapping<T: 'static>(StaticMapping<T>);

impl<T> std::ops::Deref for OwnedMapping<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for OwnedMapping<T> {
    fn drop(&mut self) {
        let address = std::ptr::from_ref(self.0.0).cast_mut().cast();
        // SAFETY: `map` mapped this address with this size. References to it were lent only for the
        // lifetime of `self`, so none is left.
        unsafe { libc::munmap(address, size_of::<T>()) };
    }
}

/// Maps the control file of a grant for reading.
///
/// # Errors
/// An error if the file is absent, too short, or of another format.
pub fn open_control(grant: &Path) -> io::Result<StaticMapping<Control>> {
    let control = map::<Control>(&OpenOptions::new().read(true).open(control_path(grant))?, libc::PROT_READ)?;
    if control.is_known() { Ok(control) } else { Err(unknown_format()) }
}

/// Maps the control file of a grant for writing, as the agent does.
///
/// # Errors
/// An error if the file is absent, too short, or of another format.
pub fn open_control_writable(grant: &Path) -> io::Result<OwnedMapping<Control>> {
    let file = OpenOptions::new().read(true).write(true).open(control_path(grant))?;
    let control = OwnedMapping(map::<Control>(&file, libc::PROT_READ | libc::PROT_WRITE)?);
    if control.is_known() { Ok(control) } else { Err(unknown_format()) }
}

/// Returns the path of a grant's control file.
#[must_use]
pub fn control_path(grant: &Path) -> PathBuf {
    grant.join(CONTROL)
}

/// Returns the path of a grant's account file.
#[must_use]
pub fn account_path(grant: &Path) -> PathBuf {
    grant.join(ACCOUNT)
}

/// Maps the account file of a grant for reading and writing.
///
/// # Errors
/// An error if the file is absent, too short, or of another format.
pub fn open_account(grant: &Path) -> io::Result<StaticMapping<MemoryAccount>> {
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(grant.join(ACCOUNT))?;
    let account = map::<MemoryAccount>(&file, libc::PROT_READ | libc::PROT_WRITE)?;
    if account.is_known() { Ok(account) } else { Err(unknown_format()) }
}

/// Creates the files of a grant or keeps the existing ones, and puts `limits` into force.
///
/// The container may be using the account and can truncate it at any time. This function therefore
/// writes to the account and never maps it.
///
/// # Errors
/// An error if a file cannot be created.
pub fn update_grant(directory: &Path, limits: &GrantLimits) -> io::Result<OwnedMapping<Control>> {
    std::fs::create_dir_all(directory)?;
    write_account_format(&create::<MemoryAccount>(&directory.join(ACCOUNT), 0o666)?)?;
    create_wakeup_pipe(directory)?;
    let file = create::<Control>(&directory.join(CONTROL), 0o644)?;
    let control = OwnedMapping(map::<Control>(&file, libc::PROT_READ | libc::PROT_WRITE)?);
    if !control.is_known() || control.read().as_ref() != Ok(limits) {
        control.write(limits);
    }
    Ok(control)
}

/// Creates the files of a grant for a container that is about to start, with an empty account.
///
/// Processes of an earlier start that still run keep the account that they have mapped.
///
/// # Errors
/// An error if a file cannot be created.
pub fn create_grant(directory: &Path, limits: &GrantLimits) -> io::Result<OwnedMapping<Control>> {
    std::fs::create_dir_all(directory)?;
    let fresh = directory.join(".account.new");
    match std::fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    write_account_format(&create::<MemoryAccount>(&fresh, 0o666)?)?;
    std::fs::rename(&fresh, directory.join(ACCOUNT))?;
    let control = update_grant(directory, limits)?;
    for gpu in GpuSlot::all() {
        control.set_uncharged(gpu, Bytes::ZERO, 0);
    }
    Ok(control)
}

fn create_wakeup_pipe(directory: &Path) -> io::Result<()> {
    let pipe = directory.join(WAKEUP_PIPE);
    let name = CString::new(pipe.clone().into_os_string().into_vec())?;
    // SAFETY: `name` is a NUL-terminated string that outlives the call.
    if unsafe { libc::mkfifo(name.as_ptr(), 0o600) } != 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::AlreadyExists {
            return Err(error);
        }
    }
    std::fs::set_permissions(pipe, std::fs::Permissions::from_mode(0o666))
}

/// Opens or creates a file that is long enough for a `T`. Existing content is kept.
fn create<T>(path: &Path, mode: u32) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    let size = size_of::<T>() as u64;
    if file.metadata()?.len() < size {
        file.set_len(size)?;
    }
    reserve(&file, size)?;
    Ok(file)
}

/// Allocates disk blocks for the whole file. Without them, a write to a mapped page on a full disk
/// would kill the writing process, which may be the agent or a process of the container.
fn reserve(file: &File, size: u64) -> io::Result<()> {
    let size = libc::off_t::try_from(size).map_err(io::Error::other)?;
    // SAFETY: `file` is open for writing during the call.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

fn write_account_format(file: &File) -> io::Result<()> {
    file.write_all_at(&memory_account::FORMAT.to_ne_bytes(), memory_account::FORMAT_OFFSET)
}

fn map<T>(file: &File, protection: libc::c_int) -> io::Result<StaticMapping<T>> {
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() < size_of::<T>() as u64 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the file is shorter than its format requires",
        ));
    }
    // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), size_of::<T>(), protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is page-aligned and as long as a `T`. It stays valid until the process
    // ends, or until the `OwnedMapping` around it is dropped. `T` consists of atomic integers, for
    // which every bit pattern is valid and which other processes may change.
    Ok(StaticMapping(unsafe { &*address.cast::<T>() }))
}

fn unknown_format() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the file was written by another version of Tessera")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{UuidBytes, limits::GpuLimit, memory_account::ProcessIdentity};

    fn limits(memory: u64) -> GrantLimits {
        let gpu = GpuLimit {
            uuid: UuidBytes([7; 16]),
            memory: Bytes(memory),
            context: Bytes::ZERO,
            compute_percent: 30,
            compute_ceiling_percent: 60,
        };
        GrantLimits { generation: 1, gpus: vec![gpu], ..GrantLimits::default() }
    }

    #[test]
    fn the_container_reads_the_limits_that_the_agent_writes() {
        let directory = tempfile::tempdir().unwrap();
        let agent = update_grant(directory.path(), &limits(5)).unwrap();
        let container = open_control(directory.path()).unwrap();
        assert_eq!(container.read(), Ok(limits(5)));
        agent.write(&limits(6));
        assert_eq!(container.read(), Ok(limits(6)), "a change is seen at once");
        open_account(directory.path()).unwrap();
    }

    #[test]
    fn grants_are_in_the_directory_or_in_its_subdirectories() {
        let root = tempfile::tempdir().unwrap();
        let own = vec![root.path().to_owned()];
        assert_eq!(grants_in(root.path()).unwrap(), own, "an error names the files that are missing");
        let claims = ["uid-a", "uid-b"].map(|name| root.path().join(name));
        for claim in &claims {
            create_grant(claim, &limits(5)).unwrap();
        }
        assert_eq!(grants_in(root.path()).unwrap(), claims);
        // A container adds what it can. Nothing hides the grants that are mounted.
        let link = root.path().join("link");
        std::os::unix::fs::symlink("/tmp", &link).unwrap();
        assert_eq!(grants_in(root.path()).unwrap(), [link.clone(), claims[0].clone(), claims[1].clone()]);
        std::fs::remove_file(&link).unwrap();
        create_grant(root.path(), &limits(500)).unwrap();
        assert!(grants_in(root.path()).is_err());
        for claim in &claims {
            std::fs::remove_dir_all(claim).unwrap();
        }
        assert_eq!(grants_in(root.path()).unwrap(), own, "the grant of a device plugin");
    }

    #[test]
    fn all_blocks_of_a_mapped_file_are_allocated() {
        use std::os::unix::fs::MetadataExt as _;
        let directory = tempfile::tempdir().unwrap();
        create_grant(directory.path(), &limits(5)).unwrap();
        for file in [CONTROL, ACCOUNT] {
            let metadata = std::fs::metadata(directory.path().join(file)).unwrap();
            assert!(metadata.len() > 0 && metadata.blocks() * 512 >= metadata.len(), "{file} has holes");
        }
    }

    #[test]
    fn a_restarted_agent_keeps_the_charges() {
        let directory = tempfile::tempdir().unwrap();
        update_grant(directory.path(), &limits(5)).unwrap();
        let account = open_account(directory.path()).unwrap();
        let me = account.claim(ProcessIdentity { id: 1, started_ticks: 1 }, 1, |_| {}).unwrap();
        account.charge(me, GpuSlot::FIRST, Bytes(3), Bytes(5)).unwrap();
        update_grant(directory.path(), &limits(5)).unwrap();
        assert_eq!(open_account(directory.path()).unwrap().held(GpuSlot::FIRST), Bytes(3));
    }

    #[test]
    fn a_restarted_container_starts_with_an_empty_account() {
        let directory = tempfile::tempdir().unwrap();
        let control = create_grant(directory.path(), &limits(5)).unwrap();
        let before = open_account(directory.path()).unwrap();
        let me = before.claim(ProcessIdentity { id: 1, started_ticks: 1 }, 1, |_| {}).unwrap();
        before.charge(me, GpuSlot::FIRST, Bytes(3), Bytes(5)).unwrap();
        control.set_uncharged(GpuSlot::FIRST, Bytes(2), 1);
        create_grant(directory.path(), &limits(5)).unwrap();
        assert_eq!(
            (before.held(GpuSlot::FIRST), open_account(directory.path()).unwrap().held(GpuSlot::FIRST)),
            (Bytes(3), Bytes::ZERO)
        );
        assert_eq!(control.uncharged(GpuSlot::FIRST), Bytes::ZERO, "the control file is kept");
    }

    #[test]
    fn restores_the_length_of_a_truncated_account() {
        let directory = tempfile::tempdir().unwrap();
        update_grant(directory.path(), &limits(5)).unwrap();
        std::fs::write(account_path(directory.path()), "").unwrap();
        assert!(open_account(directory.path()).is_err());
        update_grant(directory.path(), &limits(5)).unwrap();
        open_account(directory.path()).unwrap();
    }

    #[test]
    fn rejects_absent_short_and_foreign_files() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(open_control(directory.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(directory.path().join(CONTROL), "short").unwrap();
        assert_eq!(open_control(directory.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        std::fs::write(directory.path().join(CONTROL), vec![b'x'; size_of::<Control>()]).unwrap();
        assert_eq!(open_control(directory.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
