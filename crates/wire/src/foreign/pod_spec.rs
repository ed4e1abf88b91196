//! Reads the resource requests of a pod from its specification.

use std::collections::BTreeMap;

use tessera_core::request::{self, ContainerRole, PodRequest, Request, peak};
use tessera_core::units::{MiB, MilliCpu};

use crate::foreign::admission_review::DEFAULT_SCHEDULER;
use crate::foreign::constraint::is_other_gpu_resource;
use crate::foreign::dialect::{self, BadRequest, Dialect, MemoryUnit};
use crate::foreign::objects::{Amounts, Container, PodSpec, Resources};
use crate::foreign::quantity::{BadQuantity, Quantity};

/// Begin of the names of resources that count MIG instances. The profile follows.
pub const MIG_PREFIX: &str = "nvidia.com/mig-";

/// A pod whose resource requests are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", prefix(container))]
pub struct BadPod {
    /// Name of the container, or empty if the pod was built from a request without containers.
    pub container: String,
    /// The error and what to write instead.
    #[source]
    pub reason: BadContainer,
}

/// An invalid resource request of a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadContainer {
    /// The GPU request is invalid.
    #[error(transparent)]
    Gpu(#[from] BadRequest),
    /// The CPU or memory request is invalid.
    #[error("{resource}: {reason}")]
    Quantity {
        /// `cpu` or `memory`.
        resource: &'static str,
        /// The parse error.
        #[source]
        reason: BadQuantity,
    },
}

/// The GPU request of one container.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Name of the container.
    pub container: String,
    /// Role of the container, which determines when it runs.
    pub role: ContainerRole,
    /// Position among the main containers. The annotations of all dialects count only these.
    pub position: Option<usize>,
    /// Dialect of the request.
    pub dialect: Dialect,
    /// The request itself.
    pub request: Request,
}

fn prefix(container: &str) -> String {
    if container.is_empty() { String::new() } else { format!("container {container}: ") }
}

impl PodSpec {
    /// Returns the name of the scheduler that places the pod. The API server fills it in where a manifest has none.
    #[must_use]
    pub fn scheduler(&self) -> &str {
        if self.scheduler_name.is_empty() { DEFAULT_SCHEDULER } else { &self.scheduler_name }
    }

    /// Returns the request of the pod on a node that counts `aliyun.com/gpu-mem` in `unit`.
    pub fn request(&self, unit: MemoryUnit) -> Result<PodRequest, BadPod> {
        let mut needs = Vec::new();
        let mut containers = Vec::new();
        for (spec, role) in self.containers_with_roles() {
            let read = spec.needs(unit).map_err(|reason| BadPod { container: spec.name.clone(), reason })?;
            needs.push((role, read.cpu, read.memory));
            containers.push(request::ContainerRequest {
                name: spec.name.clone(),
                role,
                request: read.request,
            });
        }
        let overhead = self
            .overhead_needs()
            .map_err(|reason| BadPod { container: "(pod overhead)".to_owned(), reason })?;
        let cpu = peak(&needs, |need| need.0, |need| need.1, |a, b| a + b, MilliCpu::max);
        let memory = peak(&needs, |need| need.0, |need| need.2, |a, b| a + b, MiB::max);
        Ok(PodRequest {
            containers,
            cpu: cpu + overhead.0,
            memory: memory + overhead.1,
            ..PodRequest::default()
        })
    }

    /// Returns all containers with their roles, in the order in which they start.
    pub fn containers_with_roles(&self) -> impl Iterator<Item = (&Container, ContainerRole)> {
        let inits = self.init_containers.iter().map(|container| (container, container.init_role()));
        inits.chain(self.containers.iter().map(|container| (container, ContainerRole::Main)))
    }

    /// Returns the GPU requests of all containers that have one.
    pub fn claims(&self, unit: MemoryUnit) -> Result<Vec<Claim>, BadPod> {
        let mut claims = Vec::new();
        let inits = self.init_containers.len();
        for (number, (container, role)) in self.containers_with_roles().enumerate() {
            let Resources { limits, requests, .. } = &container.resources;
            let found = dialect::request(limits, requests, unit)
                .map_err(|reason| BadPod { container: container.name.clone(), reason: reason.into() })?;
            if let Some((dialect, request)) = found {
                let position = number.checked_sub(inits);
                claims.push(Claim { container: container.name.clone(), role, position, dialect, request });
            }
        }
        Ok(claims)
    }

    /// Returns the MIG instances that the pod holds while it runs, by resource.
    #[must_use]
    pub fn mig_instances(&self) -> BTreeMap<String, u64> {
        let mut held = self.other_gpu_amounts();
        held.retain(|name, _| name.starts_with(MIG_PREFIX));
        held
    }

    /// Returns the amounts of GPU resources outside Tessera's dialects that the pod holds while it runs, by resource.
    #[must_use]
    pub fn other_gpu_amounts(&self) -> BTreeMap<String, u64> {
        let mut held = BTreeMap::new();
        for (container, role) in self.containers_with_roles() {
            if role == ContainerRole::Init {
                continue;
            }
            for (name, amount) in &container.resources.limits {
                let amount = amount.0.parse::<Quantity>().ok().and_then(Quantity::whole).unwrap_or(0);
                if is_other_gpu_resource(name) && amount > 0 {
                    *held.entry(name.clone()).or_default() += amount;
                }
            }
        }
        held
    }

    /// Returns whether any container requests GPUs. An invalid request counts, so that the
    /// scheduler reports its error.
    #[must_use]
    pub fn asks_for_gpus(&self) -> bool {
        self.claims(MemoryUnit::GiB).map_or(true, |claims| !claims.is_empty())
    }

    /// Returns whether any container names a GPU resource, with whatever amount. kube-scheduler
    /// calls an extender for exactly these pods.
    #[must_use]
    pub fn names_gpu_resources(&self) -> bool {
        let is_named =
            |resources: &Resources| resources.extended().any(|name| Dialect::RESOURCES.contains(&name));
        self.containers_with_roles().any(|(container, _)| is_named(&container.resources))
    }

    /// Returns CPU and memory of the whole pod. Invalid amounts count as zero; the API server
    /// rejects them before.
    #[must_use]
    pub fn host_needs(&self) -> (MilliCpu, MiB) {
        self.request(MemoryUnit::GiB).map(|request| (request.cpu, request.memory)).unwrap_or_default()
    }

    fn overhead_needs(&self) -> Result<(MilliCpu, MiB), BadContainer> {
        cpu_and_memory(&self.overhead, &Amounts::new())
    }
}

/// Requested resources of one container.
struct ContainerNeeds {
    request: Option<Request>,
    cpu: MilliCpu,
    memory: MiB,
}

impl Container {
    fn init_role(&self) -> ContainerRole {
        if self.restart_policy == "Always" { ContainerRole::Sidecar } else { ContainerRole::Init }
    }

    fn needs(&self, unit: MemoryUnit) -> Result<ContainerNeeds, BadContainer> {
        let Resources { limits, requests, .. } = &self.resources;
        let request = dialect::request(limits, requests, unit)?.map(|(_, request)| request);
        let (cpu, memory) = cpu_and_memory(requests, limits)?;
        Ok(ContainerNeeds { request, cpu, memory })
    }
}

/// Returns CPU and memory from `requests`, or from `limits` if absent, like the API server's
/// defaulting.
fn cpu_and_memory(requests: &Amounts, limits: &Amounts) -> Result<(MilliCpu, MiB), BadContainer> {
    let amount = |resource: &'static str| {
        let text = requests.get(resource).or_else(|| limits.get(resource));
        let amount = text.map_or_else(|| Ok(Quantity::default()), |text| text.0.parse::<Quantity>());
        amount.map_err(|reason| BadContainer::Quantity { resource, reason })
    };
    let cpu = amount("cpu")?.milli().unwrap_or(0);
    let memory = amount("memory")?.mib().unwrap_or(0);
    Ok((MilliCpu(cpu), MiB(memory)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<PodRequest, BadPod> {
        serde_json::from_str::<PodSpec>(json).unwrap().request(MemoryUnit::GiB)
    }

    /// kube-scheduler counts MIG instances without the extender.
    #[test]
    fn mig_instances_are_no_gpu_request() {
        let container =
            |limits: &str| format!(r#"{{"containers":[{{"name":"c","resources":{{"limits":{limits}}}}}]}}"#);
        let read = |limits: &str| serde_json::from_str::<PodSpec>(&container(limits)).unwrap();
        let instance = read(r#"{"nvidia.com/mig-1g.10gb":"1"}"#);
        assert!(!instance.asks_for_gpus() && !instance.names_gpu_resources());
        assert_eq!(instance.request(MemoryUnit::GiB).unwrap().containers[0].request, None);
        assert_eq!(instance.mig_instances(), [("nvidia.com/mig-1g.10gb".to_owned(), 1)].into());
        let both = read(r#"{"nvidia.com/mig-1g.10gb":"1","nvidia.com/gpu":"1"}"#);
        assert_eq!(both.request(MemoryUnit::GiB).unwrap().containers[0].request, Some(Request::Whole(1)));
    }

    #[test]
    fn adds_up_init_containers_and_sidecars_like_kubernetes() {
        let pod = read(
            r#"{
                "nodeName": "ignored",
                "overhead": {"cpu": "100m"},
                "initContainers": [
                    {"name": "proxy", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
                    {"name": "load", "resources": {"limits": {"cpu": "6", "nvidia.com/gpu": "1"}}}
                ],
                "containers": [
                    {"name": "train", "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "1Gi"},
                                                    "requests": {"nvidia.com/gpu": "2", "cpu": "4"}}},
                    {"name": "log"}
                ]
            }"#,
        )
        .unwrap();
        let asked: Vec<_> = pod.containers.iter().map(|c| (c.name.as_str(), c.role, c.request)).collect();
        assert_eq!(
            asked,
            [
                ("proxy", ContainerRole::Sidecar, None),
                ("load", ContainerRole::Init, Some(Request::Whole(1))),
                ("train", ContainerRole::Main, Some(Request::Whole(2))),
                ("log", ContainerRole::Main, None),
            ]
        );
        assert_eq!((pod.cpu, pod.memory), (MilliCpu(6600), MiB(1024)));
    }

    #[test]
    fn every_error_names_the_container() {
        let pod =
            r#"{"containers": [{"name": "train", "resources": {"limits": {"aliyun.com/gpu-mem": "10G"}}}]}"#;
        assert_eq!(
            read(pod).unwrap_err().to_string(),
            "container train: aliyun.com/gpu-mem: 10G means 10000000000 units of GiB; \
             write the number of units, such as 10"
        );
        let pod = r#"{"containers": [{"name": "train", "resources": {"requests": {"cpu": "much"}}}]}"#;
        assert_eq!(
            read(pod).unwrap_err().to_string(),
            "container train: cpu: `much` is not a quantity; write a number such as 2, 500m or 4Gi"
        );
        let pod = r#"{"containers": [{"resources": {"limits": {"nvidia.com/gpu": "half"}}}]}"#;
        let said = read(pod).unwrap_err().to_string();
        assert!(
            said.starts_with("nvidia.com/gpu: half is not a number"),
            "the container has no name: {said}"
        );
    }
}
