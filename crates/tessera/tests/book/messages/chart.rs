//! The messages in the templates of the chart: refusals of its admission policies, and errors of its rendering.

use std::collections::BTreeSet;

use super::super::{files, read};

const REFUSAL: &str = "refusal by an admission policy";
const OF_HELM: &str = "error of Helm";

/// Returns the messages of all templates.
pub(super) fn messages() -> BTreeSet<(String, &'static str)> {
    let templates = ["yaml", "tpl"].into_iter().flat_map(|ending| files("deploy/chart/templates", ending));
    templates.flat_map(|file| of_template(&read(&file))).collect()
}

fn of_template(text: &str) -> BTreeSet<(String, &'static str)> {
    let mut found = BTreeSet::new();
    let lines: Vec<&str> = text.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        if let Some((_, rest)) = line.split_once("fail (printf \"").or_else(|| line.split_once("fail \"")) {
            let format = rest.split('"').next().unwrap_or_default();
            found.insert((format.replace("%s", "…"), OF_HELM));
        }
        let Some((key, value)) = line.trim().split_once(": ") else { continue };
        let value = || match value {
            ">-" => folded(line, &lines[number + 1..]),
            inline => unquoted(inline).to_owned(),
        };
        match key {
            "message" => drop(found.insert((value(), REFUSAL))),
            "messageExpression" => drop(found.insert((concatenated(&value()), REFUSAL))),
            _ => {}
        }
    }
    found
}

/// Returns a scalar of YAML without its quotes. An expression that begins and ends with texts of CEL is in quotes too.
fn unquoted(scalar: &str) -> &str {
    let without = |quote| scalar.strip_prefix(quote)?.strip_suffix(quote);
    without('"').or_else(|| without('\'')).unwrap_or(scalar)
}

/// Returns the text of a folded block: the lines below `head` that are indented deeper.
fn folded(head: &str, below: &[&str]) -> String {
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let block = below.iter().take_while(|line| indentation(line) > indentation(head));
    block.map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// Returns the texts of a CEL expression that joins them with `+`, with dots for everything else.
fn concatenated(expression: &str) -> String {
    let (mut text, mut depth, mut is_text) = (String::new(), 0, false);
    for letter in expression.chars() {
        match letter {
            '\'' if depth == 0 => is_text = !is_text,
            letter if is_text => text.push(letter),
            ' ' | '+' => {}
            _ => {
                depth += match letter {
                    '(' | '[' => 1,
                    ')' | ']' => -1,
                    _ => 0,
                };
                if !text.ends_with('…') {
                    text.push('…');
                }
            }
        }
    }
    text
}

#[test]
fn messages_of_templates_are_found() {
    let template = "
        {{- fail (printf \"a=%s is too old: write b\" .Values.a) -}}
        - expression: variables.x.size() == 0
          messageExpression: >-
            'annotation ' + variables.x[0] + ' is wrong; ' + string(quantity('1'))
            + ' is right' + (variables.kind == 'nodes' ? '!' : '')
        - expression: true
          message: 'a/b: write at most 64'
        - expression: true
          message: >-
            two
            lines
        - expression: true
          messageExpression: \"'label ' + variables.x[0] + ' of pods'\"
        - name: other
    ";
    let expected = [
        ("a/b: write at most 64", REFUSAL),
        ("a=… is too old: write b", OF_HELM),
        ("annotation … is wrong; … is right…", REFUSAL),
        ("label … of pods", REFUSAL),
        ("two lines", REFUSAL),
    ];
    assert_eq!(of_template(template), expected.map(|(text, kind)| (text.to_owned(), kind)).into());
}
