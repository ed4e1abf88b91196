//! Kubernetes Events: what `kubectl describe pod` shows.

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

/// Something to tell the owner of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNotice {
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

impl PodNotice {
    /// Writes it for the first time, under `name`.
    pub async fn create(&self, client: &Client, name: &str, reporter: &str) -> Result<(), EventError> {
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let source = EventSource { component: Some(reporter.to_owned()), host: None };
        let event = self.event(metadata, source);
        self.events(client).create(&PostParams::default(), &event).await.map_err(Box::new)?;
        Ok(())
    }

    /// Tells that it has happened so often by now.
    pub async fn repeat(&self, client: &Client, name: &str, count: u32) -> Result<(), EventError> {
        let patch = json!({ "count": count, "lastTimestamp": Time(Timestamp::now()) });
        let patch = Patch::Merge(patch);
        self.events(client).patch(name, &PatchParams::default(), &patch).await.map_err(Box::new)?;
        Ok(())
    }

    /// Where it is written.
    pub(crate) fn events(&self, client: &Client) -> Api<Event> {
        Api::namespaced(client.clone(), &self.namespace)
    }

    /// As the API server takes it, from whoever tells it.
    pub(crate) fn event(&self, metadata: ObjectMeta, source: EventSource) -> Event {
        let now = Some(Time(Timestamp::now()));
        Event {
            metadata,
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
            reporting_component: source.component.clone(),
            reporting_instance: source.host.clone(),
            source: Some(source),
            ..Event::default()
        }
    }
}
