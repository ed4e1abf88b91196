//! Events of objects, as components of Kubernetes write them.

use serde_json::{Value, json};

use crate::apiserver::{ApiServer, now};
use crate::scatter;

/// What happened to whom.
#[derive(Debug)]
pub(crate) struct Event<'a> {
    /// The whole object.
    pub(crate) about: &'a Value,
    /// Whether it is out of the ordinary.
    pub(crate) is_warning: bool,
    /// One word.
    pub(crate) reason: &'a str,
    /// A sentence.
    pub(crate) message: &'a str,
    /// Who says so.
    pub(crate) component: &'a str,
}

impl Event<'_> {
    /// Writes it; one that was written before is counted.
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
            // It may have been the oldest, and gone meanwhile: then nobody misses the count.
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
        // Of an object in a namespace that is just being deleted nothing is told.
        let _ = api.create(&path, event);
    }
}
