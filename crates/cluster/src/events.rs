//! Kubernetes Events about pods and claims, as `kubectl describe` shows them.

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

/// Kind of the object that an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeKind {
    /// `Pod` of the core group.
    Pod,
    /// `ResourceClaim` of dynamic resource allocation.
    ResourceClaim,
}

/// A message to the owner of an object, written as a Kubernetes Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Kind of the object.
    pub kind: NoticeKind,
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// UID of the object.
    pub uid: String,
    /// True for type `Warning`, false for type `Normal`.
    pub is_warning: bool,
    /// Machine-readable reason in one word, such as `FailedScheduling`.
    pub reason: String,
    /// Human-readable description of what happened.
    pub message: String,
}

/// The API server did not store the event.
#[derive(Debug, thiserror::Error)]
#[error("the API server rejected the event")]
pub struct EventError(#[from] Box<kube::Error>);

impl Notice {
    /// Creates the event under `name`.
    pub async fn create(&self, client: &Client, name: &str, reporter: &str) -> Result<(), EventError> {
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let source = EventSource { component: Some(reporter.to_owned()), host: None };
        let event = self.event(metadata, source);
        self.events(client).create(&PostParams::default(), &event).await.map_err(Box::new)?;
        Ok(())
    }

    /// Updates the event `name` with the number of times it has occurred.
    pub async fn repeat(&self, client: &Client, name: &str, count: u32) -> Result<(), EventError> {
        let patch = json!({ "count": count, "lastTimestamp": Time(Timestamp::now()) });
        let patch = Patch::Merge(patch);
        self.events(client).patch(name, &PatchParams::default(), &patch).await.map_err(Box::new)?;
        Ok(())
    }

    pub(crate) fn events(&self, client: &Client) -> Api<Event> {
        Api::namespaced(client.clone(), &self.namespace)
    }

    /// Returns the API object, reported by `source`.
    pub(crate) fn event(&self, metadata: ObjectMeta, source: EventSource) -> Event {
        let now = Some(Time(Timestamp::now()));
        let (api_version, kind) = match self.kind {
            NoticeKind::Pod => ("v1", "Pod"),
            NoticeKind::ResourceClaim => ("resource.k8s.io/v1", "ResourceClaim"),
        };
        Event {
            metadata,
            involved_object: ObjectReference {
                api_version: Some(api_version.to_owned()),
                kind: Some(kind.to_owned()),
                namespace: Some(self.namespace.clone()),
                name: Some(self.name.clone()),
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
