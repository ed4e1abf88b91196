//! Client of the kubelet's podresources API: which container holds which device.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use tessera_wire::kubelet::pod_resources::{
    self as proto, AllocatableResourcesRequest, ListPodResourcesRequest,
    pod_resources_lister_client::PodResourcesListerClient,
};
use tokio::time::{sleep, timeout};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

/// Pause after a rejected request. The kubelet answers 100 requests per second from all clients
/// together and rejects the others at once.
const RATE_LIMIT_PAUSE: Duration = Duration::from_millis(50);

/// Default timeout of a list, including retries. It is short, because pods are not admitted until
/// the list arrives.
const LIST_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum size of an answer in bytes. gRPC's default of 4 MiB holds about 900 pods with 70 devices
/// each, which is not enough of a margin.
const MAX_ANSWER_BYTES: usize = 32 << 20;

/// Client of the kubelet's podresources socket.
#[derive(Debug, Clone)]
pub struct PodResources {
    client: PodResourcesListerClient<Channel>,
    timeout: Duration,
}

/// Devices of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodDevices {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod. The kubelet does not report its UID.
    pub name: String,
    /// Containers of the pod, including those without devices. Ordinary init containers are never
    /// listed.
    pub containers: Vec<ContainerDevices>,
}

/// Devices of one container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerDevices {
    /// Name of the container.
    pub name: String,
    /// Device IDs by resource name.
    pub ids: BTreeMap<String, BTreeSet<String>>,
    /// Devices that the container has by claims.
    pub claimed: BTreeSet<ClaimedDevice>,
}

/// Device that a container has by a claim in the namespace of its pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimedDevice {
    /// Name of the claim.
    pub claim: String,
    /// Name of the driver.
    pub driver: String,
    /// Name of the device in the driver's pool of this node.
    pub device: String,
    /// Identity of the share, if several claims can hold the device.
    pub share_id: Option<String>,
}

/// Reason why the kubelet's list is not available.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
    /// The path of the socket is not a valid address.
    #[error("{0:?} is not the path of a socket; name the kubelet's pod-resources/kubelet.sock")]
    Path(std::path::PathBuf),
    /// The kubelet answered with an error, or the connection failed.
    #[error("the kubelet does not list pod resources")]
    List(#[source] Box<Status>),
    /// The kubelet accepted the request and did not answer before the timeout.
    #[error("the kubelet did not answer the request to list pod resources; check that it is running")]
    Silent,
}

impl PodResources {
    /// Returns a client for the socket at `path` (`pod-resources/kubelet.sock` in the kubelet's
    /// root directory). It connects with the first request, and again after a restart of the
    /// kubelet.
    pub fn at(path: &Path) -> Result<Self, PodResourcesError> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", path.display()))
            .map_err(|_invalid| PodResourcesError::Path(path.to_owned()))?;
        let client = PodResourcesListerClient::new(endpoint.connect_lazy())
            .max_decoding_message_size(MAX_ANSWER_BYTES);
        Ok(Self { client, timeout: LIST_TIMEOUT })
    }

    /// Returns the same client with another timeout.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Lists all pods that the kubelet counts as active.
    pub async fn list(&self) -> Result<Vec<PodDevices>, PodResourcesError> {
        let mut last = None;
        match timeout(self.timeout, self.list_with_retries(&mut last)).await {
            Ok(answer) => answer,
            Err(_) => Err(last.map_or(PodResourcesError::Silent, PodResourcesError::List)),
        }
    }

    /// Returns the healthy devices that the kubelet has, from whatever plugin, by resource.
    pub async fn offered(&self) -> Result<BTreeMap<String, BTreeSet<String>>, PodResourcesError> {
        let mut client = self.client.clone();
        let asked = client.get_allocatable_resources(AllocatableResourcesRequest {});
        let answer = timeout(self.timeout, asked).await.map_err(|_| PodResourcesError::Silent)?;
        let answer = answer.map_err(|status| PodResourcesError::List(Box::new(status)))?.into_inner();
        let mut offered: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for devices in answer.devices.into_iter().filter(|devices| !devices.device_ids.is_empty()) {
            offered.entry(devices.resource_name).or_default().extend(devices.device_ids);
        }
        Ok(offered)
    }

    /// Lists the pods, and retries while the kubelet rejects the request. Stores the last rejection
    /// in `rejection`.
    async fn list_with_retries(
        &self,
        rejection: &mut Option<Box<Status>>,
    ) -> Result<Vec<PodDevices>, PodResourcesError> {
        loop {
            match self.client.clone().list(ListPodResourcesRequest {}).await {
                Ok(answer) => {
                    return Ok(answer.into_inner().pod_resources.into_iter().map(pod_devices).collect());
                }
                Err(status) if status.code() == Code::ResourceExhausted => {
                    *rejection = Some(Box::new(status));
                    sleep(RATE_LIMIT_PAUSE).await;
                }
                Err(status) => return Err(PodResourcesError::List(Box::new(status))),
            }
        }
    }
}

fn pod_devices(pod: proto::PodResources) -> PodDevices {
    PodDevices {
        namespace: pod.namespace,
        name: pod.name,
        containers: pod.containers.into_iter().map(container_devices).collect(),
    }
}

/// Collects the device IDs of a container. The kubelet sends one entry for each ID.
fn container_devices(container: proto::ContainerResources) -> ContainerDevices {
    let mut ids: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in container.devices {
        ids.entry(entry.resource_name).or_default().extend(entry.device_ids);
    }
    let claimed = container.dynamic_resources.into_iter().flat_map(|claim| {
        claim.claim_resources.into_iter().map(move |device| ClaimedDevice {
            claim: claim.claim_name.clone(),
            driver: device.driver_name,
            device: device.device_name,
            share_id: device.share_id,
        })
    });
    ContainerDevices { name: container.name, ids, claimed: claimed.collect() }
}
