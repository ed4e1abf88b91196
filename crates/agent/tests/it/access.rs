//! Who may read the pages of the agent.

use std::{net::SocketAddr, time::Duration};

use tessera_agent::shell::PagesAccess;
use tessera_cluster::{
    connect_to,
    fetch::{FetchError, Fetcher},
};
use tessera_sim::reviews::{KnownToken, ReviewServer};
use tessera_wire::tessera::{
    agent_address::{AUDIENCE, Fingerprint},
    page_rights,
};

use super::common::{RegistrationWay, World, load};

const READER: KnownToken = KnownToken {
    user: "system:serviceaccount:monitoring:prometheus",
    audience: None,
    paths: &[page_rights::METRICS, page_rights::USE],
};

struct Stage {
    world: World,
    reviews: ReviewServer,
    fingerprint: Fingerprint,
}

impl Stage {
    async fn new() -> Self {
        let reviews = ReviewServer::start().await.unwrap();
        reviews.add("reader", READER);
        reviews.add(
            "for-agents",
            KnownToken { user: "scheduler", audience: Some(AUDIENCE), paths: READER.paths },
        );
        reviews.add("other", KnownToken { user: "other", audience: Some("vault"), paths: READER.paths });
        reviews.add("nobody", KnownToken { user: "nobody", audience: None, paths: &[] });
        let access = PagesAccess::authenticated(connect_to(reviews.url()).unwrap()).unwrap();
        let fingerprint = access.fingerprint().unwrap();
        let world = World::with_access(RegistrationWay::Registry, access).await;
        Self { world, reviews, fingerprint }
    }

    async fn get(&self, path: &str, token: Option<&str>) -> Result<String, FetchError> {
        let fetcher = Fetcher::new(Duration::from_secs(60));
        let url = format!("https://{}{path}", self.world.address);
        fetcher.get_pinned(&url, self.fingerprint, token).await
    }

    /// Returns the code and the text of a refusal.
    async fn refused(&self, path: &str, token: Option<&str>) -> (u16, String) {
        match self.get(path, token).await {
            Err(FetchError::Status { code, text }) => (code, text),
            other => panic!("{path} {token:?}: {other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_readers_with_a_token_and_the_right_get_pages() {
    let stage = Stage::new().await;
    for token in ["reader", "for-agents"] {
        assert!(stage.get("/metrics", Some(token)).await.unwrap().contains("tessera_"), "{token}");
        let metrics = stage.get("/metrics", Some(token)).await.unwrap();
        let certificate =
            "tessera_certificate_expiry_timestamp_seconds{node=\"node-1\",certificate=\"server\"} ";
        assert!(metrics.contains(certificate), "{metrics}");
        assert!(stage.get("/v1/use", Some(token)).await.unwrap().starts_with('{'), "{token}");
    }
    for path in
        ["/", "/metrics", "/v1/use", "/usage", "/graph", "/healthz", "/readyz", "/version", "/nowhere"]
    {
        let (code, text) = stage.refused(path, None).await;
        assert!(code == 401 && text.contains("ClusterRole tessera-agent-reader"), "{path}: {code} {text}");
    }
    for token in ["unknown", "other"] {
        let (code, text) = stage.refused("/metrics", Some(token)).await;
        assert!(code == 401 && text.contains("kubectl create token"), "{token}: {code} {text}");
    }
    let (code, text) = stage.refused("/usage", Some("reader")).await;
    let command = "--clusterrole=tessera-agent-reader --serviceaccount=monitoring:prometheus";
    assert!(code == 403 && text.contains("URL /tessera/agent;") && text.contains(command), "{code} {text}");
    assert_eq!(stage.refused("/metrics", Some("nobody")).await.0, 403);
    assert_eq!(stage.refused("/made-up", Some("nobody")).await.0, 403, "counts as the index");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_remembered_and_garbage_is_refused_without_a_question() {
    let stage = Stage::new().await;
    stage.get("/metrics", Some("for-agents")).await.unwrap();
    assert_eq!(stage.reviews.count(), 2, "a TokenReview and a SubjectAccessReview");
    stage.get("/metrics", Some("for-agents")).await.unwrap();
    assert_eq!(stage.refused("/metrics", Some("a b")).await.0, 401);
    assert_eq!(stage.refused("/metrics", None).await.0, 401);
    assert_eq!(stage.reviews.count(), 2);
    // All at once, because the budget of an address is filled again five times a second.
    let wrong = (0..24).map(|number| {
        let stage = &stage;
        async move { stage.refused("/metrics", Some(&format!("garbage-{number}"))).await.0 }
    });
    let codes = futures::future::join_all(wrong).await;
    assert!(codes.contains(&401) && codes.contains(&429), "{codes:?}");
    stage.get("/metrics", Some("for-agents")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn known_readers_go_on_while_the_api_server_is_away() {
    let stage = Stage::new().await;
    stage.get("/metrics", Some("reader")).await.unwrap();
    stage.reviews.set_down(true);
    stage.get("/metrics", Some("reader")).await.unwrap();
    let (code, text) = stage.refused("/metrics", Some("for-agents")).await;
    assert!(code == 503 && text.contains("API server cannot be asked"), "{code} {text}");
    stage.reviews.set_down(false);
    stage.get("/metrics", Some("for-agents")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_certificate_or_plain_http_is_refused_by_the_reader() {
    let stage = Stage::new().await;
    let fetcher = Fetcher::new(Duration::from_secs(60));
    let url = |scheme: &str| format!("{scheme}://{}/metrics", stage.world.address);
    let other = Fingerprint([7; 32]);
    let refused = fetcher.get_pinned(&url("https"), other, Some("reader")).await;
    assert!(matches!(refused, Err(FetchError::Certificate)), "{refused:?}");
    assert_eq!(stage.reviews.count(), 0, "no token was sent");
    let refused = fetcher.get_pinned(&url("http"), stage.fingerprint, Some("reader")).await;
    assert!(matches!(refused, Err(FetchError::Address(_))), "{refused:?}");
    assert!(fetcher.get(&url("http")).await.is_err(), "the agent does not speak plain HTTP");
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_need_no_token() {
    let stage = Stage::new().await;
    let probes: SocketAddr = stage.world.probes;
    assert_eq!(load::page(probes, "/healthz").await.as_deref(), Some("ok\n"));
    let ready = Fetcher::new(Duration::from_secs(60)).get(&format!("http://{probes}/readyz")).await;
    assert!(matches!(ready, Ok(_) | Err(FetchError::Status { code: 503, .. })), "{ready:?}");
    assert_eq!(load::page(probes, "/metrics").await, None);
    assert_eq!(stage.reviews.count(), 0);
}
