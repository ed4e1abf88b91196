//! What the pages show, each a function from the state to a value that is written as JSON.

pub mod cluster;
pub mod explanation;
pub mod gpu;
pub mod node;
pub mod nodes;
pub mod pods;
pub mod quota;

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Part of a longer list.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Page<T> {
    /// How many there are in all.
    pub total: usize,
    /// How many come before the first one here.
    pub offset: usize,
    /// Those asked for.
    pub items: Vec<T>,
}

/// Which part of a list, and which of its members.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Filter {
    /// Pods of this namespace, or nodes with one of them.
    pub namespace: String,
    /// GPUs of this model.
    pub model: String,
    /// `nvidia`, `gputopology`, `gpushare` or `vcuda`.
    pub dialect: String,
    /// A part of a name.
    pub q: String,
    /// Of nodes: how full, from 0 (empty) to 5 (full).
    pub fullness: Option<usize>,
    /// Of nodes: `trouble` for those with a GPU that is unhealthy or carries too much. Of pods: `waiting` or `placed`.
    pub state: String,
    /// How many to leave out.
    pub offset: usize,
    /// How many to give, at most [`MOST_ITEMS`].
    pub limit: Option<usize>,
}

/// How many members of a list are given at once, at most.
pub const MOST_ITEMS: usize = 500;

const USUAL_ITEMS: usize = 100;

impl Filter {
    /// The part of a list of so many that was asked for.
    fn range(&self, total: usize) -> Range<usize> {
        let begin = self.offset.min(total);
        let limit = self.limit.unwrap_or(USUAL_ITEMS).min(MOST_ITEMS);
        begin..begin.saturating_add(limit).min(total)
    }

    fn mentions(&self, text: &str) -> bool {
        self.q.is_empty() || contains(text, &self.q)
    }
}

/// Whether `text` contains `part`, capitals or not.
fn contains(text: &str, part: &str) -> bool {
    let (text, part) = (text.as_bytes(), part.as_bytes());
    part.is_empty() || text.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part))
}
