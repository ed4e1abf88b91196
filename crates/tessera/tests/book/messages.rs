//! The page of all messages, which is generated from the sources.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{files, golden, read};

/// The programs and libraries with what their messages are about.
const PARTS: [(&str, &str); 11] = [
    ("core", "Placement, quotas and constraints"),
    ("wire", "Requests, annotations and other formats"),
    ("scheduler", "The scheduler"),
    ("agent", "The agent"),
    ("node", "The GPUs and the kubelet of a node"),
    ("cluster", "The API server"),
    ("serve", "Connections and certificates"),
    ("cli", "The kubectl plugins"),
    ("tessera", "The command line"),
    ("demo", "The demo"),
    ("sim", "Simulations and the embedded cluster"),
];

/// What begins a message in the sources, and how it reaches the user.
const KINDS: [(&str, &str); 14] = [
    ("#[error(", "error"),
    ("bail!(", "error"),
    ("ensure!(", "error"),
    ("anyhow!(", "error"),
    (".context(", "error"),
    (".with_context(", "error"),
    ("Error::msg(", "error"),
    ("Error::other(", "error"),
    // Errors about values of flags are texts.
    ("Err(", "error"),
    (".ok_or(", "error"),
    (".ok_or_else(", "error"),
    ("eprintln!(", "on standard error"),
    ("tracing::warn!(", "warning in the log"),
    ("tracing::error!(", "error in the log"),
];

/// Parses a string literal at the begin of `text`. Returns its content and the rest.
fn literal(text: &str) -> Option<(String, &str)> {
    let mut content = String::new();
    let mut rest = text.strip_prefix('"')?.chars();
    loop {
        match rest.next()? {
            '"' => return Some((content, rest.as_str())),
            '\\' => match rest.next()? {
                // The line goes on without its indentation.
                '\n' => rest = rest.as_str().trim_start().chars(),
                'n' => content.push(' '),
                other => content.push(other),
            },
            letter => content.push(letter),
        }
    }
}

/// Returns the last string literal before the bracket that closes the macro. Literals of fields come first.
fn message(mut text: &str) -> Option<String> {
    let (mut depth, mut last) = (0, None);
    loop {
        let letter = text.chars().next()?;
        if letter == '"' {
            let (found, rest) = literal(text)?;
            if depth == 0 {
                last = Some(found);
            }
            text = rest;
            continue;
        }
        depth += match letter {
            '(' | '[' | '{' => 1,
            ')' | ']' | '}' if depth == 0 => return last,
            ')' | ']' | '}' => -1,
            _ => 0,
        };
        text = &text[letter.len_utf8()..];
    }
}

/// Replaces the placeholders of a format string by dots.
fn shown(format: &str) -> String {
    let mut text = String::new();
    let mut letters = format.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '{' | '}' if letters.peek() == Some(&letter) => {
                letters.next();
                text.push(letter);
            }
            '{' => {
                letters.find(|letter| *letter == '}');
                text.push('…');
            }
            letter => text.push(letter),
        }
    }
    text.replace('|', "\\|")
}

/// Returns the text that follows the begin of a message: a literal, `format!` with a literal, or a closure of these.
fn text_after(begin: &str, rest: &str) -> Option<String> {
    let rest = rest.trim_start();
    match begin {
        // The arguments of an error's text follow it.
        "#[error(" => literal(rest).map(|(text, _)| text),
        ".context(" | ".with_context(" | "Error::msg(" | "Error::other(" | "Err(" | ".ok_or("
        | ".ok_or_else(" => {
            let body = rest.strip_prefix("||").unwrap_or(rest).trim_start();
            let body = body.strip_prefix('{').unwrap_or(body).trim_start();
            let format = body.strip_prefix("format!(").unwrap_or(body).trim_start();
            literal(format).map(|(text, _)| text)
        }
        _ => message(rest),
    }
}

/// Returns whether a reader can recognise a message by its words.
fn is_text(text: &str) -> bool {
    let is_word = |word: &&str| word.chars().filter(|letter| letter.is_alphabetic()).count() > 1;
    text.split(|letter: char| letter.is_whitespace() || letter == '…').filter(is_word).count() > 1
        || text.starts_with("--")
}

fn messages_in(code: &str) -> BTreeSet<(String, &'static str)> {
    let mut found = BTreeSet::new();
    for (begin, kind) in KINDS {
        for (at, _) in code.match_indices(begin) {
            // A longer name ends like this one: `ApiErr(` is no `Err(`.
            let is_in_name = begin.starts_with(|letter: char| letter.is_alphabetic())
                && code[..at].ends_with(|letter: char| letter.is_alphanumeric() || letter == '_');
            let text = text_after(begin, &code[at + begin.len()..]).filter(|_| !is_in_name);
            found.extend(text.map(|text| shown(&text)).filter(|text| is_text(text)).map(|text| (text, kind)));
        }
    }
    found
}

fn messages_of(part: &str) -> BTreeSet<(String, &'static str)> {
    let mut found = BTreeSet::new();
    for file in files(&format!("crates/{part}/src"), "rs").iter().filter(|file| !file.contains("tests")) {
        let text = read(file);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        found.extend(messages_in(code));
    }
    found
}

#[test]
fn messages_are_found_in_every_form() {
    let code = r#"
        ensure!(count > 0, "no {count} are left");
        let error = anyhow!("the node is gone");
        read(file).with_context(|| format!("cannot read {}", file.display()))?;
        read(file).with_context(|| {
            format!("{} is no list", file.display())
        })?;
        read(file).with_context(|| file.display().to_string())?;
        parse(text).context("the flag is wrong")?;
        eprintln!("warning: node {node}: it is slow");
        eprintln!("{error}");
        value.ok_or_else(|| format!("{text:?} is not a time"))?;
        return BadErr("not a message of this kind");
    "#;
    let found = messages_in(code);
    let found: Vec<(&str, &str)> = found.iter().map(|(text, kind)| (text.as_str(), *kind)).collect();
    let expected = [
        ("cannot read …", "error"),
        ("no … are left", "error"),
        ("the flag is wrong", "error"),
        ("the node is gone", "error"),
        ("warning: node …: it is slow", "on standard error"),
        ("… is no list", "error"),
        ("… is not a time", "error"),
    ];
    assert_eq!(found, expected);
}

#[test]
fn every_message_is_on_the_page() {
    let mut page = "# Messages\n\nEvery message of Tessera, by the part that prints it, with `…` for names and numbers. \
                    Most messages say what\nto do. [Troubleshooting](../troubleshooting.md) begins with symptoms. This \
                    page is generated from the sources.\n"
        .to_owned();
    for (part, about) in PARTS {
        let _ = write!(page, "\n## {about}\n\n| message | kind |\n| --- | --- |\n");
        let messages = messages_of(part);
        assert!(!messages.is_empty(), "{part}");
        for (message, kind) in messages {
            let quotes = if message.contains('`') { "``" } else { "`" };
            let _ = writeln!(page, "| {quotes} {message} {quotes} | {kind} |");
        }
    }
    golden("docs/reference/messages.md", &page);
}
