//! Kubernetes Events, as components write them.

use serde_json::{Value, json};

use crate::apiserver::{ApiServer, now};
use crate::scatter;

/// A Kubernetes Event about one object.
#[derive(Debug)]
pub(crate) struct ObjectEvent<'a> {
    /// The object the event is about.
    pub(crate) about: &'a Value,
    /// True for type `Warning`, false for `Normal`.
    pub(crate) is_warning: bool,
    /// The reason, such as `FailedScheduling`.
    pub(crate) reason: &'a str,
    /// The message for users.
    pub(crate) message: &'a str,
    /// The component that reports the event.
    pub(crate) component: &'a str,
}

impl ObjectEvent<'_> {
    /// Writes the event. An equal event that was written before gets a higher count instead.
    pub(crate) fn write(&self, api: &ApiServer) {
        let metadata = &self.about["metadata"];
        let text = |key: &str| metadata[key].as_str().unwrap_or_default();
        let namespace = Some(text("namespace")).filter(|name| !name.is_empty()).unwrap_or("default");
        let number = scatter::of_text(&format!("{} {} {}", text("uid"), self.reason, self.message));
        let name = format!("{}.{number:016x}", text("name"));
        let path = format!("/api/v1/namespaces/{namespace}/events");
        let time = now();
        if let Some(known) = api.get(&format!("{path}/{name}")) {
            let count = known["count"].as_u64().unwrap_or(1) + 1;
            let again = json!({ "count": count, "lastTimestamp": time });
            // The store may have dropped the event as its oldest one. Then the count is lost.
            let _ = api.patch(&format!("{path}/{name}"), &again);
            return;
        }
        let event = json!({
            "metadata": { "name": name },
            "involvedObject": {
                "apiVersion": "v1", "kind": self.about["kind"], "namespace": metadata["namespace"],
                "name": metadata["name"], "uid": metadata["uid"],
            },
            "type": if self.is_warning { "Warning" } else { "Normal" },
            "reason": self.reason, "message": self.message, "count": 1,
            "firstTimestamp": time, "lastTimestamp": time,
            "source": { "component": self.component }, "reportingComponent": self.component,
        });
        // The namespace may be gone by now. Then there is no place for the event.
        let _ = api.create(&path, event);
    }
}
