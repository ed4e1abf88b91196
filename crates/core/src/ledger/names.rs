//! The names of nodes by position, and the positions by name.
//!
//! kube-scheduler names hundreds of nodes with every pod, in an order that changes with every call. The names lie in
//! one block of memory and the index holds only positions, so that all of it stays in the processor's cache.

use std::hash::BuildHasher as _;

use hashbrown::{DefaultHashBuilder, HashTable};

/// The names by position.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    texts: Texts,
    /// The positions that have a name, by the hash of the name.
    index: HashTable<usize>,
    hasher: DefaultHashBuilder,
}

/// The texts of the names.
#[derive(Clone, Debug, Default)]
struct Texts {
    text: String,
    /// The range of each name in `text`; empty for no name.
    places: Vec<(usize, usize)>,
    /// The bytes of `text` that belong to no name any more.
    waste: usize,
}

/// Bytes that may be wasted before the names are compacted: one page, so that small clusters never
/// compact.
const ALLOWED_WASTE_BYTES: usize = 4096;

impl Names {
    /// Returns the position of the name.
    pub(super) fn position(&self, name: &str) -> Option<usize> {
        let is_named = |position: &usize| self.texts.at(*position) == name;
        self.index.find(self.hasher.hash_one(name), is_named).copied()
    }

    /// Sets the name at a position. No other position has this name.
    pub(super) fn set(&mut self, position: usize, name: &str) {
        self.clear(position);
        self.texts.set(position, name);
        let Self { texts, index, hasher } = self;
        index.insert_unique(hasher.hash_one(name), position, |other| hasher.hash_one(texts.at(*other)));
    }

    /// Removes the name at a position.
    pub(super) fn clear(&mut self, position: usize) {
        let hash = self.hasher.hash_one(self.texts.at(position));
        if let Ok(entry) = self.index.find_entry(hash, |other| *other == position) {
            entry.remove();
        }
        self.texts.set(position, "");
    }
}

impl Texts {
    /// Returns the name at a position, or an empty text if it has none.
    fn at(&self, position: usize) -> &str {
        let (begin, end) = self.places.get(position).copied().unwrap_or_default();
        self.text.get(begin..end).unwrap_or_default()
    }

    fn set(&mut self, position: usize, name: &str) {
        if position >= self.places.len() {
            self.places.resize(position + 1, (0, 0));
        }
        self.waste += self.at(position).len();
        let begin = self.text.len();
        self.text.push_str(name);
        self.places[position] = (begin, self.text.len());
        if self.waste > ALLOWED_WASTE_BYTES.max(self.text.len() / 2) {
            self.compact();
        }
    }

    fn compact(&mut self) {
        let mut compacted = Self::default();
        for position in 0..self.places.len() {
            compacted.set(position, self.at(position));
        }
        *self = compacted;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A position has the name that was set last, and is found by it.
        #[test]
        fn finds_what_was_set_last(steps in prop::collection::vec((0..20usize, "[a-b]{0,2}|[a-z]{300}"), 1..400)) {
            let mut names = Names::default();
            let mut expected = vec![String::new(); 20];
            for (position, name) in steps {
                if name.is_empty() {
                    names.clear(position);
                } else if let Some(other) = expected.iter().position(|known| *known == name) {
                    prop_assert_eq!(names.position(&name), Some(other));
                    continue;
                } else {
                    names.set(position, &name);
                }
                let replaced = std::mem::replace(&mut expected[position], name);
                prop_assert_eq!(names.position(&replaced), None);
                for (position, name) in expected.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
                    prop_assert_eq!(names.texts.at(position), name);
                    prop_assert_eq!(names.position(name), Some(position));
                }
                let used: usize = expected.iter().map(String::len).sum();
                prop_assert!(names.texts.text.len() <= 2 * used + 2 * ALLOWED_WASTE_BYTES);
            }
        }
    }
}
