//! Binds a pod to a node and records the placement decision in the same write.

use std::collections::BTreeMap;

use http::{Method, Request, header::CONTENT_TYPE};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::Client;
use serde_json::json;

/// A request to run a pod on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's UID. The API server rejects the binding if a new pod has the same name.
    pub uid: String,
    /// Name of the node.
    pub node: String,
    /// Annotations that the API server adds to the pod in the same write that sets `nodeName`.
    /// A reader never sees one without the other.
    pub annotations: BTreeMap<String, String>,
}

/// Reason why a pod was not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The pod is already bound, or another pod has its name. A retry cannot succeed.
    #[error("the pod cannot be bound any more: {0}")]
    Conflict(String),
    /// The pod was deleted.
    #[error("the pod is gone: {0}")]
    Gone(String),
    /// The API server rejected the binding for another reason.
    #[error("the API server rejected the binding: {message}")]
    Refused {
        /// HTTP status code.
        code: u16,
        /// Message of the API server.
        message: String,
    },
    /// The API server did not answer.
    #[error("the API server did not answer the binding")]
    Api(#[source] Box<kube::Error>),
    /// The namespace or pod name cannot be part of a URL.
    #[error("the namespace or pod name of the binding cannot be part of a URL")]
    Request(#[from] http::Error),
}

impl BindError {
    /// Returns whether the API server may have bound the pod despite this error.
    #[must_use]
    pub fn may_have_been_applied(&self) -> bool {
        match self {
            Self::Conflict(_) | Self::Gone(_) | Self::Request(_) => false,
            Self::Refused { code, .. } => *code >= 500,
            Self::Api(_) => true,
        }
    }
}

impl Binding {
    /// Sends the binding to the API server.
    pub async fn send(&self, client: &Client) -> Result<(), BindError> {
        match client.request::<Status>(self.to_request()?).await {
            Ok(_created) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                Err(BindError::Conflict(status.message.clone()))
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {
                Err(BindError::Gone(status.message.clone()))
            }
            Err(kube::Error::Api(status)) => {
                Err(BindError::Refused { code: status.code, message: status.message.clone() })
            }
            Err(error) => Err(BindError::Api(Box::new(error))),
        }
    }

    fn to_request(&self) -> Result<Request<Vec<u8>>, http::Error> {
        let Self { namespace, pod, uid, node, annotations } = self;
        let body = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": { "name": pod, "namespace": namespace, "uid": uid, "annotations": annotations },
            "target": { "apiVersion": "v1", "kind": "Node", "name": node },
        });
        Request::builder()
            .method(Method::POST)
            // This request contains no unknown fields, so the API server need not search for them.
            .uri(format!("/api/v1/namespaces/{namespace}/pods/{pod}/binding?fieldValidation=Ignore"))
            .header(CONTENT_TYPE, "application/json")
            .body(body.to_string().into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carries_the_uid_and_the_annotations() {
        let binding = Binding {
            namespace: "team".into(),
            pod: "train".into(),
            uid: "31653bf8".into(),
            node: "n1".into(),
            annotations: BTreeMap::from([("tessera.dev/grant".into(), "{}".into())]),
        };
        let request = binding.to_request().unwrap();
        assert_eq!(request.uri().path(), "/api/v1/namespaces/team/pods/train/binding");
        let body: serde_json::Value = serde_json::from_slice(request.body()).unwrap();
        assert_eq!(body["metadata"]["uid"], "31653bf8");
        assert_eq!(body["metadata"]["annotations"]["tessera.dev/grant"], "{}");
        assert_eq!(body["target"]["name"], "n1");
    }

    #[test]
    fn returns_an_error_for_a_name_that_cannot_be_in_a_url() {
        let binding = Binding {
            namespace: "a b".into(),
            pod: "c".into(),
            uid: String::new(),
            node: "n".into(),
            annotations: BTreeMap::new(),
        };
        assert!(binding.to_request().is_err());
    }
}
