//! Fills a directory of the host with the driver's libraries and programs. Containers mount it, so that
//! they need no container runtime of NVIDIA's.
//!
//! [`plan`](mod@plan) decides which files the directory gets. A new directory is complete before it
//! takes the place of the old one in one step. Running containers keep the old one, which stays until
//! it is replaced again.

pub mod plan;

use std::{
    fs,
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::{Component, Path, PathBuf},
};

use rustix::fs::{Access, CWD, RenameFlags, access, renameat_with};
use tessera_wire::foreign::{
    ld_cache::{self, NotALoaderCache},
    volume_config::Components,
};

use self::plan::{FoundBinary, FoundLibrary, Plan, PlannedFile, is_named, is_vendor_neutral, plan};

/// Directories in which programs are searched, in this order.
const PROGRAM_DIRECTORIES: &[&str] = &[
    "usr/local/bin",
    "usr/local/sbin",
    "usr/bin",
    "usr/sbin",
    "bin",
    "sbin",
    "opt/bin",
    "usr/local/nvidia/bin",
];

/// File in a driver directory that describes its content, to notice a changed driver.
const CONTENTS: &str = ".contents";

/// Largest number of symbolic links in a path, as in the kernel.
const MAX_LINKS: usize = 40;

/// Why a driver directory could not be filled. The old content stays.
#[derive(Debug, thiserror::Error)]
pub enum DriverVolumeError {
    /// A file of the host or of the directory cannot be used.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        cause: io::Error,
    },
    /// The loader's cache is invalid.
    #[error("{}: {cause}", path.display())]
    Cache {
        /// The cache.
        path: PathBuf,
        /// The error.
        cause: NotALoaderCache,
    },
    /// The host has no driver.
    #[error(
        "no library of the driver is in {}; install the driver, or name the host's root directory by --driver-root",
        .0.display()
    )]
    NoDriver(PathBuf),
}

/// The result of [`fill`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filled {
    /// The directory already had these files.
    Unchanged,
    /// The directory was replaced.
    Replaced {
        /// Number of files, links included.
        files: usize,
        /// Number of files that were copied, because they are on another file system.
        copied: usize,
        /// Wanted programs and libraries that the host lacks.
        missing: Vec<String>,
    },
}

/// Fills `directory` with the wanted files of the host whose root directory is `root`.
///
/// # Errors
/// [`DriverVolumeError`] if a file cannot be read or written, or the host has no driver. The directory
/// then stays as it was.
pub fn fill(root: &Path, directory: &Path, wanted: &Components) -> Result<Filled, DriverVolumeError> {
    let plan = plan(wanted, &libraries(root, wanted)?, &binaries(root, wanted));
    if !plan.has_driver() {
        return Err(DriverVolumeError::NoDriver(root.join("etc/ld.so.cache")));
    }
    let contents = describe(root, &plan)?;
    let directory = &through_root(root, directory);
    if fs::read_to_string(directory.join(CONTENTS)).is_ok_and(|there| there == contents)
        && plan.files.keys().all(|path| directory.join(path).exists())
    {
        return Ok(Filled::Unchanged);
    }
    let fresh = with_suffix(directory, ".new");
    let copied = build(root, &fresh, &plan, &contents).inspect_err(|_| {
        // What was written so far is of no use; the first error is the one to report.
        let _ignored = fs::remove_dir_all(&fresh);
    })?;
    replace(directory, &fresh).map_err(failed(directory))?;
    Ok(Filled::Replaced { files: plan.files.len(), copied, missing: plan.missing.into_iter().collect() })
}

/// Returns the same directory as it is seen below `root`, if it is there and can be written. Files can
/// be linked only within one mount.
fn through_root(root: &Path, directory: &Path) -> PathBuf {
    let seen = in_root(root, directory);
    let identity = |path: &Path| Some(fs::metadata(path.parent()?).ok()?).map(|of| (of.dev(), of.ino()));
    let is_same = identity(directory).is_some() && identity(directory) == identity(&seen);
    let is_writable =
        |path: &Path| path.parent().is_some_and(|above| access(above, Access::WRITE_OK).is_ok());
    if is_same && is_writable(&seen) { seen } else { directory.to_owned() }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> DriverVolumeError {
    move |cause| DriverVolumeError::Io { path: path.to_owned(), cause }
}

fn with_suffix(directory: &Path, suffix: &str) -> PathBuf {
    let mut name = directory.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Returns the wanted libraries that the loader of the host knows.
fn libraries(root: &Path, wanted: &Components) -> Result<Vec<FoundLibrary>, DriverVolumeError> {
    let path = root.join("etc/ld.so.cache");
    let cache = fs::read(&path).map_err(failed(&path))?;
    let known = ld_cache::parse(&cache).map_err(|cause| DriverVolumeError::Cache { path, cause })?;
    let is_wanted = |name: &str| wanted.libraries.iter().any(|wanted| is_named(name, wanted));
    let found = known.into_iter().filter(|library| is_wanted(&library.name)).filter_map(|library| {
        // The cache may be older than the files.
        let file = resolve(root, Path::new(&library.path)).ok()?;
        let uses_driver = is_vendor_neutral(&library.name) && uses_driver(&in_root(root, &file));
        Some(FoundLibrary { name: library.name, file, word_size: library.word_size, uses_driver })
    });
    Ok(found.collect())
}

/// Returns the wanted programs. A script of the same name starts a program elsewhere on the host, which a
/// container does not have. So it counts only if there is nothing else.
fn binaries(root: &Path, wanted: &Components) -> Vec<FoundBinary> {
    let find = |name: &String| {
        let places = PROGRAM_DIRECTORIES.iter().map(|directory| Path::new("/").join(directory).join(name));
        let is_program = |file: &PathBuf| {
            let metadata = fs::metadata(in_root(root, file));
            metadata.is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
        };
        let found: Vec<PathBuf> =
            places.filter_map(|place| resolve(root, &place).ok().filter(is_program)).collect();
        let is_script = |file: &&PathBuf| starts_with(&in_root(root, file), b"#!");
        let file = found.iter().find(|file| !is_script(file)).or_else(|| found.first())?;
        Some(FoundBinary { name: name.clone(), file: file.clone() })
    };
    wanted.binaries.iter().filter(|name| !name.contains('/')).filter_map(find).collect()
}

/// Returns whether a file begins with these bytes.
fn starts_with(file: &Path, expected: &[u8]) -> bool {
    let mut begin = vec![0; expected.len()];
    fs::File::open(file).and_then(|mut file| file.read_exact(&mut begin)).is_ok() && begin == expected
}

/// Returns whether a library names one of the driver's, as those do that it needs.
fn uses_driver(file: &Path) -> bool {
    let Ok(content) = fs::read(file) else { return false };
    let names = |needle: &[u8]| content.windows(needle.len()).any(|window| window == needle);
    names(b"libnvidia-glcore.so") || names(b"libGLdispatch.so")
}

/// Returns a path of the host as this process sees it.
fn in_root(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Resolves the symbolic links in a path of the host, which may be absolute and then begin at the
/// host's root.
fn resolve(root: &Path, path: &Path) -> io::Result<PathBuf> {
    let (mut resolved, mut links) = (PathBuf::from("/"), 0);
    let mut rest: Vec<PathBuf> = parts(path);
    while let Some(part) = rest.pop() {
        if part == Path::new("..") {
            resolved.pop();
            continue;
        }
        let next = resolved.join(part);
        let seen = in_root(root, &next);
        if !fs::symlink_metadata(&seen)?.is_symlink() {
            resolved = next;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(io::Error::other("too many symbolic links"));
        }
        let target = fs::read_link(&seen)?;
        if target.is_absolute() {
            resolved = PathBuf::from("/");
        }
        rest.extend(parts(&target));
    }
    Ok(resolved)
}

/// Returns the parts of a path, the last one first.
fn parts(path: &Path) -> Vec<PathBuf> {
    let parts = path.components().rev();
    parts
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
        .map(|part| part.as_os_str().into())
        .collect()
}

/// Describes the files of a plan, so that a changed driver gives another text.
fn describe(root: &Path, plan: &Plan) -> Result<String, DriverVolumeError> {
    let mut text = String::new();
    for (path, file) in &plan.files {
        let line = match file {
            PlannedFile::LinkTo(name) => format!("{} -> {name}\n", path.display()),
            PlannedFile::Same(source) => {
                let seen = in_root(root, source);
                let of = fs::metadata(&seen).map_err(failed(&seen))?;
                let (bytes, changed) = (of.len(), (of.mtime(), of.mtime_nsec()));
                format!("{} = {} {} {bytes} {changed:?}\n", path.display(), source.display(), of.ino())
            }
        };
        text += &line;
    }
    Ok(text)
}

/// Builds a directory from scratch. Returns how many files were copied.
fn build(root: &Path, fresh: &Path, plan: &Plan, contents: &str) -> Result<usize, DriverVolumeError> {
    let mut copied = 0;
    remove(fresh).map_err(failed(fresh))?;
    for part in ["", "bin", "lib", "lib64"] {
        let part = fresh.join(part);
        fs::create_dir_all(&part).map_err(failed(&part))?;
    }
    for (path, file) in &plan.files {
        let target = fresh.join(path);
        match file {
            PlannedFile::LinkTo(name) => symlink(name, &target).map_err(failed(&target))?,
            PlannedFile::Same(source) => {
                let source = in_root(root, source);
                // A hard link needs no space, but must be on the same mount, and some file systems have none.
                if fs::hard_link(&source, &target).is_err() {
                    fs::copy(&source, &target).map_err(failed(&target))?;
                    copied += 1;
                }
            }
        }
    }
    let file = fresh.join(CONTENTS);
    fs::write(&file, contents).map_err(failed(&file))?;
    Ok(copied)
}

/// Puts `fresh` in the place of `directory`. The directory before is kept with the suffix `.old`.
fn replace(directory: &Path, fresh: &Path) -> io::Result<()> {
    if !fs::exists(directory)? {
        return fs::rename(fresh, directory);
    }
    let old = with_suffix(directory, ".old");
    remove(&old)?;
    match renameat_with(CWD, fresh, CWD, directory, RenameFlags::EXCHANGE) {
        Ok(()) => fs::rename(fresh, &old),
        // Some file systems cannot exchange two directories.
        Err(_) => {
            fs::rename(directory, &old)?;
            fs::rename(fresh, directory)
        }
    }
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
