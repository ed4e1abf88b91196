//! The files of the pages, embedded in the binary.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// The page that loads all other files.
const INDEX: &str = "index.html";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// All files by name.
        const FILES: &[(&str, &[u8])] = &[$(($name, include_bytes!(concat!("assets/", $name)))),*];
    };
}

files![
    "index.html",
    "login.html",
    "icon.svg",
    "base.css",
    "parts.css",
    "pages.css",
    "app.js",
    "api.js",
    "dom.js",
    "text.js",
    "text-en.js",
    "text-zh.js",
    "reasons-en.js",
    "reasons-zh.js",
    "format.js",
    "filters.js",
    "virtual.js",
    "tile.js",
    "heat.js",
    "links.js",
    "spark.js",
    "explanation.js",
    "page-overview.js",
    "page-nodes.js",
    "page-node.js",
    "page-pods.js",
    "page-pod.js",
    "page-quota.js",
    "page-waste.js",
    "page-what-if.js",
    "page-decisions.js",
];

pub(super) async fn index(headers: HeaderMap) -> Response {
    file(INDEX, &headers)
}

pub(super) async fn asset(Path(name): Path<String>, headers: HeaderMap) -> Response {
    file(&name, &headers)
}

fn file(name: &str, asked: &HeaderMap) -> Response {
    let Some((_, bytes)) = FILES.iter().find(|(known, _)| *known == name) else {
        return (StatusCode::NOT_FOUND, "no such file").into_response();
    };
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    let tag = format!("\"{:016x}\"", hasher.finish());
    // The browser revalidates its copy each time, so a new release shows at once.
    let caching = [(header::ETAG, tag.clone()), (header::CACHE_CONTROL, "no-cache".to_owned())];
    if asked.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes()) {
        return (StatusCode::NOT_MODIFIED, caching).into_response();
    }
    (caching, [(header::CONTENT_TYPE, media_type(name))], *bytes).into_response()
}

fn media_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}
