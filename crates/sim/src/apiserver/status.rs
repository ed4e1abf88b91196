//! Errors with the texts of Kubernetes.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::kinds::ResourceKind;
use super::path::ObjectPath;

/// An error with its status code.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Problem {
    code: u16,
    reason: &'static str,
    message: String,
    details: Value,
}

impl Problem {
    fn new(code: u16, reason: &'static str, message: String) -> Self {
        Self { code, reason, message, details: Value::Null }
    }

    /// Adds the object that the error is about.
    fn about(mut self, kind: &ResourceKind, name: &str) -> Self {
        self.details = json!({ "name": name, "kind": kind.plural });
        if !kind.group.is_empty() {
            self.details["group"] = kind.group.into();
        }
        self
    }

    pub(super) fn no_such_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource".to_owned())
    }

    pub(super) fn not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(405, "MethodNotAllowed", message.to_owned())
    }

    pub(super) fn not_found(kind: &ResourceKind, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} {name:?} not found", kind.word())).about(kind, name)
    }

    pub(super) fn exists(kind: &ResourceKind, name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("{} {name:?} already exists", kind.word())).about(kind, name)
    }

    /// The error of a write based on an old version.
    pub(super) fn stale(target: &ObjectPath) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(&target.kind.word(), &target.name, why).about(target.kind, &target.name)
    }

    /// The error of a write that expects another object of the same name.
    pub(super) fn other_uid(target: &ObjectPath, wanted: &str, actual: &str) -> Self {
        let ObjectPath { kind, namespace, name, .. } = target;
        let why = format!(
            "StorageError: invalid object, Code: 4, Key: /registry/{}/{namespace}/{name}, ResourceVersion: 0, \
             AdditionalErrorMsg: Precondition failed: UID in precondition: {wanted}, UID in object meta: {actual}",
            kind.plural
        );
        Self::conflict(&kind.word(), name, &why).about(kind, name)
    }

    pub(super) fn conflict(what: &str, name: &str, why: &str) -> Self {
        Self::new(409, "Conflict", format!("Operation cannot be fulfilled on {what} {name:?}: {why}"))
    }

    pub(super) fn bad_request(message: String) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// The error for an invalid object: `Pod "x" is invalid: spec.containers: Required value`.
    pub(super) fn invalid(kind: &ResourceKind, name: &str, why: &str) -> Self {
        let group = if kind.group.is_empty() { String::new() } else { format!(".{}", kind.group) };
        Self::new(422, "Invalid", format!("{}{group} {name:?} is invalid: {why}", kind.name))
            .about(kind, name)
    }

    pub(super) fn forbidden(kind: &ResourceKind, name: &str, why: &str) -> Self {
        Self::new(403, "Forbidden", format!("{} {name:?} is forbidden: {why}", kind.word())).about(kind, name)
    }

    /// The error for a malformed version. Kubernetes answers with a server error, although the
    /// client made the mistake.
    pub(super) fn bad_version(text: &str) -> Self {
        let syntax = format!("strconv.ParseUint: parsing {text:?}: invalid syntax");
        Self::new(500, "", format!("resourceVersion: Invalid value: {text:?}: {syntax}"))
    }

    pub(super) fn invalid_options(why: &str) -> Self {
        Self::new(422, "Invalid", format!("ListOptions.meta.k8s.io \"\" is invalid: {why}"))
    }

    pub(super) fn unsupported_media(media: &str) -> Self {
        let message = format!(
            "the body of the request was in an unknown format ({media}) - accepted media types include: application/json"
        );
        Self::new(415, "UnsupportedMediaType", message)
    }

    pub(super) fn unsupported_patch() -> Self {
        let message = "the body of the request was in an unknown format - accepted media types include: \
                       application/json-patch+json, application/merge-patch+json, \
                       application/strategic-merge-patch+json, application/apply-patch+yaml";
        Self::new(415, "UnsupportedMediaType", message.to_owned())
    }

    pub(super) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    pub(super) fn internal(message: &str) -> Self {
        Self::new(500, "InternalError", format!("Internal error occurred: {message}"))
    }

    pub(super) fn unavailable() -> Self {
        let message = "the server is currently unable to handle the request";
        Self::new(503, "ServiceUnavailable", message.to_owned())
    }

    pub(super) fn into_body(self) -> Value {
        let mut body = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code,
        });
        if !self.reason.is_empty() {
            body["reason"] = self.reason.into();
        }
        if !self.details.is_null() {
            body["details"] = self.details;
        }
        body
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let code = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (code, Json(self.into_body())).into_response()
    }
}
