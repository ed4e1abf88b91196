//! The protobuf format: objects, as `kubectl create namespace` and similar commands send them, and
//! the schema document that kubectl reads.
//!
//! Objects can only be read, and only what those commands create: names, labels, annotations and
//! data. The field numbers are those of Kubernetes.

use std::collections::BTreeMap;

use prost::Message;
use serde_json::{Value, json};

/// Media type of the format.
pub(super) const MEDIA: &str = "application/vnd.kubernetes.protobuf";

/// First bytes of every message.
const MAGIC: &[u8] = b"k8s\0";

#[derive(Clone, PartialEq, Message)]
struct Envelope {
    #[prost(message, optional, tag = "1")]
    kind: Option<TypeMeta>,
    #[prost(bytes = "vec", tag = "2")]
    raw: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct TypeMeta {
    #[prost(string, tag = "2")]
    kind: String,
}

#[derive(Clone, PartialEq, Message)]
struct Metadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    generate_name: String,
    #[prost(btree_map = "string, string", tag = "11")]
    labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "12")]
    annotations: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct Plain {
    #[prost(message, optional, tag = "1")]
    metadata: Option<Metadata>,
}

#[derive(Clone, PartialEq, Message)]
struct ConfigMap {
    #[prost(btree_map = "string, string", tag = "2")]
    data: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct PriorityClass {
    #[prost(int32, tag = "2")]
    value: i32,
    #[prost(string, tag = "4")]
    description: String,
}

/// Begin of the media types of a schema document of OpenAPI version 2.
pub(super) const SCHEMA_MEDIA_FAMILY: &str = "application/com.github.proto-openapi.spec.v2";

/// Media type of a schema document of OpenAPI version 2.
pub(super) const SCHEMA_MEDIA: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// A schema document of OpenAPI version 2 without definitions.
#[derive(Clone, PartialEq, Message)]
struct SchemaDocument {
    #[prost(string, tag = "1")]
    swagger: String,
    #[prost(message, optional, tag = "2")]
    info: Option<SchemaInfo>,
}

#[derive(Clone, PartialEq, Message)]
struct SchemaInfo {
    #[prost(string, tag = "1")]
    title: String,
    #[prost(string, tag = "2")]
    version: String,
}

/// Returns a schema document without definitions.
pub(super) fn schema_document(title: &str, version: &str) -> Vec<u8> {
    let info = SchemaInfo { title: title.to_owned(), version: version.to_owned() };
    SchemaDocument { swagger: "2.0".to_owned(), info: Some(info) }.encode_to_vec()
}

/// Converts an object to JSON. Returns `None` for kinds that kubectl does not send in this format.
pub(super) fn read(body: &[u8]) -> Option<Value> {
    let Envelope { kind, raw } = Envelope::decode(body.strip_prefix(MAGIC)?).ok()?;
    let mut object = match kind?.kind.as_str() {
        "Namespace" => json!({}),
        "ConfigMap" => json!({ "data": ConfigMap::decode(raw.as_slice()).ok()?.data }),
        "PriorityClass" => {
            let PriorityClass { value, description } = PriorityClass::decode(raw.as_slice()).ok()?;
            json!({ "value": value, "description": description })
        }
        // The options of a deletion are ignored.
        "DeleteOptions" => return Some(json!({})),
        _ => return None,
    };
    let metadata = Plain::decode(raw.as_slice()).ok()?.metadata.unwrap_or_default();
    let Metadata { name, generate_name, labels, annotations } = metadata;
    object["metadata"] = json!({ "labels": labels, "annotations": annotations });
    for (key, text) in [("name", name), ("generateName", generate_name)] {
        if !text.is_empty() {
            object["metadata"][key] = text.into();
        }
    }
    Some(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(kind: &str, raw: Vec<u8>) -> Vec<u8> {
        let kind = Some(TypeMeta { kind: kind.to_owned() });
        [MAGIC, &Envelope { kind, raw }.encode_to_vec()].concat()
    }

    #[test]
    fn reads_a_config_map_and_rejects_a_pod() {
        let metadata = Metadata { name: "m".to_owned(), ..Metadata::default() };
        let mut raw = Plain { metadata: Some(metadata) }.encode_to_vec();
        raw.extend(ConfigMap { data: BTreeMap::from([("a".to_owned(), "b".to_owned())]) }.encode_to_vec());
        let read_back = read(&sent("ConfigMap", raw.clone())).unwrap();
        assert_eq!((&read_back["metadata"]["name"], &read_back["data"]["a"]), (&json!("m"), &json!("b")));
        assert_eq!(read(&sent("Pod", raw.clone())), None);
        assert_eq!(read(&raw), None);
    }
}
