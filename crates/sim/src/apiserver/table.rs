//! Tables, as `kubectl get` shows them.

use std::sync::Arc;

use serde_json::{Value, json};

use super::clock::age;
use super::kinds::ResourceKind;
use super::store::StoredObject;

/// Part of the object that each row includes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Include {
    None,
    Metadata,
    Object,
}

impl Include {
    /// Reads the value of the query parameter `includeObject`.
    pub(super) fn read(text: &str) -> Self {
        match text {
            "None" => Self::None,
            "Object" => Self::Object,
            _ => Self::Metadata,
        }
    }
}

/// Name and format of a column, and whether only wide tables show it.
type Column = (&'static str, &'static str, bool);

/// Returns the cells of an object, without its name.
type Cells = fn(&Value) -> Vec<Value>;

const NAME: Column = ("Name", "name", false);
const AGE: Column = ("Age", "", false);

/// Builds a table of objects of one kind.
pub(super) fn of(kind: &ResourceKind, objects: &[Arc<StoredObject>], include: Include) -> Value {
    let (columns, cells): (&[Column], Cells) = match kind.plural {
        "pods" => (&PODS, pod),
        "nodes" => (&NODES, node),
        "namespaces" => (&[NAME, ("Status", "", false), AGE], |namespace| {
            vec![namespace["status"]["phase"].clone(), aged(namespace)]
        }),
        "configmaps" => (&[NAME, ("Data", "", false), AGE], |map| {
            vec![map["data"].as_object().map_or(0, serde_json::Map::len).into(), aged(map)]
        }),
        "leases" => (&[NAME, ("Holder", "", false), AGE], |lease| {
            vec![lease["spec"]["holderIdentity"].clone(), aged(lease)]
        }),
        "priorityclasses" => (&[NAME, ("Value", "", false), ("Global-Default", "", false), AGE], |class| {
            vec![
                class["value"].clone(),
                class["globalDefault"].as_bool().unwrap_or(false).into(),
                aged(class),
            ]
        }),
        "events" => (&EVENTS, event),
        _ => (&[NAME, AGE], |object| vec![aged(object)]),
    };
    let column = |(name, format, wide): &Column| {
        let kind = if matches!(*name, "Value" | "Data" | "Count") { "integer" } else { "string" };
        json!({ "name": name, "type": kind, "format": format, "description": "", "priority": i32::from(*wide) })
    };
    let row = |object: &Arc<StoredObject>| {
        let value = object.value();
        // Tables of events do not begin with a name.
        let named = (kind.plural != "events").then(|| json!(object.name));
        let cells: Vec<Value> = named.into_iter().chain(cells(&value)).collect();
        match include {
            Include::None => json!({ "cells": cells }),
            Include::Object => json!({ "cells": cells, "object": value }),
            Include::Metadata => json!({
                "cells": cells,
                "object": { "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": value["metadata"] },
            }),
        }
    };
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {},
        "columnDefinitions": columns.iter().map(column).collect::<Vec<_>>(),
        "rows": objects.iter().map(row).collect::<Vec<_>>(),
    })
}

const PODS: [Column; 9] = [
    NAME,
    ("Ready", "", false),
    ("Status", "", false),
    ("Restarts", "", false),
    AGE,
    ("IP", "", true),
    ("Node", "", true),
    ("Nominated Node", "", true),
    ("Readiness Gates", "", true),
];

fn pod(pod: &Value) -> Vec<Value> {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let statuses = || status["containerStatuses"].as_array().into_iter().flatten();
    let ready = statuses().filter(|container| container["ready"] == true).count();
    let restarts: u64 = statuses().filter_map(|container| container["restartCount"].as_u64()).sum();
    let reason = statuses().find_map(|container| {
        let state = &container["state"];
        state["waiting"]["reason"].as_str().or_else(|| state["terminated"]["reason"].as_str())
    });
    let shown = if pod["metadata"]["deletionTimestamp"].is_string() {
        "Terminating"
    } else {
        status["reason"].as_str().or(reason).or_else(|| status["phase"].as_str()).unwrap_or_default()
    };
    let all = spec["containers"].as_array().map_or(0, Vec::len);
    vec![
        format!("{ready}/{all}").into(),
        shown.into(),
        restarts.into(),
        aged(pod),
        or_none(&status["podIP"]),
        or_none(&spec["nodeName"]),
        or_none(&status["nominatedNodeName"]),
        "<none>".into(),
    ]
}

const NODES: [Column; 10] = [
    NAME,
    ("Status", "", false),
    ("Roles", "", false),
    AGE,
    ("Version", "", false),
    ("Internal-IP", "", true),
    ("External-IP", "", true),
    ("OS-Image", "", true),
    ("Kernel-Version", "", true),
    ("Container-Runtime", "", true),
];

fn node(node: &Value) -> Vec<Value> {
    let (status, info) = (&node["status"], &node["status"]["nodeInfo"]);
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let mut ready =
        conditions.filter(|condition| condition["type"] == "Ready").map(|condition| &condition["status"]);
    let mut shown = match ready.next_back().and_then(Value::as_str) {
        Some("True") => "Ready",
        Some(_) => "NotReady",
        None => "Unknown",
    }
    .to_owned();
    if node["spec"]["unschedulable"] == true {
        shown += ",SchedulingDisabled";
    }
    let labels = node["metadata"]["labels"].as_object().into_iter().flatten();
    let roles: Vec<&str> =
        labels.filter_map(|(label, _)| label.strip_prefix("node-role.kubernetes.io/")).collect();
    let address = |wanted: &str| {
        let addresses = status["addresses"].as_array().into_iter().flatten();
        let mut found =
            addresses.filter(|address| address["type"] == wanted).map(|address| address["address"].clone());
        found.next_back().unwrap_or_else(|| "<none>".into())
    };
    let told = |key: &str| match &info[key] {
        Value::Null => "<unknown>".into(),
        known => known.clone(),
    };
    vec![
        shown.into(),
        if roles.is_empty() { "<none>".into() } else { roles.join(",").into() },
        aged(node),
        info["kubeletVersion"].clone(),
        address("InternalIP"),
        address("ExternalIP"),
        told("osImage"),
        told("kernelVersion"),
        told("containerRuntimeVersion"),
    ]
}

const EVENTS: [Column; 10] = [
    ("Last Seen", "", false),
    ("Type", "", false),
    ("Reason", "", false),
    ("Object", "", false),
    ("Subobject", "", true),
    ("Source", "", true),
    ("Message", "", false),
    ("First Seen", "", true),
    ("Count", "", true),
    ("Name", "name", true),
];

fn event(event: &Value) -> Vec<Value> {
    let object = &event["involvedObject"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let since = |key: &str| {
        let time = event[key].as_str().or_else(|| event["metadata"]["creationTimestamp"].as_str());
        Value::from(time.map_or_else(|| "<unknown>".to_owned(), age))
    };
    vec![
        since("lastTimestamp"),
        event["type"].clone(),
        event["reason"].clone(),
        format!("{}/{}", text(&object["kind"]).to_lowercase(), text(&object["name"])).into(),
        text(&object["fieldPath"]).into(),
        text(&event["source"]["component"]).into(),
        text(&event["message"]).trim().into(),
        since("firstTimestamp"),
        event["count"].as_u64().unwrap_or(1).into(),
        event["metadata"]["name"].clone(),
    ]
}

fn aged(object: &Value) -> Value {
    age(object["metadata"]["creationTimestamp"].as_str().unwrap_or_default()).into()
}

fn or_none(value: &Value) -> Value {
    value.as_str().filter(|text| !text.is_empty()).unwrap_or("<none>").into()
}
