//! Requests that only the leader may send end before another replica leads.

use std::time::Duration;

use futures::FutureExt;
use tessera_cluster::lease::LeaseTiming;
use tessera_scheduler::server::RequestAborted;
use tessera_sim::apiserver::ApiServer;
use tokio::sync::oneshot;

use crate::server::{Replica, cluster, eventually};

const LONG: Duration = Duration::from_secs(60);

fn lead_for(replica: &Replica, time: Duration) {
    let timing = LeaseTiming { duration: time, renew_within: time, retry: time };
    replica.app.lead_until(replica.app.now().steady, timing);
}

async fn idle_replica() -> (ApiServer, Replica) {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    replica.task.abort();
    (api, replica)
}

#[tokio::test]
async fn a_request_is_aborted_when_the_lease_is_not_renewed() {
    let (_api, replica) = idle_replica().await;
    lead_for(&replica, Duration::from_millis(20));
    let never = std::future::pending::<()>();
    assert_eq!(replica.app.while_leading(LONG, never).await, Err(RequestAborted));
    let at_once = replica.app.while_leading(LONG, async { 1 }).await;
    assert_eq!(at_once, Err(RequestAborted), "the lease has expired before");
    lead_for(&replica, LONG);
    assert_eq!(replica.app.while_leading(LONG, async { 1 }).await, Ok(1));
    let never = std::future::pending::<()>();
    assert_eq!(replica.app.while_leading(Duration::from_millis(20), never).await, Err(RequestAborted));
}

#[tokio::test]
async fn a_renewal_defers_the_abort() {
    let (_api, replica) = idle_replica().await;
    let first_abort = replica.app.now().steady + Duration::from_millis(200);
    lead_for(&replica, Duration::from_millis(100));
    let (answer, answered) = oneshot::channel();
    let renewed = async {
        lead_for(&replica, LONG);
        eventually(|| replica.app.now().steady > first_abort).await;
        answer.send(7).unwrap();
    };
    let (outcome, ()) = tokio::join!(replica.app.while_leading(LONG, answered), renewed);
    assert_eq!(outcome, Ok(Ok(7)));
}

#[tokio::test]
async fn the_lease_is_released_after_the_last_request() {
    let api = cluster().await;
    let mut replica = Replica::ready(&api, "one").await;
    lead_for(&replica, LONG);
    let holder = || {
        let lease = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/tessera-scheduler";
        api.get(lease).unwrap()["spec"]["holderIdentity"].as_str().unwrap().to_owned()
    };
    let (answer, answered) = oneshot::channel();
    let app = replica.app.clone();
    let request = tokio::spawn(async move { app.while_leading(LONG, answered).await });
    eventually(|| replica.app.leadership.requests_ended().now_or_never().is_none()).await;
    replica.stop.take().unwrap().send(()).unwrap();
    eventually(|| !replica.app.is_ready()).await;
    assert_eq!(holder(), "one");
    answer.send(()).unwrap();
    assert_eq!(request.await.unwrap(), Ok(Ok(())));
    eventually(|| holder().is_empty()).await;
}
