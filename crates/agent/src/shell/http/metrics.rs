//! Pages for Prometheus, in the format and encoding that the reader accepts.

use std::io::Write as _;

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse as _, Response},
    routing::get,
};
use flate2::{Compression, write::GzEncoder};
use tessera_wire::metrics::Format;

use super::Pages;
use crate::exporter::families;

pub(super) fn routes() -> Router<Pages> {
    Router::new()
        .route("/metrics", get(all))
        .route("/metrics/nodes", get(nodes))
        .route("/metric", get(gpu_manager))
}

async fn all(State(pages): State<Pages>, headers: HeaderMap) -> Result<Response, StatusCode> {
    let snapshot = pages.snapshot().await?;
    Ok(answer(&headers, |format| families::metrics(&snapshot, pages.sampler.metrics_options(), format)))
}

async fn nodes(State(pages): State<Pages>, headers: HeaderMap) -> Result<Response, StatusCode> {
    let snapshot = pages.snapshot().await?;
    Ok(answer(&headers, |format| families::metrics_of_nodes(&snapshot, format)))
}

async fn gpu_manager(State(pages): State<Pages>, headers: HeaderMap) -> Result<Response, StatusCode> {
    let snapshot = pages.snapshot().await?;
    Ok(answer(&headers, |format| families::metric(&snapshot, format)))
}

fn answer(headers: &HeaderMap, page: impl Fn(Format) -> String) -> Response {
    // A header may occur several times, and its values are case-insensitive.
    let header_text = |name| {
        let all: Vec<&str> = headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect();
        all.join(",").to_ascii_lowercase()
    };
    let format = Format::accepted(&header_text(header::ACCEPT));
    let text = page(format);
    let content_type = (header::CONTENT_TYPE, format.content_type());
    if accepts_gzip(&header_text(header::ACCEPT_ENCODING))
        && let Ok(packed) = gzip(&text)
    {
        return ([content_type, (header::CONTENT_ENCODING, "gzip")], packed).into_response();
    }
    ([content_type], text).into_response()
}

/// Returns whether the header names `gzip` with a weight above zero.
fn accepts_gzip(header: &str) -> bool {
    header.split(',').any(|choice| {
        let mut words = choice.split(';').map(str::trim);
        let refused = |word: &str| word.strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0f32));
        words.next() == Some("gzip") && !words.any(refused)
    })
}

fn gzip(text: &str) -> std::io::Result<Vec<u8>> {
    let mut packer = GzEncoder::new(Vec::with_capacity(text.len() / 8), Compression::fast());
    packer.write_all(text.as_bytes())?;
    packer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_headers_regardless_of_case_and_repetition() {
        let mut headers = HeaderMap::new();
        headers.append(header::ACCEPT, "text/html".parse().unwrap());
        headers.append(header::ACCEPT, "Application/OpenMetrics-Text; version=1.0.0".parse().unwrap());
        headers.insert(header::ACCEPT_ENCODING, "br, GZip".parse().unwrap());
        let response = answer(&headers, |format| format!("{format:?}"));
        assert_eq!(response.headers()[header::CONTENT_TYPE], Format::OpenMetrics.content_type());
        assert_eq!(response.headers()[header::CONTENT_ENCODING], "gzip");
    }

    #[test]
    fn compresses_only_for_readers_that_accept_gzip() {
        for (header, accepts) in [
            ("", false),
            ("gzip", true),
            ("deflate, gzip;q=0.5", true),
            ("gzip;q=0", false),
            ("identity", false),
        ] {
            assert_eq!(accepts_gzip(header), accepts, "{header}");
        }
    }
}
