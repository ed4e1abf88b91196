//! The map in ARCHITECTURE.md, enforced: which crate may use which, how long a file may be, what the core may not do.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Every crate with the crates of this workspace it may use. A new crate or arrow is a change of architecture: add
/// it here and to ARCHITECTURE.md.
const ARROWS: &[(&str, &[&str])] = &[
    ("tessera-core", &[]),
    ("tessera-limits", &[]),
    ("tessera-interpose", &["tessera-limits"]),
    ("tessera-arbiter", &["tessera-limits"]),
    ("tessera-simulated-driver", &[]),
    ("tessera-wire", &["tessera-core"]),
    ("tessera-node", &["tessera-core", "tessera-wire"]),
    ("tessera-cluster", &["tessera-core", "tessera-wire"]),
    ("tessera-sim", &["tessera-core", "tessera-wire"]),
    (
        "tessera-agent",
        &[
            "tessera-core",
            "tessera-wire",
            "tessera-node",
            "tessera-cluster",
            "tessera-limits",
            "tessera-arbiter",
        ],
    ),
    ("tessera-scheduler", &["tessera-core", "tessera-wire", "tessera-cluster"]),
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
            "tessera-scheduler",
            "tessera-sim",
        ],
    ),
    (
        "tessera-e2e",
        &["tessera-core", "tessera-limits", "tessera-wire", "tessera-node", "tessera-cluster", "tessera-sim"],
    ),
];

/// What must not come into the core from outside the workspace, whatever the reason.
const CORE_DEPENDENCIES: &[&str] = &["thiserror"];

/// Words that would let the world into the core.
const IMPURE: &[&str] =
    &["std::fs", "std::env", "std::net", "std::process", "std::thread", "Instant", "SystemTime", "println!"];

/// Parts of other crates that decide as purely as the core does: a shell beside each of them does the talking.
const PURE_PARTS: &[&str] = &[
    "crates/agent/src/exporter",
    "crates/agent/src/controller",
    "crates/scheduler/src/dashboard/view",
    "crates/scheduler/src/state",
    "crates/scheduler/src/verb",
];

/// What would let their shells, or the world, into them.
const SHELLS: &[&str] =
    &["crate::dashboard", "crate::run", "crate::server", "crate::shell", "axum", "tessera_cluster", "tokio"];

const MOST_LINES: usize = 800;
const USUAL_LINES: usize = 300;

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

/// Names of what a package depends on, in ordinary and build dependencies.
fn dependencies(package: &Value) -> BTreeSet<&str> {
    let all = package["dependencies"].as_array().unwrap().iter();
    all.filter(|dependency| dependency["kind"] != "dev")
        .map(|dependency| dependency["name"].as_str().unwrap())
        .collect()
}

#[test]
fn arrows_point_one_way() {
    for package in packages() {
        let name = package["name"].as_str().unwrap();
        let (_, allowed) = ARROWS
            .iter()
            .find(|(known, _)| *known == name)
            .unwrap_or_else(|| panic!("crate {name} is not on the map in {}", file!()));
        for dependency in dependencies(&package).into_iter().filter(|name| name.starts_with("tessera")) {
            assert!(allowed.contains(&dependency), "{name} may not use {dependency}; allowed: {allowed:?}");
        }
    }
}

#[test]
fn the_core_depends_on_nothing_that_acts() {
    let packages = packages();
    let core = packages.iter().find(|package| package["name"] == "tessera-core").unwrap();
    let foreign: Vec<_> =
        dependencies(core).into_iter().filter(|name| !CORE_DEPENDENCIES.contains(name)).collect();
    assert!(foreign.is_empty(), "the core may not use {foreign:?}");
    for (path, text) in sources(&root().join("crates/core/src")) {
        for word in IMPURE {
            assert!(!text.contains(word), "{}: {word} has no place in the core", path.display());
        }
    }
}

#[test]
fn what_decides_knows_nothing_of_its_shell() {
    for part in PURE_PARTS {
        for (path, text) in sources(&root().join(part)) {
            for word in IMPURE.iter().chain(SHELLS) {
                assert!(!text.contains(word), "{}: {word} has no place there", path.display());
            }
        }
    }
}

#[test]
fn files_stay_small() {
    let all = sources(&root());
    let lines = |text: &String| text.lines().count();
    for (path, text) in &all {
        assert!(lines(text) <= MOST_LINES, "{} has {} lines; split it", path.display(), lines(text));
    }
    let large = all.iter().filter(|(_, text)| lines(text) > USUAL_LINES).count();
    assert!(large * 5 <= all.len(), "{large} of {} files have over {USUAL_LINES} lines", all.len());
}

/// All Rust files below a folder, but for generated ones and build output.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
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
