//! The kinds of objects, and their discovery by clients.

use axum::Json;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::protobuf;

/// A kind of object.
#[derive(Debug)]
pub(super) struct ResourceKind {
    /// API group. Empty for the core group.
    pub(super) group: &'static str,
    pub(super) plural: &'static str,
    pub(super) name: &'static str,
    short: &'static [&'static str],
    pub(super) namespaced: bool,
    pub(super) has_status: bool,
    /// Fields that field selectors support in addition to [`COMMON_FIELDS`].
    pub(super) fields: &'static [&'static str],
}

/// Fields that field selectors support for every kind.
pub(super) const COMMON_FIELDS: [&str; 2] = ["metadata.name", "metadata.namespace"];

/// Release of Kubernetes whose behaviour this server follows.
pub(super) const RELEASE: &str = "v1.33.0";

/// Title of the schema documents.
const SCHEMA_TITLE: &str = "Kubernetes";

macro_rules! kind {
    ($group:literal, $plural:literal, $name:literal, $short:expr, $scope:ident, $status:literal, $fields:expr) => {
        ResourceKind {
            group: $group,
            plural: $plural,
            name: $name,
            short: &$short,
            namespaced: kind!(@ $scope),
            has_status: $status,
            fields: &$fields,
        }
    };
    (@ Namespaced) => { true };
    (@ Cluster) => { false };
}

/// All kinds, each as `v1` of its group.
pub(super) static KINDS: [ResourceKind; 12] = [
    kind!("", "configmaps", "ConfigMap", ["cm"], Namespaced, false, []),
    kind!(
        "",
        "events",
        "Event",
        ["ev"],
        Namespaced,
        false,
        [
            "involvedObject.kind",
            "involvedObject.name",
            "involvedObject.namespace",
            "involvedObject.uid",
            "reason",
            "type"
        ]
    ),
    kind!("", "namespaces", "Namespace", ["ns"], Cluster, true, ["status.phase"]),
    kind!("", "nodes", "Node", ["no"], Cluster, true, ["spec.unschedulable"]),
    kind!(
        "",
        "pods",
        "Pod",
        ["po"],
        Namespaced,
        true,
        [
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "status.nominatedNodeName",
            "status.phase",
            "status.podIP"
        ]
    ),
    kind!("", "resourcequotas", "ResourceQuota", ["quota"], Namespaced, true, []),
    kind!("coordination.k8s.io", "leases", "Lease", [], Namespaced, false, []),
    kind!("policy", "poddisruptionbudgets", "PodDisruptionBudget", ["pdb"], Namespaced, true, []),
    kind!("resource.k8s.io", "deviceclasses", "DeviceClass", [], Cluster, false, []),
    kind!("resource.k8s.io", "resourceclaims", "ResourceClaim", [], Namespaced, true, []),
    kind!(
        "resource.k8s.io",
        "resourceslices",
        "ResourceSlice",
        [],
        Cluster,
        false,
        ["spec.driver", "spec.nodeName"]
    ),
    kind!("scheduling.k8s.io", "priorityclasses", "PriorityClass", ["pc"], Cluster, false, []),
];

impl ResourceKind {
    /// Returns the kind with this group and plural name.
    pub(super) fn find(group: &str, plural: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.group == group && kind.plural == plural)
    }

    /// Returns the API version, such as `v1` or `coordination.k8s.io/v1`.
    pub(super) fn api_version(&self) -> String {
        if self.group.is_empty() { "v1".to_owned() } else { format!("{}/v1", self.group) }
    }

    /// Returns the name in messages, such as `pods` or `leases.coordination.k8s.io`.
    pub(super) fn word(&self) -> String {
        if self.group.is_empty() { self.plural.to_owned() } else { format!("{}.{}", self.plural, self.group) }
    }

    fn singular(&self) -> String {
        self.name.to_lowercase()
    }
}

/// Returns the groups except for the core group, each once.
fn groups() -> impl Iterator<Item = &'static str> {
    let mut last = "";
    // Kinds of one group are adjacent in the table.
    KINDS.iter().map(|kind| kind.group).filter(move |group| std::mem::replace(&mut last, group) != *group)
}

/// Returns the answer of a discovery path, or `None` for other paths.
pub(super) fn discover(path: &str) -> Option<Value> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    match parts.as_slice() {
        ["version"] => Some(json!({
            "major": "1", "minor": "33", "gitVersion": format!("{RELEASE}+tessera"), "gitCommit": "",
            "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "",
        })),
        ["api"] => {
            Some(json!({ "kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [] }))
        }
        ["apis"] => {
            let groups: Vec<Value> = groups().map(describe_group).collect();
            Some(json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups }))
        }
        ["apis", group] => groups().find(|known| known == group).map(|group| {
            let mut described = describe_group(group);
            described["kind"] = "APIGroup".into();
            described["apiVersion"] = "v1".into();
            described
        }),
        ["api", "v1"] => Some(resources("")),
        ["apis", group, "v1"] => groups().find(|known| known == group).map(resources),
        ["openapi", "v3"] => {
            let entry =
                |path: String| (path.clone(), json!({ "serverRelativeURL": format!("/openapi/v3/{path}") }));
            let paths: serde_json::Map<String, Value> = std::iter::once("api/v1".to_owned())
                .chain(groups().map(|group| format!("apis/{group}/v1")))
                .map(entry)
                .collect();
            Some(json!({ "paths": paths }))
        }
        ["openapi", "v3", "api", "v1"] => Some(schema("")),
        ["openapi", "v3", "apis", group, "v1"] => groups().find(|known| known == group).map(schema),
        _ => None,
    }
}

fn describe_group(group: &str) -> Value {
    let version = json!({ "groupVersion": format!("{group}/v1"), "version": "v1" });
    json!({ "name": group, "versions": [version], "preferredVersion": version })
}

fn of_group(group: &str) -> impl Iterator<Item = &'static ResourceKind> {
    KINDS.iter().filter(move |kind| kind.group == group)
}

fn resources(group: &str) -> Value {
    let resource = |kind: &ResourceKind| {
        json!({
            "name": kind.plural, "singularName": kind.singular(), "namespaced": kind.namespaced, "kind": kind.name,
            "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"], "shortNames": kind.short,
        })
    };
    let part = |kind: &ResourceKind, part: &str, verbs: &[&str], of: &str| {
        json!({
            "name": format!("{}/{part}", kind.plural), "singularName": "", "namespaced": kind.namespaced,
            "kind": of, "verbs": verbs,
        })
    };
    let mut all = Vec::new();
    for kind in of_group(group) {
        all.push(resource(kind));
        if kind.has_status {
            all.push(part(kind, "status", &["get", "patch", "update"], kind.name));
        }
        if kind.plural == "pods" {
            all.push(part(kind, "binding", &["create"], "Binding"));
            all.push(part(kind, "eviction", &["create"], "Eviction"));
        }
    }
    let version = if group.is_empty() { "v1".to_owned() } else { format!("{group}/v1") };
    json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": all })
}

/// Returns the schemas of OpenAPI version 2, which kubectl reads to validate objects of kind `List`.
/// It does not validate items whose kind is missing in them, so the server validates all objects.
pub(super) fn schemas_v2(accept: &str) -> Response {
    // Releases of kubectl write the version in the media type as `v2@v1.0` or as `v2.v1.0`.
    if accept.starts_with(protobuf::SCHEMA_MEDIA_FAMILY) {
        let document = protobuf::schema_document(SCHEMA_TITLE, RELEASE);
        return ([(header::CONTENT_TYPE, protobuf::SCHEMA_MEDIA)], document).into_response();
    }
    let info = json!({ "title": SCHEMA_TITLE, "version": RELEASE });
    Json(json!({ "swagger": "2.0", "info": info, "paths": {}, "definitions": {} })).into_response()
}

/// Returns the part of a schema that kubectl reads: that the server validates fields itself.
fn schema(group: &str) -> Value {
    let path = |kind: &ResourceKind| {
        let root = if group.is_empty() { "/api/v1".to_owned() } else { format!("/apis/{group}/v1") };
        let namespace = if kind.namespaced { "/namespaces/{namespace}" } else { "" };
        let patch = json!({
            "operationId": format!("patch{}", kind.name),
            "parameters": [{ "name": "fieldValidation", "in": "query", "schema": { "type": "string" } }],
            "responses": { "200": { "description": "OK" } },
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": { "group": group, "kind": kind.name, "version": "v1" },
        });
        (format!("{root}{namespace}/{}/{{name}}", kind.plural), json!({ "patch": patch }))
    };
    let paths: serde_json::Map<String, Value> = of_group(group).map(path).collect();
    json!({ "openapi": "3.0.0", "info": { "title": SCHEMA_TITLE, "version": RELEASE }, "paths": paths })
}
