//! The node's type, as the metadata service of a cloud tells it.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// What the service at this URL answers, if it does.
pub(super) async fn ask(url: &str) -> Option<String> {
    let found = fetch(url).await;
    found.inspect_err(|error| tracing::warn!("no instance type from {url}: {error:#}")).ok()
}

/// One line over plain HTTP, within two seconds.
async fn fetch(url: &str) -> Result<String> {
    let rest = url.strip_prefix("http://").context("only http:// is supported")?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let address = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
    let exchange = async {
        let mut stream = tokio::net::TcpStream::connect(&address).await?;
        let request = format!("GET /{path} HTTP/1.0\r\nHost: {host}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(65_536).read_to_end(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer =
        tokio::time::timeout(Duration::from_secs(2), exchange).await.context("no answer in time")??;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    let status = head.lines().next().unwrap_or_default();
    ensure!(status.split(' ').nth(1) == Some("200"), "it answered {status:?}");
    let found = body.trim();
    ensure!(!found.is_empty() && found.len() < 256 && !found.contains(['\n', '<']), "it answered {found:?}");
    Ok(found.to_owned())
}
