//! Writes, with the rules of the individual kinds.

use std::sync::Arc;

use serde_json::{Value, json};

use super::clock::{now, stamp};
use super::names::{check_name, suffix, uid};
use super::path::ObjectPath;
use super::status::Problem;
use super::store::{Store, StoredObject};
use super::{patch, pods};

/// A fault of a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindingFault {
    /// The binding is not executed, and the answer is an internal error.
    Broken,
    /// The binding is executed, but the answer is a timeout.
    AnswerLost,
    /// The binding is rejected, as an admission plugin would.
    Refused,
}

/// Options of a deletion.
#[derive(Debug, Clone, Default)]
pub(super) struct Deletion {
    /// Grace period of a pod in seconds. Absent for the grace period of the pod.
    pub(super) grace: Option<u64>,
    /// UID that the object must have.
    pub(super) uid: Option<String>,
}

impl Store {
    pub(super) fn create(
        &self,
        target: &ObjectPath,
        mut object: Value,
    ) -> Result<Arc<StoredObject>, Problem> {
        let mut inner = self.lock();
        inner.made += 1;
        let made = inner.made;
        let ObjectPath { kind, namespace, .. } = target;
        if !object.is_object() {
            return Err(Problem::bad_request(format!("the body is no {}", kind.name)));
        }
        let metadata = &mut object["metadata"];
        if let (None, Some(prefix)) = (metadata["name"].as_str(), metadata["generateName"].as_str()) {
            metadata["name"] = format!("{prefix}{}", suffix(made)).into();
        }
        let name = metadata["name"].as_str().unwrap_or_default().to_owned();
        check_name(kind, &name)?;
        if metadata["namespace"].as_str().is_some_and(|written| written != namespace && !namespace.is_empty())
        {
            let message =
                "the namespace of the provided object does not match the namespace sent on the request";
            return Err(Problem::bad_request(message.to_owned()));
        }
        metadata["uid"] = uid(made).into();
        metadata["creationTimestamp"] = now().into();
        if !namespace.is_empty() {
            metadata["namespace"] = namespace.clone().into();
        }
        strip_nulls(metadata);
        object["apiVersion"] = kind.api_version().into();
        object["kind"] = kind.name.into();
        for part in ["spec", "status"] {
            if kind.has_status && object[part].is_null() {
                object[part] = json!({});
            }
        }
        match kind.plural {
            "pods" => pods::prepare(&inner, &mut object)?,
            "namespaces" => object["status"] = json!({ "phase": "Active" }),
            _ => {}
        }
        let target = target.named(&name);
        if inner.find(kind, namespace, &name).is_some() {
            return Err(Problem::exists(kind, &name));
        }
        Ok(inner.put(&target, object))
    }

    /// Replaces an object if the writer has seen its newest version.
    pub(super) fn replace(&self, target: &ObjectPath, object: &Value) -> Result<Arc<StoredObject>, Problem> {
        self.change(target, object, |current| {
            let named = object["metadata"]["uid"].as_str().filter(|uid| !uid.is_empty());
            let actual = current["metadata"]["uid"].as_str().unwrap_or_default();
            match named.filter(|uid| *uid != actual) {
                Some(other) => Err(Problem::other_uid(target, other, actual)),
                None => Ok(object.clone()),
            }
        })
    }

    pub(super) fn patch(
        &self,
        target: &ObjectPath,
        patch: &Value,
        kind: patch::PatchKind,
    ) -> Result<Arc<StoredObject>, Problem> {
        if kind == patch::PatchKind::Apply && self.get(target).is_err() {
            let mut object = patch.clone();
            object["metadata"]["name"] = target.name.clone().into();
            return self.create(&target.named(""), object);
        }
        self.change(target, patch, |current| {
            let uid = &patch["metadata"]["uid"];
            if uid.is_string() && *uid != current["metadata"]["uid"] {
                let why = format!("metadata.uid: Invalid value: {uid}: field is immutable");
                return Err(Problem::invalid(target.kind, &target.name, &why));
            }
            let mut patched = current.clone();
            let outcome = patch::apply(&mut patched, patch, kind);
            outcome.map_err(|why| Problem::invalid(target.kind, &target.name, &why.to_string()))?;
            Ok(patched)
        })
    }

    /// Changes an object: its status if the path ends in `/status`, otherwise everything but its
    /// status. If `written` names a version, the stored object must have that version.
    fn change(
        &self,
        target: &ObjectPath,
        written: &Value,
        make: impl FnOnce(&Value) -> Result<Value, Problem>,
    ) -> Result<Arc<StoredObject>, Problem> {
        let mut inner = self.lock();
        let stored = inner.get(target)?;
        let current = stored.value();
        let seen = written["metadata"]["resourceVersion"].as_str().filter(|text| !text.is_empty());
        if seen.is_some_and(|version| stored.version.to_string() != version) {
            return Err(Problem::stale(target));
        }
        let mut next = make(&current)?;
        let kept: &[&str] = match (target.part.as_str(), target.kind.has_status) {
            ("status", _) => &["spec"],
            (_, true) => &["status"],
            _ => &[],
        };
        for key in kept {
            next[*key] = current[*key].clone();
        }
        for fixed in [
            "name",
            "namespace",
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "resourceVersion",
        ] {
            next["metadata"][fixed] = current["metadata"][fixed].clone();
        }
        strip_nulls(&mut next);
        strip_nulls(&mut next["metadata"]);
        if target.kind.plural == "pods" {
            pods::check_update(target, &current, &next)?;
        }
        if target.kind.plural == "resourceclaims" {
            check_claim(target, &current, &next)?;
        }
        // A write without a change creates no new version.
        if next == current { Ok(stored) } else { Ok(inner.put(target, next)) }
    }

    /// Deletes an object. A running pod with a grace period is only marked: its kubelet deletes it
    /// at the end.
    pub(super) fn delete(&self, target: &ObjectPath, how: &Deletion) -> Result<Arc<StoredObject>, Problem> {
        let mut inner = self.lock();
        let stored = inner.get(target)?;
        let current = stored.value();
        let actual = current["metadata"]["uid"].as_str().unwrap_or_default();
        if let Some(uid) = how.uid.as_deref().filter(|uid| *uid != actual) {
            return Err(Problem::other_uid(target, uid, actual));
        }
        if target.kind.plural == "pods"
            && let Some(grace) = pods::grace(&current, how)
        {
            let marked_with = current["metadata"]["deletionGracePeriodSeconds"].as_u64();
            if marked_with.is_some_and(|before| before <= grace) {
                return Ok(stored);
            }
            let mut marked = current;
            marked["metadata"]["deletionTimestamp"] = stamp(i64::try_from(grace).unwrap_or(i64::MAX)).into();
            marked["metadata"]["deletionGracePeriodSeconds"] = grace.into();
            return Ok(inner.put(target, marked));
        }
        if target.kind.plural == "namespaces" {
            if matches!(target.name.as_str(), "default" | "kube-system") {
                return Err(Problem::forbidden(
                    target.kind,
                    &target.name,
                    "this namespace may not be deleted",
                ));
            }
            inner.clear_namespace(&target.name);
        }
        Ok(inner.remove(target).unwrap_or(stored))
    }

    /// Binds a pod: writes node, annotations and condition at once.
    pub(super) fn bind(&self, target: &ObjectPath, binding: &Value) -> Result<(), Problem> {
        let mut inner = self.lock();
        let fault = inner.faults.pop_front();
        match fault {
            Some(BindingFault::Broken) => return Err(Problem::internal("etcdserver: leader changed")),
            Some(BindingFault::Refused) => {
                return Err(Problem::bad_request("admission denied the binding".to_owned()));
            }
            Some(BindingFault::AnswerLost) | None => {}
        }
        let pod = ObjectPath { part: String::new(), ..target.clone() };
        let mut bound = inner.get(&pod)?.value();
        let refuse = |why: &str| Err(Problem::conflict("pods/binding", &target.name, why));
        let actual = bound["metadata"]["uid"].as_str().unwrap_or_default();
        let wanted = binding["metadata"]["uid"].as_str().filter(|uid| !uid.is_empty() && *uid != actual);
        if let Some(wanted) = wanted {
            return Err(Problem::other_uid(&pod, wanted, actual));
        }
        if !bound["metadata"]["deletionTimestamp"].is_null() {
            return refuse(&format!("pod {} is being deleted, cannot be assigned to a host", target.name));
        }
        if let Some(node) = bound["spec"]["nodeName"].as_str() {
            return refuse(&format!("pod {} is already assigned to node {node:?}", target.name));
        }
        let Some(node) = binding["target"]["name"].as_str().filter(|node| !node.is_empty()) else {
            return Err(Problem::invalid(pod.kind, &target.name, "target.name: Required value"));
        };
        bound["spec"]["nodeName"] = node.into();
        for (annotation, value) in binding["metadata"]["annotations"].as_object().into_iter().flatten() {
            bound["metadata"]["annotations"][annotation] = value.clone();
        }
        let scheduled = json!({ "type": "PodScheduled", "status": "True", "lastTransitionTime": now() });
        pods::set_condition(&mut bound["status"], scheduled);
        inner.put(&pod, bound);
        match fault {
            // Clients repeat a 504 by themselves, so this is a 500.
            Some(BindingFault::AnswerLost) => Err(Problem::internal("request timed out")),
            _ => Ok(()),
        }
    }
}

/// Rejects a change of an allocation, which can only be cleared and set anew.
fn check_claim(target: &ObjectPath, current: &Value, next: &Value) -> Result<(), Problem> {
    let allocation = |claim: &Value| claim["status"].get("allocation").cloned();
    match (allocation(current), allocation(next)) {
        (Some(before), Some(after)) if before != after => {
            let why = "status.allocation: Invalid value: field is immutable";
            Err(Problem::invalid(target.kind, &target.name, why))
        }
        _ => Ok(()),
    }
}

fn strip_nulls(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.retain(|_, field| !field.is_null());
    }
}
