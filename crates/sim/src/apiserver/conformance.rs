//! Requests and the expected answers of an API server, run against the embedded server and a real
//! one.
//!
//! An expected answer is a pattern: objects and lists may contain more than it names. These
//! placeholders match many values:
//!
//! | placeholder | matches |
//! | --- | --- |
//! | `<text>`, `<any>` | a text that is not empty; any value |
//! | `<absent>` | a missing key |
//! | `<begins>...`, `<ends>...` | a text with this beginning or end |
//! | `{"<length>": n, "<items>": [...]}` | a list of exactly `n` items that begins with these |
//!
//! Other lists match in any order, except for `cells`, which must begin with the expected items.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// A request to an API server.
#[derive(Debug, Clone, PartialEq)]
pub struct ConformanceRequest {
    /// HTTP method, such as `GET`.
    pub method: String,
    /// Path with query.
    pub path: String,
    /// Media type of the answer.
    pub accept: String,
    /// Media type of the body.
    pub media: String,
    /// Body of the request. Empty for none.
    pub body: String,
}

impl ConformanceRequest {
    /// Returns the same watch with the next longer timeout. Returns `None` for the longest one and for
    /// other requests.
    fn with_longer_watch(&self) -> Option<Self> {
        let timeouts = [1, 5, 25].map(|seconds| format!("timeoutSeconds={seconds}&"));
        let path = timeouts
            .windows(2)
            .find_map(|pair| self.path.contains(&pair[0]).then(|| self.path.replace(&pair[0], &pair[1])))?;
        Some(Self { path, ..self.clone() })
    }
}

/// A request and the pattern of its answer.
#[derive(Debug, Clone, Deserialize)]
struct ConformanceStep {
    about: String,
    method: String,
    path: String,
    #[serde(default)]
    accept: Option<String>,
    #[serde(default)]
    media: Option<String>,
    #[serde(default)]
    body: Value,
    code: u16,
    #[serde(default)]
    answer: Value,
    /// Names for parts of the answer, by JSON pointer. Later steps refer to them as `${name}`.
    #[serde(default)]
    save: BTreeMap<String, String>,
}

/// Reasons why a server does not conform.
#[derive(Debug, thiserror::Error)]
pub enum ConformanceError {
    /// The list of requests cannot be read.
    #[error("conformance.json: {0}")]
    Steps(#[from] serde_json::Error),
    /// A request got no answer.
    #[error("{about}: {message}")]
    Send {
        /// Description, method and path of the request.
        about: String,
        /// The error of the client.
        message: String,
    },
    /// Answers differ from the expected ones.
    #[error("{0}")]
    Different(String),
}

/// Sends every request and compares the answer, which is a status and a body. Returns the number of
/// steps, or all differences.
pub async fn run<E: std::fmt::Display>(
    mut send: impl AsyncFnMut(ConformanceRequest) -> Result<(u16, String), E>,
) -> Result<usize, ConformanceError> {
    let steps: Vec<ConformanceStep> = serde_json::from_str(include_str!("conformance.json"))?;
    let mut known = BTreeMap::new();
    let mut wrong = Vec::new();
    for step in &steps {
        let mut request = step.request(&known);
        let about = format!("{} ({} {})", step.about, step.method, request.path);
        let (code, answer, differences) = loop {
            let (code, body) = match send(request.clone()).await {
                Ok(answer) => answer,
                Err(error) => return Err(ConformanceError::Send { about, message: error.to_string() }),
            };
            let answer = step.read(&body);
            let differences = step.differences(code, &answer, &known);
            // A busy server may not have sent every event when the watch timed out.
            match request.with_longer_watch() {
                Some(longer) if !differences.is_empty() => request = longer,
                _ => break (code, answer, differences),
            }
        };
        if !differences.is_empty() {
            wrong.push(format!("{about}:\n  {}\n  answer: {code} {answer}", differences.join("\n  ")));
        }
        for (name, pointer) in &step.save {
            let found = answer.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
            known.insert(name.clone(), found.to_owned());
        }
    }
    if wrong.is_empty() { Ok(steps.len()) } else { Err(ConformanceError::Different(wrong.join("\n"))) }
}

impl ConformanceStep {
    fn request(&self, known: &BTreeMap<String, String>) -> ConformanceRequest {
        let json = "application/json";
        ConformanceRequest {
            method: if self.method == "WATCH" { "GET".to_owned() } else { self.method.clone() },
            path: fill(&self.path, known),
            accept: self.accept.clone().unwrap_or_else(|| json.to_owned()),
            media: self.media.clone().unwrap_or_else(|| json.to_owned()),
            body: if self.body.is_null() { String::new() } else { fill(&self.body.to_string(), known) },
        }
    }

    /// Parses the answer. A watch answers with one line for each event.
    fn read(&self, body: &str) -> Value {
        let json = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
        if self.method == "WATCH" { body.lines().map(json).collect() } else { json(body) }
    }

    fn differences(&self, code: u16, answer: &Value, known: &BTreeMap<String, String>) -> Vec<String> {
        let mut found = Vec::new();
        if self.code != code {
            found.push(format!("expected status {}, found {code}", self.code));
        }
        let expected = fill(&self.answer.to_string(), known);
        if let Ok(expected) = serde_json::from_str(&expected)
            && !self.answer.is_null()
        {
            compare("", &expected, Some(answer), &mut found);
        }
        found
    }
}

fn fill(text: &str, known: &BTreeMap<String, String>) -> String {
    known.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("${{{name}}}"), value))
}

fn compare(path: &str, expected: &Value, actual: Option<&Value>, found: &mut Vec<String>) {
    let actual = actual.filter(|value| !value.is_null());
    let mut differ = |what: String| found.push(format!("{path}: {what}"));
    match (expected, actual) {
        (Value::String(word), None) if word == "<absent>" => {}
        (Value::String(word), Some(actual)) if word == "<absent>" => {
            differ(format!("expected nothing, found {actual}"));
        }
        (_, None) => differ(format!("expected {expected}, found nothing")),
        (Value::String(word), Some(actual)) if word.starts_with('<') && word != "<none>" => {
            let text = actual.as_str().unwrap_or_default();
            let fits = match word.split_once('>') {
                Some(("<text", _)) => !text.is_empty(),
                Some(("<begins", start)) => text.starts_with(start),
                Some(("<ends", end)) => text.ends_with(end),
                _ => word == "<any>",
            };
            if !fits {
                differ(format!("expected {word:?}, found {actual}"));
            }
        }
        (Value::Object(fields), Some(Value::Array(items))) if fields.contains_key("<length>") => {
            if fields["<length>"] != items.len() {
                differ(format!("expected {} items, found {}", fields["<length>"], items.len()));
            }
            for (place, item) in fields["<items>"].as_array().into_iter().flatten().enumerate() {
                compare(&format!("{path}/{place}"), item, items.get(place), found);
            }
        }
        (Value::Object(fields), Some(actual)) => {
            for (key, value) in fields {
                compare(&format!("{path}/{key}"), value, actual.get(key), found);
            }
        }
        (Value::Array(items), Some(Value::Array(actual))) if path.ends_with("/cells") => {
            for (place, item) in items.iter().enumerate() {
                compare(&format!("{path}/{place}"), item, actual.get(place), found);
            }
        }
        (Value::Array(items), Some(Value::Array(actual))) => {
            for item in items {
                let fits = |candidate: &Value| {
                    let mut differences = Vec::new();
                    compare("", item, Some(candidate), &mut differences);
                    differences.is_empty()
                };
                if !actual.iter().any(fits) {
                    differ(format!("expected {item} among {}", Value::from(actual.clone())));
                }
            }
        }
        (expected, Some(actual)) if expected != actual => {
            differ(format!("expected {expected}, found {actual}"));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn differences(expected: &Value, actual: &Value) -> Vec<String> {
        let mut found = Vec::new();
        compare("", expected, Some(actual), &mut found);
        found
    }

    #[test]
    fn patterns_accept_more_than_they_name_and_nothing_less() {
        let actual = json!({"a": "x", "l": [{"n": 1, "m": 2}, {"n": 3}], "cells": ["p", 7]});
        let fits = [
            json!({"a": "<text>"}),
            json!({"a": "<begins>x", "b": "<absent>"}),
            json!({"l": [{"n": 3}, {"n": 1}]}),
            json!({"l": {"<length>": 2, "<items>": [{"n": 1}]}}),
            json!({"cells": ["p", "<any>"]}),
        ];
        for expected in &fits {
            assert_eq!(differences(expected, &actual), Vec::<String>::new(), "{expected}");
        }
        let misfits = [
            json!({"a": "y"}),
            json!({"a": "<absent>"}),
            json!({"b": "<any>"}),
            json!({"a": "<ends>y"}),
            json!({"l": [{"n": 2}]}),
            json!({"l": {"<length>": 1, "<items>": []}}),
            json!({"l": {"<length>": 2, "<items>": [{"n": 3}]}}),
            json!({"cells": [7]}),
        ];
        for expected in &misfits {
            assert_eq!(differences(expected, &actual).len(), 1, "{expected}");
        }
    }
}
