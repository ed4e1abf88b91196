//! The limits file: what a container may use of its cards, as the agent writes it and the library in the container reads it.
//!
//! Text, one fact per line, words apart by one blank, so that a reader in any language needs no parser worth the name:
//!
//! ```text
//! tessera-limits 1
//! pod 31653bf8-6d5b-4a53-a2f1-0c3cbd5ad9a5
//! namespace team-a
//! name train-0
//! container main
//! gpu GPU-8f2a61c0-0d31-4ecc-9fcd-0a6bd3a1c4a7 index 3 cores 50 ceiling 80 memory 7680
//! gpu GPU-11d3b1a2-0d31-4ecc-9fcd-0a6bd3a1c4a7 index 4 whole
//! ```
//!
//! The first line names the version; a reader refuses one it does not know. `cores` is percent of the card's compute that
//! is guaranteed, `ceiling` the percent it may grow to (the same where the share is hard), `memory` MiB. Lines whose first word
//! is unknown are passed over.

use std::fmt::Write as _;

use tessera_core::gpu::GpuUuid;
use tessera_core::grant::Hold;
use tessera_core::units::{GpuIndex, MiB, Percent};

/// The file's name in a container's grant directory.
pub const FILE: &str = "limits";

/// Where a container finds its grant directory.
pub const DIRECTORY_IN_CONTAINER: &str = "/run/tessera";

const FIRST_LINE: &str = "tessera-limits 1";

/// What one container may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The pod's UID.
    pub pod: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The container's name.
    pub container: String,
    /// Its cards by ascending index.
    pub cards: Vec<CardLimits>,
}

/// What a container may use of one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardLimits {
    /// Which card.
    pub uuid: GpuUuid,
    /// Its position on the node.
    pub index: GpuIndex,
    /// How much of it.
    pub hold: Hold,
    /// The compute it may grow to where others leave some; means nothing for a whole card.
    pub ceiling: Percent,
}

/// A text that is no limits file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: found {found:?}, expected {expected}")]
pub struct BadLimits {
    /// Counted from 1.
    pub line: usize,
    /// What stands there.
    pub found: String,
    /// What should.
    pub expected: &'static str,
}

/// Writes the file.
#[must_use]
pub fn print(limits: &Limits) -> String {
    let Limits { pod, namespace, name, container, cards } = limits;
    let mut text =
        format!("{FIRST_LINE}\npod {pod}\nnamespace {namespace}\nname {name}\ncontainer {container}\n");
    for CardLimits { uuid, index, hold, ceiling } in cards {
        // Writing to a String cannot fail.
        let _ = match hold {
            Hold::Whole => writeln!(text, "gpu {uuid} index {index} whole"),
            Hold::Part { cores, memory } => writeln!(
                text,
                "gpu {uuid} index {index} cores {} ceiling {} memory {}",
                cores.0, ceiling.0, memory.0
            ),
        };
    }
    text
}

/// Reads the file.
pub fn parse(text: &str) -> Result<Limits, BadLimits> {
    let mut limits = Limits {
        pod: String::new(),
        namespace: String::new(),
        name: String::new(),
        container: String::new(),
        cards: Vec::new(),
    };
    let mut lines = (1..).zip(text.lines());
    let bad = |line, found: &str, expected| BadLimits { line, found: found.to_owned(), expected };
    match lines.next() {
        Some((_, FIRST_LINE)) => {}
        other => return Err(bad(1, other.map_or("", |(_, line)| line), FIRST_LINE)),
    }
    for (number, line) in lines {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "pod" => limits.pod = rest.to_owned(),
            "namespace" => limits.namespace = rest.to_owned(),
            "name" => limits.name = rest.to_owned(),
            "container" => limits.container = rest.to_owned(),
            "gpu" => limits.cards.push(card(rest).ok_or_else(|| {
                bad(number, line, "gpu UUID index N whole, or gpu UUID index N cores N ceiling N memory N")
            })?),
            _ => {}
        }
    }
    Ok(limits)
}

fn card(text: &str) -> Option<CardLimits> {
    let words: Vec<&str> = text.split(' ').collect();
    let (uuid, index, hold, ceiling) = match words.as_slice() {
        [uuid, "index", index, "whole"] => (uuid, index, Hold::Whole, Percent::WHOLE),
        [uuid, "index", index, "cores", cores, "ceiling", ceiling, "memory", memory] => {
            let hold = Hold::Part { cores: Percent(cores.parse().ok()?), memory: MiB(memory.parse().ok()?) };
            (uuid, index, hold, Percent(ceiling.parse().ok()?))
        }
        _ => return None,
    };
    Some(CardLimits { uuid: (*uuid).into(), index: GpuIndex(index.parse().ok()?), hold, ceiling })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
tessera-limits 1
pod 31653bf8
namespace team-a
name train-0
container main
gpu GPU-8f2a index 3 cores 50 ceiling 80 memory 7680
gpu GPU-11d3 index 4 whole
";

    #[test]
    fn reads_what_it_writes() {
        let limits = parse(TEXT).unwrap();
        assert_eq!(print(&limits), TEXT);
        assert_eq!(limits.cards[0].hold, Hold::Part { cores: Percent(50), memory: MiB(7680) });
        assert_eq!((limits.cards[0].ceiling, limits.cards[1].hold), (Percent(80), Hold::Whole));
    }

    #[test]
    fn other_versions_and_broken_lines_are_refused_and_new_words_are_not() {
        let error = parse(&TEXT.replace("limits 1", "limits 2")).unwrap_err().to_string();
        assert_eq!(error, "line 1: found \"tessera-limits 2\", expected tessera-limits 1");
        assert!(parse("").is_err());
        assert_eq!(parse(&TEXT.replace(" whole", " all")).unwrap_err().line, 7);
        assert!(parse(&format!("{TEXT}priority high\n")).is_ok());
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(tessera-limits 1\n)?(gpu [a-z]* index [0-9]* (whole|cores [0-9]{0,20} .*)\n|.*\n){0,4}") {
            let _ = parse(&text);
        }
    }
}
