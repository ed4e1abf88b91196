//! A local copy of the objects of a watch.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cluster::watch::WatchChange;

/// Objects by key.
#[derive(Debug)]
pub(crate) struct Mirror<T> {
    pub(crate) objects: BTreeMap<String, T>,
    /// Keys that the list in progress has not contained yet.
    unlisted: BTreeSet<String>,
    /// True after the first complete list.
    pub(crate) listed: bool,
}

impl<T> Default for Mirror<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), unlisted: BTreeSet::new(), listed: false }
    }
}

impl<T> Mirror<T> {
    /// Applies a change. `key` returns an object's key, and `keep` whether to store the object.
    /// Returns the error if the watch was interrupted.
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
    fn a_new_list_removes_missing_objects() {
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
