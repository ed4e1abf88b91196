//! Taking connections: so many at a time, none that only occupies a place.

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

/// Connections at a time on one listener. kube-scheduler keeps a few dozen; the rest is for people and Prometheus.
const CONNECTIONS: usize = 512;

/// How long a client may take to shake hands, and to send the head of a request.
const HEAD_WITHIN: Duration = Duration::from_secs(120);

/// Serves connections until the listener fails for good.
pub(super) async fn serve(listener: TcpListener, router: Router, tls: Option<Tls>) -> io::Result<()> {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
        let (stream, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            // Of one connection, or of the whole process for a moment.
            Err(error) => {
                tracing::warn!(%error, "cannot take a connection");
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
                    let shaken = tokio::time::timeout(HEAD_WITHIN, tls.acceptor().accept(stream)).await;
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
        .header_read_timeout(HEAD_WITHIN)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await;
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection ended");
    }
}
