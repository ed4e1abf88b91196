//! Installs the library on the host, where containers can mount it. The agent's own image is not visible to them.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::SystemTime,
};

use tessera_node::processes::FileId;
use tessera_wire::kubelet::cdi;

use crate::controller::{InstalledLibrary, LibraryError};

/// Ending of a file that is being written.
const TEMPORARY: &str = ".new";

/// Number of replaced libraries that are kept. Containers rarely run through more updates of the agent.
const MAX_KEPT: usize = 8;

/// Copies the library into a directory below `grants`, together with the preload file that loads it. With a
/// directory for CDI, also writes a CDI description of both.
///
/// Existing files are replaced atomically, so that running containers keep the library they started with.
pub fn install_library(
    library: &Path,
    grants: &Path,
    cdi_directory: Option<&Path>,
) -> Result<InstalledLibrary, LibraryError> {
    let folder = grants.join(".library");
    let path = library.display().to_string();
    let content = fs::read(library)
        .map_err(|error| LibraryError::Read { path: path.clone(), cause: error.to_string() })?;
    if !content.starts_with(b"\x7fELF") {
        return Err(LibraryError::NotALibrary { path });
    }
    let installed =
        InstalledLibrary { folder: folder.display().to_string(), by_cdi: cdi_directory.is_some() };
    let place = || -> io::Result<()> {
        fs::create_dir_all(&folder)?;
        let file = folder.join(InstalledLibrary::FILE);
        keep_replaced(&file, &content)?;
        replace(&file, &content, 0o755)?;
        let preload = format!("{}\n", InstalledLibrary::IN_CONTAINER);
        replace(&folder.join(InstalledLibrary::PRELOAD), preload.as_bytes(), 0o644)?;
        if let Some(directory) = cdi_directory {
            fs::create_dir_all(directory)?;
            let mounts = installed.mounts();
            let description = cdi::print(mounts.iter().map(|(host, container)| (host.as_str(), *container)));
            replace(&directory.join(cdi::FILE), description.as_bytes(), 0o644)?;
        }
        Ok(())
    };
    place().map_err(|error| LibraryError::Install {
        directory: folder.display().to_string(),
        cause: error.to_string(),
    })?;
    Ok(installed)
}

/// Returns the files of an installed library: the current one, and those that containers may still have
/// mounted. Files that cannot be read are left out.
pub(super) fn library_files(library: &InstalledLibrary) -> BTreeSet<FileId> {
    let Ok(folder) = fs::read_dir(&library.folder) else { return BTreeSet::new() };
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(InstalledLibrary::FILE) && !name.ends_with(TEMPORARY)
    };
    let paths = folder.flatten().map(|entry| entry.path()).filter(is_library);
    paths.filter_map(|path| FileId::of(&path).ok()).flatten().collect()
}

/// Keeps the installed library under another name if it is going to be replaced. Running containers
/// have mapped that file, and its inode must not be given to another file.
fn keep_replaced(path: &Path, content: &[u8]) -> io::Result<()> {
    let Ok(installed) = fs::read(path) else { return Ok(()) };
    if installed == content {
        return Ok(());
    }
    let mut kept = path.as_os_str().to_owned();
    kept.push(format!(".{}", fs::metadata(path)?.ino()));
    match fs::hard_link(path, &kept) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    forget_oldest(path)
}

/// Removes the oldest of the kept libraries if there are too many.
fn forget_oldest(path: &Path) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let begin = format!("{}.", name.to_string_lossy());
    let mut kept: Vec<(SystemTime, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(&begin) && !name.ends_with(TEMPORARY) {
            kept.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    kept.sort();
    let spare = kept.len().saturating_sub(MAX_KEPT);
    kept.into_iter().take(spare).try_for_each(|(_, oldest)| fs::remove_file(oldest))
}

/// Writes a file atomically, unless it already has this content.
fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    if fs::read(path).is_ok_and(|there| there == content) {
        return Ok(());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(TEMPORARY);
    let temporary = PathBuf::from(temporary);
    fs::write(&temporary, content)?;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(mode))?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_the_file_only_if_the_library_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let (source, cdi_directory) = (folder.path().join("lib.so"), folder.path().join("cdi"));
        fs::write(&source, b"\x7fELF one").unwrap();
        let library = install_library(&source, folder.path(), Some(&cdi_directory)).unwrap();
        let installed = Path::new(&library.folder).join(InstalledLibrary::FILE);
        let inode = || fs::metadata(&installed).unwrap().ino();
        let before = inode();
        install_library(&source, folder.path(), None).unwrap();
        assert_eq!(inode(), before);
        let mapped = fs::File::open(&installed).unwrap();
        fs::write(&source, b"\x7fELF two").unwrap();
        install_library(&source, folder.path(), None).unwrap();
        assert_ne!(inode(), before);
        assert_eq!(mapped.metadata().unwrap().ino(), before, "running containers keep their file");
        let known: BTreeSet<u64> = library_files(&library).iter().map(|file| file.inode).collect();
        assert_eq!(known, [before, inode()].into(), "the files of old and new containers are known");
        for version in 0..20 {
            fs::write(&source, format!("\x7fELF {version}")).unwrap();
            install_library(&source, folder.path(), None).unwrap();
        }
        let known: BTreeSet<u64> = library_files(&library).iter().map(|file| file.inode).collect();
        assert_eq!(known.len(), MAX_KEPT + 1);
        let preload = fs::read_to_string(Path::new(&library.folder).join(InstalledLibrary::PRELOAD)).unwrap();
        assert_eq!(preload, "/usr/lib/tessera/libtessera.so\n");
        assert!(fs::read_to_string(cdi_directory.join(cdi::FILE)).unwrap().contains(&library.folder));
    }

    #[test]
    fn returns_an_error_for_a_file_that_is_not_a_library() {
        let folder = tempfile::tempdir().unwrap();
        let missing = install_library(Path::new("/nowhere/libtessera.so"), folder.path(), None).unwrap_err();
        assert!(
            missing.to_string().starts_with("the library /nowhere/libtessera.so cannot be read"),
            "{missing}"
        );
        let text = folder.path().join("text");
        fs::write(&text, "hello").unwrap();
        assert!(
            install_library(&text, folder.path(), None)
                .unwrap_err()
                .to_string()
                .ends_with("is not a shared library")
        );
    }
}
