//! The files that a prepared claim needs on the node: its record, its grants, and its CDI devices.

use std::collections::BTreeMap;

use tessera_core::{
    grant::{ContainerGrant, Hold},
    request::ContainerRole,
    units::PodUid,
};
use tessera_limits::{Bytes, GpuLimit, UuidBytes, files};
use tessera_wire::{
    foreign::dialect::Dialect,
    kubelet::{
        cdi::{self, BindMount, ContainerEdits},
        container_response::GrantedContainer,
    },
    tessera::dra::{GrantedGpu, PreparedClaim, PreparedGpu, request_directory},
};

use super::{
    super::{AgentSettings, ContainerLimits, inventory::NodeGpus, isolation::Enforcement},
    ClaimError, index_of,
};

/// Everything that is written for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimFiles {
    /// The record of the claim.
    pub claim: PreparedClaim,
    /// Limits of each grant, as if the claim were a pod and its requests were containers.
    pub limits: Vec<ContainerLimits>,
    /// CDI device of each request.
    pub edits: Vec<ContainerEdits>,
}

/// Returns the files of a claim.
///
/// A request with whole GPUs has limits too: a container may use it beside a share, and the library needs to know
/// the GPU then. Administrative access has none, because the claim holds nothing. Requests with parts of one GPU have
/// the same grant, so their containers share the sum of the parts.
pub(super) fn claim_files(
    claim: &PreparedClaim,
    settings: &AgentSettings,
    gpus: &NodeGpus,
    node_labels: Option<&BTreeMap<String, String>>,
) -> Result<ClaimFiles, ClaimError> {
    let name = || format!("{}/{}", claim.namespace, claim.name);
    let (mut limits, mut edits) = (Vec::new(), Vec::new());
    for request in claim.requests() {
        let devices: Vec<&PreparedGpu> = claim.of_request(request).collect();
        let directory = request_directory(request);
        let of_grant = claim.grant_of(request);
        let grant = ContainerGrant {
            container: request.to_owned(),
            role: ContainerRole::Main,
            holds: devices
                .iter()
                .filter_map(|device| Some((index_of(gpus, device)?, device.hold.unwrap_or(Hold::Whole))))
                .collect(),
        };
        // Nothing in the environment depends on a dialect of shares.
        let recipient = GrantedContainer {
            dialect: Dialect::Nvidia,
            grant: &grant,
            memory_units: (0, 0),
            priority: None,
        };
        let given = settings.injection.response(&recipient, &gpus.node, gpus.ids.unit());
        let mut mounts: Vec<BindMount> = given
            .mounts
            .into_iter()
            .map(|mount| BindMount {
                host: mount.host_path,
                container: mount.container_path,
                is_writable: !mount.read_only,
            })
            .collect();
        let held: Vec<(&PreparedGpu, Hold)> =
            devices.iter().filter_map(|device| Some((*device, device.hold?))).collect();
        if !held.is_empty() {
            let shared = request_directory(of_grant);
            let host = format!("{}/{}/{shared}", settings.grants, claim.uid);
            // A container with several requests of one grant has one mount for all of them.
            let container = format!("{}/{}", files::GRANT_DIRECTORY, cdi::claim_device(&claim.uid, &shared));
            let account = |path: &str| format!("{path}/{}", files::ACCOUNT);
            mounts.push(BindMount { host: host.clone(), container: container.clone(), is_writable: false });
            mounts.push(BindMount {
                host: account(&host),
                container: account(&container),
                is_writable: true,
            });
        }
        if !held.is_empty() && of_grant == request {
            limits.push(ContainerLimits {
                pod: PodUid(claim.uid.clone()),
                namespace: claim.namespace.clone(),
                name: claim.name.clone(),
                container: directory.clone(),
                meaning: settings.isolation.meaning,
                gpus: claim
                    .of_grant(of_grant)
                    .into_iter()
                    .map(gpu_limit)
                    .collect::<Option<_>>()
                    .ok_or_else(|| ClaimError::NoUuid { claim: name(), device: devices[0].device.clone() })?,
            });
        }
        if let Some((_, share)) = held.iter().find(|(_, hold)| *hold != Hold::Whole) {
            let enforcement = settings.isolation.enforcement(*share, &BTreeMap::new(), node_labels);
            match enforcement.map_err(|reason| ClaimError::NotEnforceable { claim: name(), reason })? {
                Enforcement::ByLibrary(library) => {
                    mounts.extend(library.mounts().map(|(host, container)| BindMount {
                        host,
                        container: container.to_owned(),
                        is_writable: false,
                    }));
                }
                Enforcement::None(_) => {}
            }
        }
        edits.push(ContainerEdits {
            name: cdi::claim_device(&claim.uid, &directory),
            env: given.envs.into_iter().collect(),
            device_nodes: given.devices.into_iter().map(|node| node.host_path).collect(),
            mounts,
        });
    }
    Ok(ClaimFiles { claim: claim.clone(), limits, edits })
}

/// Returns the limit of a claim on one GPU, or `None` if the GPU's UUID cannot be written. Claims that hold more than
/// the GPU has are not prepared.
fn gpu_limit(granted: GrantedGpu<'_>) -> Option<GpuLimit> {
    let (memory, compute_percent) = match granted.usage.whole {
        true => (GpuLimit::WHOLE, 100),
        false => (Bytes::from_mib(granted.usage.memory.0), granted.usage.compute_percent.0.min(100)),
    };
    Some(GpuLimit {
        uuid: UuidBytes::parse(&granted.device.gpu.0)?,
        memory,
        context: Bytes::ZERO,
        compute_percent,
        compute_ceiling_percent: granted.cores_limit.0.max(compute_percent),
    })
}
