//! What may come into the programs from outside: under which licences, from where, and what may not.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::process::Command;

use serde_json::Value;

/// Licences that ask for no more than to be named. A crate may be had under one of them, or is not used.
const LICENCES: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// Crates that would come in by a careless feature, and why they may not.
const UNWANTED: &[(&str, &str)] = &[
    ("aws-lc-sys", "the costliest build in the tree; rustls runs on ring"),
    ("openssl", "one TLS stack: rustls"),
    ("native-tls", "one TLS stack: rustls"),
    ("chrono", "jiff is already in the tree"),
    ("serde_yaml", "archived upstream; serde-saphyr reads YAML"),
];

/// All packages that are built here.
fn packages() -> Vec<Value> {
    // Those of other systems need not have been fetched.
    let here = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--filter-platform", &here])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Whether a crate may be had under accepted licences: `(MIT OR Apache-2.0) AND BSD-3-Clause`. Old crates write `/` for `OR`.
fn is_accepted(expression: &str) -> bool {
    let plain = expression.replace(['(', ')'], "").replace(" / ", "/").replace('/', " OR ");
    // AND binds closer where there are no brackets, and everywhere else brackets stand around an OR.
    if expression.contains('(') {
        plain.split(" AND ").all(|part| part.split(" OR ").any(|licence| LICENCES.contains(&licence)))
    } else {
        plain.split(" OR ").any(|part| part.split(" AND ").all(|licence| LICENCES.contains(&licence)))
    }
}

#[test]
fn every_crate_has_a_licence_that_is_accepted() {
    for package in packages() {
        let licence = package["license"].as_str().unwrap_or("none");
        assert!(is_accepted(licence), "{} is under {licence}; accepted: {LICENCES:?}", package["name"]);
    }
}

#[test]
fn licences_are_read_as_they_are_written() {
    for accepted in
        ["MIT", "MIT/Apache-2.0", "Apache-2.0 / MIT", "GPL-3.0 OR MIT", "(MIT OR GPL-3.0) AND ISC"]
    {
        assert!(is_accepted(accepted), "{accepted}");
    }
    for refused in ["none", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR ISC) AND GPL-3.0", "GPL-2.0 OR GPL-3.0"] {
        assert!(!is_accepted(refused), "{refused}");
    }
}

#[test]
fn crates_that_are_unwanted_stay_away() {
    let lock = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock");
    let lock = std::fs::read_to_string(lock).unwrap();
    for (name, why) in UNWANTED {
        assert!(!lock.contains(&format!("name = \"{name}\"\n")), "{name} came in: {why}");
    }
    assert!(lock.contains("name = \"rustls\"\n"), "this test cannot fail");
}

/// Versions are pinned by the lock file only where they come from a registry.
#[test]
fn nothing_is_taken_from_a_repository_of_somebody() {
    for package in packages() {
        let source = package["source"].as_str().unwrap_or("here");
        assert!(source == "here" || source.starts_with("registry+"), "{} is from {source}", package["name"]);
    }
}
