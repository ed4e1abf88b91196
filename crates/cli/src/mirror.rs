//! A copy of what a watch shows.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cluster::watch::Change;

/// Objects by key.
#[derive(Debug)]
pub(crate) struct Mirror<T> {
    pub(crate) objects: BTreeMap<String, T>,
    /// What a list in progress has not shown yet.
    unlisted: BTreeSet<String>,
    /// Whether a list was complete.
    pub(crate) listed: bool,
}

impl<T> Default for Mirror<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), unlisted: BTreeSet::new(), listed: false }
    }
}

impl<T> Mirror<T> {
    /// Takes note. `keep` tells the key, and whether the object is worth keeping. Answers with the trouble, if that is the news.
    pub(crate) fn take(
        &mut self,
        change: Change<T>,
        key: impl Fn(&T) -> String,
        keep: impl Fn(&T) -> bool,
    ) -> Option<String> {
        match change {
            Change::Listing => self.unlisted = self.objects.keys().cloned().collect(),
            Change::Listed => {
                for gone in std::mem::take(&mut self.unlisted) {
                    self.objects.remove(&gone);
                }
                self.listed = true;
            }
            Change::Set(object) => {
                let key = key(&object);
                self.unlisted.remove(&key);
                if keep(&object) {
                    self.objects.insert(key, object);
                } else {
                    self.objects.remove(&key);
                }
            }
            Change::Gone(object) => {
                self.objects.remove(&key(&object));
            }
            Change::Lost(why) => return Some(why),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_list_forgets_what_it_does_not_show() {
        let mut mirror = Mirror::default();
        let mut take = |change: Change<i32>| mirror.take(change, i32::to_string, |object| *object > 0);
        take(Change::Listing);
        take(Change::Set(1));
        take(Change::Set(2));
        take(Change::Set(-3));
        take(Change::Listed);
        take(Change::Gone(1));
        assert_eq!(take(Change::Lost("away".into())).as_deref(), Some("away"));
        take(Change::Listing);
        take(Change::Set(4));
        take(Change::Listed);
        assert_eq!(mirror.objects.into_values().collect::<Vec<_>>(), [4]);
    }
}
