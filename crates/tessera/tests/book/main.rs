//! Checks the documentation against the code: every page is in the book, links resolve, and annotations, labels, events,
//! alerts and messages are documented. `BLESS=1` writes the pages that are generated.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod messages;
mod old_names;
mod translations;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Returns all files with this extension below a folder, relative to the root, sorted.
fn files(folder: &str, extension: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

/// Compares a generated page with its file. `BLESS=1` writes the file.
fn golden(file: &str, text: &str) {
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(root().join(file), text).unwrap();
    }
    let expected = std::fs::read_to_string(root().join(file)).unwrap_or_default();
    for (number, (found, expected)) in text.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "{file} line {}; BLESS=1 updates the file", number + 1);
    }
    assert_eq!(text.lines().count(), expected.lines().count(), "{file}; BLESS=1 updates the file");
}

/// Returns the lines of Markdown outside of code blocks.
fn prose_lines(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    })
}

/// Returns the targets of the links in Markdown.
fn links(text: &str) -> Vec<String> {
    let targets = prose_lines(text).flat_map(|line| line.split("](").skip(1));
    targets.filter_map(|rest| rest.split(')').next()).map(str::to_owned).collect()
}

/// Returns the anchor of a heading, as GitHub and mdBook make it.
fn anchor(heading: &str) -> String {
    let heading = heading.to_lowercase();
    let kept = heading.chars().filter_map(|letter| match letter {
        ' ' | '-' => Some('-'),
        letter if letter.is_alphanumeric() || letter == '_' => Some(letter),
        _ => None,
    });
    kept.collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose_lines(text).filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
}

#[test]
fn the_book_lists_every_page() {
    let listed: BTreeSet<String> =
        links(&read("docs/SUMMARY.md")).into_iter().map(|page| format!("docs/{page}")).collect();
    let mut pages: BTreeSet<String> = files("docs", "md").into_iter().collect();
    pages.remove("docs/SUMMARY.md");
    assert_eq!(listed, pages);
}

#[test]
fn links_resolve() {
    let pages = ["docs", "examples", "e2e"].into_iter().flat_map(|folder| files(folder, "md"));
    let of_root = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"];
    let mut broken = Vec::new();
    for page in pages.chain(of_root.map(str::to_owned)) {
        let text = read(&page);
        for link in links(&text).into_iter().filter(|link| !link.contains("://")) {
            let (file, place) = link.split_once('#').unwrap_or((&link, ""));
            let folder = root().join(&page).parent().unwrap().to_owned();
            let target = if file.is_empty() { root().join(&page) } else { folder.join(file) };
            let has_place = || {
                let text = std::fs::read_to_string(&target).unwrap_or_default();
                place.is_empty() || anchors(&text).contains(place)
            };
            if !target.exists() || !has_place() {
                broken.push(format!("{page}: {link}"));
            } else if page.starts_with("docs/")
                && !target.canonicalize().unwrap().starts_with(root().join("docs"))
            {
                // The book has the pages of docs/ alone.
                broken
                    .push(format!("{page}: {link} leaves the book; write the path of the file in backticks"));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Returns the words in backticks in the first column of the tables of a page.
fn first_column(text: &str) -> BTreeSet<String> {
    let cells = text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    cells.map(str::to_owned).collect()
}

/// Returns the string literals of the programs, without those of tests.
fn literals() -> BTreeSet<String> {
    let crates =
        ["agent", "cli", "cluster", "core", "demo", "node", "scheduler", "serve", "sim", "tessera", "wire"];
    let sources = crates.into_iter().flat_map(|name| files(&format!("crates/{name}/src"), "rs"));
    let mut found = BTreeSet::new();
    for file in sources.filter(|file| !file.contains("tests")) {
        let text = read(&file);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        found.extend(code.split('"').skip(1).step_by(2).map(str::to_owned));
    }
    found
}

/// Returns the files of the chart that name labels and annotations.
fn chart_files() -> impl Iterator<Item = String> {
    let templates =
        ["yaml", "tpl", "txt"].into_iter().flat_map(|ending| files("deploy/chart/templates", ending));
    templates.chain(["deploy/chart/values.yaml".to_owned()])
}

/// Returns Tessera's own keys in a manifest, and those by which it selects objects. Tolerations name taints.
fn keys_of_manifest(text: &str) -> BTreeSet<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "-._/".contains(letter);
    let mut found = BTreeSet::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with('#')) {
        let words = line.split(|letter| !is_part(letter));
        found.extend(words.filter(|word| word.starts_with("tessera.dev/")).map(str::to_owned));
        if let Some((_, rest)) = line.split_once("{ key: ").filter(|_| line.contains("operator: ")) {
            found.extend(rest.split([',', ' ']).next().map(str::to_owned));
        }
    }
    found.retain(|key| !key.ends_with('/'));
    found
}

#[test]
fn the_keys_of_a_manifest_are_found() {
    let text = "# tessera.dev/comment\n  labels: { tessera.dev/one: \"true\", other.io/x: y }\n\
                matchExpressions: [{ key: cloud/two, operator: Exists }]\n- { key: taint, effect: NoSchedule }\n";
    assert_eq!(keys_of_manifest(text).into_iter().collect::<Vec<_>>(), ["cloud/two", "tessera.dev/one"]);
}

#[test]
fn annotations_and_labels_are_documented_and_exist() {
    let (annotations, labels) = (read("docs/reference/annotations.md"), read("docs/reference/labels.md"));
    let literals = literals();
    let is_key = |literal: &&String| {
        let is_ours = literal.starts_with("tessera.dev/") || literal.starts_with("ALIYUN_COM_");
        let is_others = ["tencent.com/predicate", "gaia.tencent.com/", "cgpu."]
            .iter()
            .any(|name| literal.starts_with(name));
        // Prefixes end with the separator.
        (is_ours || is_others) && !literal.contains([' ', '=', '{']) && !literal.ends_with('_')
    };
    let told = format!("{annotations}{labels}");
    let missing: Vec<&String> =
        literals.iter().filter(is_key).filter(|key| !told.contains(key.trim_end_matches('-'))).collect();
    assert!(missing.is_empty(), "not documented: {missing:#?}");
    let manifests: String = chart_files().map(|file| read(&file)).collect();
    let of_chart = keys_of_manifest(&manifests);
    assert!(
        of_chart.contains("tessera.dev/scheduler") && of_chart.contains("cloud.google.com/gke-accelerator")
    );
    let missing: Vec<&String> = of_chart.iter().filter(|key| !told.contains(&format!("`{key}`"))).collect();
    assert!(missing.is_empty(), "in the chart, and not documented: {missing:#?}");
    let documented = first_column(&annotations).into_iter().chain(first_column(&labels));
    let unknown: Vec<String> =
        documented.filter(|key| !literals.contains(key) && !manifests.contains(key.as_str())).collect();
    assert!(unknown.is_empty(), "documented, and neither in the code nor in the manifests: {unknown:#?}");
}

#[test]
fn events_are_documented_and_exist() {
    let notices = read("crates/scheduler/src/notices.rs");
    let (_, reasons) = notices.split_once("pub enum NoticeReason {").unwrap();
    let (reasons, _) = reasons.split_once('}').unwrap();
    let mut written: BTreeSet<String> =
        reasons.lines().filter_map(|line| line.trim().strip_suffix(',')).map(str::to_owned).collect();
    for file in files("crates/agent/src/controller", "rs").iter().filter(|file| !file.contains("tests")) {
        let text = read(file);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default().to_owned();
        let is_reason = |literal: &&str| {
            let capitals = literal.chars().filter(char::is_ascii_uppercase).count();
            capitals > 1
                && literal.chars().all(|letter| letter.is_ascii_alphabetic())
                && *literal != "GeForce"
        };
        let is_camel = |literal: &&str| literal.chars().any(|letter| letter.is_ascii_lowercase());
        written
            .extend(code.split('"').skip(1).step_by(2).filter(is_reason).filter(is_camel).map(str::to_owned));
    }
    assert_eq!(first_column(&read("docs/reference/events.md")), written);
}

#[test]
fn every_alert_has_a_runbook() {
    let alerts = read("deploy/monitoring/alerts.yaml");
    let alerts: Vec<&str> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let page = read("docs/runbooks.md");
    let runbooks: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    assert_eq!(runbooks, alerts, "in the same order");
}

/// Texts in the tables of `troubleshooting.md` that other programs print, or that are no messages.
const NOT_OURS: [&str; 6] = [
    "x509: ...",
    "tls: ...",
    "helm install --wait",
    "RuntimeClass \"nvidia\" not found",
    "--without-library serve",
    "tessera.dev/isolation: \"off\"",
];

/// A message that is quoted as a symptom is one that a user sees. `...`, N and M stand for what differs.
#[test]
fn quoted_symptoms_are_messages_of_the_programs() {
    let (literals, page) = (literals(), read("docs/troubleshooting.md"));
    let messages: BTreeSet<String> = first_column(&read("docs/reference/messages.md"));
    let cells =
        page.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.split(" | ").next());
    let quoted = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let mut checked = 0;
    for quoted in quoted.filter(|text| text.contains(' ') && !NOT_OURS.contains(text)) {
        checked += 1;
        let is_place = |word: &&str| ["N", "M"].contains(word) || word.contains("...");
        let words: Vec<&str> = quoted.split(' ').collect();
        let parts: Vec<String> = words
            .split(|word| is_place(word))
            .filter(|part| !part.is_empty())
            .map(|part| part.join(" "))
            .collect();
        let is_printed = parts.iter().all(|part| literals.iter().any(|text| text.contains(part)));
        let is_listed = messages.iter().any(|form| has_form(quoted, form.trim()));
        assert!(is_printed || is_listed, "troubleshooting.md quotes {quoted:?}, which no program prints");
    }
    assert!(checked > 15, "only {checked} messages were found");
}

/// Returns whether a text is an instance of a message in which `…` stands for what differs.
fn has_form(text: &str, form: &str) -> bool {
    let mut rest = text;
    let in_order = form.split('…').all(|part| {
        rest.split_once(part).is_some_and(|(_, behind)| {
            rest = behind;
            true
        })
    });
    in_order && form.split('…').next().is_some_and(|begin| begin.len() > 5 && text.starts_with(begin))
}

#[test]
fn the_uninstall_commands_remove_every_annotation_of_nodes() {
    let annotations = read("docs/reference/annotations.md");
    let (_, of_nodes) = annotations.split_once("## Annotations of nodes").unwrap();
    let (of_nodes, _) = of_nodes.split_once("\n## ").unwrap();
    let keys = of_nodes.lines().filter_map(|row| row.strip_prefix("| `")?.split_once('`'));
    let install = read("docs/install.md");
    let (_, uninstall) = install.split_once("## Uninstall").unwrap();
    let mut count = 0;
    for (key, _) in keys {
        assert!(uninstall.contains(&format!(" {key}-")), "docs/install.md does not remove {key}");
        count += 1;
    }
    assert!(count >= 8, "{of_nodes}");
}
