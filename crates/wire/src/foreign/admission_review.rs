//! The JSON of a mutating admission webhook, `admission.k8s.io/v1`: a pod that is about to be created, and the answer
//! with a patch.

use serde::{Deserialize, Serialize};

use crate::foreign::objects::{Pod, null_as_default};

/// Version of the reviews that are read and written.
const API_VERSION: &str = "admission.k8s.io/v1";

/// Kind of the reviews.
const KIND: &str = "AdmissionReview";

/// Name that the API server gives to pods without a scheduler.
pub(crate) const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// The reason why a review is not answered.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadReview {
    /// The object is of another kind or version.
    #[error("expected an {KIND} of {API_VERSION}, not {kind:?} of {version:?}")]
    Kind {
        /// Kind of the object.
        kind: String,
        /// Version of the object.
        version: String,
    },
    /// The review has no request.
    #[error("the {KIND} has no request")]
    NoRequest,
}

/// What the API server sends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AdmissionReview {
    /// Version of the review.
    #[serde(deserialize_with = "null_as_default")]
    pub api_version: String,
    /// Kind of the review.
    #[serde(deserialize_with = "null_as_default")]
    pub kind: String,
    /// The pod and the number of the request.
    pub request: Option<AdmissionRequest>,
}

/// A pod that is about to be created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct AdmissionRequest {
    /// Number of the request, which the answer repeats.
    pub uid: String,
    /// The pod.
    pub object: Pod,
}

/// The answer to a review.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionAnswer {
    api_version: &'static str,
    kind: &'static str,
    response: AdmissionResponse,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct AdmissionResponse {
    uid: String,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    /// A JSON patch in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
}

impl AdmissionReview {
    /// Answers that the pod is admitted. If the pod requests GPUs and names no scheduler and no node, it gets `scheduler`
    /// as its `schedulerName`. With `claims` it also gets it if it uses claims, which may be for GPUs.
    pub fn with_scheduler(&self, scheduler: &str, claims: bool) -> Result<AdmissionAnswer, BadReview> {
        if self.kind != KIND || self.api_version != API_VERSION {
            return Err(BadReview::Kind { kind: self.kind.clone(), version: self.api_version.clone() });
        }
        let request = self.request.as_ref().ok_or(BadReview::NoRequest)?;
        let spec = &request.object.spec;
        let wants = spec.asks_for_gpus() || claims && !spec.resource_claims.is_empty();
        let is_ours = spec.scheduler() == DEFAULT_SCHEDULER && spec.node_name.is_empty() && wants;
        let patch = is_ours.then(|| {
            let add = serde_json::json!([{ "op": "add", "path": "/spec/schedulerName", "value": scheduler }]);
            base64(add.to_string().as_bytes())
        });
        let response = AdmissionResponse {
            uid: request.uid.clone(),
            allowed: true,
            patch_type: patch.is_some().then_some("JSONPatch"),
            patch,
        };
        Ok(AdmissionAnswer { api_version: API_VERSION, kind: KIND, response })
    }
}

/// Encodes bytes in base64 with padding (RFC 4648).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |bits: u32| char::from(DIGITS[(bits & 63) as usize]);
    let encode = |three: &[u8]| {
        let byte = |number: usize| u32::from(three.get(number).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        let all = [digit(bits >> 18), digit(bits >> 12), digit(bits >> 6), digit(bits)];
        let used = three.len() + 1;
        all.into_iter().enumerate().map(move |(number, digit)| if number < used { digit } else { '=' })
    };
    bytes.chunks(3).flat_map(encode).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// `[{"op":"add","path":"/spec/schedulerName","value":"tessera"}]`, as `base64 -w0` writes it.
    const PATCH: &str =
        "W3sib3AiOiJhZGQiLCJwYXRoIjoiL3NwZWMvc2NoZWR1bGVyTmFtZSIsInZhbHVlIjoidGVzc2VyYSJ9XQ==";

    fn answer(spec: &Value) -> Value {
        answer_with(spec, false)
    }

    fn answer_with(spec: &Value, claims: bool) -> Value {
        let review = json!({
            "apiVersion": API_VERSION, "kind": KIND,
            "request": { "uid": "705ab4f5", "operation": "CREATE", "object": { "metadata": { "generateName": "p-" }, "spec": spec } },
        });
        let review: AdmissionReview = serde_json::from_value(review).unwrap();
        serde_json::to_value(review.with_scheduler("tessera", claims).unwrap()).unwrap()
    }

    fn spec(resource: &str, amount: &str) -> Value {
        json!({ "schedulerName": DEFAULT_SCHEDULER,
            "containers": [{ "name": "main", "resources": { "limits": { resource: amount } } }] })
    }

    #[test]
    fn pods_with_gpus_get_the_scheduler() {
        for resource in ["nvidia.com/gpu", "aliyun.com/gpu", "aliyun.com/gpu-mem", "nvidia.com/gpumem"] {
            let expected = json!({ "apiVersion": API_VERSION, "kind": KIND, "response":
                { "uid": "705ab4f5", "allowed": true, "patchType": "JSONPatch", "patch": PATCH } });
            assert_eq!(answer(&spec(resource, "1")), expected, "{resource}");
        }
        let init = json!({ "containers": [{ "name": "main" }],
            "initContainers": [{ "name": "first", "resources": { "limits": { "nvidia.com/gpu": "1" } } }] });
        assert_eq!(answer(&init)["response"]["patch"], PATCH);
    }

    #[test]
    fn pods_with_claims_get_the_scheduler_if_it_serves_claims() {
        let claims = json!([{ "name": "gpu", "resourceClaimTemplateName": "small" }]);
        let pod = json!({ "containers": [{ "name": "main" }], "resourceClaims": claims });
        assert_eq!(answer_with(&pod, true)["response"]["patch"], PATCH);
        let unchanged = json!({ "uid": "705ab4f5", "allowed": true });
        assert_eq!(answer_with(&pod, false)["response"], unchanged);
        let named = json!({ "schedulerName": "volcano", "resourceClaims": claims });
        assert_eq!(answer_with(&named, true)["response"], unchanged);
        assert_eq!(answer_with(&json!({ "resourceClaims": [] }), true)["response"], unchanged);
    }

    #[test]
    fn other_pods_are_admitted_unchanged() {
        let mut named = spec("nvidia.com/gpu", "1");
        named["schedulerName"] = "volcano".into();
        let mut bound = spec("nvidia.com/gpu", "1");
        bound["nodeName"] = "node-1".into();
        for spec in [
            named,
            bound,
            spec("cpu", "1"),
            spec("nvidia.com/gpu", "0"),
            json!({}),
            json!({ "containers": null }),
        ] {
            assert_eq!(answer(&spec)["response"], json!({ "uid": "705ab4f5", "allowed": true }), "{spec}");
        }
    }

    #[test]
    fn other_objects_are_not_answered() {
        let read = |text: &str| {
            serde_json::from_str::<AdmissionReview>(text).unwrap().with_scheduler("tessera", true)
        };
        let old = read(
            r#"{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview","request":{"uid":"u"}}"#,
        );
        assert!(matches!(old, Err(BadReview::Kind { .. })), "{old:?}");
        let empty = read(r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}"#);
        assert_eq!(empty, Err(BadReview::NoRequest));
    }

    /// The examples of RFC 4648.
    #[test]
    fn encodes_base64() {
        for (plain, encoded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }
}
