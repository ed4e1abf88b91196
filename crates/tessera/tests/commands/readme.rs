//! Runs the commands of README.md, of the page for beginners and of the tutorials as they are written there, from the
//! root of a clone. The tutorials' commands for a cluster have a test beside the kubectl plugins.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::command;

/// Begin of a command that a reader of the README types in a clone.
const PROMPT: &str = "$ cargo run --release -- ";

/// Commands that take minutes. Each has tests of its own.
const NOT_RUN: [&str; 1] = ["simulate cluster --workload all --json bench.json"];

/// A command with the output that the README shows for it.
#[derive(Debug)]
struct Shown {
    command: String,
    output: Vec<String>,
}

fn shown_commands(text: &str) -> Vec<Shown> {
    let mut all: Vec<Shown> = Vec::new();
    let (mut in_block, mut in_output) = (false, false);
    for line in text.lines() {
        if line.starts_with("```") {
            (in_block, in_output) = (!in_block, false);
        } else if let Some(command) = line.strip_prefix(PROMPT).filter(|_| in_block) {
            all.push(Shown { command: command.to_owned(), output: Vec::new() });
            in_output = true;
        } else if line.starts_with("$ ") {
            in_output = false;
        } else if in_output && let Some(shown) = all.last_mut() {
            shown.output.push(line.to_owned());
        }
    }
    all
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the lines of the first code block after a heading.
fn first_block<'a>(page: &'a str, heading: &str) -> Vec<&'a str> {
    let (_, section) = page.split_once(heading).unwrap_or_else(|| panic!("there is no {heading}"));
    section.split("```").nth(1).unwrap().trim().lines().collect()
}

/// The first command of the README runs until the user ends it, so the test gives it a time.
#[test]
fn the_first_command_of_the_readme_runs() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let lines = first_block(&readme, "## See it work");
    let words = lines[0].strip_prefix("cargo run --release -- ").unwrap();
    let mut arguments: Vec<&str> = words.split_whitespace().collect();
    arguments.extend(["--for", "5s", "--listen", "127.0.0.1:0"]);
    let ran = command(&arguments).current_dir(root()).output().unwrap();
    let (text, error) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{words}: {text}{error}");
    assert!(text.contains("http://127.0.0.1:"), "the address of the page is missing: {text}");
}

/// A demo that ends with the test.
struct Demo(Child);

impl Drop for Demo {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Needs kubectl. The demo has no containers, so the commands up to the logs of the pod are run.
#[test]
fn the_commands_for_beginners_run_on_the_demo() {
    let page = std::fs::read_to_string(root().join("docs/getting-started.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    let started = first_block(&page, "# Getting started")[0].strip_prefix(PROMPT).unwrap();
    let started = started.replace("/tmp/kubeconfig", kubeconfig.to_str().unwrap());
    let mut arguments: Vec<&str> = started.split_whitespace().collect();
    arguments.extend(["--listen", "127.0.0.1:0"]);
    let demo = command(&arguments).current_dir(root()).stdout(Stdio::null()).spawn().unwrap();
    let _demo = Demo(demo);
    let kubectl = |line: &str| {
        let words = line.strip_prefix("$ kubectl ").unwrap().split_whitespace();
        let mut program = Command::new("kubectl");
        program.args(words).env("KUBECONFIG", &kubeconfig).current_dir(root());
        let output = program.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned() + &error)
    };
    let until = |line: &str, part: &str| {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let (is_good, text) = kubectl(line);
            if is_good && text.contains(part) {
                return;
            }
            assert!(Instant::now() < end, "{line}: {text}");
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let lines = first_block(&page, "## Run a pod with a share");
    let [apply, get, describe] = lines[..] else { panic!("{lines:?}") };
    until(apply, "pod/share created");
    until(get, "Running");
    until(describe, "GpusChosen");
}

#[test]
fn every_command_of_the_readme_runs_as_written() {
    let root = root();
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let shown = shown_commands(&readme);
    assert!(shown.len() > 5, "{shown:?}");
    for Shown { command: words, output } in shown {
        if NOT_RUN.contains(&words.as_str()) {
            continue;
        }
        let arguments: Vec<&str> = words.split_whitespace().collect();
        let ran = command(&arguments).current_dir(&root).output().unwrap();
        let (text, error) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        let is_refusal = output.first().is_some_and(|line| line.starts_with("does not fit"));
        assert_eq!(ran.status.code(), Some(i32::from(is_refusal)), "{words}: {error}");
        assert!(!text.is_empty(), "{words}");
        // The README leaves out what follows a line of three dots.
        let compared = output.iter().position(|line| line.trim() == "...").unwrap_or(output.len());
        let printed: Vec<&str> = text.lines().take(compared).collect();
        assert_eq!(printed, output[..compared], "{words}");
    }
}

#[test]
fn the_commands_of_the_tutorials_that_need_no_cluster_run() {
    let page = std::fs::read_to_string(root().join("docs/tutorials.md")).unwrap();
    let shown = shown_commands(&page);
    let of_no_cluster = shown.iter().filter(|shown| !shown.command.starts_with("demo "));
    let mut count = 0;
    for Shown { command: words, .. } in of_no_cluster {
        let arguments: Vec<&str> = words.split_whitespace().collect();
        let ran = command(&arguments).current_dir(root()).output().unwrap();
        assert!(ran.status.success(), "{words}: {}", String::from_utf8_lossy(&ran.stderr));
        assert!(!ran.stdout.is_empty(), "{words}");
        count += 1;
    }
    assert!(count > 0, "{shown:?}");
}
