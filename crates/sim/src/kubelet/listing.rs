//! The podresources API: lists which container holds which device.

use std::{
    io,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use tessera_wire::kubelet::pod_resources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources,
    pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer},
};
use tokio::{net::UnixListener, task::JoinSet};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, transport::Server};

use super::{KubeletState, PodEntry, lock};

/// Rate limit of the podresources API: calls per second and burst size, as in the real kubelet.
const RATE: f64 = 100.0;
const BURST: f64 = 10.0;

/// The rate limit. A call above the limit fails at once.
#[derive(Debug)]
pub(super) struct RateLimit {
    tokens: f64,
    last: Instant,
}

impl RateLimit {
    pub(super) fn new() -> Self {
        Self { tokens: BURST, last: Instant::now() }
    }

    fn pass(&mut self) -> bool {
        let passed: Duration = self.last.elapsed();
        self.last = Instant::now();
        self.tokens = (self.tokens + passed.as_secs_f64() * RATE).min(BURST);
        let pass = self.tokens >= 1.0;
        if pass {
            self.tokens -= 1.0;
        }
        pass
    }
}

pub(super) fn serve(
    socket: &Path,
    state: Arc<KubeletState>,
    stop: &CancellationToken,
    tasks: &mut JoinSet<()>,
) -> io::Result<()> {
    let _stale = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    let stop = stop.clone();
    tasks.spawn(async move {
        let service = PodResourcesListerServer::new(Lister { state });
        let incoming = UnixListenerStream::new(listener);
        let served = Server::builder().add_service(service);
        let _ended = served.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await;
    });
    Ok(())
}

struct Lister {
    state: Arc<KubeletState>,
}

impl Lister {
    fn check_rate(&self) -> Result<(), Status> {
        if lock(&self.state.limit).pass() {
            return Ok(());
        }
        Err(Status::resource_exhausted("rejected by rate limit"))
    }
}

/// Builds the entry of a pod, with one item for each device like the real kubelet.
fn listed(pod: &PodEntry) -> PodResources {
    let devices = |ids: &std::collections::BTreeMap<String, std::collections::BTreeSet<String>>| {
        let pairs = ids.iter().flat_map(|(resource, ids)| ids.iter().map(move |id| (resource, id)));
        let entry = |(resource, id): (&String, &String)| ContainerDevices {
            resource_name: resource.clone(),
            device_ids: vec![id.clone()],
            ..ContainerDevices::default()
        };
        pairs.map(entry).collect()
    };
    let containers = pod.containers.iter().filter(|container| container.listed);
    PodResources {
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        containers: containers
            .map(|container| ContainerResources {
                name: container.name.clone(),
                devices: devices(&container.ids),
                ..ContainerResources::default()
            })
            .collect(),
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.check_rate()?;
        self.state.lists.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let pod_resources = lock(&self.state.allocations).pods.values().map(listed).collect();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let plugins = lock(&self.state.plugins);
        let offered = plugins.iter().map(|(resource, plugin)| ContainerDevices {
            resource_name: resource.clone(),
            device_ids: plugin.healthy().into_iter().collect(),
            ..ContainerDevices::default()
        });
        let devices = offered.filter(|offered| !offered.device_ids.is_empty()).collect();
        Ok(Response::new(AllocatableResourcesResponse { devices, ..AllocatableResourcesResponse::default() }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        self.check_rate()?;
        let asked = request.into_inner();
        let allocations = lock(&self.state.allocations);
        let mut pods = allocations.pods.values();
        let found = pods.find(|pod| pod.name == asked.pod_name && pod.namespace == asked.pod_namespace);
        let pod = found.ok_or_else(|| Status::unknown("pod is not found"))?;
        Ok(Response::new(GetPodResourcesResponse { pod_resources: Some(listed(pod)) }))
    }
}
