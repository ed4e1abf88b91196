use std::fmt::Write as _;

use super::{section, tessera};

pub(super) const COMMANDS: &[&[&str]] = &[
    &["agent"],
    &["defragment"],
    &["demo"],
    &["inventory"],
    &["metrics"],
    &["migrate", "check"],
    &["mount-grants"],
    &["place"],
    &["scheduler"],
    &["simulate", "cluster"],
    &["simulate", "defragment"],
    &["simulate", "gangs"],
    &["simulate", "topology"],
    &["topology"],
];

fn help(command: &[&str]) -> String {
    let output = tessera(&[command, &["--help"]].concat());
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the commands below this one that have no commands of their own.
fn leaves(command: &[String]) -> Vec<Vec<String>> {
    let text = help(&command.iter().map(String::as_str).collect::<Vec<_>>());
    let Some((_, listed)) = text.split_once("\nCommands:\n") else { return vec![command.to_vec()] };
    let lines = listed.lines().take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
    names.flat_map(|name| leaves(&[command, &[name.to_owned()]].concat())).collect()
}

#[test]
fn the_list_of_commands_is_complete() {
    assert_eq!(leaves(&[]), COMMANDS);
}

#[test]
fn every_command_is_listed_and_has_examples() {
    let all = help(&[]);
    for command in COMMANDS {
        assert!(all.contains(&format!("\n  {} ", command[0])), "{all}");
        let text = help(command);
        let (_, examples) = text.split_once("\nExamples:\n").unwrap_or_else(|| panic!("{text}"));
        let lines: Vec<&str> = examples.lines().take_while(|line| !line.is_empty()).collect();
        assert!(lines.len() >= 2, "{text}");
        let call = format!("tessera {}", command.join(" "));
        for line in lines {
            assert!(line.contains(&call), "this line is wrapped or not an example: {line}\n{text}");
        }
    }
}

#[test]
fn every_flag_has_a_description() {
    for command in COMMANDS {
        let text = help(command);
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for pair in lines.windows(2).filter(|pair| pair[0].starts_with("--")) {
            let on_one_line = pair[0].contains("  ");
            assert!(on_one_line || pair[1].starts_with(char::is_alphabetic), "{command:?}: {pair:?}");
        }
    }
}

#[test]
fn the_reference_has_the_help_of_every_command() {
    let mut page = String::new();
    for command in COMMANDS {
        let text: String = help(command).lines().map(|line| format!("{}\n", line.trim_end())).collect();
        let _ = write!(page, "### tessera {}\n\n```\n{text}```\n\n", command.join(" "));
    }
    section::check("docs/reference/flags.md", "Commands of tessera", page.trim_end_matches('\n'));
}
