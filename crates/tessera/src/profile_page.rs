//! `--pprof-address`: CPU profiles of the running program, for `go tool pprof` and other viewers.

use std::time::Duration;

use anyhow::Result;
use axum::Router;
use axum::extract::Query;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use clap::Args;
use serde::Deserialize;
use tessera_profile::{MAX_DURATION, ProfileError, record};
use tessera_serve::{ConnectionLimits, ServeOptions};

use crate::host;
use crate::values::Listen;

/// Duration of a profile without `seconds`, as of Go's programs.
const DEFAULT_SECONDS: u64 = 30;

/// A viewer uses one connection, and profiles are recorded one after the other.
const LIMITS: ConnectionLimits = ConnectionLimits {
    total: 8,
    per_peer: 8,
    head_timeout: Duration::from_secs(5),
    idle_timeout: Duration::from_secs(5),
};

#[derive(Debug, Args)]
pub(crate) struct ProfileArguments {
    /// Address of CPU profiles for pprof, such as 127.0.0.1:6060; every client that reaches it can record one
    #[arg(long, value_name = "ADDRESS", default_value = "off")]
    pprof_address: Listen,
}

#[derive(Deserialize)]
struct Wanted {
    seconds: Option<u64>,
}

impl ProfileArguments {
    /// Starts to serve profiles, if an address is given.
    pub(crate) async fn serve(&self) -> Result<()> {
        let Some(address) = self.pprof_address.0 else { return Ok(()) };
        let (listener, address) = host::listen(address, "--pprof-address").await?;
        tracing::info!(url = %format_args!("http://{address}/debug/pprof/profile"), "serving CPU profiles");
        if !address.ip().is_loopback() {
            tracing::warn!(
                %address,
                "every client that reaches this address can record profiles; use 127.0.0.1 and kubectl port-forward"
            );
        }
        tokio::spawn(async move {
            let options = ServeOptions { limits: LIMITS, tls: None };
            if let Err(error) = tessera_serve::serve(listener, router(), options).await {
                tracing::error!(%error, "the HTTP server of --pprof-address failed; restart to record profiles");
            }
        });
        Ok(())
    }
}

fn router() -> Router {
    Router::new()
        .route("/debug/pprof/", get(async || "CPU profile: /debug/pprof/profile?seconds=30\n"))
        .route("/debug/pprof/profile", get(profile))
}

async fn profile(Query(Wanted { seconds }): Query<Wanted>) -> Response {
    let duration = Duration::from_secs(seconds.unwrap_or(DEFAULT_SECONDS));
    if duration.is_zero() || duration > MAX_DURATION {
        let text = format!("seconds: write 1 to {}\n", MAX_DURATION.as_secs());
        return (StatusCode::BAD_REQUEST, text).into_response();
    }
    let recorded = tokio::task::spawn_blocking(move || record(duration).map(|profile| profile.print())).await;
    match recorded {
        Ok(Ok(Ok(bytes))) => {
            let headers = [
                (header::CONTENT_TYPE, "application/octet-stream"),
                (header::CONTENT_DISPOSITION, "attachment; filename=\"profile\""),
            ];
            (headers, bytes).into_response()
        }
        Ok(Err(error @ ProfileError::Busy)) => (StatusCode::CONFLICT, format!("{error}\n")).into_response(),
        Ok(Err(error)) => failed(&error),
        Ok(Ok(Err(error))) => failed(&error),
        Err(error) => failed(&error),
    }
}

fn failed(error: &dyn std::error::Error) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, format!("{}\n", tessera_cluster::with_causes(error))).into_response()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// Returns head and body of an answer.
    async fn fetch(address: std::net::SocketAddr, path: &str) -> (String, Vec<u8>) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let head = answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap();
        (String::from_utf8_lossy(&answer[..head]).into_owned(), answer.split_off(head + 4))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn serves_a_compressed_profile() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(tessera_serve::serve(listener, router(), ServeOptions { limits: LIMITS, tls: None }));
        let (head, body) = fetch(address, "/debug/pprof/profile?seconds=1").await;
        assert!(head.starts_with("HTTP/1.0 200") && head.contains("application/octet-stream"), "{head}");
        assert_eq!(body.get(..2), Some(&[0x1f, 0x8b][..]), "the magic number of gzip");
        for seconds in ["0", "61"] {
            let (head, body) = fetch(address, &format!("/debug/pprof/profile?seconds={seconds}")).await;
            assert!(head.starts_with("HTTP/1.0 400"), "{head}");
            assert_eq!(body, b"seconds: write 1 to 60\n");
        }
    }
}
