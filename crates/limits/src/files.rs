//! The two files of a grant, made by the agent and mapped by both sides.
//!
//! ```text
//! <grant>/control   mode 0644, the whole directory is mounted read-only into the container
//! <grant>/bell      mode 0666, a named pipe: a byte in it tells the arbiter to look. Writable also where it is mounted
//!                   read-only. No open file is kept for it in the container: a program may close files it did not open.
//! <grant>/account   mode 0666, mounted writable over the same file: any user of the container may have a ledger in it.
//!                   The directory above is the agent's alone, so nobody else on the node gets there.
//! ```

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::GpuSlot;
use crate::control::Control;
use crate::limits::GrantLimits;
use crate::memory_account::{self, MemoryAccount};

/// Where a container finds its grant.
pub const GRANT_DIRECTORY: &str = "/etc/tessera";

const CONTROL: &str = "control";
/// The account in it.
pub const ACCOUNT: &str = "account";
const WAKEUP_PIPE: &str = "bell";

/// The bell of a grant, as the container rings it.
#[derive(Debug)]
pub struct ArbiterWakeup(PathBuf);

impl ArbiterWakeup {
    /// The bell of the grant in `folder`.
    #[must_use]
    pub fn of(folder: &Path) -> Self {
        Self(folder.join(WAKEUP_PIPE))
    }

    /// Rings. Without an arbiter nothing happens, and an arbiter that hears nothing looks by itself now and then.
    pub fn notify(&self) {
        if let Ok(mut bell) = open_pipe(&self.0) {
            let _ = bell.write_all(&[1]);
        }
    }
}

/// Opens the bell of a grant to hear it. Reading never blocks; the pipe never ends, for this is a writer of it too.
///
/// # Errors
/// When there is none.
pub fn open_wakeup_pipe(grant: &Path) -> io::Result<File> {
    open_pipe(&grant.join(WAKEUP_PIPE))
}

fn open_pipe(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// A file mapped for as long as the process lives. Its type must be made of atomic numbers only.
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

/// A file mapped for as long as its owner keeps it: for the agent, which outlives its containers.
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
        // SAFETY: mapped by `map` with this size, and the reference, which was lent only for as long as we live, is used no more.
        unsafe { libc::munmap(address, size_of::<T>()) };
    }
}

/// Maps the control file of a grant for reading.
///
/// # Errors
/// When it is absent, too short, or of another format.
pub fn open_control(grant: &Path) -> io::Result<StaticMapping<Control>> {
    let control = map::<Control>(&OpenOptions::new().read(true).open(grant.join(CONTROL))?, libc::PROT_READ)?;
    if control.is_known() { Ok(control) } else { Err(other_format()) }
}

/// Maps the control file of a grant for writing: for the agent.
///
/// # Errors
/// When it is absent, too short, or of another format.
pub fn open_control_writable(grant: &Path) -> io::Result<OwnedMapping<Control>> {
    let file = OpenOptions::new().read(true).write(true).open(grant.join(CONTROL))?;
    let control = OwnedMapping(map::<Control>(&file, libc::PROT_READ | libc::PROT_WRITE)?);
    if control.is_known() { Ok(control) } else { Err(other_format()) }
}

/// Where the account of a grant lies.
#[must_use]
pub fn account_path(grant: &Path) -> PathBuf {
    grant.join(ACCOUNT)
}

/// Maps the account file of a grant for reading and writing.
///
/// # Errors
/// When it is absent, too short, or of another format.
pub fn open_account(grant: &Path) -> io::Result<StaticMapping<MemoryAccount>> {
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(grant.join(ACCOUNT))?;
    let account = map::<MemoryAccount>(&file, libc::PROT_READ | libc::PROT_WRITE)?;
    if account.is_known() { Ok(account) } else { Err(other_format()) }
}

/// Makes the files of a grant, or takes over those that are there, and puts `limits` in force.
///
/// The account may be in use by the container, which can cut it short at any time: it is written to, never mapped.
///
/// # Errors
/// When the files cannot be made.
pub fn update_grant(folder: &Path, limits: &GrantLimits) -> io::Result<OwnedMapping<Control>> {
    std::fs::create_dir_all(folder)?;
    begin_account(&make::<MemoryAccount>(&folder.join(ACCOUNT), 0o666)?)?;
    make_wakeup_pipe(folder)?;
    let file = make::<Control>(&folder.join(CONTROL), 0o644)?;
    let control = OwnedMapping(map::<Control>(&file, libc::PROT_READ | libc::PROT_WRITE)?);
    if !control.is_known() || control.read().as_ref() != Ok(limits) {
        control.write(limits);
    }
    Ok(control)
}

/// Makes the files of a grant for a container that is about to start: nobody holds anything yet. Processes of an earlier
/// start that should still be there keep the account they have.
///
/// # Errors
/// When the files cannot be made.
pub fn create_grant(folder: &Path, limits: &GrantLimits) -> io::Result<OwnedMapping<Control>> {
    std::fs::create_dir_all(folder)?;
    let fresh = folder.join(".account.new");
    match std::fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    begin_account(&make::<MemoryAccount>(&fresh, 0o666)?)?;
    std::fs::rename(&fresh, folder.join(ACCOUNT))?;
    let control = update_grant(folder, limits)?;
    for gpu in GpuSlot::all() {
        control.set_uncharged(gpu, 0, 0);
    }
    Ok(control)
}

fn make_wakeup_pipe(folder: &Path) -> io::Result<()> {
    let bell = folder.join(WAKEUP_PIPE);
    let name = CString::new(bell.clone().into_os_string().into_vec())?;
    // SAFETY: a path that ends in zero.
    if unsafe { libc::mkfifo(name.as_ptr(), 0o600) } != 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::AlreadyExists {
            return Err(error);
        }
    }
    std::fs::set_permissions(bell, std::fs::Permissions::from_mode(0o666))
}

/// A file long enough for a `T`, with its old content where it has some.
fn make<T>(path: &Path, mode: u32) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    let size = size_of::<T>() as u64;
    if file.metadata()?.len() < size {
        file.set_len(size)?;
    }
    reserve(&file, size)?;
    Ok(file)
}

/// Has the disk keep room for all of a file that will be mapped: a write to a page that finds the disk full ends the process that
/// writes, be it ours or the container's.
fn reserve(file: &File, size: u64) -> io::Result<()> {
    let size = libc::off_t::try_from(size).map_err(io::Error::other)?;
    // SAFETY: a file that is open for writing.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Marks a file as an account.
fn begin_account(file: &File) -> io::Result<()> {
    file.write_all_at(&memory_account::FORMAT.to_ne_bytes(), memory_account::FORMAT_OFFSET)
}

fn map<T>(file: &File, protection: libc::c_int) -> io::Result<StaticMapping<T>> {
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() < size_of::<T>() as u64 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is too short"));
    }
    // SAFETY: a fresh mapping chosen by the kernel.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), size_of::<T>(), protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: page-aligned, as long as a `T`, valid for ever but where a `Mapping` owns it; `T` consists of atomic numbers, for which any bits are a
    // value and which others may change.
    Ok(StaticMapping(unsafe { &*address.cast::<T>() }))
}

fn other_format() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the file is of another version")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{UuidBytes, limits::GpuLimit};

    fn limits(memory: u64) -> GrantLimits {
        let gpu = GpuLimit {
            uuid: UuidBytes([7; 16]),
            memory_bytes: memory,
            context_bytes: 0,
            compute_percent: 30,
            compute_ceiling_percent: 60,
        };
        GrantLimits { generation: 1, gpus: vec![gpu], ..GrantLimits::default() }
    }

    #[test]
    fn what_the_agent_grants_the_container_reads() {
        let folder = tempfile::tempdir().unwrap();
        let agent = update_grant(folder.path(), &limits(5)).unwrap();
        let container = open_control(folder.path()).unwrap();
        assert_eq!(container.read(), Ok(limits(5)));
        agent.write(&limits(6));
        assert_eq!(container.read(), Ok(limits(6)), "a change is seen at once");
        open_account(folder.path()).unwrap();
    }

    #[test]
    fn the_disk_has_room_for_whatever_is_written_to_a_mapping() {
        use std::os::unix::fs::MetadataExt as _;
        let folder = tempfile::tempdir().unwrap();
        create_grant(folder.path(), &limits(5)).unwrap();
        for file in [CONTROL, ACCOUNT] {
            let there = std::fs::metadata(folder.path().join(file)).unwrap();
            assert!(there.len() > 0 && there.blocks() * 512 >= there.len(), "{file} has holes");
        }
    }

    #[test]
    fn a_restarted_agent_finds_what_is_held() {
        let folder = tempfile::tempdir().unwrap();
        update_grant(folder.path(), &limits(5)).unwrap();
        let account = open_account(folder.path()).unwrap();
        let me = account.claim(1, 1, |_| {}).unwrap();
        account.charge(me, GpuSlot::FIRST, 3, 5).unwrap();
        update_grant(folder.path(), &limits(5)).unwrap();
        assert_eq!(open_account(folder.path()).unwrap().held(GpuSlot::FIRST), 3);
    }

    #[test]
    fn a_container_that_starts_again_holds_nothing_and_the_old_processes_do_not_see_it() {
        let folder = tempfile::tempdir().unwrap();
        let control = create_grant(folder.path(), &limits(5)).unwrap();
        let before = open_account(folder.path()).unwrap();
        let me = before.claim(1, 1, |_| {}).unwrap();
        before.charge(me, GpuSlot::FIRST, 3, 5).unwrap();
        control.set_uncharged(GpuSlot::FIRST, 2, 1);
        create_grant(folder.path(), &limits(5)).unwrap();
        assert_eq!(
            (before.held(GpuSlot::FIRST), open_account(folder.path()).unwrap().held(GpuSlot::FIRST)),
            (3, 0)
        );
        assert_eq!(control.uncharged(GpuSlot::FIRST), 0, "the same control file goes on");
    }

    #[test]
    fn an_account_that_was_cut_short_is_made_whole() {
        let folder = tempfile::tempdir().unwrap();
        update_grant(folder.path(), &limits(5)).unwrap();
        std::fs::write(account_path(folder.path()), "").unwrap();
        assert!(open_account(folder.path()).is_err());
        update_grant(folder.path(), &limits(5)).unwrap();
        open_account(folder.path()).unwrap();
    }

    #[test]
    fn absent_short_and_foreign_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(open_control(folder.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(folder.path().join(CONTROL), "short").unwrap();
        assert_eq!(open_control(folder.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        std::fs::write(folder.path().join(CONTROL), vec![b'x'; size_of::<Control>()]).unwrap();
        assert_eq!(open_control(folder.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
