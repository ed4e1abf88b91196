//! The ways past the library that are known, each as one row: those that the library prevents, and those
//! that only the agent can see. `docs/security.md` has the same rows.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use tessera_node::processes::{FileId, Mapping, Processes};

use crate::support::{Built, Container, ManualArbiter, Tenant, until};

/// What becomes of a program that tries to get 2 GiB with a limit of 1 GiB, and to compute while its
/// window is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The library keeps it within its limits.
    Prevented,
    /// It succeeds, and the kernel shows that the process has not mapped the library.
    WithoutLibrary,
    /// It succeeds although the process has mapped the library. Only the driver's figures show it.
    OverLimits,
}
use Outcome::{OverLimits, Prevented, WithoutLibrary};

/// Name of a row, and its outcome.
const ROWS: &[(&str, Outcome)] = &[
    ("deepbind-linked", Prevented),
    ("deepbind-dlsym", Prevented),
    ("dlsym-of-libc", Prevented),
    ("dlsym-behind", Prevented),
    ("next-behind", Prevented),
    ("dlvsym-of-libc", Prevented),
    ("dlvsym-default", Prevented),
    ("dlvsym-next", Prevented),
    ("dlopen-of-libc", Prevented),
    ("dlmopen-driver", Prevented),
    ("dlmopen-plugin", Prevented),
    ("dlmopen-dlsym", Prevented),
    ("display-context", Prevented),
    ("empty-preload-file", WithoutLibrary),
    ("patched-loader", WithoutLibrary),
    ("driver-copy", OverLimits),
    ("symbol-table", OverLimits),
];

/// Copies the loader of this host and makes the copy ignore what is to be preloaded.
fn patched_loader(folder: &Path) -> PathBuf {
    let patched = folder.join("loader");
    let own = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = own.split_whitespace().find(|word| word.contains("/ld-linux") || word.contains("/ld-2"));
    let mut loader = std::fs::read(path.unwrap()).unwrap();
    let mut replace = |from: &[u8], to: &[u8]| {
        for place in 0..loader.len() - from.len() {
            if loader[place..].starts_with(from) {
                loader[place..place + to.len()].copy_from_slice(to);
            }
        }
    };
    replace(b"PREL", b"XREL");
    replace(b"ld.so.preload", b"ld.so.nothing");
    std::fs::write(&patched, loader).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&patched, executable).unwrap();
    patched
}

/// Starts the program of a row.
fn start(row: &str, container: &Container, folder: &Path) -> Tenant {
    let built = Built::get();
    let parts = built.escape.with_file_name("escape-parts");
    let file = parts.join(if row == "driver-copy" { "driver-copy.so" } else { "plugin.so" });
    let library = (row != "empty-preload-file").then_some(built.library.as_path());
    let mut program = if row == "patched-loader" {
        let mut program: Command = container.program(&patched_loader(folder), library);
        program.arg(&built.escape);
        program
    } else {
        container.program(&built.escape, library)
    };
    Tenant::start(program.arg(row).arg(file))
}

#[test]
fn each_known_way_past_the_library_is_prevented_or_visible_to_the_agent() {
    let library = FileId::of(&Built::get().library).unwrap();
    for (row, expected) in ROWS {
        let container = Container::with(1024, 25);
        let arbiter = ManualArbiter::start(&container);
        let folder = tempfile::tempdir().unwrap();
        let mut program = start(row, &container, folder.path());
        assert_eq!(program.ask("begin"), "0", "{row}");
        // With the first context, two more of 500 MiB each are beyond the limit.
        let command = if *row == "display-context" { "contexts 2" } else { "take 2048" };
        let memory = program.ask(command);
        program.tell("launch 1000");
        let mut account = container.account();
        // The launch reaches the GPU, or waits for the closed window.
        until(|| container.work_ns() > 0 || account.want() > 0);
        let has_computed = container.work_ns() > 0;
        let mapping = Processes::at("/proc".into()).mapping(program.child.id(), &library).unwrap();
        let outcome = match (memory.as_str(), has_computed, mapping) {
            ("2", false, Mapping::Present) => Prevented,
            ("0", true, Mapping::Absent) => WithoutLibrary,
            ("0", true, Mapping::Present) => OverLimits,
            other => panic!("{row}: {other:?}"),
        };
        assert_eq!(outcome, *expected, "{row}");
        arbiter.stop();
        assert_eq!(program.answer(), "0", "{row}");
        assert_eq!(program.end(), "", "{row}");
    }
}

#[test]
fn dlopen_uses_the_search_path_of_its_caller() {
    let container = Container::with(1024, 100);
    let mut program = start("run-path", &container, Path::new(""));
    assert_eq!(program.ask("begin"), "0");
    assert_eq!(program.ask("take 2048"), "2");
}

#[test]
fn another_preloaded_library_may_wrap_malloc_and_dlsym() {
    let built = Built::get();
    let (own, other) = (built.library.display(), built.preloaded.display());
    for order in [format!("{own} {other}"), format!("{other} {own}")] {
        for row in ["dlsym-of-libc", "dlvsym-next", "dlmopen-plugin"] {
            let container = Container::with(1024, 100);
            let plugin = built.escape.with_file_name("escape-parts").join("plugin.so");
            let mut program = container.program(&built.escape, None);
            let mut program = Tenant::start(program.env("LD_PRELOAD", &order).arg(row).arg(plugin));
            assert_eq!(program.ask("begin"), "0", "{order}: {row}");
            assert_eq!(program.ask("take 2048"), "2", "{order}: {row}");
            assert_eq!(program.end(), "", "{order}: {row}");
        }
    }
}

/// Compares the table of `docs/security.md` with the rows above, and with the tests of the agent that it
/// names.
#[test]
fn the_table_of_the_documentation_has_the_same_rows() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join("docs/security.md")).unwrap();
    let begin = text.find("| escape | result | test |").expect("the table of escapes");
    let table = text[begin..].lines().take_while(|line| line.starts_with('|')).skip(2);
    let mut documented = BTreeSet::new();
    for line in table {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [escape, result, tests] = cells[..] else { panic!("not three cells: {line}") };
        assert!(!escape.is_empty(), "{line}");
        for test in tests.split('`').skip(1).step_by(2) {
            if let Some(row) = test.strip_prefix("escapes::") {
                let (_, outcome) = ROWS.iter().find(|(name, _)| *name == row).expect(test);
                let words = match outcome {
                    Prevented => "prevented",
                    WithoutLibrary => "detected as `without-library`",
                    OverLimits => "detected as `over-memory`",
                };
                assert!(result.starts_with(words), "{row}: {result:?} is not {words:?}");
                assert!(documented.insert(row.to_owned()), "{row} is there twice");
            } else {
                let (file, function) = test.split_once("::").expect(test);
                let controller = root.join("crates/agent/src/controller");
                let sources = ["tests/", ""].map(|folder| controller.join(format!("{folder}{file}.rs")));
                let has_test = |source: &PathBuf| {
                    std::fs::read_to_string(source)
                        .is_ok_and(|text| text.contains(&format!("fn {function}()")))
                };
                assert!(sources.iter().any(has_test), "{test} does not exist");
            }
        }
    }
    let known: BTreeSet<String> = ROWS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(documented, known);
}
