//! Output has colours only on a terminal.

use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::ffi::OsStringExt as _;
use std::process::Stdio;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::stage::{GPU, Stage};
use crate::states::{T4, node};

/// Runs the plugin on a pseudo-terminal and returns its output.
fn on_a_terminal(stage: &Stage, arguments: &[&str], no_color: bool) -> String {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let path = std::ffi::OsString::from_vec(ptsname(&ours, Vec::new()).unwrap().into_bytes());
    let theirs = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut command = stage.command(GPU);
    command.args(arguments).stdout(Stdio::from(theirs));
    if no_color {
        command.env("NO_COLOR", "1");
    }
    let mut child = command.spawn().unwrap();
    // Reading ends when no process holds the other side of the terminal.
    drop(command);
    let (mut ours, mut seen, mut part) = (File::from(ours), Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = ours.read(&mut part) {
        seen.extend_from_slice(&part[..count]);
    }
    child.wait().unwrap();
    String::from_utf8(seen).unwrap().replace("\r\n", "\n")
}

/// Removes the colour codes.
fn plain(text: &str) -> String {
    let mut parts = text.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once('m').unwrap().1)
}

#[test]
fn prints_colours_only_on_a_terminal() {
    let stage = Stage::of(&[node("n", "10.0.0.1", "GiB", &[T4])], &[]);
    let arguments = ["what-if", "nvidia.com/gpu=2"];
    let output = stage.run(GPU, &arguments);
    let written = String::from_utf8(output.stdout).unwrap();
    assert!(written.contains("fewer than 2 GPUs") && !written.contains('\u{1b}'), "{written:?}");
    let painted = on_a_terminal(&stage, &arguments, false);
    assert!(painted.contains("\u{1b}[31m"), "{painted:?}");
    assert_eq!(plain(&painted), written, "colours change no text");
    assert_eq!(on_a_terminal(&stage, &arguments, true), written, "NO_COLOR");
}
