//! The login of the pages.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, Response, header};
use tessera_cluster::connect_to;
use tessera_scheduler::dashboard::login::Login;
use tessera_scheduler::server::{pages, verbs};
use tessera_sim::reviews::{KnownToken, ReviewServer};
use tessera_wire::tessera::page_rights;
use tower::ServiceExt as _;

use crate::server::{Replica, cluster};

struct Stage {
    reviews: ReviewServer,
    replica: Replica,
    pages: Router,
}

impl Stage {
    async fn new(is_secure: bool) -> Self {
        let reviews = ReviewServer::start().await.unwrap();
        let token = |user, audience, paths| KnownToken { user, audience, paths };
        reviews.add("reader", token("jane", None, &[page_rights::DASHBOARD]));
        reviews.add("prometheus", token("prometheus", None, &[page_rights::METRICS]));
        reviews.add("stranger", token("<b>", None, &["/api/v1/nodes", "/"]));
        reviews.add("for-agents", token("jane", Some("tessera.dev/agent"), &[page_rights::DASHBOARD]));
        let replica = Replica::ready(&cluster().await, "one").await;
        let login = Login::new(connect_to(reviews.url()).unwrap(), is_secure);
        let pages = pages(Arc::clone(&replica.app), 1 << 20, &[], Some(login));
        Self { reviews, replica, pages }
    }

    async fn send(&self, request: Request<Body>) -> Response<Body> {
        self.pages.clone().oneshot(request).await.unwrap()
    }

    async fn code(&self, path: &str, name: header::HeaderName, value: &str) -> u16 {
        let request = Request::get(path).header(name, value).body(Body::empty()).unwrap();
        self.send(request).await.status().as_u16()
    }

    async fn log_in(&self, token: &str, origin: &str) -> Response<Body> {
        let request = Request::post("/login")
            .header(header::HOST, "127.0.0.1:12346")
            .header(header::ORIGIN, origin)
            .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        self.send(request.body(Body::from(format!("token={token}"))).unwrap()).await
    }
}

/// A stranger could otherwise keep all connections of the pages.
#[tokio::test]
async fn a_form_that_does_not_arrive_is_answered() {
    let reviews = ReviewServer::start().await.unwrap();
    let replica = Replica::ready(&cluster().await, "one").await;
    let login = Login::new(connect_to(reviews.url()).unwrap(), false).with_form_timeout(Duration::ZERO);
    let pages = pages(Arc::clone(&replica.app), 1 << 20, &[], Some(login));
    let never = Body::from_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>());
    let request = Request::post("/login").header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
    let answer = pages.oneshot(request.body(never).unwrap()).await.unwrap();
    assert_eq!(answer.status(), 408);
}

async fn text(answer: Response<Body>) -> String {
    String::from_utf8(to_bytes(answer.into_body(), usize::MAX).await.unwrap().to_vec()).unwrap()
}

fn header_of(answer: &Response<Body>, name: header::HeaderName) -> String {
    answer.headers().get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
}

#[tokio::test]
async fn pages_need_a_token_with_the_right_to_read_them() {
    let stage = Stage::new(true).await;
    let bearer = header::AUTHORIZATION;
    for path in
        ["/api/v1/nodes", "/api/v1/stream", "/explain/team/p", "/gpushare-scheduler/inspect", "/metrics"]
    {
        assert_eq!(stage.code(path, header::ACCEPT, "*/*").await, 401, "{path}");
        assert_eq!(stage.code(path, bearer.clone(), "Bearer stranger").await, 403, "{path}");
        assert_eq!(stage.code(path, bearer.clone(), "Bearer for-agents").await, 401, "{path}");
    }
    for (path, token, code) in [
        ("/", "reader", 200),
        ("/api/v1/nodes", "reader", 200),
        ("/version", "reader", 200),
        ("/metrics", "prometheus", 200),
        ("/metrics", "reader", 403),
        ("/api/v1/nodes", "prometheus", 403),
    ] {
        assert_eq!(
            stage.code(path, bearer.clone(), &format!("Bearer {token}")).await,
            code,
            "{path} {token}"
        );
    }
    let request = Request::get("/").body(Body::empty()).unwrap();
    let answer = stage.send(request).await;
    assert_eq!((answer.status().as_u16(), header_of(&answer, header::LOCATION)), (303, "login".to_owned()));
    let request = Request::get("/api/v1/nodes").body(Body::empty()).unwrap();
    let body = text(stage.send(request).await).await;
    let json: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert!(json["error"].as_str().unwrap().contains("tessera-dashboard-reader"), "{body}");
    assert_eq!(stage.code("/assets/base.css", header::ACCEPT, "*/*").await, 200);
    // The verbs have certificates instead.
    let verbs = verbs(Arc::clone(&stage.replica.app), 1 << 20);
    let filter = Request::post("/scheduler/filter").body(Body::from(r#"{"Pod":{},"NodeNames":[]}"#)).unwrap();
    assert_eq!(verbs.oneshot(filter).await.unwrap().status().as_u16(), 200);
}

#[tokio::test]
async fn a_login_is_kept_in_a_cookie_that_scripts_and_other_sites_do_not_get() {
    for (is_secure, name, ending) in
        [(true, "__Host-tessera-token", "; Secure"), (false, "tessera-token", "")]
    {
        let stage = Stage::new(is_secure).await;
        let own = "http://127.0.0.1:12346";
        let answer = stage.log_in("reader", own).await;
        assert_eq!((answer.status().as_u16(), header_of(&answer, header::LOCATION)), (303, "./".to_owned()));
        let cookie = header_of(&answer, header::SET_COOKIE);
        assert_eq!(cookie, format!("{name}=reader; Path=/; HttpOnly; SameSite=Strict{ending}"));
        assert_eq!(stage.code("/api/v1/nodes", header::COOKIE, &format!("{name}=reader")).await, 200);
        assert_eq!(stage.code("/api/v1/nodes", header::COOKIE, &format!("{name}=garbage")).await, 401);
        let request = Request::post("/logout").body(Body::empty()).unwrap();
        let answer = stage.send(request).await;
        let cleared = format!("{name}=; Path=/; HttpOnly; SameSite=Strict{ending}; Max-Age=0");
        assert_eq!(header_of(&answer, header::SET_COOKIE), cleared);
    }
}

/// A reader that lost the right must not follow the cluster for ever.
#[tokio::test]
async fn a_stream_ends_so_that_its_reader_is_checked_again() {
    let stage = Stage::new(true).await;
    let login =
        Login::new(connect_to(stage.reviews.url()).unwrap(), true).with_stream_lifetime(Duration::ZERO);
    let pages = pages(Arc::clone(&stage.replica.app), 1 << 20, &[], Some(login));
    let request = Request::get("/api/v1/stream").header(header::AUTHORIZATION, "Bearer reader");
    let answer = pages.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(answer.status().as_u16(), 200);
    let ended = tokio::time::timeout(Duration::from_secs(60), text(answer)).await;
    assert!(ended.is_ok(), "the stream goes on");
}

#[tokio::test]
async fn a_login_that_fails_says_why_and_sets_no_cookie() {
    let stage = Stage::new(true).await;
    let own = "http://127.0.0.1:12346";
    let long = "a".repeat(4000);
    for (token, origin, code, words) in [
        ("unknown", own, 401, "the API server does not accept this token"),
        ("stranger", own, 403, "user &lt;b&gt; may not get the non-resource URL /tessera/dashboard"),
        ("", own, 401, "cannot be a token"),
        (long.as_str(), own, 400, "too long for a cookie"),
        ("reader", "http://evil.example", 403, "requests of pages from"),
    ] {
        let answer = stage.log_in(token, origin).await;
        assert_eq!(answer.status().as_u16(), code, "{token} {origin}");
        assert_eq!(header_of(&answer, header::SET_COOKIE), "");
        let body = text(answer).await;
        assert!(body.contains(words), "{token} {origin}: {body}");
    }
    stage.reviews.set_down(true);
    let answer = stage.log_in("reader", own).await;
    assert_eq!(answer.status().as_u16(), 503);
    let page = stage.send(Request::get("/login").body(Body::empty()).unwrap()).await;
    assert!(header_of(&page, header::CONTENT_SECURITY_POLICY).contains("form-action 'self'"));
    assert_eq!(header_of(&page, header::X_FRAME_OPTIONS), "DENY");
}
