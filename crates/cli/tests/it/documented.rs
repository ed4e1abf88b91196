//! The command lines of the documentation, the README and the examples are accepted by the plugins, and the reference
//! has their help and their exit codes. `BLESS=1` writes the help.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::section;
use crate::stage::{GPU, SHARE, Stage};
use crate::states::{T4, node};

/// The subcommands of `kubectl inspect gpu`.
const COMMANDS: [&str; 8] =
    ["overview", "tree", "explain", "what-if", "top", "cordon", "uncordon", "defragment"];

/// Begin of a command line of a plugin.
const CALL: &str = "kubectl inspect ";

/// A command line, and whether it stands on a line of its own in a code block. In a sentence the name of a subcommand
/// may stand without its arguments.
#[derive(Debug, PartialEq)]
struct Documented {
    words: Vec<String>,
    is_to_be_typed: bool,
}

/// Returns the command lines of a page. A comment, a pipe or another command ends a line.
fn documented(text: &str) -> Vec<Documented> {
    let mut found = Vec::new();
    let mut prose = String::new();
    let mut in_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if in_code {
            let typed = line.trim().trim_start_matches("$ ");
            found.extend(typed.starts_with(CALL).then(|| parsed(typed, true)));
        } else {
            // A comment of a manifest goes on in the next line, too.
            prose += line.trim().trim_start_matches("# ");
            prose.push(' ');
        }
    }
    let begin = format!("`{CALL}");
    let in_backticks = prose.split(&begin).skip(1).filter_map(|rest| rest.split('`').next());
    found.extend(in_backticks.map(|rest| parsed(&format!("{CALL}{rest}"), false)));
    found
}

fn parsed(line: &str, is_to_be_typed: bool) -> Documented {
    let ends = |word: &&str| !matches!(*word, "|" | "&&" | "||" | ">" | ";" | "#");
    let words = line.split_whitespace().take_while(ends).map(|word| word.replace(['"', '\''], ""));
    Documented { words: words.collect(), is_to_be_typed }
}

/// Returns all files below a folder whose name has this ending.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.extension().is_some_and(|found| found == ending) {
            found.push(path);
        }
    }
    found
}

/// Runs a plugin without a cluster. It parses its command line first, then finds no cluster.
fn run(words: &[String]) -> Output {
    let program = match words[2].as_str() {
        "gpu" | "gputopology" => GPU,
        "gpushare" => SHARE,
        other => panic!("there is no plugin {other}: {words:?}"),
    };
    let mut command = Command::new(program);
    for name in ["KUBECONFIG", "KUBERNETES_SERVICE_HOST"] {
        command.env_remove(name);
    }
    command.args(&words[3..]).env("HOME", "/nonexistent").output().unwrap()
}

/// Returns why a plugin refuses a command line.
fn refusal(documented: &Documented) -> Option<String> {
    let output = run(&documented.words);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_name = !documented.is_to_be_typed && documented.words.len() == 4;
    let lacks_arguments = error.contains("required arguments were not provided");
    let is_refused = error.contains("--help' for usage.") && !(is_name && lacks_arguments);
    is_refused.then_some(error)
}

#[test]
fn the_plugins_accept_every_documented_command_line() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = [files(&root.join("docs"), "md"), files(&root.join("examples"), "md")].concat();
    pages.extend(files(&root.join("examples"), "yaml"));
    pages.push(root.join("README.md"));
    let (mut count, mut refused) = (0, Vec::new());
    for page in pages {
        for line in documented(&std::fs::read_to_string(&page).unwrap()) {
            count += 1;
            let error = refusal(&line);
            refused
                .extend(error.map(|error| format!("{}: {}: {error}", page.display(), line.words.join(" "))));
        }
    }
    assert!(count > 50, "only {count} command lines were found");
    assert!(refused.is_empty(), "{refused:#?}");
}

#[test]
fn wrong_command_lines_are_found_and_refused() {
    let page = "```\n$ kubectl inspect gpu top -n NAMESPACE    # use\n```\n\nRead `kubectl inspect gpu\ndefragment --shape 1x8` \
                or `kubectl inspect gpu explain` or `kubectl inspect gpu explain -x`.\n";
    let found = documented(page);
    let line = |text: &str, is_to_be_typed| parsed(text, is_to_be_typed);
    assert_eq!(
        found,
        [
            line("kubectl inspect gpu top -n NAMESPACE", true),
            line("kubectl inspect gpu defragment --shape 1x8", false),
            line("kubectl inspect gpu explain", false),
            line("kubectl inspect gpu explain -x", false),
        ]
    );
    let is_refused: Vec<bool> = found.iter().map(|line| refusal(line).is_some()).collect();
    assert_eq!(is_refused, [true, false, false, true]);
    assert!(refusal(&line("kubectl inspect gpu explain", true)).is_some());
}

#[test]
fn the_reference_has_the_help_of_every_plugin() {
    let help = |words: &[&str]| {
        let words: Vec<String> = words.iter().copied().chain(["--help"]).map(str::to_owned).collect();
        let output = run(&words);
        assert!(output.status.success(), "{words:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let all = help(&["kubectl", "inspect", "gpu"]);
    let (_, listed) = all.split_once("\nCommands:\n").unwrap();
    let listed: Vec<&str> = listed
        .lines()
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   "))
        })
        .filter(|name| *name != "help")
        .collect();
    assert_eq!(listed, COMMANDS);
    let mut page = String::new();
    let of_gpu = COMMANDS.iter().map(|command| vec!["gpu", command]);
    for words in [vec!["gpu"]].into_iter().chain(of_gpu).chain([vec!["gpushare"]]) {
        let call = [&["kubectl", "inspect"], &words[..]].concat();
        let text: String = help(&call).lines().map(|line| format!("{}\n", line.trim_end())).collect();
        let _ = write!(page, "### {}\n\n```\n{text}```\n\n", call.join(" "));
    }
    section::check("docs/reference/flags.md", "Commands of the kubectl plugins", page.trim_end_matches('\n'));
}

#[test]
fn the_page_of_exit_codes_is_true_for_the_plugins() {
    let page = include_str!("../../../../docs/reference/exit-codes.md");
    let row = page.lines().find(|line| line.starts_with("| `kubectl inspect gpu`")).unwrap();
    let cells: Vec<&str> = row.split('|').map(str::trim).collect();
    assert!(cells[1].contains("`kubectl inspect gpushare`"), "{row}");
    let stage = Stage::of(&[node("n", "10.0.0.1", "GiB", &[T4])], &[]);
    let runs: [(&str, &[&str], i32); 8] = [
        (GPU, &[], 0),
        (SHARE, &[], 0),
        (GPU, &["what-if", "aliyun.com/gpu-mem=1"], 0),
        (GPU, &["what-if", "aliyun.com/gpu-mem=1000"], 1),
        (GPU, &["explain", "missing"], 1),
        (GPU, &["defragment", "--shape", "2x8"], 1),
        (GPU, &["--bogus"], 1),
        (SHARE, &["-o", "xml"], 1),
    ];
    for (program, arguments, code) in runs {
        let output = stage.run(program, arguments);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let cell = cells[2 + usize::try_from(code).unwrap()];
        assert!(!cell.is_empty(), "{arguments:?} exits with {code}, which the page does not explain");
    }
    assert!(cells[4].is_empty(), "the plugins never exit with 2");
}
