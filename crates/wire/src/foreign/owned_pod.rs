//! Pods with the objects that own them, for readers that ask whether an evicted pod comes back.

use serde::Deserialize;

use super::objects::{Metadata, Pod, PodSpec, PodStatus, null_as_default};

/// A pod with its owners. Watches leave the owners out.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct OwnedPod {
    metadata: OwnedMetadata,
    spec: PodSpec,
    status: PodStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct OwnedMetadata {
    #[serde(flatten)]
    metadata: Metadata,
    #[serde(rename = "ownerReferences", deserialize_with = "null_as_default")]
    owners: Vec<Owner>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Owner {
    kind: String,
    uid: String,
    #[serde(deserialize_with = "null_as_default")]
    controller: bool,
}

/// The controller that creates a pod again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// Kind of the controller, such as `ReplicaSet`.
    pub kind: String,
    /// UID of the controller.
    pub uid: String,
}

impl OwnedPod {
    /// Returns the pod, and the controller that creates it again.
    #[must_use]
    pub fn split(self) -> (Pod, Option<Controller>) {
        let OwnedMetadata { metadata, owners } = self.metadata;
        let controller = owners.into_iter().find(|owner| owner.controller);
        let controller = controller.map(|Owner { kind, uid, .. }| Controller { kind, uid });
        (Pod { metadata, spec: self.spec, status: self.status }, controller)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn finds_the_controller_among_the_owners() {
        let owners = json!([{ "kind": "Other" }, { "kind": "Job", "uid": "u", "controller": true }]);
        let object = json!({
            "metadata": { "name": "p", "labels": null, "ownerReferences": owners },
            "spec": { "nodeName": "n", "containers": [] },
        });
        let (pod, controller) = serde_json::from_value::<OwnedPod>(object).unwrap().split();
        assert_eq!((pod.metadata.name.as_str(), pod.spec.node_name.as_str()), ("p", "n"));
        assert_eq!(controller, Some(Controller { kind: "Job".to_owned(), uid: "u".to_owned() }));
        let bare =
            json!({ "metadata": { "name": "p", "ownerReferences": null }, "spec": { "containers": [] } });
        assert_eq!(serde_json::from_value::<OwnedPod>(bare).unwrap().split().1, None);
    }
}
