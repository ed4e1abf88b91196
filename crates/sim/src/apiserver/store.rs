//! The objects, their change history and their watchers.
//!
//! An object is stored as its JSON text. A list joins these texts, and thousands of versions fit
//! into memory.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::sync::{mpsc, watch};

use super::kinds::ResourceKind;
use super::path::ObjectPath;
use super::selector::Selector;
use super::status::Problem;
use super::write::BindingFault;

/// All state of the server.
#[derive(Debug, Default)]
pub(super) struct Store {
    inner: Mutex<Inner>,
    down: AtomicBool,
    /// True while requests are held. Held requests subscribe to it.
    held: watch::Sender<bool>,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) version: u64,
    objects: BTreeMap<Key, Arc<StoredObject>>,
    history: VecDeque<Change>,
    /// Newest version that the history no longer covers.
    compacted: u64,
    watchers: Vec<Watcher>,
    /// Event objects, oldest first. Kubernetes deletes events after an hour; this store deletes the
    /// oldest above [`MAX_EVENTS`].
    events: VecDeque<Key>,
    pub(super) faults: VecDeque<BindingFault>,
    pub(super) made: u64,
}

/// Plural name of the kind, namespace and name.
type Key = (&'static str, String, String);

/// An object at one version.
#[derive(Debug)]
pub(super) struct StoredObject {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) text: String,
    pub(super) labels: BTreeMap<String, String>,
    fields: Vec<(&'static str, String)>,
}

/// One change of one object.
#[derive(Debug)]
struct Change {
    version: u64,
    kind: &'static ResourceKind,
    before: Option<Arc<StoredObject>>,
    /// The new object, or the last one before a deletion.
    object: Arc<StoredObject>,
    is_deletion: bool,
}

#[derive(Debug)]
struct Watcher {
    kind: &'static ResourceKind,
    selector: Selector,
    queue: mpsc::UnboundedSender<StoreEvent>,
}

/// A change as a watcher with a selector sees it.
#[derive(Debug, Clone)]
pub(super) struct StoreEvent {
    /// Type of the event: `ADDED`, `MODIFIED` or `DELETED`.
    pub(super) kind: &'static str,
    pub(super) object: Arc<StoredObject>,
}

/// The missed events of a watch and the queue of the later ones.
#[derive(Debug)]
pub(super) struct Subscription {
    pub(super) backlog: Vec<StoreEvent>,
    pub(super) queue: mpsc::UnboundedReceiver<StoreEvent>,
}

/// A page of a list.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) version: u64,
    pub(super) items: Vec<Arc<StoredObject>>,
    pub(super) remaining: usize,
}

/// Number of changes kept for watches that resume.
const MAX_HISTORY: usize = 5_000;

/// Number of event objects kept.
const MAX_EVENTS: usize = 2_000;

impl Store {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }

    /// Returns the number of held requests.
    pub(super) fn waiting(&self) -> usize {
        self.held.receiver_count()
    }

    /// Waits until requests are no longer held.
    pub(super) async fn unheld(&self) {
        if *self.held.borrow() {
            // The sender lives as long as the store.
            let _ = self.held.subscribe().wait_for(|held| !held).await;
        }
    }

    pub(super) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
        self.lock().watchers.clear();
    }

    pub(super) fn is_down(&self) -> bool {
        self.down.load(Ordering::SeqCst)
    }

    pub(super) fn compact(&self) {
        let mut inner = self.lock();
        inner.compacted = inner.version;
        inner.history.clear();
        inner.watchers.clear();
    }

    pub(super) fn version(&self) -> u64 {
        self.lock().version
    }

    /// Lists up to `limit` objects of a kind by namespace and name, starting after a position.
    pub(super) fn list(
        &self,
        kind: &'static ResourceKind,
        selector: &Selector,
        after: Option<(&str, &str)>,
        limit: usize,
    ) -> Page {
        let inner = self.lock();
        let mut items = inner.select(kind, selector, after);
        let remaining = items.len().saturating_sub(limit);
        items.truncate(limit);
        Page { version: inner.version, items, remaining }
    }

    /// Watches a kind from a version on. Without a version, the backlog is every existing object.
    pub(super) fn watch(
        &self,
        kind: &'static ResourceKind,
        selector: Selector,
        since: Option<u64>,
    ) -> Result<Subscription, Problem> {
        let mut inner = self.lock();
        let backlog = match since {
            None => {
                let there = inner.select(kind, &selector, None).into_iter();
                there.map(|object| StoreEvent { kind: "ADDED", object }).collect()
            }
            Some(version) if version < inner.compacted => {
                return Err(Problem::expired(version, inner.compacted));
            }
            Some(version) => {
                let start = inner.history.partition_point(|change| change.version <= version);
                let later = inner.history.range(start..).filter(|change| change.kind.plural == kind.plural);
                later.filter_map(|change| change.as_seen_by(&selector)).collect()
            }
        };
        let (sender, queue) = mpsc::unbounded_channel();
        inner.watchers.push(Watcher { kind, selector, queue: sender });
        Ok(Subscription { backlog, queue })
    }

    pub(super) fn get(&self, target: &ObjectPath) -> Result<Arc<StoredObject>, Problem> {
        self.lock().get(target)
    }
}

impl Inner {
    fn select(
        &self,
        kind: &'static ResourceKind,
        selector: &Selector,
        after: Option<(&str, &str)>,
    ) -> Vec<Arc<StoredObject>> {
        let start = match after {
            None => Bound::Included((kind.plural, selector.namespace.clone(), String::new())),
            Some((namespace, name)) => Bound::Excluded((kind.plural, namespace.to_owned(), name.to_owned())),
        };
        let of_kind =
            self.objects.range((start, Bound::Unbounded)).take_while(|(key, _)| key.0 == kind.plural);
        of_kind.map(|(_, object)| object).filter(|object| selector.selects(object)).cloned().collect()
    }

    pub(super) fn find(
        &self,
        kind: &'static ResourceKind,
        namespace: &str,
        name: &str,
    ) -> Option<&Arc<StoredObject>> {
        self.objects.get(&(kind.plural, namespace.to_owned(), name.to_owned()))
    }

    pub(super) fn get(&self, target: &ObjectPath) -> Result<Arc<StoredObject>, Problem> {
        let ObjectPath { kind, namespace, name, .. } = target;
        self.find(kind, namespace, name).cloned().ok_or_else(|| Problem::not_found(kind, name))
    }

    /// Stores an object with the next version.
    pub(super) fn put(&mut self, target: &ObjectPath, mut object: Value) -> Arc<StoredObject> {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let object = Arc::new(StoredObject::of(target.kind, &object, self.version));
        let key = key(target);
        let before = self.objects.insert(key.clone(), Arc::clone(&object));
        if target.kind.plural == "events" && before.is_none() {
            self.events.push_back(key);
        }
        self.record(target.kind, before, Arc::clone(&object), false);
        while self.events.len() > MAX_EVENTS
            && let Some(oldest) = self.events.pop_front()
        {
            self.take(target.kind, &oldest);
        }
        object
    }

    pub(super) fn remove(&mut self, target: &ObjectPath) -> Option<Arc<StoredObject>> {
        self.take(target.kind, &key(target))
    }

    fn take(&mut self, kind: &'static ResourceKind, key: &Key) -> Option<Arc<StoredObject>> {
        let before = self.objects.remove(key)?;
        self.version += 1;
        let mut last = before.value();
        last["metadata"]["resourceVersion"] = self.version.to_string().into();
        let last = Arc::new(StoredObject::of(kind, &last, self.version));
        self.record(kind, Some(before), Arc::clone(&last), true);
        Some(last)
    }

    /// Deletes all objects of a namespace.
    pub(super) fn clear_namespace(&mut self, namespace: &str) {
        let keys: Vec<Key> = self.objects.keys().filter(|key| key.1 == namespace).cloned().collect();
        for key in keys {
            let kind = super::kinds::KINDS.iter().find(|kind| kind.plural == key.0);
            kind.and_then(|kind| self.take(kind, &key));
        }
    }

    fn record(
        &mut self,
        kind: &'static ResourceKind,
        before: Option<Arc<StoredObject>>,
        object: Arc<StoredObject>,
        is_deletion: bool,
    ) {
        let change = Change { version: self.version, kind, before, object, is_deletion };
        self.watchers.retain(|watcher| {
            if watcher.kind.plural != kind.plural {
                return !watcher.queue.is_closed();
            }
            match change.as_seen_by(&watcher.selector) {
                Some(event) => watcher.queue.send(event).is_ok(),
                None => !watcher.queue.is_closed(),
            }
        });
        self.history.push_back(change);
        if self.history.len() > MAX_HISTORY {
            self.history.drain(..MAX_HISTORY / 4);
            self.compacted = self.history.front().map_or(self.version, |change| change.version - 1);
        }
    }
}

impl Change {
    fn as_seen_by(&self, selector: &Selector) -> Option<StoreEvent> {
        let before = self.before.as_ref().is_some_and(|object| selector.selects(object));
        let after = !self.is_deletion && selector.selects(&self.object);
        let kind = match (before, after) {
            (false, false) => return None,
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
        };
        Some(StoreEvent { kind, object: Arc::clone(&self.object) })
    }
}

impl StoredObject {
    pub(super) fn of(kind: &ResourceKind, object: &Value, version: u64) -> Self {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        };
        let metadata = &object["metadata"];
        let labels = metadata["labels"].as_object().into_iter().flatten();
        let at = |path: &'static str| path.split('.').fold(object, |value, key| &value[key]);
        Self {
            namespace: text(&metadata["namespace"]),
            name: text(&metadata["name"]),
            version,
            text: object.to_string(),
            labels: labels.map(|(label, value)| (label.clone(), text(value))).collect(),
            fields: kind.fields.iter().map(|path| (*path, text(at(path)))).collect(),
        }
    }

    /// Returns the value of a field for field selectors.
    pub(super) fn field(&self, path: &str) -> &str {
        match path {
            "metadata.name" => &self.name,
            "metadata.namespace" => &self.namespace,
            _ => self.fields.iter().find(|(known, _)| *known == path).map_or("", |(_, value)| value),
        }
    }

    pub(super) fn value(&self) -> Value {
        // The text was written from a JSON value, so it always parses.
        serde_json::from_str(&self.text).unwrap_or_default()
    }
}

fn key(target: &ObjectPath) -> Key {
    (target.kind.plural, target.namespace.clone(), target.name.clone())
}
