//! The admission webhook, for clusters whose API server cannot set `schedulerName` by a policy. Every replica answers,
//! because the answer depends on nothing but the pod and the settings.

use std::sync::Arc;

use axum::extract::State as FromApp;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Json, body::Bytes, extract::rejection::BytesRejection};
use tessera_wire::foreign::admission_review::AdmissionReview;

use super::{App, Caller};
use crate::state::ServedSchedulers;

/// Path at which the API server calls the webhook.
pub(super) const PATH: &str = "/admit/pods";

/// Largest accepted body. The API server stores pods of up to 1.5 MiB.
pub(super) const BODY_LIMIT: usize = 4 << 20;

/// Gives pods that request GPUs, or use claims where these are served, the name of the second kube-scheduler.
pub(super) async fn admit(FromApp(app): FromApp<Arc<App>>, body: Result<Bytes, BytesRejection>) -> Response {
    let refused = |text: String| (StatusCode::BAD_REQUEST, text).into_response();
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return refused(rejection.body_text()),
    };
    let review = match app.parse::<AdmissionReview>(Caller::ApiServer, &body) {
        Ok(review) => review,
        Err(error) => return refused(format!("cannot parse the request: {error}")),
    };
    let serves_claims = app.read().serves_claims();
    match review.with_scheduler(ServedSchedulers::SECOND, serves_claims) {
        Ok(answer) => Json(answer).into_response(),
        Err(bad) => refused(bad.to_string()),
    }
}
