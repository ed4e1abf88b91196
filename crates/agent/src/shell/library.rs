//! Installs the library on the host, where containers can mount it. The agent's own image is not visible to them.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use tessera_wire::kubelet::cdi;

use crate::controller::{InstalledLibrary, LibraryError};

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
        replace(&folder.join(InstalledLibrary::FILE), &content, 0o755)?;
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

/// Writes a file atomically, unless it already has this content.
fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    if fs::read(path).is_ok_and(|there| there == content) {
        return Ok(());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    fs::write(&temporary, content)?;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(mode))?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

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
