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
const KINDS: [(&str, &str); 5] = [
    ("#[error(", "error"),
    ("bail!(", "error"),
    (".context(", "error"),
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

fn messages_of(part: &str) -> BTreeSet<(String, &'static str)> {
    let mut found = BTreeSet::new();
    for file in files(&format!("crates/{part}/src"), "rs").iter().filter(|file| !file.contains("tests")) {
        let text = read(file);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (begin, kind) in KINDS {
            for rest in code.split(begin).skip(1) {
                // The arguments of an error's text follow it.
                let text = if begin == "#[error(" {
                    literal(rest.trim_start()).map(|(text, _)| text)
                } else {
                    message(rest)
                };
                let is_text = |text: &String| text.contains(' ') || text.starts_with("--");
                found.extend(text.filter(is_text).map(|text| (shown(&text), kind)));
            }
        }
    }
    found
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
