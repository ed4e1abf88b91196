//! The limits of the listeners.

use std::io;
use std::time::Duration;

use axum::Router;
use tessera_serve::{ConnectionLimits, ServeOptions, Tls, serve};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Idle time of connections to the verbs. kube-scheduler closes idle connections after 90 s. If the scheduler closed
/// them first, a call could fail that is sent at the same moment.
const VERBS_IDLE_TIMEOUT: Duration = Duration::from_secs(120);

/// Limits of the verbs. kube-scheduler binds many pods at a time, each on a connection of its own. All of them come
/// from one address, and only clients with a certificate get past the handshake.
pub const VERBS: ConnectionLimits = ConnectionLimits {
    total: 1024,
    per_peer: 1024,
    head_timeout: Duration::from_secs(5),
    idle_timeout: VERBS_IDLE_TIMEOUT,
};

/// Limits of the pages. All users of `kubectl port-forward` share one address.
pub const PAGES: ConnectionLimits = ConnectionLimits {
    total: 192,
    per_peer: 96,
    head_timeout: Duration::from_secs(5),
    idle_timeout: Duration::from_secs(30),
};

/// Limits of the probes. A kubelet uses one connection for each.
pub const PROBES: ConnectionLimits = ConnectionLimits {
    total: 64,
    per_peer: 16,
    head_timeout: Duration::from_secs(2),
    idle_timeout: Duration::from_secs(2),
};

/// Limits of the admission webhook. The API servers keep their connections open and share them among calls.
pub const WEBHOOK: ConnectionLimits = ConnectionLimits { total: 128, per_peer: 64, ..VERBS };

/// Limits of a listener with all routes.
pub const ALL: ConnectionLimits = ConnectionLimits { total: 512, per_peer: 512, ..VERBS };

/// Serves several listeners until one of them fails.
pub async fn serve_all(
    listeners: Vec<(TcpListener, Router, ConnectionLimits, Option<Tls>)>,
) -> io::Result<()> {
    let mut servers = JoinSet::new();
    for (listener, router, limits, tls) in listeners {
        servers.spawn(serve(listener, router, ServeOptions { limits, tls }));
    }
    match servers.join_next().await {
        Some(Ok(ended)) => ended,
        Some(Err(panicked)) => Err(io::Error::other(panicked)),
        None => std::future::pending().await,
    }
}
