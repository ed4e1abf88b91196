use std::{fs, os::unix::fs::MetadataExt as _};

use tempfile::TempDir;

use super::*;

/// A host with a driver, as its packages install it.
struct Host(TempDir);

impl Host {
    fn with_driver(version: &str) -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        let root = host.root();
        for directory in ["etc", "usr/bin", "usr/lib/gnu"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        symlink("usr/lib", root.join("lib")).unwrap();
        symlink("/usr/bin", root.join("bin")).unwrap();
        host.install(version);
        host
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn directory(&self) -> PathBuf {
        self.root().join("var/driver")
    }

    fn install(&self, version: &str) {
        let root = self.root();
        let mut cache = Vec::new();
        for library in ["libcuda.so", "libnvidia-ml.so"] {
            let file = root.join(format!("usr/lib/gnu/{library}.{version}"));
            fs::write(&file, format!("{library} {version}")).unwrap();
            let link = root.join(format!("usr/lib/gnu/{library}.1"));
            let _absent = fs::remove_file(&link);
            symlink(format!("/lib/gnu/{library}.{version}"), link).unwrap();
            cache.push((format!("{library}.1"), format!("/lib/gnu/{library}.1")));
        }
        cache.push(("libnvidia-encode.so.1".into(), "/lib/gnu/absent.so.1".into()));
        fs::write(root.join("usr/bin/nvidia-smi"), version).unwrap();
        fs::set_permissions(root.join("usr/bin/nvidia-smi"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(root.join("usr/bin/nvidia-debugdump"), "not a program").unwrap();
        fs::write(root.join("etc/ld.so.cache"), loader_cache(&cache)).unwrap();
    }

    fn fill(&self) -> Result<Filled, DriverVolumeError> {
        fs::create_dir_all(self.root().join("var")).unwrap();
        fill(self.root(), &self.directory(), &Components::of_driver())
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.directory().join(file)).unwrap()
    }
}

/// Writes a loader's cache with 64-bit libraries.
fn loader_cache(libraries: &[(String, String)]) -> Vec<u8> {
    let begin = 48 + 24 * libraries.len();
    let (mut entries, mut strings) = (Vec::new(), Vec::new());
    for (name, path) in libraries {
        let mut add = |text: &str| {
            let place = u32::try_from(begin + strings.len()).unwrap();
            strings.extend(text.bytes().chain([0]));
            place
        };
        for word in [0x0303, add(name), add(path), 0, 0, 0] {
            entries.extend(word.to_ne_bytes());
        }
    }
    let mut file = b"glibc-ld.so.cache1.1".to_vec();
    file.extend(u32::try_from(libraries.len()).unwrap().to_ne_bytes());
    file.resize(48, 0);
    file.extend(entries.into_iter().chain(strings));
    file
}

#[test]
fn fills_a_directory_with_links_to_the_driver() {
    let host = Host::with_driver("580.95");
    let Filled::Replaced { files, copied, missing } = host.fill().unwrap() else {
        panic!("nothing was filled")
    };
    assert_eq!((files, copied), (7, 0));
    assert!(missing.contains(&"libnvidia-encode.so".to_owned()), "{missing:?}");
    assert!(missing.contains(&"nvidia-debugdump".to_owned()), "{missing:?}");
    assert_eq!(host.read("bin/nvidia-smi"), "580.95");
    for name in ["libcuda.so", "libcuda.so.1", "libcuda.so.580.95"] {
        assert_eq!(host.read(&format!("lib64/{name}")), "libcuda.so 580.95");
    }
    let inode = |path: &Path| fs::metadata(path).unwrap().ino();
    assert_eq!(
        inode(&host.directory().join("lib64/libcuda.so.1")),
        inode(&host.root().join("usr/lib/gnu/libcuda.so.580.95"))
    );
    assert_eq!(host.fill().unwrap(), Filled::Unchanged);
}

/// A container has mounted the directory, so it keeps the files that it started with.
#[test]
fn a_new_driver_replaces_the_directory_at_once_and_running_containers_keep_the_old_one() {
    let host = Host::with_driver("580.95");
    host.fill().unwrap();
    let mounted = fs::File::open(host.directory()).unwrap();
    host.install("590.10");
    assert!(matches!(host.fill().unwrap(), Filled::Replaced { .. }));
    assert_eq!(
        (host.read("bin/nvidia-smi"), host.read("lib64/libcuda.so.1")),
        ("590.10".into(), "libcuda.so 590.10".into())
    );
    assert!(!host.directory().join("lib64/libcuda.so.580.95").exists());
    use std::os::fd::AsRawFd as _;
    let kept = format!("/proc/self/fd/{}/lib64/libcuda.so.1", mounted.as_raw_fd());
    assert_eq!(fs::read_to_string(kept).unwrap(), "libcuda.so 580.95");
    assert!(!with_suffix(&host.directory(), ".new").exists());
}

#[test]
fn a_damaged_or_foreign_directory_is_filled_again() {
    let host = Host::with_driver("580.95");
    fs::create_dir_all(host.directory().join("lib64")).unwrap();
    fs::write(host.directory().join("lib64/own"), "of another tool").unwrap();
    assert!(matches!(host.fill().unwrap(), Filled::Replaced { .. }));
    assert!(!host.directory().join("lib64/own").exists());
    fs::remove_file(host.directory().join("bin/nvidia-smi")).unwrap();
    assert!(matches!(host.fill().unwrap(), Filled::Replaced { .. }));
    assert_eq!(host.read("bin/nvidia-smi"), "580.95");
}

#[test]
fn without_a_driver_the_directory_stays_as_it_was() {
    let host = Host::with_driver("580.95");
    host.fill().unwrap();
    for library in ["libcuda.so", "libnvidia-ml.so"] {
        fs::remove_file(host.root().join(format!("usr/lib/gnu/{library}.580.95"))).unwrap();
    }
    assert!(host.fill().unwrap_err().to_string().contains("--driver-root"));
    fs::write(host.root().join("etc/ld.so.cache"), "x").unwrap();
    assert!(matches!(host.fill().unwrap_err(), DriverVolumeError::Cache { .. }));
    fs::remove_file(host.root().join("etc/ld.so.cache")).unwrap();
    assert!(matches!(host.fill().unwrap_err(), DriverVolumeError::Io { .. }));
    assert_eq!(host.read("lib64/libcuda.so.1"), "libcuda.so 580.95");
}

/// The file system of the target has no room for a file, here because a directory is in its place.
#[test]
fn a_failure_leaves_no_half_filled_directory() {
    let host = Host::with_driver("580.95");
    host.fill().unwrap();
    host.install("590.10");
    let source = host.root().join("usr/lib/gnu/libcuda.so.590.10");
    fs::remove_file(&source).unwrap();
    fs::create_dir(&source).unwrap();
    assert!(host.fill().is_err());
    assert_eq!(host.read("lib64/libcuda.so.1"), "libcuda.so 580.95");
    assert!(!with_suffix(&host.directory(), ".new").exists());
}

#[test]
fn links_of_the_host_begin_at_its_root_and_may_not_loop() {
    let host = Host::with_driver("580.95");
    assert_eq!(resolve(host.root(), Path::new("/bin/nvidia-smi")).unwrap(), Path::new("/usr/bin/nvidia-smi"));
    symlink("../../../../../usr/bin", host.root().join("usr/up")).unwrap();
    assert_eq!(
        resolve(host.root(), Path::new("/usr/up/nvidia-smi")).unwrap(),
        Path::new("/usr/bin/nvidia-smi")
    );
    symlink("loop", host.root().join("loop")).unwrap();
    assert!(resolve(host.root(), Path::new("/loop")).is_err());
}

#[test]
fn a_program_is_preferred_to_a_script_that_starts_it() {
    let host = Host::with_driver("580.95");
    let directory = host.root().join("usr/local/nvidia/bin");
    fs::create_dir_all(&directory).unwrap();
    fs::copy(host.root().join("usr/bin/nvidia-smi"), directory.join("nvidia-smi")).unwrap();
    fs::write(host.root().join("usr/bin/nvidia-smi"), "#!/bin/sh\nexec /usr/local/nvidia/bin/nvidia-smi")
        .unwrap();
    host.fill().unwrap();
    assert_eq!(host.read("bin/nvidia-smi"), "580.95");
    fs::remove_dir_all(&directory).unwrap();
    host.fill().unwrap();
    assert!(host.read("bin/nvidia-smi").starts_with("#!"), "a script is better than nothing");
}
