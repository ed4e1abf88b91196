//! What the shipped file exports and needs.

use std::process::Command;

use crate::support::Built;

fn tool(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).arg(&Built::get().library).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn only_names_of_the_driver_and_dlsym_are_exported() {
    let symbols = tool("nm", &["-D", "--defined-only"]);
    let names: Vec<_> = symbols.lines().filter_map(|line| line.split_whitespace().last()).collect();
    assert!(names.len() > 40, "{names:?}");
    for name in names {
        let is_known = name.starts_with("cu") || name.starts_with("nvml") || name == "dlsym";
        assert!(is_known, "{name} is exported");
    }
}

#[test]
fn it_is_small() {
    let size = Built::get().library.metadata().unwrap().len();
    assert!(size < 500_000, "{size} bytes");
}
