//! The part of an API server that answers who a token belongs to and what its user may read, for tests of programs
//! that check tokens.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Audience of tokens for the server itself.
const OWN_AUDIENCE: &str = "https://kubernetes.default.svc";

/// A token that the server knows.
#[derive(Clone, Debug)]
pub struct KnownToken {
    /// Name of its user.
    pub user: &'static str,
    /// Audience for which it was made; `None` for the server itself.
    pub audience: Option<&'static str>,
    /// Non-resource URLs that the user may get.
    pub paths: &'static [&'static str],
}

/// A server that answers TokenReviews and SubjectAccessReviews. It ends when it is dropped.
#[derive(Debug)]
pub struct ReviewServer {
    state: Shared,
    url: String,
    task: JoinHandle<io::Result<()>>,
}

type Shared = Arc<Mutex<Reviews>>;

#[derive(Debug, Default)]
struct Reviews {
    tokens: BTreeMap<String, KnownToken>,
    is_down: bool,
    count: usize,
}

impl Drop for ReviewServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ReviewServer {
    /// Starts a server that knows no tokens.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let state = Shared::default();
        let router = Router::new()
            .route("/apis/authentication.k8s.io/v1/tokenreviews", post(review_token))
            .route("/apis/authorization.k8s.io/v1/subjectaccessreviews", post(review_access))
            .with_state(Arc::clone(&state));
        let task = tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { state, url, task })
    }

    /// Returns the URL of the server.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Adds or replaces a token.
    pub fn add(&self, token: &str, known: KnownToken) {
        lock(&self.state).tokens.insert(token.to_owned(), known);
    }

    /// Makes the server answer all requests with an error, or answer them again.
    pub fn set_down(&self, is_down: bool) {
        lock(&self.state).is_down = is_down;
    }

    /// Returns the number of requests so far.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.state).count
    }
}

fn lock(state: &Shared) -> MutexGuard<'_, Reviews> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a request. Returns the answer of a server that is down.
fn admit(state: &Shared) -> Option<Response> {
    let mut state = lock(state);
    state.count += 1;
    state.is_down.then(|| {
        let status =
            json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 503, "message": "away" });
        (StatusCode::SERVICE_UNAVAILABLE, Json(status)).into_response()
    })
}

async fn review_token(State(state): State<Shared>, Json(mut review): Json<Value>) -> Response {
    if let Some(refused) = admit(&state) {
        return refused;
    }
    let spec = &review["spec"];
    let token = lock(&state).tokens.get(spec["token"].as_str().unwrap_or_default()).cloned();
    let valid = token.and_then(|token| {
        let audience = token.audience.unwrap_or(OWN_AUDIENCE);
        let wanted = spec["audiences"].as_array().cloned().unwrap_or_else(|| vec![json!(OWN_AUDIENCE)]);
        wanted.contains(&json!(audience)).then_some((token.user, audience))
    });
    review["status"] = match valid {
        Some((user, audience)) => {
            json!({ "authenticated": true, "audiences": [audience], "user": { "username": user, "groups": ["all"] } })
        }
        None => json!({ "authenticated": false, "error": "the token is unknown" }),
    };
    (StatusCode::CREATED, Json(review)).into_response()
}

async fn review_access(State(state): State<Shared>, Json(mut review): Json<Value>) -> Response {
    if let Some(refused) = admit(&state) {
        return refused;
    }
    let (spec, wanted) = (&review["spec"], &review["spec"]["nonResourceAttributes"]);
    let allowed = wanted["verb"] == "get"
        && spec["groups"] == json!(["all"])
        && lock(&state).tokens.values().any(|token| {
            spec["user"] == token.user && token.paths.iter().any(|path| wanted["path"] == *path)
        });
    review["status"] = json!({ "allowed": allowed });
    (StatusCode::CREATED, Json(review)).into_response()
}
