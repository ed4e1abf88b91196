//! What a pod asks for, read from its specification.

use tessera_core::request::{self, ContainerRole, PodRequest, Request, peak};
use tessera_core::units::{MiB, MilliCpu};

use crate::foreign::dialect::{self, BadRequest, Dialect, MemoryUnit};
use crate::foreign::objects::{Amounts, Container, PodSpec, Resources};
use crate::foreign::quantity::{BadQuantity, Quantity};

/// A pod that cannot be placed as it is written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", prefix(container))]
pub struct BadPod {
    /// Which container; empty where a pod was made of a request that named none.
    pub container: String,
    /// What is wrong, and what to write instead.
    #[source]
    pub reason: BadContainer,
}

/// What is wrong with a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadContainer {
    /// Its GPUs.
    #[error(transparent)]
    Gpu(#[from] BadRequest),
    /// Its CPU or main memory.
    #[error("{resource}: {reason}")]
    Quantity {
        /// Which of the two.
        resource: &'static str,
        /// What is wrong with it.
        #[source]
        reason: BadQuantity,
    },
}

/// What one container claims of the GPUs.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Its name.
    pub container: String,
    /// When it runs.
    pub role: ContainerRole,
    /// Its position among the main containers; the dialects count no others.
    pub position: Option<usize>,
    /// In which vocabulary it asks.
    pub dialect: Dialect,
    /// For what.
    pub request: Request,
}

fn prefix(container: &str) -> String {
    if container.is_empty() { String::new() } else { format!("container {container}: ") }
}

impl PodSpec {
    /// What the pod asks for, on a node that counts `aliyun.com/gpu-mem` in `unit`.
    pub fn request(&self, unit: MemoryUnit) -> Result<PodRequest, BadPod> {
        let mut needs = Vec::new();
        let mut containers = Vec::new();
        for (spec, role) in self.containers_with_roles() {
            let read = spec.read(unit).map_err(|reason| BadPod { container: spec.name.clone(), reason })?;
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

    /// All containers in the order they start, and when each runs.
    pub fn containers_with_roles(&self) -> impl Iterator<Item = (&Container, ContainerRole)> {
        let inits = self.init_containers.iter().map(|container| (container, container.init_role()));
        inits.chain(self.containers.iter().map(|container| (container, ContainerRole::Main)))
    }

    /// What each container that asks for GPUs claims, and in which vocabulary.
    pub fn claims(&self, unit: MemoryUnit) -> Result<Vec<Claim>, BadPod> {
        let mut claims = Vec::new();
        let inits = self.init_containers.len();
        for (number, (container, role)) in self.containers_with_roles().enumerate() {
            let Resources { limits, requests } = &container.resources;
            let asked = dialect::request(limits, requests, unit)
                .map_err(|reason| BadPod { container: container.name.clone(), reason: reason.into() })?;
            if let Some((dialect, request)) = asked {
                let position = number.checked_sub(inits);
                claims.push(Claim { container: container.name.clone(), role, position, dialect, request });
            }
        }
        Ok(claims)
    }

    /// Whether any container asks for GPUs. One that asks in a way nobody can serve does, so that it can be told.
    #[must_use]
    pub fn asks_for_gpus(&self) -> bool {
        self.claims(MemoryUnit::GiB).map_or(true, |claims| !claims.is_empty())
    }

    /// CPU and memory of the whole pod; nothing where they cannot be read, which the API server would not let happen.
    #[must_use]
    pub fn host_needs(&self) -> (MilliCpu, MiB) {
        self.request(MemoryUnit::GiB).map(|request| (request.cpu, request.memory)).unwrap_or_default()
    }

    fn overhead_needs(&self) -> Result<(MilliCpu, MiB), BadContainer> {
        cpu_and_memory(&self.overhead, &Amounts::new())
    }
}

/// What one container asks for.
struct Needs {
    request: Option<Request>,
    cpu: MilliCpu,
    memory: MiB,
}

impl Container {
    fn init_role(&self) -> ContainerRole {
        if self.restart_policy == "Always" { ContainerRole::Sidecar } else { ContainerRole::Init }
    }

    fn read(&self, unit: MemoryUnit) -> Result<Needs, BadContainer> {
        let Resources { limits, requests } = &self.resources;
        let request = dialect::request(limits, requests, unit)?.map(|(_, request)| request);
        let (cpu, memory) = cpu_and_memory(requests, limits)?;
        Ok(Needs { request, cpu, memory })
    }
}

/// As requested, or else as limited, which is what the API server fills in.
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

    #[test]
    fn init_containers_and_sidecars_have_their_roles_and_count_as_kubernetes_does() {
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
    fn a_refusal_names_the_container() {
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
            "container train: cpu: `much` is no quantity; write a number such as 2, 500m or 4Gi"
        );
        let pod = r#"{"containers": [{"resources": {"limits": {"nvidia.com/gpu": "half"}}}]}"#;
        let said = read(pod).unwrap_err().to_string();
        assert!(said.starts_with("nvidia.com/gpu: half is no number"), "no container to name: {said}");
    }
}
