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

/// Whose calls they are. Each has pools of its own, so that calls of strangers keep no verb waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// kube-scheduler, which calls the verbs.
    KubeScheduler,
    /// A client of the pages, which needs no credential by default.
    PageClient,
    /// The API server, which calls the admission webhook without a credential.
    ApiServer,
}

/// Sizes of the pools that running calls share.
struct PoolSizes {
    /// Calls handled concurrently; more would compete for the same cores.
    calls: usize,
    /// Bodies in memory at the same time, in KiB.
    body_kib: u32,
    /// Elements of all parsed bodies in memory. The worst element, a map with one entry, needs about 300 bytes.
    elements: usize,
}

/// For the verbs. The bodies are larger than one body of the default limit, so that small calls need not wait for a
/// large one. Whole nodes of a cluster of 2,500 nodes have about 280,000 elements.
const VERBS: PoolSizes = PoolSizes { calls: 64, body_kib: 48 << 10, elements: 400_000 };

/// For the pages, which take the manifest of one pod.
const PAGES: PoolSizes = PoolSizes { calls: 16, body_kib: 8 << 10, elements: 50_000 };

/// For the admission webhook, which takes one pod.
const WEBHOOK: PoolSizes = PoolSizes { calls: 32, body_kib: 16 << 10, elements: 50_000 };

/// Timeout of a call. kube-scheduler's own default timeout is 5 s.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// What running calls share.
#[derive(Debug)]
pub(super) struct CallPools {
    calls: Semaphore,
    body_kib: Semaphore,
    max_body_kib: u32,
    pub(super) elements: Arc<ElementPool>,
}

impl CallPools {
    pub(super) fn of(caller: Caller) -> Self {
        let PoolSizes { calls, body_kib, elements } = match caller {
            Caller::KubeScheduler => VERBS,
            Caller::PageClient => PAGES,
            Caller::ApiServer => WEBHOOK,
        };
        Self {
            calls: Semaphore::new(calls),
            body_kib: Semaphore::new(body_kib as usize),
            max_body_kib: body_kib,
            elements: ElementPool::new(elements),
        }
    }
}

/// Limits the number of concurrent calls, the size of their bodies and the duration of each call.
pub(crate) async fn limit(
    FromApp((app, caller, body_limit)): FromApp<(Arc<App>, Caller, usize)>,
    request: Request,
    next: Next,
) -> Response {
    let pools = app.pools(caller);
    let reserved_kib = reserved_kib(request.headers(), body_limit).min(pools.max_body_kib);
    let answer = async {
        let _call = pools.calls.acquire().await;
        let _body = pools.body_kib.acquire_many(reserved_kib).await;
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
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
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
        assert_eq!(reserved_kib(&one(header::TRANSFER_ENCODING, "chunked"), usize::MAX), u32::MAX);
    }
}
