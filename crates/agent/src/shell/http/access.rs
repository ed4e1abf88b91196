//! Who may read the pages.

use std::{sync::Arc, time::SystemTime};

use axum::{
    Router,
    extract::Request,
    middleware::{self, Next},
    response::Response,
};
use tessera_cluster::{
    Client,
    access::{Gate, Protection},
};
use tessera_serve::{
    Tls, TlsError,
    access::{Peer, bearer_token, refusal},
    authority::{self, AuthorityError},
};
use tessera_wire::tessera::{
    agent_address::{AUDIENCE, Fingerprint},
    node_use, page_rights,
};

/// ClusterRole of `deploy/agent` that permits to read the pages.
const READER_ROLE: &str = "tessera-agent-reader";

/// Name in the certificate. Clients do not check it, because they know the certificate by its fingerprint.
const SERVER_NAME: &str = "tessera-agent";

/// Who may read the pages.
#[derive(Clone, Debug)]
pub enum PagesAccess {
    /// Everyone who reaches them, by plain HTTP.
    Open,
    /// Callers with a token that the API server allows, by HTTPS.
    Authenticated(Box<AuthenticatedPages>),
}

/// How the pages are protected.
#[derive(Clone, Debug)]
pub struct AuthenticatedPages {
    gate: Arc<Gate>,
    tls: Tls,
    fingerprint: Fingerprint,
}

/// The pages cannot be protected.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The certificate cannot be made.
    #[error(transparent)]
    Certificate(#[from] AuthorityError),
    /// The certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

impl PagesAccess {
    /// Makes a certificate and lets the API server of this client decide who may read.
    pub fn authenticated(client: Client) -> Result<Self, AccessError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let made = authority::self_signed(SERVER_NAME, now.as_secs())?;
        let tls = Tls::for_all(&made.certificate, &made.key)?;
        let gate = Arc::new(Gate::new(client, Protection { audience: AUDIENCE, role: READER_ROLE }));
        let fingerprint = Fingerprint(made.sha256);
        Ok(Self::Authenticated(Box::new(AuthenticatedPages { gate, tls, fingerprint })))
    }

    /// Returns the fingerprint of the certificate, if the pages are served with one.
    #[must_use]
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        match self {
            Self::Open => None,
            Self::Authenticated(pages) => Some(pages.fingerprint),
        }
    }

    /// Returns the certificate of the listener, if it has one.
    pub(super) fn certificate(&self) -> Option<Tls> {
        match self {
            Self::Open => None,
            Self::Authenticated(pages) => Some(pages.tls.clone()),
        }
    }

    /// Returns the certificate of the listener, and the router with a check of each request.
    pub(super) fn protect(self, router: Router) -> (Router, Option<Tls>) {
        let Self::Authenticated(pages) = self else { return (router, None) };
        let AuthenticatedPages { gate, tls, .. } = *pages;
        let check = move |request: Request, next: Next| check(Arc::clone(&gate), request, next);
        (router.layer(middleware::from_fn(check)), Some(tls))
    }
}

/// Returns the right to read a page, as ClusterRoles name it. Pages that do not exist need one too.
fn right_for(path: &str) -> &'static str {
    match path {
        "/metric" | "/metrics" | "/metrics/nodes" => page_rights::METRICS,
        node_use::PATH => page_rights::USE,
        _ => page_rights::AGENT,
    }
}

async fn check(gate: Arc<Gate>, request: Request, next: Next) -> Response {
    let right = right_for(request.uri().path());
    let peer = Peer::of_request(&request);
    let checked = gate.check(peer, bearer_token(request.headers()), right).await;
    match checked {
        Ok(()) => next.run(request).await,
        Err(denied) => refusal(denied.code(), &denied.to_string()),
    }
}
