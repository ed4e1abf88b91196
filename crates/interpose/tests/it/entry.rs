//! The symbols that the shipped library exports and needs.

use std::collections::BTreeSet;
use std::process::Command;

use crate::support::Built;

fn tool(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).arg(&Built::get().library).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Compares `functions.txt`, which says for each driver function whether it is wrapped, with the
/// exported symbols.
#[test]
fn each_driver_function_is_wrapped_or_listed_as_unwrapped() {
    let (mut wrapped, mut passing) = (BTreeSet::new(), BTreeSet::new());
    let mut section = "";
    for line in include_str!("functions.txt").lines() {
        match line.strip_prefix("## ") {
            Some(title) => section = title,
            None if line.starts_with('#') => {}
            None if section == "Passes as it is." => passing.extend(line.split_whitespace()),
            None => wrapped.extend(line.split_whitespace()),
        }
    }
    assert!(passing.len() > 400 && wrapped.is_disjoint(&passing));
    let symbols = tool("nm", &["-D", "--defined-only"]);
    let exported: BTreeSet<_> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|name| name.starts_with("cu"))
        .collect();
    let missing: Vec<_> = wrapped.difference(&exported).collect();
    let unlisted: Vec<_> = exported.difference(&wrapped).collect();
    assert!(missing.is_empty() && unlisted.is_empty(), "not wrapped: {missing:?}; not listed: {unlisted:?}");
}

#[test]
fn exports_only_functions_of_the_driver_and_of_the_loader() {
    let symbols = tool("nm", &["-D", "--defined-only"]);
    let names: Vec<_> = symbols.lines().filter_map(|line| line.split_whitespace().last()).collect();
    assert!(names.len() > 40, "{names:?}");
    for name in names {
        let is_of_loader = ["dlopen", "dlmopen", "dlsym", "dlvsym"].contains(&name);
        let is_known = name.starts_with("cu") || name.starts_with("nvml") || is_of_loader;
        assert!(is_known, "{name} is exported");
    }
}

/// Two thirds of the library are Rust's standard library, most of that its printer of backtraces.
/// A build for an old glibc is 5 % larger than one for this machine's.
const LARGEST_LIBRARY_BYTES: u64 = 540_000;

#[test]
fn the_library_is_small() {
    let size = Built::get().library.metadata().unwrap().len();
    assert!(size < LARGEST_LIBRARY_BYTES, "{size} bytes");
}

/// The library must load in images with a glibc of 2012. The check needs a build for that glibc,
/// and so cargo-zigbuild.
#[test]
fn the_library_needs_no_glibc_newer_than_2_17() {
    let crate_folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = crate_folder.join("../../target/under-test");
    let has_zig =
        Command::new("cargo-zigbuild").arg("--version").output().is_ok_and(|output| output.status.success());
    if !has_zig {
        eprintln!("passed over: cargo-zigbuild is not installed");
        return;
    }
    let built = Command::new(env!("CARGO"))
        .args(["zigbuild", "--quiet", "--offline", "--profile", "interpose", "-p", "tessera-interpose"])
        .args(["--target", "x86_64-unknown-linux-gnu.2.17", "--target-dir"])
        .arg(&target)
        .current_dir(crate_folder)
        .status()
        .unwrap();
    assert!(built.success());
    let library = target.join("x86_64-unknown-linux-gnu/interpose/libtessera.so");
    let size = library.metadata().unwrap().len();
    assert!(size < LARGEST_LIBRARY_BYTES, "{size} bytes");
    let symbols = Command::new("objdump").args(["-p"]).arg(library).output().unwrap();
    let text = String::from_utf8(symbols.stdout).unwrap();
    for word in text.split_whitespace().filter_map(|word| word.strip_prefix("GLIBC_2.")) {
        let minor: u32 = word.split('.').next().unwrap().parse().unwrap();
        assert!(minor <= 17, "needs GLIBC_2.{word}");
    }
    let needed: Vec<_> =
        text.lines().filter_map(|line| line.trim().strip_prefix("NEEDED")).map(str::trim).collect();
    let of_libc = ["libc.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0", "libdl.so.2"];
    assert!(needed.iter().all(|name| of_libc.contains(name)), "{needed:?}");
}
