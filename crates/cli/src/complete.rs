//! Shell completion. kubectl calls `kubectl_complete-inspect-gpu` with the words after the plugin's
//! name, where the last word may be incomplete. It reads one candidate per line, and a last line
//! that tells the shell what to do with them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, CommandFactory as _};
use tessera_cluster::Selection;
use tessera_cluster::list::{self, ListKind};
use tessera_wire::foreign::objects::{Node, Pod};

use crate::options::SourceOptions;
use crate::plugin::Plugin;
use crate::{args, load, what_if};

/// Subcommand that prints completions, for shells that call the plugin directly.
pub(crate) const COMMAND: &str = "__complete";

/// Longest time that a completion may take, because the user is waiting at the prompt.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Directive of kubectl: do not complete file names.
const NO_FILES: u8 = 4;
/// Directive of kubectl: add no space after the completion.
const NO_SPACE: u8 = 2;

/// Kinds of words that may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Completion {
    Words(Vec<String>),
    /// Names of nodes and these words.
    Nodes(Vec<String>),
    Pods,
    Namespaces,
    Requests,
    Files,
}

/// Returns the candidates and the directive for kubectl.
pub(crate) async fn print_candidates(plugin: Plugin, words: &[String]) -> String {
    let (typed, last) = match words.split_last() {
        Some((last, typed)) => (typed, last.as_str()),
        None => (words, ""),
    };
    let source = source_of(typed);
    let (candidates, directive) = match completion(plugin, typed, last) {
        Completion::Words(words) => (words, NO_FILES),
        Completion::Requests => {
            (what_if::RESOURCES.map(|resource| format!("{resource}=")).to_vec(), NO_FILES | NO_SPACE)
        }
        Completion::Files => (Vec::new(), 0),
        Completion::Nodes(mut words) => {
            words.extend(with_timeout(nodes(&source)).await);
            (words, NO_FILES)
        }
        Completion::Pods => {
            (with_timeout(pods(&source, value_of(typed, &["-n", "--namespace"]))).await, NO_FILES)
        }
        Completion::Namespaces => (with_timeout(namespaces(&source)).await, NO_FILES),
    };
    let mut text = String::new();
    for candidate in candidates.iter().filter(|candidate| candidate.starts_with(last)) {
        text.push_str(candidate);
        text.push('\n');
    }
    format!("{text}:{directive}\n")
}

fn completion(plugin: Plugin, typed: &[String], last: &str) -> Completion {
    let root = match plugin {
        Plugin::Gpu => args::Gpu::command(),
        Plugin::Share => args::Share::command(),
    };
    let subcommand = typed.iter().find_map(|word| root.find_subcommand(word));
    let command = subcommand.unwrap_or(&root);
    let options = || command.get_arguments().chain(root.get_arguments().filter(|arg| arg.is_global_set()));
    let takes_value = |word: &str| {
        options().find(|arg| {
            let long = arg.get_long().is_some_and(|long| word == format!("--{long}"));
            let short = arg.get_short().is_some_and(|short| word == format!("-{short}"));
            (long || short) && matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
        })
    };
    if let Some(option) = typed.last().and_then(|word| takes_value(word)) {
        let values = option.get_possible_values();
        return match option.get_id().as_str() {
            _ if !values.is_empty() => {
                Completion::Words(values.iter().map(|value| value.get_name().to_owned()).collect())
            }
            "namespace" => Completion::Namespaces,
            "kubeconfig" => Completion::Files,
            "memory_unit" => Completion::Words(["GiB", "MiB", "256MiB"].map(str::to_owned).to_vec()),
            _ => Completion::Words(Vec::new()),
        };
    }
    if last.starts_with('-') {
        let mut flags: Vec<String> =
            options().filter_map(|arg| arg.get_long()).map(|long| format!("--{long}")).collect();
        flags.extend(["--help".to_owned(), "--version".to_owned()]);
        flags.sort();
        flags.dedup();
        return Completion::Words(flags);
    }
    let words = typed.iter().enumerate().filter(|(place, word)| {
        let is_value = place.checked_sub(1).and_then(|before| takes_value(&typed[before])).is_some();
        !word.starts_with('-') && !is_value
    });
    let positions = words.count() - usize::from(subcommand.is_some());
    match (subcommand.map(clap::Command::get_name), positions) {
        (Some("what-if"), _) => Completion::Requests,
        (_, 1..) => Completion::Words(Vec::new()),
        (Some("explain"), 0) => Completion::Pods,
        (Some(_), 0) => Completion::Nodes(Vec::new()),
        (None, 0) => {
            Completion::Nodes(root.get_subcommands().map(|command| command.get_name().to_owned()).collect())
        }
    }
}

fn value_of(typed: &[String], names: &[&str]) -> Option<String> {
    for (place, word) in typed.iter().enumerate() {
        if names.contains(&word.as_str()) {
            return typed.get(place + 1).cloned();
        }
        let joined = names.iter().find_map(|name| word.strip_prefix(name)?.strip_prefix('='));
        if let Some(value) = joined {
            return Some(value.to_owned());
        }
    }
    None
}

fn source_of(typed: &[String]) -> SourceOptions {
    SourceOptions {
        kubeconfig: value_of(typed, &["--kubeconfig"]).map(PathBuf::from),
        context: value_of(typed, &["--context"]),
        ..SourceOptions::default()
    }
}

/// Returns the names, or none after a timeout or an error. A shell prompt cannot show errors.
async fn with_timeout(names: impl Future<Output = Option<Vec<String>>>) -> Vec<String> {
    tokio::time::timeout(TIMEOUT, names).await.ok().flatten().unwrap_or_default()
}

async fn nodes(source: &SourceOptions) -> Option<Vec<String>> {
    let client = load::client(source).await.ok()?;
    list::list(&client, ListKind::Nodes, &Selection::default(), |node: Node| Some(node.metadata.name))
        .await
        .ok()
}

async fn pods(source: &SourceOptions, namespace: Option<String>) -> Option<Vec<String>> {
    let client = load::client(source).await.ok()?;
    let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
    let selection = Selection { labels: None, fields: Some(format!("metadata.namespace={namespace}")) };
    let keep = |pod: Pod| {
        (pod.spec.asks_for_gpus() && pod.metadata.namespace == namespace).then_some(pod.metadata.name)
    };
    list::list(&client, ListKind::Pods, &selection, keep).await.ok()
}

async fn namespaces(source: &SourceOptions) -> Option<Vec<String>> {
    let client = load::client(source).await.ok()?;
    list::namespaces(&client).await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(plugin: Plugin, words: &str, last: &str) -> Completion {
        completion(plugin, &words.split_whitespace().map(str::to_owned).collect::<Vec<_>>(), last)
    }

    #[test]
    fn completes_commands_options_and_names() {
        let commands = ["overview", "tree", "explain", "what-if", "top", "cordon", "uncordon", "defragment"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(complete(Plugin::Gpu, "", ""), Completion::Nodes(commands));
        assert_eq!(complete(Plugin::Share, "", "n"), Completion::Nodes(Vec::new()));
        assert_eq!(complete(Plugin::Gpu, "explain", ""), Completion::Pods);
        assert_eq!(complete(Plugin::Gpu, "explain -n", ""), Completion::Namespaces);
        assert_eq!(complete(Plugin::Gpu, "explain -n team", ""), Completion::Pods);
        assert_eq!(complete(Plugin::Gpu, "explain train", ""), Completion::Words(Vec::new()));
        assert_eq!(complete(Plugin::Gpu, "what-if cpu=1", ""), Completion::Requests);
        assert_eq!(complete(Plugin::Gpu, "--context a tree", ""), Completion::Nodes(Vec::new()));
        assert_eq!(complete(Plugin::Gpu, "--kubeconfig", ""), Completion::Files);
        let forms = ["json", "yaml", "wide", "name"].map(str::to_owned).to_vec();
        assert_eq!(complete(Plugin::Gpu, "-o", ""), Completion::Words(forms));
        let Completion::Words(flags) = complete(Plugin::Gpu, "top", "--") else { panic!("expected flags") };
        assert!(
            flags.contains(&"--interval".to_owned()) && flags.contains(&"--context".to_owned()),
            "{flags:?}"
        );
    }
}
