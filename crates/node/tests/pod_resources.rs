//! Asking the kubelet who holds what.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tessera_node::pod_resources::{ClaimedDevice, PodResources, PodResourcesError};
use tessera_wire::kubelet::pod_resources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ClaimResource, ContainerDevices,
    ContainerResources, DynamicResource, GetPodResourcesRequest, GetPodResourcesResponse,
    ListPodResourcesRequest, ListPodResourcesResponse, PodResources as Listed,
    pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer},
};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// A podresources server that rejects the given number of requests.
struct RateLimited(AtomicUsize);

#[tonic::async_trait]
impl PodResourcesLister for RateLimited {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        if self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            return Err(Status::resource_exhausted("rejected by rate limit"));
        }
        let device = |resource: &str, id: &str| ContainerDevices {
            resource_name: resource.into(),
            device_ids: vec![id.into()],
            topology: None,
        };
        let claimed = ClaimResource {
            driver_name: "gpu.example.com".into(),
            device_name: "gpu-1".into(),
            share_id: Some("s".into()),
            ..ClaimResource::default()
        };
        let claim = DynamicResource {
            claim_name: "c".into(),
            claim_resources: vec![claimed],
            ..DynamicResource::default()
        };
        let container = ContainerResources {
            name: "main".into(),
            devices: vec![device("x/core", "b"), device("x/mem", "m"), device("x/core", "a")],
            dynamic_resources: vec![claim],
            ..ContainerResources::default()
        };
        let pod = Listed { name: "p".into(), namespace: "n".into(), containers: vec![container] };
        Ok(Response::new(ListPodResourcesResponse { pod_resources: vec![pod] }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let devices = |resource: &str, ids: &[&str]| ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            topology: None,
        };
        let devices = vec![devices("x/core", &["a", "b"]), devices("x/unhealthy", &[])];
        Ok(Response::new(AllocatableResourcesResponse { devices, ..Default::default() }))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

#[tokio::test]
async fn collects_the_ids_and_retries_after_the_rate_limit() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kubelet.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let router =
        Server::builder().add_service(PodResourcesListerServer::new(RateLimited(AtomicUsize::new(3))));
    tokio::spawn(router.serve_with_incoming(UnixListenerStream::new(listener)));

    let pod_resources = PodResources::at(&socket).unwrap();
    let pods = pod_resources.list().await.unwrap();
    assert_eq!((pods[0].namespace.as_str(), pods[0].name.as_str()), ("n", "p"));
    let ids = &pods[0].containers[0].ids;
    assert_eq!(ids["x/core"], ["a".to_owned(), "b".to_owned()].into());
    assert_eq!(ids["x/mem"], ["m".to_owned()].into());
    let claimed = ClaimedDevice {
        claim: "c".into(),
        driver: "gpu.example.com".into(),
        device: "gpu-1".into(),
        share_id: Some("s".into()),
    };
    assert_eq!(pods[0].containers[0].claimed, [claimed].into());
    let offered = pod_resources.offered().await.unwrap();
    assert_eq!(offered.keys().collect::<Vec<_>>(), ["x/core"]);
}

#[tokio::test]
async fn returns_an_error_without_a_kubelet() {
    let directory = tempfile::tempdir().unwrap();
    let pod_resources = PodResources::at(&directory.path().join("kubelet.sock")).unwrap();
    assert!(matches!(pod_resources.list().await, Err(PodResourcesError::List(_))));
}

#[tokio::test]
async fn times_out_when_the_kubelet_never_answers() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kubelet.sock");
    // The kernel accepts the connections, and no server reads them.
    let _listener = UnixListener::bind(&socket).unwrap();
    let pod_resources = PodResources::at(&socket).unwrap().with_timeout(Duration::from_millis(20));
    for _ in 0..2 {
        assert!(matches!(pod_resources.list().await, Err(PodResourcesError::Silent)));
    }
}
