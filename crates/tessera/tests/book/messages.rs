//! The page of all messages, which is generated from the sources.

mod chart;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{files, golden, read};

/// The programs and libraries with what their messages are about.
const PARTS: [(&[&str], &str); 12] = [
    (&["core"], "Placement, quotas and constraints"),
    (&["wire"], "Requests, annotations and other formats"),
    (&["scheduler"], "The scheduler"),
    (&["agent"], "The agent"),
    (&["node"], "The GPUs and the kubelet of a node"),
    (&["interpose", "limits"], LIBRARY),
    (&["cluster"], "The API server"),
    (&["serve", "profile"], "Connections, certificates and profiles"),
    (&["cli"], "The kubectl plugins"),
    (&["tessera"], "The command line"),
    (&["demo"], "The demo"),
    (&["sim"], "Simulations and the embedded cluster"),
];

/// The library that is loaded into the programs of users. It has no dependencies, so its errors are written by hand.
const LIBRARY: &str = "The library in containers";

/// What begins a message in the sources, and how it reaches the user.
const KINDS: [(&str, &str); 17] = [
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
    ("eprint!(", "on standard error"),
    ("eprintln!(", "on standard error"),
    ("tracing::warn!(", "warning in the log"),
    ("tracing::error!(", "error in the log"),
    ("Warning::new(", "warning in the log"),
    ("let message =", "in the log, an event or an answer"),
];

/// The same in the library.
const KINDS_OF_LIBRARY: [(&str, &str); 3] = [
    ("log(", "on standard error, after `tessera: `"),
    ("write!(f, ", "reason in such a line"),
    ("f.write_str(", "reason in such a line"),
];

/// Functions whose result is an argument of a message, with the texts that they return.
const HELPERS: [(&str, &[&str]); 1] = [("fewer(", &["no GPU", "fewer than … GPUs"])];

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

/// Returns the last string literal before the bracket that closes the macro, and the rest. Literals of fields come first.
fn message(mut text: &str) -> Option<(String, &str)> {
    let (mut depth, mut last) = (0, None);
    loop {
        let letter = text.chars().next()?;
        if letter == '"' {
            let (found, rest) = literal(text)?;
            if depth == 0 {
                last = Some((found, rest));
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

/// Returns the arguments that follow a format string, up to the bracket that closes the macro.
fn arguments(text: &str) -> Vec<String> {
    let (mut found, mut depth, mut in_literal) = (Vec::new(), 0, false);
    for letter in text.chars() {
        match letter {
            '"' => in_literal = !in_literal,
            ')' | ']' | '}' if depth == 0 && !in_literal => break,
            ',' if depth == 0 && !in_literal => {
                found.push(String::new());
                continue;
            }
            '(' | '[' | '{' if !in_literal => depth += 1,
            ')' | ']' | '}' if !in_literal => depth -= 1,
            _ => {}
        }
        // What precedes the first comma is no argument.
        if let Some(argument) = found.last_mut() {
            argument.push(letter);
        }
    }
    found.iter().map(|argument| argument.trim().to_owned()).collect()
}

/// Returns the texts that an argument of a message can become, with dots for what is not known here.
fn texts_of(argument: &str) -> Vec<String> {
    let noun = argument.strip_prefix("Count(").and_then(|counted| counted.split('"').nth(1));
    let helper = HELPERS.iter().find(|(begin, _)| argument.starts_with(begin));
    match (noun, helper) {
        (Some(noun), _) => vec![format!("… {noun}s")],
        (None, Some((_, texts))) => texts.iter().map(|text| (*text).to_owned()).collect(),
        (None, None) => vec!["…".to_owned()],
    }
}

/// Returns what a format string shows, with dots for names and numbers.
fn shown(format: &str, arguments: &[String]) -> Vec<String> {
    let mut texts = vec![String::new()];
    let mut positional = arguments.iter();
    let mut letters = format.chars().peekable();
    while let Some(letter) = letters.next() {
        let parts = match letter {
            '{' | '}' if letters.peek() == Some(&letter) => {
                letters.next();
                vec![letter.to_string()]
            }
            '{' => {
                let name: String = letters.by_ref().take_while(|letter| *letter != '}').collect();
                let is_next = name.is_empty() || name.starts_with(':');
                let argument = if is_next { positional.next() } else { None };
                argument.map_or_else(|| vec!["…".to_owned()], |argument| texts_of(argument))
            }
            '|' => vec!["\\|".to_owned()],
            letter => vec![letter.to_string()],
        };
        texts = texts.iter().flat_map(|text| parts.iter().map(move |part| format!("{text}{part}"))).collect();
    }
    texts
}

/// Returns the texts that follow the begin of a message, as formats with their arguments: a literal, `format!` with a
/// literal, a closure of these, or a `match` with literals.
fn texts_after(begin: &str, rest: &str) -> Vec<(String, Vec<String>)> {
    let rest = rest.trim_start();
    let with_arguments = |(text, rest): (String, &str)| (text, arguments(rest));
    match begin {
        // The arguments of an error's text follow it.
        "#[error(" => literal(rest).map(with_arguments).into_iter().collect(),
        "f.write_str(" if rest.starts_with("match ") => {
            let end = rest.find("})").unwrap_or(rest.len());
            rest[..end].split('"').skip(1).step_by(2).map(|text| (text.to_owned(), Vec::new())).collect()
        }
        ".context(" | ".with_context(" | "Error::msg(" | "Error::other(" | "Err(" | ".ok_or("
        | ".ok_or_else(" | "log(" | "write!(f, " | "f.write_str(" | "Warning::new(" | "let message =" => {
            let body = rest.strip_prefix("||").unwrap_or(rest).trim_start();
            let body = body.strip_prefix('{').unwrap_or(body).trim_start();
            let body = body.strip_prefix('&').unwrap_or(body);
            let format = body.strip_prefix("format!(").unwrap_or(body).trim_start();
            literal(format).map(with_arguments).into_iter().collect()
        }
        _ => message(rest).map(with_arguments).into_iter().collect(),
    }
}

/// Returns whether a reader can recognise a message by its words.
fn is_text(text: &str) -> bool {
    let is_word = |word: &&str| word.chars().filter(|letter| letter.is_alphabetic()).count() > 1;
    text.split(|letter: char| letter.is_whitespace() || letter == '…').filter(is_word).count() > 1
        || text.starts_with("--")
}

fn messages_in(code: &str, kinds: &[(&str, &'static str)]) -> BTreeSet<(String, &'static str)> {
    let mut found = BTreeSet::new();
    for (begin, kind) in kinds {
        for (at, _) in code.match_indices(begin) {
            // A longer name ends like this one: `ApiErr(` is no `Err(`.
            let is_in_name = begin.starts_with(|letter: char| letter.is_alphabetic())
                && code[..at].ends_with(|letter: char| letter.is_alphanumeric() || letter == '_');
            if is_in_name {
                continue;
            }
            let texts = texts_after(begin, &code[at + begin.len()..]);
            let texts = texts.iter().flat_map(|(text, arguments)| shown(text, arguments));
            found.extend(texts.filter(|text| is_text(text)).map(|text| (text, *kind)));
        }
    }
    found
}

fn messages_of(part: &str, kinds: &[(&str, &'static str)]) -> BTreeSet<(String, &'static str)> {
    let mut found = BTreeSet::new();
    for file in files(&format!("crates/{part}/src"), "rs").iter().filter(|file| !file.contains("tests")) {
        let text = read(file);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        found.extend(messages_in(code, kinds));
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
        let warning = Warning::new("a container is not held to its share");
        let message =
            format!("evicting {} pods", count);
        let message = if it.is_empty() { "no message" } else { other };
        #[error("fewer than {}", Count(*.0, "idle GPU"))]
        #[error("{} with {share} left", fewer(.0.count), share = .0)]
    "#;
    let found = messages_in(code, &KINDS);
    let found: Vec<(&str, &str)> = found.iter().map(|(text, kind)| (text.as_str(), *kind)).collect();
    let expected = [
        ("a container is not held to its share", "warning in the log"),
        ("cannot read …", "error"),
        ("evicting … pods", "in the log, an event or an answer"),
        ("fewer than … GPUs with … left", "error"),
        ("fewer than … idle GPUs", "error"),
        ("no GPU with … left", "error"),
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
fn messages_of_the_library_are_found() {
    let code = r#"
        log(&format!("GPU {hex} is unknown; the program cannot use it"));
        f.write_str(match self {
            Self::Format => "the file has another version",
            Self::Range => "a value is out of range",
        })
        write!(f, "cannot open {}: {error}", path.display());
    "#;
    let found = messages_in(code, &KINDS_OF_LIBRARY);
    let found: Vec<&str> = found.iter().map(|(text, _)| text.as_str()).collect();
    let expected = [
        "GPU … is unknown; the program cannot use it",
        "a value is out of range",
        "cannot open …: …",
        "the file has another version",
    ];
    assert_eq!(found, expected);
}

#[test]
fn every_message_is_on_the_page() {
    let mut page = "# Messages\n\nEvery message of Tessera, by the part that prints it, with `…` for names and numbers. \
                    Most messages say what\nto do. [Troubleshooting](../troubleshooting.md) begins with symptoms. This \
                    page is generated from the sources.\n"
        .to_owned();
    let of_crates = |(crates, about): (&[&str], &'static str)| {
        let kinds: &[(&str, &'static str)] = if about == LIBRARY { &KINDS_OF_LIBRARY } else { &KINDS };
        let messages = crates.iter().flat_map(|part| messages_of(part, kinds)).collect::<BTreeSet<_>>();
        (about, messages)
    };
    let all =
        PARTS.map(of_crates).into_iter().chain([("The chart and its admission policies", chart::messages())]);
    for (about, messages) in all {
        assert!(!messages.is_empty(), "{about}");
        let _ = write!(page, "\n## {about}\n\n| message | kind |\n| --- | --- |\n");
        for (message, kind) in messages {
            let quotes = if message.contains('`') { "``" } else { "`" };
            let _ = writeln!(page, "| {quotes} {message} {quotes} | {kind} |");
        }
    }
    golden("docs/reference/messages.md", &page);
    for said in ["fewer than … idle GPUs", "no GPU with … left", "cannot load this container's GPU limits"]
    {
        assert!(page.contains(said), "{said}");
    }
}
