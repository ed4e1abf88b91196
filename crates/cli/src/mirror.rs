//! A copy of what a watch shows.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cluster::watch::WatchChange;

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
        change: WatchChange<T>,
        key: impl Fn(&T) -> String,
        keep: impl Fn(&T) -> bool,
    ) -> Option<String> {
        match change {
            WatchChange::Listing => self.unlisted = self.objects.keys().cloned().collect(),
            WatchChange::Listed => {
                for gone in std::mem::take(&mut self.unlisted) {
                    self.objects.remove(&gone);
                }
                self.listed = true;
            }
            WatchChange::Set(object) => {
                let key = key(&object);
                self.unlisted.remove(&key);
                if keep(&object) {
                    self.objects.insert(key, object);
                } else {
                    self.objects.remove(&key);
                }
            }
            WatchChange::Gone(object) => {
                self.objects.remove(&key(&object));
            }
            WatchChange::Lost(why) => return Some(why),
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
        let mut take = |change: WatchChange<i32>| mirror.take(change, i32::to_string, |object| *object > 0);
        take(WatchChange::Listing);
        take(WatchChange::Set(1));
        take(WatchChange::Set(2));
        take(WatchChange::Set(-3));
        take(WatchChange::Listed);
        take(WatchChange::Gone(1));
        assert_eq!(take(WatchChange::Lost("away".into())).as_deref(), Some("away"));
        take(WatchChange::Listing);
        take(WatchChange::Set(4));
        take(WatchChange::Listed);
        assert_eq!(mirror.objects.into_values().collect::<Vec<_>>(), [4]);
    }
}
