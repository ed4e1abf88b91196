//! What goes wrong, as Kubernetes words it.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::path::Target;

/// An error with its status code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    code: u16,
    reason: &'static str,
    message: String,
}

impl Problem {
    fn new(code: u16, reason: &'static str, message: String) -> Self {
        Self { code, reason, message }
    }

    pub(super) fn no_such_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource".to_owned())
    }

    pub(super) fn not_found(target: &Target) -> Self {
        Self::new(404, "NotFound", format!("{} {:?} not found", target.word(), target.name))
    }

    pub(super) fn exists(target: &Target, name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("{} {name:?} already exists", target.word()))
    }

    /// Of a write that goes by an old version.
    pub(super) fn stale(target: &Target) -> Self {
        Self::conflict(
            &target.word(),
            &target.name,
            "the object has been modified; please apply your changes to the latest version and try again",
        )
    }

    pub(super) fn conflict(what: &str, name: &str, why: &str) -> Self {
        Self::new(409, "Conflict", format!("Operation cannot be fulfilled on {what} {name:?}: {why}"))
    }

    pub(super) fn bad_request(message: String) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(super) fn unsupported_patch() -> Self {
        let message = "the body of the request was in an unknown format - accepted media types include: \
                       application/merge-patch+json, application/strategic-merge-patch+json";
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
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        })
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let code = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (code, Json(self.into_body())).into_response()
    }
}
