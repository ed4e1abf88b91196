//! Binding a pod to a node, with what was decided for it, in one write.

use std::collections::BTreeMap;

use http::{Method, Request, header::CONTENT_TYPE};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::Client;
use serde_json::json;

/// A pod is to run on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's identity: one that was deleted and made anew under the same name is not bound.
    pub uid: String,
    /// The node.
    pub node: String,
    /// Added to the pod's annotations by the API server in the same write that sets `nodeName`, so nobody ever sees the
    /// one without the other.
    pub annotations: BTreeMap<String, String>,
}

/// The pod was not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Bound already, or another pod of the same name. Trying again is of no use.
    #[error("the pod cannot be bound any more: {0}")]
    Conflict(String),
    /// Deleted meanwhile.
    #[error("the pod is gone: {0}")]
    Gone(String),
    /// The API server did not take it for another reason.
    #[error("the API server did not take the binding: {message}")]
    Refused {
        /// The HTTP status.
        code: u16,
        /// In its words.
        message: String,
    },
    /// There was no answer.
    #[error("the API server did not answer")]
    Api(#[source] Box<kube::Error>),
    /// A name that cannot stand in a URL.
    #[error("the binding cannot be written as a request")]
    Request(#[from] http::Error),
}

impl BindError {
    /// Whether the pod may be bound all the same: there was no answer, or none that says.
    #[must_use]
    pub fn leaves_doubt(&self) -> bool {
        match self {
            Self::Conflict(_) | Self::Gone(_) | Self::Request(_) => false,
            Self::Refused { code, .. } => *code >= 500,
            Self::Api(_) => true,
        }
    }
}

impl Binding {
    /// Sends it.
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
            // Unknown fields need not be looked for in what we wrote ourselves.
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
    fn a_name_that_is_no_name_is_an_error_and_no_panic() {
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
