//! A proxy in front of the API server that can hold a Binding before it arrives, hold its answer, or hold the second
//! write of a corrected claim.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use anyhow::Result;
use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use tokio::{net::TcpListener, sync::Notify};

use super::Site;

/// What is held.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Hold {
    Nothing = 0,
    /// The Binding does not arrive.
    Before = 1,
    /// The Binding is executed, but its answer does not arrive.
    After = 2,
    /// The allocation of a claim does not arrive, after the old one was cleared.
    Allocation = 3,
}

pub(super) struct Gate {
    shared: Arc<Shared>,
    pub(super) kubeconfig: PathBuf,
}

struct Shared {
    client: kube::Client,
    hold: AtomicU8,
    held: Notify,
}

impl Gate {
    pub(super) async fn start(site: &Site) -> Result<Self> {
        let client = tessera_cluster::connect(Some(&site.cluster.kubeconfig(super::USER, "e2e")?)).await?;
        let shared = Arc::new(Shared { client, hold: AtomicU8::new(0), held: Notify::new() });
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let router = Router::new().fallback(pass).with_state(Arc::clone(&shared));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let kubeconfig = site.harness.state("gate")?.join("kubeconfig");
        let text = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "gate",
            "clusters": [{ "name": "gate", "cluster": { "server": url } }],
            "users": [{ "name": "gate", "user": {} }],
            "contexts": [{ "name": "gate", "context": { "cluster": "gate", "user": "gate" } }],
        });
        fs::write(&kubeconfig, text.to_string())?;
        Ok(Self { shared, kubeconfig })
    }

    pub(super) fn hold(&self, hold: Hold) {
        self.shared.hold.store(hold as u8, Ordering::SeqCst);
    }

    /// Waits until a request is held.
    pub(super) async fn held(&self) {
        self.shared.held.notified().await;
    }
}

async fn pass(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let hold = shared.hold.load(Ordering::SeqCst);
    let path = request.uri().path().to_owned();
    let is_binding = path.ends_with("/binding");
    if is_binding && hold == Hold::Before as u8 {
        shared.held.notify_one();
        return std::future::pending().await;
    }
    let (mut parts, body) = request.into_parts();
    parts.headers.remove("host");
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default().to_vec();
    let is_claim_status = path.contains("/resourceclaims/") && path.ends_with("/status");
    let is_allocation = || String::from_utf8_lossy(&body).contains("\"allocationTimestamp\"");
    if hold == Hold::Allocation as u8 && is_claim_status && is_allocation() {
        shared.held.notify_one();
        return std::future::pending().await;
    }
    let forwarded = shared.client.send(Request::from_parts(parts, body.into())).await;
    if is_binding && hold == Hold::After as u8 {
        shared.held.notify_one();
        return std::future::pending().await;
    }
    match forwarded {
        Ok(response) => response.map(Body::new),
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}
