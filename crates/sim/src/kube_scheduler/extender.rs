//! The calls kube-scheduler makes to an extender, over HTTP.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tessera_wire::foreign::extender::{
    BindingArgs, BindingResult, FilterResult, HostPriority, PreemptionResult,
};

use super::snapshot::PodInfo;
use crate::http::{HttpClient, HttpError};

/// Timeout of one call, like `httpTimeout` in kube-scheduler's configuration.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Path below which the extender serves its verbs.
const PREFIX: &str = "/scheduler";

/// A client of the extender.
#[derive(Debug)]
pub(super) struct Extender {
    url: String,
    client: HttpClient,
}

/// Reasons why a call of the extender failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExtenderError {
    #[error("extender {verb}: {source}")]
    Call { verb: &'static str, source: HttpError },
    #[error("extender {0}: no answer within {CALL_TIMEOUT:?}")]
    Late(&'static str),
    #[error("extender {verb}: status {code}: {body}")]
    Status { verb: &'static str, code: u16, body: String },
    #[error("extender {verb}: {source}")]
    Json { verb: &'static str, source: serde_json::Error },
}

impl Extender {
    pub(super) fn at(url: &str) -> Result<Self, HttpError> {
        Ok(Self { url: url.to_owned(), client: HttpClient::new(url)? })
    }

    /// Returns another client of the same extender, for a call beside those of this one.
    pub(super) fn another(&self) -> Result<Self, ExtenderError> {
        Self::at(&self.url).map_err(|source| ExtenderError::Call { verb: "bind", source })
    }

    async fn call<T: DeserializeOwned>(
        &mut self,
        verb: &'static str,
        request: &impl Serialize,
    ) -> Result<T, ExtenderError> {
        let body = serde_json::to_vec(request).map_err(|source| ExtenderError::Json { verb, source })?;
        let path = format!("{PREFIX}/{verb}");
        let headers = [("content-type", "application/json")];
        let sent = self.client.send("POST", &path, &headers, body);
        let answer = tokio::time::timeout(CALL_TIMEOUT, sent).await.map_err(|_| ExtenderError::Late(verb))?;
        let (code, body) = answer.map_err(|source| ExtenderError::Call { verb, source })?;
        if code != 200 {
            return Err(ExtenderError::Status { verb, code, body });
        }
        serde_json::from_str(&body).map_err(|source| ExtenderError::Json { verb, source })
    }

    /// Calls filter as for an extender with `nodeCacheCapable`: with the whole pod and the names of
    /// the nodes.
    pub(super) async fn filter(
        &mut self,
        pod: &PodInfo,
        nodes: &[String],
    ) -> Result<FilterResult, ExtenderError> {
        let request = json!({ "Pod": pod.object, "Nodes": null, "NodeNames": nodes });
        self.call("filter", &request).await
    }

    pub(super) async fn prioritize(
        &mut self,
        pod: &PodInfo,
        nodes: &[String],
    ) -> Result<Vec<HostPriority>, ExtenderError> {
        let request = json!({ "Pod": pod.object, "Nodes": null, "NodeNames": nodes });
        self.call("prioritize", &request).await
    }

    pub(super) async fn bind(&mut self, pod: &PodInfo, node: &str) -> Result<BindingResult, ExtenderError> {
        let metadata = &pod.pod.metadata;
        let request = BindingArgs {
            pod_name: metadata.name.clone(),
            pod_namespace: metadata.namespace.clone(),
            pod_uid: metadata.uid.clone(),
            node: node.to_owned(),
        };
        self.call("bind", &request).await
    }

    /// Calls preempt with the pods that kube-scheduler would evict, by node.
    pub(super) async fn preempt(
        &mut self,
        pod: &PodInfo,
        victims: &[(String, Vec<String>)],
    ) -> Result<PreemptionResult, ExtenderError> {
        let mut by_node = json!({});
        for (node, uids) in victims {
            let pods: Vec<_> = uids.iter().map(|uid| json!({ "UID": uid })).collect();
            by_node[node] = json!({ "Pods": pods, "NumPDBViolations": 0 });
        }
        let request =
            json!({ "Pod": pod.object, "NodeNameToVictims": null, "NodeNameToMetaVictims": by_node });
        self.call("preempt", &request).await
    }
}
