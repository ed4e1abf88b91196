//! The program as somebody meets it who has never seen it: its help, what it says about mistakes, and the manifests that start it.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

mod deploy;
mod help;
mod mistakes;
mod serving;

use std::process::{Command, Output};

fn tessera(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

/// The program where none of the caller's settings reach it.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tessera"));
    for name in ["KUBECONFIG", "NODE_NAME", "TESSERA_LOG", "KUBERNETES_SERVICE_HOST"] {
        command.env_remove(name);
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    command.args(arguments).env("HOME", "/nonexistent").current_dir(folder);
    command
}
