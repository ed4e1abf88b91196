//! The admission webhook, as the API server calls it.

use axum::body::{Body, to_bytes};
use axum::http::Request;
use serde_json::{Value, json};
use tessera_scheduler::dashboard::AgentReader;
use tessera_scheduler::server::webhook;
use tessera_scheduler::state::SchedulerSettings;
use tower::ServiceExt as _;

use crate::fixtures::*;
use crate::server::{Replica, cluster};

async fn send(replica: &Replica, path: &str, body: String) -> (u16, String) {
    let request = Request::post(path).header("content-type", "application/json").body(Body::from(body));
    let response = webhook(replica.app.clone()).oneshot(request.unwrap()).await.unwrap();
    let code = response.status().as_u16();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (code, String::from_utf8(body.to_vec()).unwrap())
}

fn review(pod: &Value) -> String {
    let request = json!({ "uid": "1", "operation": "CREATE", "object": pod });
    json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request }).to_string()
}

/// The API server reaches any replica, so one that waits answers too.
#[tokio::test]
async fn a_replica_that_waits_answers_too() {
    let api = cluster().await;
    let leader = Replica::ready(&api, "leader").await;
    let waiting = Replica::start(&api, "waiting");
    for replica in [&leader, &waiting] {
        let (code, answer) = send(replica, "/admit/pods", review(&whole("p", 1))).await;
        assert_eq!(code, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["response"]["patchType"], "JSONPatch", "{answer}");
        let (_, plain) = send(replica, "/admit/pods", review(&pod("plain", &[("cpu", "1")]))).await;
        let plain: Value = serde_json::from_str(&plain).unwrap();
        assert_eq!(plain["response"], json!({ "uid": "1", "allowed": true }));
    }
}

/// Claims may be for GPUs. They reach the scheduler only with `--dra`.
#[tokio::test]
async fn pods_with_claims_get_the_scheduler_with_dra() {
    let api = cluster().await;
    let mut claiming = pod("claiming", &[]);
    claiming["spec"]["resourceClaims"] = json!([{ "name": "gpu", "resourceClaimName": "small" }]);
    for dra in [false, true] {
        let settings = SchedulerSettings { dra, ..SchedulerSettings::default() };
        let replica = Replica::with_settings(&api, settings, AgentReader::default(), |membership| membership);
        let (_, answer) = send(&replica, "/admit/pods", review(&claiming)).await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["response"]["patchType"].is_string(), dra, "{answer}");
    }
}

/// The listener has no other routes, and hostile bodies are refused.
#[tokio::test]
async fn other_requests_are_refused() {
    let replica = Replica::start(&cluster().await, "one");
    let cases = [
        ("/admit/pods", "nonsense".to_owned(), 400),
        ("/admit/pods", "{}".to_owned(), 400),
        ("/admit/pods", " ".repeat(5 << 20), 400),
        ("/admit/pods", format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)), 400),
        ("/scheduler/bind", "{}".to_owned(), 404),
        ("/metrics", "{}".to_owned(), 404),
    ];
    for (path, body, expected) in cases {
        let size = body.len();
        let (code, answer) = send(&replica, path, body).await;
        assert_eq!(code, expected, "{path} with {size} bytes: {answer}");
    }
}
