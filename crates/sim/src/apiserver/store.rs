//! The objects and their history.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::patch;
use super::path::Target;
use super::status::Problem;

/// What goes wrong with a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It is not done, and the answer says that something broke.
    Broken,
    /// It is done, but the answer says that time ran out.
    AnswerLost,
    /// It is refused for a reason that has nothing to do with it.
    Refused,
}

/// Everything.
#[derive(Debug)]
pub(super) struct Store {
    inner: Mutex<Inner>,
    changed: watch::Sender<u64>,
    /// Counts how often all watches were ended.
    hung_up: watch::Sender<u64>,
    down: AtomicBool,
}

#[derive(Debug, Default)]
struct Inner {
    version: u64,
    objects: BTreeMap<Key, Arc<Value>>,
    history: VecDeque<Change>,
    /// Changes up to this version are forgotten.
    compacted: u64,
    faults: VecDeque<Fault>,
    made: u64,
}

/// Kind, namespace, name.
type Key = (String, String, String);

/// One change of one object.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) resource: String,
    pub(super) before: Option<Arc<Value>>,
    /// As it is after, or as it was last.
    pub(super) object: Arc<Value>,
    pub(super) is_deletion: bool,
}

/// Changes remembered for watches that resume.
const HISTORY: usize = 100_000;

impl Default for Store {
    fn default() -> Self {
        let (changed, hung_up) = (watch::Sender::new(0), watch::Sender::new(0));
        Self { inner: Mutex::default(), changed, hung_up, down: AtomicBool::new(false) }
    }
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(super) fn hang_ups(&self) -> watch::Receiver<u64> {
        self.hung_up.subscribe()
    }

    pub(super) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
        self.hang_up();
    }

    pub(super) fn is_down(&self) -> bool {
        self.down.load(Ordering::SeqCst)
    }

    fn hang_up(&self) {
        self.hung_up.send_modify(|count| *count += 1);
    }

    pub(super) fn fail_bindings(&self, faults: impl IntoIterator<Item = Fault>) {
        self.lock().faults.extend(faults);
    }

    pub(super) fn compact(&self) {
        let mut inner = self.lock();
        inner.compacted = inner.version;
        inner.history.clear();
        drop(inner);
        self.hang_up();
    }

    /// The version, and all objects of a kind.
    pub(super) fn list(&self, target: &Target) -> (u64, Vec<Value>) {
        let inner = self.lock();
        let from = (target.resource.clone(), target.namespace.clone(), String::new());
        let of_kind = inner.objects.range(from..).take_while(|(key, _)| key.0 == target.resource);
        let wanted = of_kind.filter(|(key, _)| target.namespace.is_empty() || key.1 == target.namespace);
        (inner.version, wanted.map(|(_, object)| object.as_ref().clone()).collect())
    }

    /// Changes of a kind since a version, or word that they are forgotten.
    pub(super) fn since(&self, target: &Target, version: u64) -> Result<(u64, Vec<Change>), Problem> {
        let inner = self.lock();
        if version < inner.compacted {
            return Err(Problem::expired(version, inner.compacted));
        }
        let start = inner.history.partition_point(|change| change.version <= version);
        let later = inner.history.range(start..).filter(|change| change.resource == target.resource);
        Ok((inner.version, later.cloned().collect()))
    }

    pub(super) fn get(&self, target: &Target) -> Result<Value, Problem> {
        let inner = self.lock();
        let found = inner.objects.get(&key(target)).ok_or_else(|| Problem::not_found(target))?;
        Ok(found.as_ref().clone())
    }

    pub(super) fn create(&self, target: &Target, mut object: Value) -> Result<Value, Problem> {
        let mut inner = self.lock();
        inner.made += 1;
        let made = inner.made;
        let metadata = &mut object["metadata"];
        if let (None, Some(prefix)) = (metadata["name"].as_str(), metadata["generateName"].as_str()) {
            metadata["name"] = format!("{prefix}{made:05}").into();
        }
        let name = metadata["name"].as_str().unwrap_or_default().to_owned();
        if name.is_empty() {
            return Err(Problem::bad_request("name or generateName is required".to_owned()));
        }
        metadata["uid"] = format!("00000000-0000-4000-8000-{made:012}").into();
        metadata["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
        if !target.namespace.is_empty() {
            metadata["namespace"] = target.namespace.clone().into();
        }
        object["apiVersion"] = target.api_version.clone().into();
        object["kind"] = target.kind().into();
        if target.resource == "pods" {
            object["status"] = json!({ "phase": "Pending" });
            if object["spec"]["schedulerName"].is_null() {
                object["spec"]["schedulerName"] = "default-scheduler".into();
            }
        }
        let target = Target { name: name.clone(), ..target.clone() };
        if inner.objects.contains_key(&key(&target)) {
            return Err(Problem::exists(&target, &name));
        }
        Ok(self.put(&mut inner, &target, object))
    }

    /// Replaces an object, provided the writer has seen its newest version.
    pub(super) fn replace(&self, target: &Target, object: Value) -> Result<Value, Problem> {
        self.change(target, |current| {
            let expected = object["metadata"]["resourceVersion"].as_str();
            if expected.is_some_and(|version| current["metadata"]["resourceVersion"] != version) {
                return Err(Problem::stale(target));
            }
            Ok(object.clone())
        })
    }

    pub(super) fn patch(&self, target: &Target, patch: &Value, kind: patch::Kind) -> Result<Value, Problem> {
        self.change(target, |current| {
            let expected = patch["metadata"]["resourceVersion"].as_str();
            if expected.is_some_and(|version| current["metadata"]["resourceVersion"] != version) {
                return Err(Problem::stale(target));
            }
            let mut patched = current.clone();
            patch::apply(&mut patched, patch, kind);
            Ok(patched)
        })
    }

    /// Changes an object, or its status only where the path says so, or all but its status.
    fn change(
        &self,
        target: &Target,
        make: impl FnOnce(&Value) -> Result<Value, Problem>,
    ) -> Result<Value, Problem> {
        let mut inner = self.lock();
        let current = inner.objects.get(&key(target)).ok_or_else(|| Problem::not_found(target))?;
        let current = current.as_ref().clone();
        let wanted = make(&current)?;
        let has_status = matches!(target.resource.as_str(), "pods" | "nodes");
        let mut next = match target.part.as_str() {
            "status" => {
                let mut next = current.clone();
                next["status"] = wanted["status"].clone();
                // Nodes are patched there with annotations too.
                next["metadata"]["annotations"] = wanted["metadata"]["annotations"].clone();
                next
            }
            _ => {
                let mut next = wanted;
                if has_status {
                    next["status"] = current["status"].clone();
                }
                next
            }
        };
        for fixed in ["name", "namespace", "uid", "creationTimestamp"] {
            next["metadata"][fixed] = current["metadata"][fixed].clone();
        }
        strip_nulls(&mut next["metadata"]);
        Ok(self.put(&mut inner, target, next))
    }

    /// Deletes an object. A pod that runs is only marked unless there is no grace: its kubelet deletes it at the end.
    pub(super) fn delete(&self, target: &Target, grace: Option<u64>) -> Result<Value, Problem> {
        let mut inner = self.lock();
        let key = key(target);
        let current = Arc::clone(inner.objects.get(&key).ok_or_else(|| Problem::not_found(target))?);
        let ended = matches!(current["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let runs = target.resource == "pods" && !current["spec"]["nodeName"].is_null() && !ended;
        if runs && grace != Some(0) {
            let mut marked = current.as_ref().clone();
            marked["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            marked["metadata"]["deletionGracePeriodSeconds"] = grace.unwrap_or(30).into();
            return Ok(self.put(&mut inner, target, marked));
        }
        inner.objects.remove(&key);
        inner.version += 1;
        let version = inner.version;
        let mut last = current.as_ref().clone();
        last["metadata"]["resourceVersion"] = version.to_string().into();
        self.record(&mut inner, target, Some(current), Arc::new(last.clone()), true);
        Ok(last)
    }

    /// Binds a pod: node, annotations and condition in one write.
    pub(super) fn bind(&self, target: &Target, binding: &Value) -> Result<Value, Problem> {
        let mut inner = self.lock();
        let fault = inner.faults.pop_front();
        match fault {
            Some(Fault::Broken) => return Err(Problem::internal("etcdserver: leader changed")),
            Some(Fault::Refused) => {
                return Err(Problem::bad_request("admission denied the binding".to_owned()));
            }
            Some(Fault::AnswerLost) | None => {}
        }
        let pod = Target { part: String::new(), ..target.clone() };
        let current = inner.objects.get(&key(&pod)).ok_or_else(|| Problem::not_found(&pod))?;
        let mut bound = current.as_ref().clone();
        let refuse = |why: String| Err(Problem::conflict("pods/binding", &target.name, &why));
        let (wanted, actual) = (&binding["metadata"]["uid"], &bound["metadata"]["uid"]);
        if wanted.as_str().is_some_and(|uid| !uid.is_empty() && actual != uid) {
            return refuse(format!(
                "Precondition failed: UID in precondition: {}, UID in object meta: {}",
                wanted.as_str().unwrap_or_default(),
                actual.as_str().unwrap_or_default()
            ));
        }
        if !bound["metadata"]["deletionTimestamp"].is_null() {
            return refuse(format!("pod {} is being deleted, cannot be assigned to a host", target.name));
        }
        if let Some(node) = bound["spec"]["nodeName"].as_str() {
            return refuse(format!("pod {} is already assigned to node {node:?}", target.name));
        }
        bound["spec"]["nodeName"] = binding["target"]["name"].clone();
        for (annotation, value) in binding["metadata"]["annotations"].as_object().into_iter().flatten() {
            bound["metadata"]["annotations"][annotation] = value.clone();
        }
        let scheduled = json!({ "conditions": [{ "type": "PodScheduled", "status": "True" }] });
        patch::apply(&mut bound["status"], &scheduled, patch::Kind::Strategic);
        self.put(&mut inner, &pod, bound);
        match fault {
            // Not a 504, which clients try again by themselves.
            Some(Fault::AnswerLost) => Err(Problem::internal("request timed out")),
            _ => Ok(
                json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201 }),
            ),
        }
    }

    fn put(&self, inner: &mut Inner, target: &Target, mut object: Value) -> Value {
        inner.version += 1;
        object["metadata"]["resourceVersion"] = inner.version.to_string().into();
        let object = Arc::new(object);
        let before = inner.objects.insert(key(target), Arc::clone(&object));
        self.record(inner, target, before, Arc::clone(&object), false);
        object.as_ref().clone()
    }

    fn record(
        &self,
        inner: &mut Inner,
        target: &Target,
        before: Option<Arc<Value>>,
        object: Arc<Value>,
        is_deletion: bool,
    ) {
        let (version, resource) = (inner.version, target.resource.clone());
        inner.history.push_back(Change { version, resource, before, object, is_deletion });
        if inner.history.len() > HISTORY {
            inner.history.drain(..HISTORY / 2);
            inner.compacted = inner.history.front().map_or(version, |change| change.version - 1);
        }
        self.changed.send_replace(version);
    }
}

fn key(target: &Target) -> Key {
    (target.resource.clone(), target.namespace.clone(), target.name.clone())
}

fn strip_nulls(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.retain(|_, field| !field.is_null());
    }
}
