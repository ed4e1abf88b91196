//! What each listener serves to whom, and which pods are bound.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use tessera_scheduler::server::{pages, probes, service_names, verbs};
use tower::ServiceExt;

use crate::fixtures::*;
use crate::server::{Replica, cluster, make};

async fn status(router: &Router, request: axum::http::request::Builder, body: &Value) -> StatusCode {
    let request = request.body(Body::from(body.to_string())).unwrap();
    router.clone().oneshot(request).await.unwrap().status()
}

#[tokio::test]
async fn each_listener_serves_only_its_own_routes() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let app = || Arc::clone(&replica.app);
    let (verbs, pages, probes) = (verbs(app(), 1 << 20), pages(app(), 1 << 20, &[], None), probes(app()));
    let question = json!({"Pod": whole("p", 1), "NodeNames": ["a"]});
    for (method, path, on_verbs, on_pages, on_probes) in [
        ("POST", "/scheduler/filter", 200, 404, 404),
        ("POST", "/gpushare-scheduler/bind", 200, 404, 404),
        ("POST", "/gputopology-schedulersort", 200, 404, 404),
        ("GET", "/gpushare-scheduler/inspect", 404, 200, 404),
        ("GET", "/", 404, 200, 404),
        ("GET", "/api/v1/decisions", 404, 200, 404),
        ("POST", "/api/v1/what-if", 404, 200, 404),
        ("GET", "/metrics", 404, 200, 404),
        ("DELETE", "/metrics", 404, 405, 404),
        ("GET", "/healthz", 404, 404, 200),
        ("GET", "/readyz", 404, 404, 200),
    ] {
        for (router, expected) in [(&verbs, on_verbs), (&pages, on_pages), (&probes, on_probes)] {
            let request = Request::builder().method(method).uri(path);
            assert_eq!(status(router, request, &question).await.as_u16(), expected, "{method} {path}");
        }
    }
}

/// A page of another site runs in an administrator's browser, which reaches the scheduler through a port-forward.
#[tokio::test]
async fn no_page_of_another_site_gets_an_answer() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &whole("p", 1));
    let bind = serde_json::to_value(bind_args(&pod, "a")).unwrap();
    let post = |path: &str, host: &str, origin: &str| {
        let request = Request::builder().method("POST").uri(path).header("host", host);
        request.header("content-type", "text/plain").header("origin", origin)
    };
    let local = "127.0.0.1:12345";
    for (path, host, origin) in [
        ("/scheduler/bind", local, "http://evil.example"),
        ("/scheduler/bind", "evil.example:12345", "http://evil.example:12345"),
        ("/scheduler/filter", local, "http://evil.example"),
        ("/what-if", local, "http://evil.example"),
        ("/api/v1/what-if", local, "null"),
        ("/api/v1/what-if", "evil.example", "http://evil.example"),
    ] {
        let code = status(&replica.router, post(path, host, origin), &bind).await;
        assert_eq!(code, StatusCode::FORBIDDEN, "{path} {host} {origin}");
    }
    for path in ["/", "/api/v1/pods", "/metrics", "/explain/team/p"] {
        let rebound = Request::builder().uri(path).header("host", "evil.example:12345");
        assert_eq!(status(&replica.router, rebound, &bind).await, StatusCode::FORBIDDEN, "{path}");
    }
    let own = post("/api/v1/what-if", local, "http://127.0.0.1:12345");
    assert_eq!(status(&replica.router, own, &pod).await, StatusCode::OK);
    assert!(api.get("/api/v1/namespaces/team/pods/p").unwrap()["spec"]["nodeName"].is_null());
    let filtered = replica.app.dashboard.decisions.newest(|_| true, 10);
    assert!(filtered.is_empty(), "{filtered:?}");
}

#[tokio::test]
async fn only_gpu_pods_of_served_schedulers_are_bound() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let of = |name: &str, scheduler: &str| {
        let mut pod = whole(name, 1);
        pod["spec"]["schedulerName"] = scheduler.into();
        make(&api, &pod)
    };
    let bound = |name: &str| {
        api.get(&format!("/api/v1/namespaces/team/pods/{name}")).unwrap()["spec"]["nodeName"].is_string()
    };
    let refused = replica.bind(&of("foreign", "volcano"), "a").await;
    assert!(refused.contains("is scheduled by volcano, which this extender does not serve"), "{refused}");
    let plain = make(&api, &pod("plain", &[("cpu", "1")]));
    let refused = replica.bind(&plain, "a").await;
    assert!(refused.contains("requests no GPU resource"), "{refused}");
    assert!(!bound("foreign") && !bound("plain"));
    for (name, scheduler) in [("default", "default-scheduler"), ("second", "tessera")] {
        assert_eq!(replica.bind(&of(name, scheduler), "a").await, "");
        assert!(bound(name));
    }
    // kube-scheduler calls the extender for this pod too, because it names one of its resources.
    let zero = make(&api, &pod("zero", &[("nvidia.com/gpu", "0")]));
    assert_eq!(replica.bind(&zero, "b").await, "");
}

#[tokio::test]
async fn a_body_of_many_small_elements_is_answered_with_an_error() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let containers = vec!["{}"; 300_000].join(",");
    let body =
        format!(r#"{{"Pod":{{"spec":{{"containers":[{containers}],"initContainers":[{containers}]}}}}}}"#);
    let router = verbs(Arc::clone(&replica.app), 32 << 20);
    let request = Request::post("/scheduler/filter").body(Body::from(body)).unwrap();
    let answer = router.oneshot(request).await.unwrap();
    let bytes = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    let answer: Value = serde_json::from_slice(&bytes).unwrap();
    assert!(answer["Error"].as_str().unwrap().contains("more than 400000 elements"), "{answer}");
}

/// Clients of the pages need no credential for a what-if call, and may send its body as slowly as they like.
#[tokio::test]
async fn calls_of_strangers_keep_no_verb_waiting() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let app = || Arc::clone(&replica.app);
    let (verbs, pages) = (verbs(app(), 1 << 20), pages(app(), 1 << 20, &[], None));
    let endless = |number: usize| {
        let path = ["/what-if", "/api/v1/what-if"][number % 2];
        let body = Body::from_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>());
        let request = Request::post(path).header("transfer-encoding", "chunked").body(body).unwrap();
        Box::pin(pages.clone().oneshot(request))
    };
    let mut slow: Vec<_> = (0..200).map(endless).collect();
    for call in &mut slow {
        assert!(futures::poll!(call).is_pending());
    }
    let question = json!({"Pod": whole("p", 1), "NodeNames": ["a"]});
    let answered = status(&verbs, Request::post("/scheduler/filter"), &question).await;
    assert_eq!(answered, StatusCode::OK);
}

#[tokio::test]
async fn pages_are_known_by_the_names_of_their_service() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let pages = pages(Arc::clone(&replica.app), 1 << 20, &service_names("gpu-system"), None);
    for (host, expected) in [
        ("tessera-scheduler", StatusCode::OK),
        ("tessera-scheduler.gpu-system:12346", StatusCode::OK),
        ("tessera-scheduler.gpu-system.svc:12346", StatusCode::OK),
        ("tessera-scheduler.gpu-system.svc.cluster.local", StatusCode::OK),
        ("tessera-scheduler.kube-system.svc:12346", StatusCode::FORBIDDEN),
    ] {
        let request = Request::get("/version").header("host", host);
        assert_eq!(status(&pages, request, &json!({})).await, expected, "{host}");
    }
}
