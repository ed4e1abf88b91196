//! Limits of calls with a body: their number, their duration, and the memory of their bodies.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State as FromApp};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tessera_wire::bounded::ElementPool;
use tokio::sync::Semaphore;

use super::App;

/// Calls handled concurrently; more would compete for the same cores.
const MAX_CALLS: usize = 64;

/// Bodies in memory at the same time, in KiB. Larger than one body of the default limit, so that small calls need
/// not wait for a large one.
const BODY_POOL_KIB: u32 = 48 << 10;

/// Elements of all parsed bodies in memory. Whole nodes of a cluster of 2,500 nodes have about 280,000. The worst
/// element, a map with one entry, needs about 300 bytes.
const ELEMENT_POOL: usize = 400_000;

/// Timeout of a call. kube-scheduler's own default timeout is 5 s.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// What running calls share.
#[derive(Debug)]
pub(super) struct CallPools {
    calls: Semaphore,
    body_kib: Semaphore,
    pub(super) elements: Arc<ElementPool>,
}

impl Default for CallPools {
    fn default() -> Self {
        Self {
            calls: Semaphore::new(MAX_CALLS),
            body_kib: Semaphore::new(BODY_POOL_KIB as usize),
            elements: ElementPool::new(ELEMENT_POOL),
        }
    }
}

/// Limits the number of concurrent calls, the size of their bodies and the duration of each call.
pub(crate) async fn limit(
    FromApp((app, body_limit)): FromApp<(Arc<App>, usize)>,
    request: Request,
    next: Next,
) -> Response {
    let reserved_kib = reserved_kib(request.headers(), body_limit);
    let answer = async {
        let _call = app.pools.calls.acquire().await;
        let _body = app.pools.body_kib.acquire_many(reserved_kib).await;
        next.run(request).await
    };
    let is_ready = app.is_ready();
    let too_late = || {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the scheduler is overloaded, or the request arrived too slowly; retry later",
        )
    };
    let answer = tokio::time::timeout(CALL_TIMEOUT, answer).await;
    let mut answer = answer.unwrap_or_else(|_| too_late().into_response());
    if !is_ready {
        // The client reconnects through the Service and then reaches the leader.
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

/// Returns the memory to reserve for a body: its announced length, or the largest allowed one.
fn reserved_kib(headers: &HeaderMap, body_limit: usize) -> u32 {
    let is_chunked = headers.contains_key(header::TRANSFER_ENCODING);
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let bytes: usize = match announced {
        Some(length) => body_limit.min(length),
        None if is_chunked => body_limit,
        None => 0,
    };
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX).min(BODY_POOL_KIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserves_what_a_body_may_need() {
        let one = |name, value: &str| HeaderMap::from_iter([(name, value.parse().unwrap())]);
        assert_eq!(reserved_kib(&HeaderMap::new(), 1 << 20), 0);
        assert_eq!(reserved_kib(&one(header::CONTENT_LENGTH, "1025"), 1 << 20), 2);
        assert_eq!(reserved_kib(&one(header::CONTENT_LENGTH, "99999999"), 1 << 20), 1 << 10);
        assert_eq!(reserved_kib(&one(header::TRANSFER_ENCODING, "chunked"), 1 << 20), 1 << 10);
        assert_eq!(reserved_kib(&one(header::TRANSFER_ENCODING, "chunked"), usize::MAX), BODY_POOL_KIB);
    }
}
