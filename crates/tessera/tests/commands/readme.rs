//! Runs the commands of README.md as they are written there, from the root of a clone.

use std::path::Path;

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

#[test]
fn every_command_of_the_readme_runs_as_written() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
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
