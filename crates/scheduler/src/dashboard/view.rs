//! The content of the pages. Each view is a function from the state to a value that serializes to
//! JSON.

pub mod cluster;
pub mod explanation;
pub mod gpu;
pub mod node;
pub mod nodes;
pub mod pods;
pub mod quota;
pub mod waste;

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A page of a longer list.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Page<T> {
    /// Number of items in the whole list.
    pub total: usize,
    /// Number of items before the first item of this page.
    pub offset: usize,
    /// The items of this page.
    pub items: Vec<T>,
}

/// The filter and the page of a list request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ListQuery {
    /// Selects pods of this namespace, or nodes with at least one such pod.
    pub namespace: String,
    /// Selects nodes with GPUs of this model, or pods on such nodes.
    pub model: String,
    /// Selects a dialect: `nvidia`, `gputopology`, `gpushare`, `vcuda` or `hami`.
    pub dialect: String,
    /// Search text. It matches names of nodes and pods, and for nodes also the instance type, the
    /// GPU model and the GPU UUID.
    pub q: String,
    /// Selects nodes by fullness grade, from 0 (empty) to 5 (full).
    pub fullness: Option<usize>,
    /// Selects nodes in `trouble` (a GPU is unhealthy or overbooked), pods that are `waiting` or `placed`, or pods
    /// in the list of waste that are `idle`.
    pub state: String,
    /// Order of pods: `age` (oldest first), `youngest` or `name`; otherwise waiting pods first, the longest waiting
    /// first, then by namespace and name. Order of waste: `pod`, `node`, `held`, `used` or `idle`; otherwise by wasted
    /// GPUs. Order of nodes: `full`, `free` or `trouble`; otherwise by name.
    pub sort: String,
    /// Reverses the order of waste.
    pub reversed: bool,
    /// Number of items to skip.
    pub offset: usize,
    /// Number of items to return, at most [`MOST_ITEMS`].
    pub limit: Option<usize>,
}

/// Largest number of items in one response.
pub const MOST_ITEMS: usize = 500;

const USUAL_ITEMS: usize = 100;

impl ListQuery {
    /// Returns the requested range of a list with `total` items.
    fn range(&self, total: usize) -> Range<usize> {
        let begin = self.offset.min(total);
        let limit = self.limit.unwrap_or(USUAL_ITEMS).min(MOST_ITEMS);
        begin..begin.saturating_add(limit).min(total)
    }

    fn mentions(&self, text: &str) -> bool {
        self.q.is_empty() || contains(text, &self.q)
    }
}

/// Returns whether `text` contains `part`, ignoring case.
fn contains(text: &str, part: &str) -> bool {
    let (text, part) = (text.as_bytes(), part.as_bytes());
    part.is_empty() || text.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part))
}
