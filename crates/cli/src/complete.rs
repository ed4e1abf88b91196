//! Completing a command line: kubectl calls `kubectl_complete-inspect-gpu` with the words after the plugin's name, the last one as far
//! as it is typed, and reads candidates line by line and then what the shell shall do with them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, CommandFactory as _};
use tessera_cluster::Selection;
use tessera_cluster::list::{self, ListKind};
use tessera_wire::foreign::objects::{Node, Pod};

use crate::options::Reach;
use crate::plugin::Plugin;
use crate::{args, load, what_if};

/// The word that asks for completions, for shells that call the plugin itself.
pub(crate) const COMMAND: &str = "__complete";

/// Who types does not wait longer.
const WITHIN: Duration = Duration::from_secs(3);

/// Complete by these only, never by files.
const NO_FILES: u8 = 4;
/// And put no space behind.
const NO_SPACE: u8 = 2;

/// What could come next.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    Words(Vec<String>),
    /// Of nodes, beside these words.
    Nodes(Vec<String>),
    /// Of pods in a namespace.
    Pods,
    Namespaces,
    Requests,
    Files,
}

/// Candidates and what to do with them.
pub(crate) async fn answer(plugin: Plugin, words: &[String]) -> String {
    let (typed, last) = match words.split_last() {
        Some((last, typed)) => (typed, last.as_str()),
        None => (words, ""),
    };
    let reach = reach_of(typed);
    let (candidates, directive) = match wanted(plugin, typed, last) {
        Wanted::Words(words) => (words, NO_FILES),
        Wanted::Requests => {
            (what_if::RESOURCES.map(|resource| format!("{resource}=")).to_vec(), NO_FILES | NO_SPACE)
        }
        Wanted::Files => (Vec::new(), 0),
        Wanted::Nodes(mut words) => {
            words.extend(timely(nodes(&reach)).await);
            (words, NO_FILES)
        }
        Wanted::Pods => (timely(pods(&reach, value_of(typed, &["-n", "--namespace"]))).await, NO_FILES),
        Wanted::Namespaces => (timely(namespaces(&reach)).await, NO_FILES),
    };
    let mut text = String::new();
    for candidate in candidates.iter().filter(|candidate| candidate.starts_with(last)) {
        text.push_str(candidate);
        text.push('\n');
    }
    format!("{text}:{directive}\n")
}

fn wanted(plugin: Plugin, typed: &[String], last: &str) -> Wanted {
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
                Wanted::Words(values.iter().map(|value| value.get_name().to_owned()).collect())
            }
            "namespace" => Wanted::Namespaces,
            "kubeconfig" => Wanted::Files,
            "memory_unit" => Wanted::Words(["GiB", "MiB", "256MiB"].map(str::to_owned).to_vec()),
            _ => Wanted::Words(Vec::new()),
        };
    }
    if last.starts_with('-') {
        let mut flags: Vec<String> =
            options().filter_map(|arg| arg.get_long()).map(|long| format!("--{long}")).collect();
        flags.extend(["--help".to_owned(), "--version".to_owned()]);
        flags.sort();
        flags.dedup();
        return Wanted::Words(flags);
    }
    let words = typed.iter().enumerate().filter(|(place, word)| {
        let is_value = place.checked_sub(1).and_then(|before| takes_value(&typed[before])).is_some();
        !word.starts_with('-') && !is_value
    });
    let positions = words.count() - usize::from(subcommand.is_some());
    match (subcommand.map(clap::Command::get_name), positions) {
        (Some("what-if"), _) => Wanted::Requests,
        (_, 1..) => Wanted::Words(Vec::new()),
        (Some("explain"), 0) => Wanted::Pods,
        (Some(_), 0) => Wanted::Nodes(Vec::new()),
        (None, 0) => {
            Wanted::Nodes(root.get_subcommands().map(|command| command.get_name().to_owned()).collect())
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

fn reach_of(typed: &[String]) -> Reach {
    Reach {
        kubeconfig: value_of(typed, &["--kubeconfig"]).map(PathBuf::from),
        context: value_of(typed, &["--context"]),
        ..Reach::default()
    }
}

/// Nothing where it takes too long or may not be known: a shell is no place for errors.
async fn timely(names: impl Future<Output = Option<Vec<String>>>) -> Vec<String> {
    tokio::time::timeout(WITHIN, names).await.ok().flatten().unwrap_or_default()
}

async fn nodes(reach: &Reach) -> Option<Vec<String>> {
    let client = load::client(reach).await.ok()?;
    list::list(&client, ListKind::Nodes, &Selection::default(), |node: Node| Some(node.metadata.name))
        .await
        .ok()
}

async fn pods(reach: &Reach, namespace: Option<String>) -> Option<Vec<String>> {
    let client = load::client(reach).await.ok()?;
    let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
    let selection = Selection { labels: None, fields: Some(format!("metadata.namespace={namespace}")) };
    let keep = |pod: Pod| {
        (pod.spec.asks_for_gpus() && pod.metadata.namespace == namespace).then_some(pod.metadata.name)
    };
    list::list(&client, ListKind::Pods, &selection, keep).await.ok()
}

async fn namespaces(reach: &Reach) -> Option<Vec<String>> {
    let client = load::client(reach).await.ok()?;
    list::namespaces(&client).await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(plugin: Plugin, words: &str, last: &str) -> Wanted {
        wanted(plugin, &words.split_whitespace().map(str::to_owned).collect::<Vec<_>>(), last)
    }

    #[test]
    fn what_comes_next() {
        let commands = ["tree", "explain", "what-if", "top"].map(str::to_owned).to_vec();
        assert_eq!(asked(Plugin::Gpu, "", ""), Wanted::Nodes(commands));
        assert_eq!(asked(Plugin::Share, "", "n"), Wanted::Nodes(Vec::new()));
        assert_eq!(asked(Plugin::Gpu, "explain", ""), Wanted::Pods);
        assert_eq!(asked(Plugin::Gpu, "explain -n", ""), Wanted::Namespaces);
        assert_eq!(asked(Plugin::Gpu, "explain -n team", ""), Wanted::Pods);
        assert_eq!(asked(Plugin::Gpu, "explain train", ""), Wanted::Words(Vec::new()));
        assert_eq!(asked(Plugin::Gpu, "what-if cpu=1", ""), Wanted::Requests);
        assert_eq!(asked(Plugin::Gpu, "--context a tree", ""), Wanted::Nodes(Vec::new()));
        assert_eq!(asked(Plugin::Gpu, "--kubeconfig", ""), Wanted::Files);
        let forms = ["json", "yaml", "wide", "name"].map(str::to_owned).to_vec();
        assert_eq!(asked(Plugin::Gpu, "-o", ""), Wanted::Words(forms));
        let Wanted::Words(flags) = asked(Plugin::Gpu, "top", "--") else { panic!("flags were asked for") };
        assert!(
            flags.contains(&"--interval".to_owned()) && flags.contains(&"--context".to_owned()),
            "{flags:?}"
        );
    }
}
