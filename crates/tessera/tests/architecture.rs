//! Tests of the rules in ARCHITECTURE.md: dependencies between crates, the size of files, and the
//! purity of the core.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Every crate with the crates of this workspace it may use. A new crate or dependency changes the
/// architecture: add it here and to ARCHITECTURE.md.
const ALLOWED_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("tessera-core", &[]),
    ("tessera-throttle", &[]),
    ("tessera-limits", &["tessera-throttle"]),
    ("tessera-interpose", &["tessera-limits", "tessera-throttle"]),
    ("tessera-arbiter", &["tessera-limits", "tessera-throttle"]),
    ("tessera-simulated-driver", &[]),
    ("tessera-profile", &[]),
    ("tessera-serve", &[]),
    ("tessera-wire", &["tessera-core"]),
    ("tessera-node", &["tessera-core", "tessera-wire"]),
    ("tessera-cluster", &["tessera-core", "tessera-wire"]),
    ("tessera-sim", &["tessera-core", "tessera-wire", "tessera-limits"]),
    (
        "tessera-agent",
        &[
            "tessera-core",
            "tessera-wire",
            "tessera-node",
            "tessera-cluster",
            "tessera-limits",
            "tessera-arbiter",
            "tessera-serve",
        ],
    ),
    ("tessera-scheduler", &["tessera-core", "tessera-wire", "tessera-cluster", "tessera-serve"]),
    ("tessera-cli", &["tessera-core", "tessera-wire", "tessera-cluster"]),
    (
        "tessera-demo",
        &[
            "tessera-core",
            "tessera-wire",
            "tessera-node",
            "tessera-cluster",
            "tessera-agent",
            "tessera-limits",
            "tessera-scheduler",
            "tessera-serve",
            "tessera-sim",
        ],
    ),
    (
        "tessera",
        &[
            "tessera-demo",
            "tessera-limits",
            "tessera-core",
            "tessera-wire",
            "tessera-node",
            "tessera-cluster",
            "tessera-agent",
            // `tessera defragment` is the command of the plugins.
            "tessera-cli",
            "tessera-profile",
            "tessera-scheduler",
            "tessera-serve",
            "tessera-sim",
        ],
    ),
    (
        "tessera-e2e",
        &["tessera-core", "tessera-limits", "tessera-wire", "tessera-node", "tessera-cluster", "tessera-sim"],
    ),
];

/// Dependencies of the core outside the workspace.
const CORE_DEPENDENCIES: &[&str] = &["hashbrown", "thiserror"];

/// Words that would give the core access to IO, time or threads.
const IMPURE: &[&str] =
    &["std::fs", "std::env", "std::net", "std::process", "std::thread", "Instant", "SystemTime", "println!"];

/// Modules of other crates that decide without IO, like the core. A module beside each of them
/// performs the IO.
const PURE_PARTS: &[&str] = &[
    "crates/agent/src/exporter",
    "crates/agent/src/controller",
    "crates/cluster/src/access",
    "crates/node/src/driver_volume/plan.rs",
    "crates/scheduler/src/dashboard/view",
    "crates/scheduler/src/state",
    "crates/scheduler/src/verb",
];

/// Words that would give those modules access to IO or to the module that performs it.
const IO_MODULES: &[&str] =
    &["crate::dashboard", "crate::run", "crate::server", "crate::shell", "axum", "tessera_cluster", "tokio"];

const MAX_LINES: usize = 800;
const RECOMMENDED_MAX_LINES: usize = 300;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn packages() -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Returns the names of a package's ordinary and build dependencies.
fn dependencies(package: &Value) -> BTreeSet<&str> {
    let all = package["dependencies"].as_array().unwrap().iter();
    all.filter(|dependency| dependency["kind"] != "dev")
        .map(|dependency| dependency["name"].as_str().unwrap())
        .collect()
}

#[test]
fn crates_use_only_allowed_crates() {
    for package in packages() {
        let name = package["name"].as_str().unwrap();
        let (_, allowed) = ALLOWED_DEPENDENCIES
            .iter()
            .find(|(known, _)| *known == name)
            .unwrap_or_else(|| panic!("crate {name} is missing in {}", file!()));
        for dependency in dependencies(&package).into_iter().filter(|name| name.starts_with("tessera")) {
            assert!(allowed.contains(&dependency), "{name} may not use {dependency}; allowed: {allowed:?}");
        }
    }
}

#[test]
fn the_core_performs_no_io() {
    let packages = packages();
    let core = packages.iter().find(|package| package["name"] == "tessera-core").unwrap();
    let foreign: Vec<_> =
        dependencies(core).into_iter().filter(|name| !CORE_DEPENDENCIES.contains(name)).collect();
    assert!(foreign.is_empty(), "the core may not use {foreign:?}");
    for (path, text) in sources(&root().join("crates/core/src")) {
        for word in IMPURE {
            assert!(!text.contains(word), "{}: the core must not use {word}", path.display());
        }
    }
}

#[test]
fn deciding_modules_perform_no_io() {
    for part in PURE_PARTS {
        for (path, text) in sources(&root().join(part)) {
            for word in IMPURE.iter().chain(IO_MODULES) {
                assert!(!text.contains(word), "{}: this module must not use {word}", path.display());
            }
        }
    }
}

#[test]
fn files_stay_small() {
    let all = sources(&root());
    let lines = |text: &String| text.lines().count();
    for (path, text) in &all {
        assert!(lines(text) <= MAX_LINES, "{} has {} lines; split it", path.display(), lines(text));
    }
    let large = all.iter().filter(|(_, text)| lines(text) > RECOMMENDED_MAX_LINES).count();
    assert!(large * 5 <= all.len(), "{large} of {} files have over {RECOMMENDED_MAX_LINES} lines", all.len());
}

/// The profile `release` saves compile time with settings for single packages. A profile
/// inherits such settings without a trace in its own section.
#[test]
fn shipped_and_measured_profiles_do_not_inherit_from_release() {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let parent = |profile: &str| -> String {
        let (_, section) = manifest.split_once(&format!("[profile.{profile}]\n")).unwrap();
        let section = section.split("\n[").next().unwrap();
        let line = section.lines().find_map(|line| line.strip_prefix("inherits = "));
        line.unwrap_or_else(|| panic!("profile {profile} does not say what it inherits"))
            .trim_matches('"')
            .to_owned()
    };
    for profile in ["dist", "bench", "interpose", "plugin"] {
        let mut ancestor = parent(profile);
        while !["dev", "release"].contains(&ancestor.as_str()) {
            ancestor = parent(&ancestor);
        }
        assert_eq!(ancestor, "dev", "profile {profile} would be built like `release`");
    }
}

/// Returns all Rust files below a directory, except for generated ones and build output.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    if folder.is_file() {
        return vec![(folder.to_owned(), std::fs::read_to_string(folder).unwrap())];
    }
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !["target", "gen"].contains(&name.as_str()) && !name.starts_with('.') {
                found.extend(sources(&path));
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push((path.clone(), std::fs::read_to_string(&path).unwrap()));
        }
    }
    found
}
