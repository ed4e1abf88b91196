//! Accepts connections, with limits on their number and on idle time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::tls::Tls;

/// Concurrent connections of one listener. kube-scheduler keeps a few dozen; the rest is for users
/// and Prometheus.
const MAX_CONNECTIONS: usize = 512;

/// Timeout of the TLS handshake and of the request head.
const HEADER_TIMEOUT: Duration = Duration::from_secs(120);

/// Serves connections until the listener fails for good.
pub(super) async fn serve(listener: TcpListener, router: Router, tls: Option<Tls>) -> io::Result<()> {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
        let (stream, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            // The error concerns one connection, or the process has no free descriptor for a
            // moment.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection; continuing with the next one");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let (router, tls) = (router.clone(), tls.clone());
        tokio::spawn(async move {
            match tls {
                None => converse(stream, router).await,
                Some(tls) => {
                    let shaken = tokio::time::timeout(HEADER_TIMEOUT, tls.acceptor().accept(stream)).await;
                    if let Ok(Ok(stream)) = shaken {
                        converse(stream, router).await;
                    }
                }
            }
            drop(place);
        });
    }
}

async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, router: Router) {
    let outcome = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await;
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection ended");
    }
}
