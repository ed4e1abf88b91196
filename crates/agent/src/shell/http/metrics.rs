//! Pages for Prometheus: in the form and encoding the reader asks for.

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
    let picture = pages.picture().await?;
    Ok(answer(&headers, |format| families::metrics(&picture, pages.sampler.wanted(), format)))
}

async fn nodes(State(pages): State<Pages>, headers: HeaderMap) -> Result<Response, StatusCode> {
    let picture = pages.picture().await?;
    Ok(answer(&headers, |format| families::metrics_of_nodes(&picture, format)))
}

async fn gpu_manager(State(pages): State<Pages>, headers: HeaderMap) -> Result<Response, StatusCode> {
    let picture = pages.picture().await?;
    Ok(answer(&headers, |format| families::metric(&picture, format)))
}

fn answer(headers: &HeaderMap, page: impl Fn(Format) -> String) -> Response {
    // A header may come several times, and what it names is the same in capitals.
    let said = |name| {
        let all: Vec<&str> = headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect();
        all.join(",").to_ascii_lowercase()
    };
    let format = Format::accepted(&said(header::ACCEPT));
    let text = page(format);
    let kind = (header::CONTENT_TYPE, format.content_type());
    if takes_gzip(&said(header::ACCEPT_ENCODING))
        && let Ok(packed) = gzip(&text)
    {
        return ([kind, (header::CONTENT_ENCODING, "gzip")], packed).into_response();
    }
    ([kind], text).into_response()
}

/// `gzip`, unless with a weight of nothing.
fn takes_gzip(header: &str) -> bool {
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
    fn headers_count_however_they_are_written() {
        let mut headers = HeaderMap::new();
        headers.append(header::ACCEPT, "text/html".parse().unwrap());
        headers.append(header::ACCEPT, "Application/OpenMetrics-Text; version=1.0.0".parse().unwrap());
        headers.insert(header::ACCEPT_ENCODING, "br, GZip".parse().unwrap());
        let told = answer(&headers, |format| format!("{format:?}"));
        assert_eq!(told.headers()[header::CONTENT_TYPE], Format::OpenMetrics.content_type());
        assert_eq!(told.headers()[header::CONTENT_ENCODING], "gzip");
    }

    #[test]
    fn gzip_is_sent_to_those_who_take_it() {
        for (header, takes) in [
            ("", false),
            ("gzip", true),
            ("deflate, gzip;q=0.5", true),
            ("gzip;q=0", false),
            ("identity", false),
        ] {
            assert_eq!(takes_gzip(header), takes, "{header}");
        }
    }
}
