//! Rules of CONTRIBUTING.md for comments and Markdown that a program can check.
//!
//! `cargo test -p tessera --test prose -- --nocapture` prints the number of violations of each crate.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "test helpers may panic and print like tests")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Pronouns that hide which component, thread or user is meant.
const VAGUE_PRONOUNS: &[&str] = &["anybody", "nobody", "somebody", "whoever"];

/// First words of a comment that continues the sentence of another one.
const CONTINUATIONS: &[&str] = &["and", "but", "likewise", "or"];

/// Longest line of running text in Markdown.
const MAX_COLUMNS: usize = 120;

/// Directories that hold no text of the project.
const SKIPPED: &[&str] = &["target", "gen", "node_modules"];

/// Names of foreign formats that contain the old word for a GPU.
const FOREIGN_NAMES: &[&str] = &["card_idx"];

/// Words for a GPU that only foreign formats use.
const OLD_GPU_WORDS: &[&str] = &["card", "cards"];

/// A violation of one rule.
#[derive(Debug)]
struct Violation {
    file: PathBuf,
    line: usize,
    what: String,
}

/// A block of consecutive comment lines of one kind.
struct Comment {
    line: usize,
    is_doc: bool,
    text: String,
    /// The first line of code after the comment.
    item: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns all files with this extension below a directory, relative to the root.
fn files(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !SKIPPED.contains(&name.as_str()) && !name.starts_with('.') {
                found.extend(files(&path, extension));
            }
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path.strip_prefix(root()).unwrap().to_owned());
        }
    }
    found.sort();
    found
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(root().join(file)).unwrap()
}

/// Splits a line of a comment into its marker and its text.
fn comment_line(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let marker = ["//!", "///", "//"].into_iter().find(|marker| line.starts_with(marker))?;
    Some((marker, line[marker.len()..].trim()))
}

fn comments(text: &str) -> Vec<Comment> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    let mut next = 0;
    while let Some(line) = lines.get(next) {
        let Some((marker, _)) = comment_line(line) else {
            next += 1;
            continue;
        };
        let same = |line: &&&str| comment_line(line).is_some_and(|(other, _)| other == marker);
        let block: Vec<&str> =
            lines[next..].iter().take_while(same).map(|line| comment_line(line).unwrap().1).collect();
        let end = next + block.len();
        let is_attribute = |line: &&&str| line.trim_start().starts_with("#[");
        let item = lines[end..].iter().find(|line| !is_attribute(line)).map_or("", |line| line.trim());
        found.push(Comment {
            line: next + 1,
            is_doc: marker != "//",
            text: block.join(" "),
            item: item.to_owned(),
        });
        next = end;
    }
    found
}

/// Returns the words of a text in lower case, without punctuation.
fn words(text: &str) -> impl Iterator<Item = String> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_' && letter != '\'')
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
}

/// Returns the name that an item declares.
fn declared_name(item: &str) -> Option<String> {
    const KEYWORDS: &[&str] = &[
        "pub", "crate", "super", "async", "const", "static", "unsafe", "extern", "fn", "struct", "enum",
        "trait", "type", "mod", "in", "self",
    ];
    let names =
        item.split(|letter: char| !letter.is_alphanumeric() && letter != '_').filter(|word| !word.is_empty());
    names.into_iter().find(|word| !KEYWORDS.contains(word)).map(str::to_owned)
}

/// Returns the words of a name in snake case or camel case.
fn name_words(name: &str) -> Vec<String> {
    let mut spaced = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() || letter == '_' {
            spaced.push(' ');
        }
        spaced.extend(letter.to_lowercase().filter(|letter| *letter != '_'));
    }
    spaced.split_whitespace().map(str::to_owned).collect()
}

/// Returns whether a comment starts in the middle of a sentence.
fn is_continuation(comment: &Comment) -> bool {
    let Some(first) = comment.text.split_whitespace().next() else { return false };
    let plain = first.trim_end_matches([',', '.', ';', ':']);
    if CONTINUATIONS.iter().any(|word| plain.eq_ignore_ascii_case(word)) {
        return comment.is_doc || plain.eq_ignore_ascii_case("likewise");
    }
    // A lower-case name such as `kubelet.sock` or `nvidia-smi` may begin a sentence.
    let is_word = plain.chars().all(char::is_alphabetic);
    comment.is_doc && is_word && plain.starts_with(char::is_lowercase) && !LOWER_CASE_NAMES.contains(&plain)
}

/// Names that are written in lower case also at the start of a sentence.
const LOWER_CASE_NAMES: &[&str] =
    &["dlopen", "dlsym", "gputopology", "gpushare", "podresources", "systemd", "vcuda", "kubectl", "etcd"];

/// Returns whether a comment of one or two words only repeats the name of its item.
fn repeats_the_name(comment: &Comment) -> bool {
    let said: Vec<String> =
        words(&comment.text).filter(|word| !["a", "an", "its", "the"].contains(&word.as_str())).collect();
    let name = declared_name(&comment.item).map(|name| name_words(&name)).unwrap_or_default();
    comment.is_doc
        && words(&comment.text).count() <= 2
        && !said.is_empty()
        && said.iter().all(|word| name.contains(word))
}

fn check_comments(file: &Path, text: &str) -> Vec<Violation> {
    let mut found = Vec::new();
    for comment in comments(text) {
        let mut report =
            |what: String| found.push(Violation { file: file.to_owned(), line: comment.line, what });
        for word in words(&comment.text).filter(|word| VAGUE_PRONOUNS.contains(&word.as_str())) {
            report(format!("name the component or user instead of `{word}`"));
        }
        if is_continuation(&comment) {
            report(format!("the comment continues another sentence: {:?}", comment.text));
        }
        if repeats_the_name(&comment) {
            report(format!("the comment repeats the name of the item: {:?}", comment.text));
        }
    }
    found
}

/// Finds the old word for a GPU in identifiers and comments. String literals may contain foreign names.
fn check_gpu_word(file: &Path, text: &str) -> Vec<Violation> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let code: String = line.split('"').step_by(2).collect::<Vec<_>>().join(" ");
        let is_foreign = |word: &str| FOREIGN_NAMES.contains(&word);
        let is_old_word = |word: &str| {
            !is_foreign(word) && name_words(word).iter().any(|part| OLD_GPU_WORDS.contains(&part.as_str()))
        };
        for word in words_as_written(&code).filter(|word| is_old_word(word)) {
            found.push(Violation {
                file: file.to_owned(),
                line: number + 1,
                what: format!("write GPU instead of `{word}`"),
            });
        }
    }
    found
}

fn words_as_written(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').filter(|word| !word.is_empty())
}

/// Finds long lines of running text. Tables, code blocks and lines with a link may be longer.
fn check_markdown(file: &Path, text: &str) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut is_code = false;
    for (number, line) in text.lines().enumerate() {
        is_code ^= line.trim_start().starts_with("```");
        let may_be_long =
            is_code || line.trim_start().starts_with('|') || line.contains("://") || line.contains("](");
        let columns = line.chars().count();
        if !may_be_long && columns > MAX_COLUMNS {
            let what = format!("the line has {columns} columns; wrap at 100");
            found.push(Violation { file: file.to_owned(), line: number + 1, what });
        }
    }
    found
}

/// Prints the number of violations of each crate and fails if there is one.
fn report(rule: &str, violations: &[Violation]) {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for violation in violations {
        let place: Vec<_> = violation.file.iter().take(2).map(|part| part.to_string_lossy()).collect();
        *counts.entry(place.join("/")).or_default() += 1;
    }
    for (place, count) in counts {
        println!("{rule}: {place}: {count}");
    }
    let lines: Vec<String> = violations
        .iter()
        .map(|Violation { file, line, what }| format!("{}:{line}: {what}", file.display()))
        .collect();
    assert!(lines.is_empty(), "{} violations:\n{}", lines.len(), lines.join("\n"));
}

fn check_all(extension: &str, check: impl Fn(&Path, &str) -> Vec<Violation>) -> Vec<Violation> {
    files(&root(), extension).iter().flat_map(|file| check(file, &read(file))).collect()
}

#[test]
fn comments_are_complete_sentences_with_a_subject() {
    report("comments", &check_all("rs", check_comments));
}

#[test]
fn gpus_are_called_gpus() {
    report("gpu word", &check_all("rs", check_gpu_word));
}

#[test]
fn markdown_lines_are_short() {
    report("markdown", &check_all("md", check_markdown));
}

#[test]
fn the_checks_find_violations() {
    let comment = |text: &str| check_comments(Path::new("x.rs"), text).len();
    assert_eq!(comment("/// Returns the name.\nfn name() {}\n"), 0);
    assert_eq!(comment("/// `null` removes a field.\nfn merge() {}\n"), 0);
    for wrong in [
        "/// and at most.\nconst TICK: u64 = 1;\n",
        "/// Likewise.\nfn allocate() {}\n",
        "// Likewise.\n",
        "/// Whoever asks.\nfn answer() {}\n",
        "//! how long a stream waits\n",
        "/// Its name.\nname: String,\n",
        "/// Queue limit.\n#[must_use]\nfn queue_limit() {}\n",
    ] {
        assert_eq!(comment(wrong), 1, "{wrong}");
    }
    let gpu_word = |text: &str| check_gpu_word(Path::new("x.rs"), text).len();
    assert_eq!(gpu_word("let by_card = cards[0];\n"), 2);
    assert_eq!(gpu_word("let discard = json[\"card_idx\"];\n"), 0);
    let markdown = |text: &str| check_markdown(Path::new("x.md"), text).len();
    let long = "word ".repeat(30);
    assert_eq!(markdown(&long), 1);
    assert_eq!(markdown(&format!("| {long} |\n```\n{long}\n```\n[{long}](x)\n")), 0);
}
