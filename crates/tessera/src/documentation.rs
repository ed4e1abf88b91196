//! Tests that compare the documentation with the program: flags, defaults and file names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use clap::{ArgAction, Command, CommandFactory as _};

use crate::{Arguments, old_flags};

/// Flags of other programs in the documentation: cargo, kubectl, helm, az, eksctl, k3s,
/// Kubeflow's operator, nvidia-ctk, curl, and our scripts and tests.
const OF_OTHERS: &[&str] = &[
    "all",
    "audience",
    "bench",
    "cfg",
    "clusterrole",
    "data-binary",
    "default-runtime",
    "delete-emptydir-data",
    "device-name-strategy",
    "dry-run",
    "endpoint",
    "field-selector",
    "for",
    "from-file",
    "gang-scheduler-name",
    "gpu-driver",
    "gpu-reset",
    "help",
    "ignore-daemonsets",
    "install",
    "install-nvidia-plugin",
    "kube-api-qps",
    "legacy-metrics",
    "lib",
    "list",
    "locked",
    "name",
    "namespace",
    "nocapture",
    "output",
    "path",
    "policy-config-file",
    "profile",
    "release",
    "require-hashes",
    "reset-then-reuse-values",
    "reset-values",
    "resource",
    "reuse-values",
    "role",
    "runtime",
    "serve",
    "serviceaccount",
    "set",
    "set-string",
    "skip-gpu-driver-install",
    "sort",
    "subresource",
    "target",
    "test",
    "type",
    "use-legacy-policy-config",
    "verb",
    "version",
    "wait",
    "workspace",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the pages for users by name. The tests of the kubectl plugins check `inspect.md`.
fn pages() -> BTreeMap<String, String> {
    let docs = std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let named = |path: PathBuf| {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        (name, std::fs::read_to_string(path).unwrap())
    };
    let pages: BTreeMap<_, _> = pages.chain([root().join("README.md")]).map(named).collect();
    assert!(pages.len() > 8, "{:?}", pages.keys());
    pages
}

/// Returns all words of a text of the form `--flag`.
fn flags(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).filter_map(|word| {
        let name = word.strip_prefix("--")?.trim_end_matches('-');
        name.starts_with(|c: char| c.is_ascii_lowercase()).then_some(name)
    })
}

/// Returns a command and all its subcommands.
fn commands(command: Command) -> Vec<Command> {
    let inner: Vec<Command> = command.get_subcommands().cloned().collect();
    let mut all: Vec<Command> = inner.into_iter().flat_map(commands).collect();
    all.push(command);
    all
}

/// Returns the names of all flags, including hidden and old ones.
fn known() -> BTreeSet<String> {
    let mut names: BTreeSet<String> = OF_OTHERS.iter().map(|name| (*name).to_owned()).collect();
    for command in commands(Arguments::command()) {
        for argument in command.get_arguments() {
            names.extend(argument.get_long().map(str::to_owned));
            names.extend(argument.get_all_aliases().unwrap_or_default().into_iter().map(str::to_owned));
        }
    }
    names
}

#[test]
fn documented_flags_exist() {
    let known = known();
    for (page, text) in pages() {
        if page == "docs/inspect.md" {
            continue;
        }
        for flag in flags(&text) {
            let is_old = old_flags::why(flag) != "it is unknown"
                || old_flags::RENAMED.iter().any(|(old, _)| *old == flag);
            assert!(known.contains(flag) || is_old, "{page}: there is no --{flag}");
        }
    }
}

/// Returns the default of each flag of a command, as a page writes it.
fn defaults(command: &str) -> BTreeMap<String, String> {
    let all = commands(Arguments::command());
    let command = all.iter().find(|found| found.get_name() == command).unwrap();
    let visible = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let with_default = visible.filter_map(|argument| {
        let values: Vec<_> =
            argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let written = match argument.get_action() {
            ArgAction::SetTrue => "off".to_owned(),
            _ => values.join(","),
        };
        (!written.is_empty()).then(|| (argument.get_long().unwrap_or_default().to_owned(), written))
    });
    with_default.collect()
}

/// Returns the rows of tables whose second column is the default.
fn rows_with_defaults(page: &str) -> Vec<Vec<&str>> {
    let tables = page.split("\n\n").filter(|block| block.starts_with('|'));
    let cells = |row| str::split(row, '|').skip(1).map(str::trim).collect::<Vec<_>>();
    let tables = tables.map(|table| table.lines().map(cells).collect::<Vec<_>>());
    tables.filter(|rows| rows[0][1] == "default").flatten().collect()
}

#[test]
fn documented_defaults_are_correct() {
    let pages = pages();
    for (page, command, at_least) in
        [("docs/agent.md", "agent", 15), ("docs/exporter.md", "metrics", 5), ("docs/demo.md", "demo", 5)]
    {
        let defaults = defaults(command);
        let mut seen = 0;
        for row in rows_with_defaults(&pages[page]) {
            for flag in flags(row[0]) {
                // An empty cell refers to another page.
                if let Some(default) = defaults.get(flag).filter(|_| !row[1].is_empty()) {
                    assert!(
                        row[1].contains(default),
                        "{page}: the default of --{flag} is {default}, not as in {row:?}"
                    );
                    seen += 1;
                }
            }
        }
        assert!(seen >= at_least, "{page}: {seen} defaults found");
    }
}

#[test]
fn every_flag_of_the_daemons_is_documented() {
    let pages = pages();
    for (command, told) in [
        ("agent", &["docs/agent.md", "docs/exporter.md"][..]),
        ("scheduler", &["docs/scheduler.md", "docs/gangs.md"]),
        ("demo", &["docs/demo.md"]),
    ] {
        let told: BTreeSet<&str> = told.iter().flat_map(|page| flags(&pages[*page])).collect();
        let all = commands(Arguments::command());
        let command = all.iter().find(|found| found.get_name() == command).unwrap();
        for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
            let Some(flag) = argument.get_long().filter(|flag| *flag != "help") else { continue };
            assert!(told.contains(flag), "no page documents `{} --{flag}`", command.get_name());
        }
    }
}

#[test]
fn documented_files_exist() {
    let folders = ["crates/", "deploy/", "docs/", "e2e/", "gpu/"];
    for (page, text) in pages() {
        let here = root().join(&page);
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            let is_file = !link.is_empty() && !link.contains("://");
            assert!(!is_file || here.with_file_name(link).exists(), "{page}: no file {link}");
        }
        for word in text.split(|c: char| c.is_whitespace() || "`()[],;:'\"".contains(c)) {
            let word = word.trim_end_matches(['.', '/']);
            let names_a_file = folders.iter().any(|folder| word.starts_with(folder));
            // `gpu/3` is a GPU in the output of a command.
            let is_gpu = word.strip_prefix("gpu/").is_some_and(|index| index.parse::<u8>().is_ok());
            // Names with variables such as `deploy/$part` are not checked.
            if names_a_file && !is_gpu && !word.contains(['$', '*', '{', '<']) {
                assert!(root().join(word).exists(), "{page}: no file {word}");
            }
        }
    }
}
