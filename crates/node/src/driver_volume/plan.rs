//! Decides which files of the driver go where in a driver directory: programs in `bin`, libraries in
//! `lib64` and `lib`, under the names by which programs ask for them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use tessera_wire::foreign::{ld_cache::WordSize, volume_config::Components};

/// A library of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// Name by which programs ask for it, such as `libcuda.so.1`.
    pub name: String,
    /// Path on the host without symbolic links, such as `/usr/lib/x86_64-linux-gnu/libcuda.so.580.95`.
    pub file: PathBuf,
    /// Size of the library's addresses.
    pub word_size: WordSize,
    /// True if the library uses other libraries of the driver. Only read for names that several vendors
    /// provide.
    pub uses_driver: bool,
}

/// A program of the host, with its path on the host without symbolic links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundBinary {
    /// Name of the program.
    pub name: String,
    /// Path on the host.
    pub file: PathBuf,
}

/// A file of a driver directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlannedFile {
    /// The same file as this one of the host.
    Same(PathBuf),
    /// A symbolic link to a file in the same directory.
    LinkTo(String),
}

/// The content of a driver directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Files by their path in the directory.
    pub files: BTreeMap<PathBuf, PlannedFile>,
    /// Wanted programs and libraries that the host lacks.
    pub missing: BTreeSet<String>,
}

/// Libraries that other vendors provide too. Those of another vendor are left to the image.
const VENDOR_NEUTRAL: &[&str] = &["libGL.so", "libEGL.so", "libGLESv1_CM.so", "libGLESv2.so"];

/// Returns whether a library has this name without its version.
#[must_use]
pub fn is_named(library: &str, wanted: &str) -> bool {
    library.strip_prefix(wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns whether several vendors provide a library of this name.
#[must_use]
pub fn is_vendor_neutral(library: &str) -> bool {
    VENDOR_NEUTRAL.iter().any(|name| is_named(library, name))
}

/// Plans the directory for the wanted files. Of several libraries of one name the first counts, as for
/// the loader.
#[must_use]
pub fn plan(wanted: &Components, libraries: &[FoundLibrary], binaries: &[FoundBinary]) -> Plan {
    let mut plan = Plan::default();
    for wanted in &wanted.binaries {
        match binaries.iter().find(|binary| binary.name == *wanted) {
            Some(binary) => plan.add(Path::new("bin").join(wanted), PlannedFile::Same(binary.file.clone())),
            None => drop(plan.missing.insert(wanted.clone())),
        }
    }
    for wanted in &wanted.libraries {
        let is_usable = |library: &&FoundLibrary| {
            is_named(&library.name, wanted)
                && !library.name.contains('/')
                && (library.uses_driver || !is_vendor_neutral(&library.name))
        };
        let mut is_missing = true;
        for library in libraries.iter().filter(is_usable) {
            let Some(file) = library.file.file_name().and_then(|name| name.to_str()) else { continue };
            is_missing = false;
            let directory = Path::new(match library.word_size {
                WordSize::Bits32 => "lib",
                WordSize::Bits64 => "lib64",
            });
            let name = directory.join(&library.name);
            if plan.files.contains_key(&name) {
                continue;
            }
            plan.add(directory.join(file), PlannedFile::Same(library.file.clone()));
            plan.add(name, PlannedFile::LinkTo(file.to_owned()));
            plan.add(directory.join(wanted), PlannedFile::LinkTo(library.name.clone()));
            if library.name == "libGLX_nvidia.so.0" {
                // GLX asks for this name where the image names no vendor.
                plan.add(directory.join("libGLX_indirect.so.0"), PlannedFile::LinkTo(file.to_owned()));
            }
        }
        if is_missing {
            plan.missing.insert(wanted.clone());
        }
    }
    plan
}

impl Plan {
    /// Adds a file unless there is one of the same name, so that no link names itself.
    fn add(&mut self, path: PathBuf, file: PlannedFile) {
        self.files.entry(path).or_insert(file);
    }

    /// Returns whether the plan contains the driver's interface for programs or for monitoring.
    #[must_use]
    pub fn has_driver(&self) -> bool {
        let is_driver = |name: &str| is_named(name, "libcuda.so") || is_named(name, "libnvidia-ml.so");
        self.files.keys().any(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_driver))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library(name: &str, file: &str, word_size: WordSize) -> FoundLibrary {
        FoundLibrary { name: name.into(), file: file.into(), word_size, uses_driver: false }
    }

    fn wanted(binaries: &[&str], libraries: &[&str]) -> Components {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Components { binaries: names(binaries), libraries: names(libraries) }
    }

    /// Returns each path in the directory and what it is.
    fn printed(plan: &Plan) -> Vec<String> {
        let line = |(path, file): (&PathBuf, &PlannedFile)| match file {
            PlannedFile::Same(source) => format!("{} = {}", path.display(), source.display()),
            PlannedFile::LinkTo(name) => format!("{} -> {name}", path.display()),
        };
        plan.files.iter().map(line).collect()
    }

    #[test]
    fn libraries_get_the_names_by_which_programs_ask_for_them() {
        let libraries = [
            library("libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95", WordSize::Bits64),
            library("libcuda.so", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95", WordSize::Bits64),
            library("libcuda.so.1", "/opt/other/libcuda.so.470.1", WordSize::Bits64),
            library("libcuda.so.1", "/usr/lib/i386-linux-gnu/libcuda.so.580.95", WordSize::Bits32),
            library("libnvidia-gpucomp.so.580.95", "/usr/lib/libnvidia-gpucomp.so.580.95", WordSize::Bits64),
            library("libcudart.so.12", "/usr/lib/libcudart.so.12", WordSize::Bits64),
        ];
        let smi = FoundBinary { name: "nvidia-smi".into(), file: "/opt/bin/nvidia-smi".into() };
        let wanted =
            wanted(&["nvidia-smi", "gpu-client"], &["libcuda.so", "libnvidia-gpucomp.so", "libnvoptix.so"]);
        let plan = plan(&wanted, &libraries, &[smi]);
        let expected = [
            "bin/nvidia-smi = /opt/bin/nvidia-smi",
            "lib/libcuda.so -> libcuda.so.1",
            "lib/libcuda.so.1 -> libcuda.so.580.95",
            "lib/libcuda.so.580.95 = /usr/lib/i386-linux-gnu/libcuda.so.580.95",
            "lib64/libcuda.so -> libcuda.so.1",
            "lib64/libcuda.so.1 -> libcuda.so.580.95",
            "lib64/libcuda.so.580.95 = /usr/lib/x86_64-linux-gnu/libcuda.so.580.95",
            "lib64/libnvidia-gpucomp.so -> libnvidia-gpucomp.so.580.95",
            "lib64/libnvidia-gpucomp.so.580.95 = /usr/lib/libnvidia-gpucomp.so.580.95",
        ];
        assert_eq!(printed(&plan), expected);
        assert_eq!(plan.missing, ["gpu-client".to_owned(), "libnvoptix.so".to_owned()].into());
        assert!(plan.has_driver());
    }

    #[test]
    fn libraries_of_other_vendors_are_left_to_the_image() {
        let mut libraries = [
            library("libGL.so.1", "/usr/lib/libGL.so.1.7.0", WordSize::Bits64),
            library("libGLX_nvidia.so.0", "/usr/lib/libGLX_nvidia.so.580.95", WordSize::Bits64),
        ];
        let wanted = wanted(&[], &["libGL.so", "libGLX_nvidia.so"]);
        let of_others = plan(&wanted, &libraries, &[]);
        assert_eq!(of_others.missing, ["libGL.so".to_owned()].into());
        assert!(of_others.files.contains_key(Path::new("lib64/libGLX_indirect.so.0")));
        assert!(!of_others.has_driver(), "it has neither CUDA nor NVML");
        libraries[0].uses_driver = true;
        assert_eq!(plan(&wanted, &libraries, &[]).missing, BTreeSet::new());
    }
}
