//! The login of the pages: a token of Kubernetes, sent with each request or kept in a cookie.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, FromRequest as _, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Form, Router};
use futures::StreamExt as _;
use serde::Deserialize;
use tessera_cluster::Client;
use tessera_cluster::access::{Gate, Protection};
use tessera_serve::access::{Peer, bearer_token, refusal};
use tessera_wire::tessera::page_rights;

use super::http::{HEADERS, problem};

/// Audience of tokens for the pages. A token for agents, which nodes receive, is of no use here.
const AUDIENCE: &str = "tessera.dev/scheduler";

/// ClusterRole of `deploy/scheduler` that permits to read the pages.
const READER_ROLE: &str = "tessera-dashboard-reader";

/// Time after which a stream ends. Its reader connects again and is checked again.
const STREAM_LIFETIME: Duration = Duration::from_secs(600);

/// Longest token that fits into a cookie. Browsers store 4096 bytes with the name and the attributes.
const MAX_COOKIE_TOKEN_BYTES: usize = 3900;

/// Path of the live updates.
const STREAM_PATH: &str = "/api/v1/stream";

/// Size limit of the login form.
const MAX_FORM_BYTES: usize = 16 << 10;

/// The login page; the comment stands for the reason why a token was not accepted.
const PAGE: &str = include_str!("assets/login.html");
const MESSAGE: &str = "<!-- message -->";

/// Content policy of the login page, which needs no script and sends its form to this server.
const CONTENT_POLICY: &str = "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; \
                              form-action 'self'; frame-ancestors 'none'";

/// Lets in callers whose token may read the pages.
#[derive(Clone, Debug)]
pub struct Login {
    gate: Arc<Gate>,
    /// True if the pages are served with TLS.
    is_secure: bool,
    stream_lifetime: Duration,
    form_timeout: Duration,
}

/// Time in which the form must arrive. A connection that waits for it is not closed otherwise.
const FORM_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
struct LoginForm {
    token: String,
}

impl Login {
    /// Returns a login that asks the API server of this client. `is_secure` says whether the pages have TLS.
    #[must_use]
    pub fn new(client: Client, is_secure: bool) -> Self {
        let protection = Protection { audience: AUDIENCE, role: READER_ROLE };
        let gate = Arc::new(Gate::new(client, protection));
        Self { gate, is_secure, stream_lifetime: STREAM_LIFETIME, form_timeout: FORM_TIMEOUT }
    }

    /// Returns the same login with another lifetime of streams.
    #[must_use]
    pub fn with_stream_lifetime(self, stream_lifetime: Duration) -> Self {
        Self { stream_lifetime, ..self }
    }

    /// Returns the same login with another time in which the form must arrive.
    #[must_use]
    pub fn with_form_timeout(self, form_timeout: Duration) -> Self {
        Self { form_timeout, ..self }
    }

    /// Returns the router with the login page and with a check of all other requests.
    pub(crate) fn protect<S: Clone + Send + Sync + 'static>(self, router: Router<S>) -> Router<S> {
        let own = Router::new()
            .route("/login", get(|| async { page(StatusCode::OK, "") }).post(log_in))
            .route("/logout", post(log_out))
            .layer(DefaultBodyLimit::max(MAX_FORM_BYTES))
            .with_state(self.clone());
        let check = move |request: Request, next: Next| check(self.clone(), request, next);
        router.layer(middleware::from_fn(check)).merge(own)
    }

    /// Returns the name of the cookie. Browsers accept the prefix only from this host and with TLS.
    fn cookie_name(&self) -> &'static str {
        if self.is_secure { "__Host-tessera-token" } else { "tessera-token" }
    }

    /// Returns the header that sets the cookie, or deletes it for an empty token.
    fn cookie(&self, token: &str) -> String {
        let name = self.cookie_name();
        let secure = if self.is_secure { "; Secure" } else { "" };
        let age = if token.is_empty() { "; Max-Age=0" } else { "" };
        format!("{name}={token}; Path=/; HttpOnly; SameSite=Strict{secure}{age}")
    }

    fn token<'h>(&self, headers: &'h HeaderMap) -> Option<&'h str> {
        bearer_token(headers).or_else(|| cookie_value(headers, self.cookie_name()))
    }
}

fn cookie_value<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut cookies =
        lines.flat_map(|line| line.split(';')).filter_map(|cookie| cookie.trim().split_once('='));
    cookies.find(|(found, value)| *found == name && !value.is_empty()).map(|(_, value)| value)
}

async fn check(login: Login, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    // The files of the pages are the same in every cluster.
    if path.starts_with("/assets/") {
        return next.run(request).await;
    }
    let is_metrics = matches!(path, "/metrics" | "/metrics/nodes");
    let url = if is_metrics { page_rights::METRICS } else { page_rights::DASHBOARD };
    let (peer, token) = (Peer::of_request(&request), login.token(request.headers()));
    let Err(denied) = login.gate.check(peer, token, url).await else {
        let is_stream = path == STREAM_PATH;
        let answer = next.run(request).await;
        return if is_stream { limited(answer, login.stream_lifetime) } else { answer };
    };
    match path {
        "/" if denied.code() == StatusCode::UNAUTHORIZED => see_other("login"),
        _ if path.starts_with("/api/") => problem(denied.code(), denied.to_string()),
        _ => refusal(denied.code(), &denied.to_string()),
    }
}

/// Ends an answer after this time.
fn limited(answer: Response, lifetime: Duration) -> Response {
    let end = Box::pin(tokio::time::sleep(lifetime));
    answer.map(|body| Body::from_stream(body.into_data_stream().take_until(end)))
}

/// Checks a token and keeps it in a cookie.
async fn log_in(State(login): State<Login>, request: Request) -> Response {
    let peer = Peer::of_request(&request);
    let form = tokio::time::timeout(login.form_timeout, Form::<LoginForm>::from_request(request, &())).await;
    let Ok(form) = form else {
        return page(StatusCode::REQUEST_TIMEOUT, "the form did not arrive in time");
    };
    let Ok(Form(LoginForm { token })) = form else {
        return page(StatusCode::BAD_REQUEST, "the form must have the field token");
    };
    let token = token.trim();
    if token.len() > MAX_COOKIE_TOKEN_BYTES {
        let text = "this token is too long for a cookie; send it as the header Authorization instead";
        return page(StatusCode::BAD_REQUEST, text);
    }
    match login.gate.check(peer, Some(token), page_rights::DASHBOARD).await {
        Ok(()) => with_cookie(see_other("./"), &login.cookie(token)),
        Err(denied) => page(denied.code(), &denied.to_string()),
    }
}

async fn log_out(State(login): State<Login>) -> Response {
    with_cookie(see_other("login"), &login.cookie(""))
}

/// Redirects to a path relative to the request's, so that it also works below a prefix.
fn see_other(location: &'static str) -> Response {
    (StatusCode::SEE_OTHER, [(header::LOCATION, location), (header::CACHE_CONTROL, "no-store")])
        .into_response()
}

fn with_cookie(mut answer: Response, cookie: &str) -> Response {
    if let Ok(value) = HeaderValue::try_from(cookie) {
        answer.headers_mut().insert(header::SET_COOKIE, value);
    }
    answer
}

/// Returns the login page with a message.
fn page(code: StatusCode, message: &str) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CACHE_CONTROL, "no-store")];
    let mut answer = (code, kind, PAGE.replace(MESSAGE, &escaped(message))).into_response();
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    let policy = HeaderValue::from_static(CONTENT_POLICY);
    answer.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    // Under `no-referrer`, browsers send forms with the origin `null`, which is refused.
    answer.headers_mut().insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    answer
}

/// Returns a text as HTML that shows it. Names of users come from outside.
fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        '\'' => "&#39;".to_owned(),
        other => other.to_string(),
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_found_by_its_whole_name() {
        let mut headers = HeaderMap::new();
        headers.append(header::COOKIE, HeaderValue::from_static("a=1; x-tessera-token=2"));
        headers
            .append(header::COOKIE, HeaderValue::from_static("tessera-token=; tessera-token=e30.e30=; b=3"));
        assert_eq!(cookie_value(&headers, "tessera-token"), Some("e30.e30="));
        assert_eq!(cookie_value(&headers, "__Host-tessera-token"), None);
    }

    #[test]
    fn the_page_shows_messages_as_text() {
        assert_eq!(PAGE.matches(MESSAGE).count(), 1);
        assert_eq!(escaped("<b a=\"'&\">"), "&lt;b a=&quot;&#39;&amp;&quot;&gt;");
    }
}
