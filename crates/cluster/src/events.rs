//! Kubernetes Events: what `kubectl describe pod` shows.

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

/// Something to tell about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// Its identity.
    pub uid: String,
    /// Whether somebody should look after it.
    pub is_warning: bool,
    /// One word, by which events are searched.
    pub reason: String,
    /// What happened.
    pub message: String,
}

/// The event was not written.
#[derive(Debug, thiserror::Error)]
#[error("the API server did not take the event")]
pub struct EventError(#[from] Box<kube::Error>);

impl PodEvent {
    /// Writes it for the first time, under `name`.
    pub async fn create(&self, client: &Client, name: &str, reporter: &str) -> Result<(), EventError> {
        let api: Api<Event> = Api::namespaced(client.clone(), &self.namespace);
        let now = Some(Time(Timestamp::now()));
        let event = Event {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            involved_object: ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                namespace: Some(self.namespace.clone()),
                name: Some(self.pod.clone()),
                uid: Some(self.uid.clone()),
                ..ObjectReference::default()
            },
            type_: Some(if self.is_warning { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(self.reason.clone()),
            message: Some(self.message.clone()),
            count: Some(1),
            first_timestamp: now.clone(),
            last_timestamp: now,
            source: Some(EventSource { component: Some(reporter.to_owned()), host: None }),
            reporting_component: Some(reporter.to_owned()),
            ..Event::default()
        };
        api.create(&PostParams::default(), &event).await.map_err(Box::new)?;
        Ok(())
    }

    /// Tells that it has happened so often by now.
    pub async fn repeat(&self, client: &Client, name: &str, count: u32) -> Result<(), EventError> {
        let api: Api<Event> = Api::namespaced(client.clone(), &self.namespace);
        let patch = json!({ "count": count, "lastTimestamp": Time(Timestamp::now()) });
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.map_err(Box::new)?;
        Ok(())
    }
}
