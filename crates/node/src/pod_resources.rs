//! Which container holds which device, by the kubelet's own books.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use tessera_wire::kubelet::pod_resources::{
    self as proto, ListPodResourcesRequest, pod_resources_lister_client::PodResourcesListerClient,
};
use tokio::time::{sleep, timeout};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

/// The kubelet answers 100 questions a second, to all who ask together, and turns the rest away at once.
const RATE_LIMIT_PAUSE: Duration = Duration::from_millis(50);

/// How long to be turned away, or left without an answer, before giving up: callers hold up the admission of pods meanwhile.
const PATIENCE: Duration = Duration::from_secs(3);

/// gRPC's usual 4 MiB hold some 900 pods with 70 devices each: enough, but not by far.
const LARGEST_ANSWER: usize = 32 << 20;

/// Asks the kubelet.
#[derive(Debug, Clone)]
pub struct PodResources {
    client: PodResourcesListerClient<Channel>,
    timeout: Duration,
}

/// The devices of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodDevices {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name. The kubelet tells no UID here.
    pub name: String,
    /// Its containers, also those without devices; ordinary init containers are never among them.
    pub containers: Vec<ContainerDevices>,
}

/// The devices of one container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerDevices {
    /// The container's name.
    pub name: String,
    /// Resource name → device IDs.
    pub ids: BTreeMap<String, BTreeSet<String>>,
}

/// The kubelet could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
    /// The socket's path cannot be written as an address.
    #[error("{0:?} cannot be the path of a socket")]
    Path(std::path::PathBuf),
    /// It did not answer, or with an error.
    #[error("the kubelet does not list pod resources")]
    List(#[source] Box<Status>),
    /// It took the question and said nothing.
    #[error("the kubelet was asked to list pod resources and does not answer; is it alive?")]
    Silent,
}

impl PodResources {
    /// For the socket at `path` (`pod-resources/kubelet.sock` in the kubelet's root directory). Connects with the first
    /// question, and again when the kubelet has restarted.
    pub fn at(path: &Path) -> Result<Self, PodResourcesError> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", path.display()))
            .map_err(|_invalid| PodResourcesError::Path(path.to_owned()))?;
        let client =
            PodResourcesListerClient::new(endpoint.connect_lazy()).max_decoding_message_size(LARGEST_ANSWER);
        Ok(Self { client, timeout: PATIENCE })
    }

    /// With another timeout for a kubelet that turns questions away or does not answer.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// All pods that the kubelet counts as active.
    pub async fn list(&self) -> Result<Vec<PodDevices>, PodResourcesError> {
        let mut last = None;
        match timeout(self.timeout, self.try_to_list(&mut last)).await {
            Ok(answer) => answer,
            Err(_) => Err(last.map_or(PodResourcesError::Silent, PodResourcesError::List)),
        }
    }

    /// Asks until it is not turned away; `refusal` is the last one.
    async fn try_to_list(
        &self,
        refusal: &mut Option<Box<Status>>,
    ) -> Result<Vec<PodDevices>, PodResourcesError> {
        loop {
            match self.client.clone().list(ListPodResourcesRequest {}).await {
                Ok(answer) => {
                    return Ok(answer.into_inner().pod_resources.into_iter().map(pod_devices).collect());
                }
                Err(status) if status.code() == Code::ResourceExhausted => {
                    *refusal = Some(Box::new(status));
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

/// The kubelet sends one entry for each ID.
fn container_devices(container: proto::ContainerResources) -> ContainerDevices {
    let mut ids: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in container.devices {
        ids.entry(entry.resource_name).or_default().extend(entry.device_ids);
    }
    ContainerDevices { name: container.name, ids }
}
