//! Agents that need a token, and to whom it is sent.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::http::{HeaderMap, header};
use axum::routing::get;
use serde_json::{Value, json};
use tessera_scheduler::dashboard::{AgentReader, view};
use tessera_scheduler::server::PROBES;
use tessera_serve::authority::self_signed;
use tessera_serve::{ServeOptions, Tls, serve};
use tessera_sim::apiserver::ApiServer;
use tessera_wire::tessera::agent_address::Fingerprint;
use tokio::net::TcpListener;

use crate::server::{Replica, cluster, eventually};

/// An agent with a certificate of its own that records the tokens it gets.
struct Agent {
    url: String,
    certificate: Fingerprint,
    tokens: Arc<Mutex<Vec<Option<String>>>>,
}

impl Agent {
    async fn start(has_tls: bool) -> Self {
        let made = self_signed("tessera-agent", 1_800_000_000).unwrap();
        let tls = has_tls.then(|| Tls::for_all(&made.certificate, &made.key).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let scheme = if has_tls { "https" } else { "http" };
        let url = format!("{scheme}://{}", listener.local_addr().unwrap());
        let tokens: Arc<Mutex<Vec<Option<String>>>> = Arc::default();
        let seen = Arc::clone(&tokens);
        let answer = move |headers: HeaderMap| async move {
            let token = headers.get(header::AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned());
            seen.lock().unwrap().push(token);
            json!({ "gpus": [], "containers": [] }).to_string()
        };
        let router = Router::new().route("/v1/use", get(answer));
        tokio::spawn(serve(listener, router, ServeOptions { limits: PROBES, tls }));
        Self { url, certificate: Fingerprint(made.sha256), tokens }
    }

    fn tokens(&self) -> Vec<Option<String>> {
        self.tokens.lock().unwrap().clone()
    }
}

/// Publishes the address of node a's agent and reads its usage.
async fn usage(api: &ApiServer, replica: &Replica, url: &str, certificate: &str) -> Value {
    let annotations = json!({ "tessera.dev/agent": url, "tessera.dev/agent-certificate": certificate });
    api.patch("/api/v1/nodes/a", &json!({ "metadata": { "annotations": annotations } })).unwrap();
    let expected = (!certificate.is_empty()).then(|| certificate.parse());
    eventually(|| {
        let known = view::node::agent(&replica.app.read(), "a");
        known.is_some_and(|known| known.url == url && known.certificate == expected)
    })
    .await;
    let (code, text) = replica.get("/api/v1/nodes/a/use").await;
    assert_eq!(code, 200);
    serde_json::from_str(&text).unwrap()
}

#[tokio::test]
async fn a_token_is_sent_only_to_the_agent_with_the_published_certificate() {
    let api = cluster().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "first\n").unwrap();
    let replica = Replica::reading(&api, "one", AgentReader::with_token(Some(file.path().to_owned())));
    eventually(|| replica.app.is_ready()).await;
    let (agent, other, open) =
        (Agent::start(true).await, Agent::start(true).await, Agent::start(false).await);
    let certificate = agent.certificate.to_string();

    let measured = usage(&api, &replica, &agent.url, &certificate).await;
    assert_eq!(measured, json!({ "use": { "gpus": [], "containers": [] } }));
    // The kubelet replaces the file before the token expires.
    std::fs::write(file.path(), "second\n").unwrap();
    usage(&api, &replica, &agent.url, &certificate).await;
    let expected = ["Bearer first", "Bearer second"].map(|token| Some(token.to_owned()));
    assert_eq!(agent.tokens(), expected);

    let refused = usage(&api, &replica, &other.url, &certificate).await;
    assert!(refused["notMeasured"].as_str().unwrap().contains("another certificate"), "{refused}");
    assert_eq!(other.tokens(), []);

    // Plain HTTP gets no token, whatever certificate the node publishes.
    assert!(usage(&api, &replica, &open.url, &certificate).await["use"].is_object());
    assert!(usage(&api, &replica, &open.url, "").await["use"].is_object());
    assert_eq!(open.tokens(), [None, None]);
    let as_https = open.url.replace("http:", "https:");
    assert!(usage(&api, &replica, &as_https, &certificate).await["notMeasured"].is_string());
    assert_eq!(open.tokens().len(), 2);

    let damaged = usage(&api, &replica, &agent.url, "sha256:0").await;
    assert!(damaged["notMeasured"].as_str().unwrap().contains("64 hexadecimal digits"), "{damaged}");
    assert_eq!(agent.tokens().len(), 2);
}

#[tokio::test]
async fn without_a_token_the_reason_is_reported() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let agent = Agent::start(true).await;
    let certificate = agent.certificate.to_string();
    let answer = usage(&api, &replica, &agent.url, &certificate).await;
    assert!(answer["notMeasured"].as_str().unwrap().contains("--agent-token"), "{answer}");
    let (api, missing) = (cluster().await, AgentReader::with_token(Some("/nonexistent/token".into())));
    let replica = Replica::reading(&api, "two", missing);
    eventually(|| replica.app.is_ready()).await;
    let answer = usage(&api, &replica, &agent.url, &certificate).await;
    assert!(answer["notMeasured"].as_str().unwrap().contains("/nonexistent/token"), "{answer}");
    assert_eq!(agent.tokens(), []);
}
