//! The program from a new user's view: its help, its error messages, and the manifests that start
//! it.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod attacks;
mod deploy;
mod exit_codes;
mod help;
mod migrate;
mod mistakes;
mod other_plugins;
mod pending_reset;
mod readme;
#[path = "../book/section.rs"]
mod section;
mod serving;

use std::process::{Command, Output};

fn tessera(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

/// Returns a command that runs the program without the caller's settings.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tessera"));
    for name in ["KUBECONFIG", "NODE_NAME", "TESSERA_LOG", "KUBERNETES_SERVICE_HOST"] {
        command.env_remove(name);
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    command.args(arguments).env("HOME", "/nonexistent").current_dir(folder);
    command
}
