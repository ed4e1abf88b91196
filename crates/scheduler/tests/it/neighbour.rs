//! A replica beside a kube-scheduler in the same pod leads only while this kube-scheduler does.

use std::sync::Arc;

use axum::http::{Request, header};
use serde_json::json;
use tessera_scheduler::dashboard::AgentReader;
use tessera_scheduler::dashboard::login::Login;
use tessera_scheduler::run::{Membership, Neighbour};
use tessera_sim::apiserver::ApiServer;
use tessera_sim::reviews::{KnownToken, ReviewServer};
use tessera_wire::tessera::page_rights;
use tower::ServiceExt as _;

use crate::fixtures::whole;
use crate::server::{Replica, cluster, eventually, make};

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";

fn start(api: &ApiServer, pod: &str) -> Replica {
    let neighbour = Neighbour { lease: "tessera-kube-scheduler".to_owned(), host: pod.to_owned() };
    Replica::beside(api, &format!("{pod}_1_1"), AgentReader::default(), Some(neighbour))
}

/// Lets the kube-scheduler in this pod hold its lease.
fn elect(api: &ApiServer, pod: &str) {
    let spec = json!({ "spec": { "holderIdentity": format!("{pod}_uuid") } });
    api.patch(&format!("{LEASES}/tessera-kube-scheduler"), &spec).unwrap();
}

fn holder(api: &ApiServer) -> String {
    let lease = api.get(&format!("{LEASES}/tessera-scheduler"));
    lease.map(|lease| lease["spec"]["holderIdentity"].as_str().unwrap().to_owned()).unwrap_or_default()
}

#[tokio::test]
async fn the_extender_follows_the_kube_scheduler_of_its_pod() {
    let api = cluster().await;
    let lease = json!({ "metadata": { "name": "tessera-kube-scheduler" }, "spec": { "holderIdentity": "" } });
    api.create(LEASES, lease).unwrap();
    let (a, b) = (start(&api, "pod-a"), start(&api, "pod-b"));
    eventually(|| a.app.leadership.follows() && b.app.leadership.follows()).await;
    assert_eq!(a.get("/readyz").await.0, 200, "a replica that waits is ready");
    assert!(!a.app.is_ready() && holder(&api).is_empty(), "no kube-scheduler leads");

    let pod = make(&api, &whole("p", 1));
    elect(&api, "pod-b");
    // kube-scheduler calls at once, and waits until the extender leads too.
    assert_eq!(b.bind(&pod, "a").await, "");
    assert!(b.app.may_write());
    assert!(a.bind(&pod, "a").await.contains("is not the leader"));

    // The kube-scheduler of the other pod takes over: the lease is released, not left to expire.
    elect(&api, "pod-a");
    eventually(|| a.app.may_write()).await;
    assert!(!b.app.may_write());
    assert_eq!(holder(&api), "pod-a_1_1");
    eventually(|| b.app.leadership.follows()).await;
    assert_eq!(b.get("/healthz/kube-scheduler").await.0, 200);
}

#[tokio::test]
async fn a_killed_extender_leads_again_beside_the_same_kube_scheduler() {
    let api = cluster().await;
    let lease = json!({ "metadata": { "name": "tessera-kube-scheduler" }, "spec": {} });
    api.create(LEASES, lease).unwrap();
    elect(&api, "pod-a");
    let (a, b) = (start(&api, "pod-a"), start(&api, "pod-b"));
    eventually(|| a.app.may_write()).await;
    a.task.abort();
    let neighbour = Neighbour { lease: "tessera-kube-scheduler".to_owned(), host: "pod-a".to_owned() };
    let again = Replica::beside(&api, "pod-a_2_2", AgentReader::default(), Some(neighbour));
    eventually(|| again.app.may_write()).await;
    assert!(!a.app.may_write() && !b.app.is_ready());
}

#[tokio::test]
async fn a_replica_that_waits_forwards_readers_to_the_leader() {
    let api = cluster().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let pages = listener.local_addr().unwrap();
    let publishing = |name: &str, pages| {
        let identity = name.to_owned();
        Replica::with(&api, AgentReader::default(), |membership| Membership { identity, pages, ..membership })
    };
    let leader = publishing("first", Some(pages));
    eventually(|| leader.app.is_ready()).await;
    tokio::spawn(axum::serve(listener, leader.router.clone()).into_future());
    let follower = publishing("second", None);
    let body = async || follower.get("/api/v1/nodes").await;
    let begun = body().await;
    assert_eq!(begun.0, 503, "the lease is not read yet: {begun:?}");
    while body().await.0 != 200 {
        tokio::task::yield_now().await;
    }
    assert_eq!(body().await.1, leader.get("/api/v1/nodes").await.1);
    assert!(follower.get("/metrics").await.1.contains("tessera_scheduler_leading 0"), "its own metrics");
    assert_eq!(follower.get("/metrics/nodes").await, leader.get("/metrics/nodes").await);
    // What readers send to a replica with a login, such as their token, must not go to one without.
    let reviews = ReviewServer::start().await.unwrap();
    let reader = KnownToken { user: "jane", audience: None, paths: &[page_rights::DASHBOARD] };
    reviews.add("reader", reader);
    let login = Login::new(tessera_cluster::connect_to(reviews.url()).unwrap(), false);
    let with_login = tessera_scheduler::server::pages(Arc::clone(&follower.app), 1 << 20, &[], Some(login));
    let request = Request::get("/api/v1/nodes").header(header::AUTHORIZATION, "Bearer reader");
    let answer = with_login.oneshot(request.body(axum::body::Body::empty()).unwrap()).await.unwrap();
    assert_eq!(answer.status(), 503, "it names the leader and forwards nothing");
    let (_, text) = leader.call("GET", "/api/v1/status", axum::body::Body::empty()).await;
    assert!(String::from_utf8(text).unwrap().contains("\"ready\":true"));
}
