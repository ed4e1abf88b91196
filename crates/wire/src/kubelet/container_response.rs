//! What a container is given with its GPUs: environment, device nodes, mounts, notes, in the words of its dialect.

use std::collections::HashMap;

use tessera_core::grant::{ContainerGrant, Hold};
use tessera_core::node::Node;
use tessera_core::units::MiB;

use crate::foreign::dialect::{Dialect, MemoryUnit, vcuda};
use crate::kubelet::device_plugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};

/// How GPUs are handed over on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InjectionSettings {
    /// What names a GPU in `NVIDIA_VISIBLE_DEVICES`.
    pub visible: VisibleDevices,
    /// The CDI kind of the GPUs, such as `nvidia.com/gpu`, where the runtime shall pass them in by CDI.
    pub cdi_kind: Option<String>,
    /// Whether containers of the vcuda dialect are given `/dev/nvidia*` by the kubelet.
    pub device_nodes: bool,
    /// A directory with the driver's libraries, mounted into containers of the vcuda dialect.
    pub driver_directory: Option<String>,
    /// Whether the node is labelled so that cGPU shall not isolate.
    pub cgpu_disabled: bool,
}

/// What names a GPU in `NVIDIA_VISIBLE_DEVICES`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VisibleDevices {
    /// Its UUID: the same in every order of GPUs.
    #[default]
    Uuid,
    /// Its index, as the originals wrote.
    Index,
}

/// Whose container it is, and what it asked for.
#[derive(Clone, Copy, Debug)]
pub struct GrantedContainer<'a> {
    /// The vocabulary it asked in.
    pub dialect: Dialect,
    /// What it holds.
    pub grant: &'a ContainerGrant,
    /// Units of `aliyun.com/gpu-mem` of the container and of its whole pod.
    pub memory_units: (u64, u64),
}

const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Where gpu-manager mounted the driver.
const DRIVER_IN_CONTAINER: &str = "/usr/local/nvidia";

impl InjectionSettings {
    /// Everything a container is given with its GPUs.
    #[must_use]
    pub fn response(
        &self,
        recipient: &GrantedContainer<'_>,
        node: &Node,
        unit: MemoryUnit,
    ) -> ContainerAllocateResponse {
        let gpus =
            || recipient.grant.holds.iter().filter_map(|(index, hold)| Some((node.gpu(*index)?, *hold)));
        let join = |names: Vec<String>| names.join(",");
        let uuids: Vec<String> = gpus().map(|(gpu, _)| gpu.uuid.to_string()).collect();
        let mut given = ContainerAllocateResponse::default();
        let mut put = |key: &str, value: String| given.envs.insert(key.to_owned(), value);
        match (&self.cdi_kind, self.visible) {
            // The runtime's own hook must not add what the image's default names, often all GPUs.
            (Some(_), _) => put(VISIBLE, "void".to_owned()),
            (None, VisibleDevices::Uuid) => put(VISIBLE, join(uuids.clone())),
            (None, VisibleDevices::Index) => put(VISIBLE, recipient.grant.gpus().to_string()),
        };
        if recipient.dialect == Dialect::Gpushare {
            let (container, pod) = recipient.memory_units;
            let card = gpus().next().map_or(0, |(gpu, _)| gpu.memory.0 / unit.mib());
            put("ALIYUN_COM_GPU_MEM_IDX", recipient.grant.gpus().to_string());
            put("ALIYUN_COM_GPU_MEM_POD", pod.to_string());
            put("ALIYUN_COM_GPU_MEM_CONTAINER", container.to_string());
            put("ALIYUN_COM_GPU_MEM_DEV", card.to_string());
            if self.cgpu_disabled {
                put("CGPU_DISABLE", "true".to_owned());
            }
        }
        if let Some(kind) = &self.cdi_kind {
            given.cdi_devices =
                uuids.iter().map(|uuid| CdiDevice { name: format!("{kind}={uuid}") }).collect();
        }
        if recipient.dialect == Dialect::Vcuda {
            self.add_vcuda(&mut given, recipient.grant, gpus().map(|(gpu, _)| gpu.minor).collect());
        }
        given
    }

    fn add_vcuda(&self, given: &mut ContainerAllocateResponse, grant: &ContainerGrant, minors: Vec<u32>) {
        let cards: Vec<String> = minors.iter().map(|minor| format!("/dev/nvidia{minor}")).collect();
        given.annotations = vcuda_notes(grant, &cards);
        if self.device_nodes && self.cdi_kind.is_none() {
            let shared = ["/dev/nvidiactl", "/dev/nvidia-uvm"].map(str::to_owned);
            given.devices = cards
                .into_iter()
                .chain(shared)
                .map(|path| DeviceSpec {
                    container_path: path.clone(),
                    host_path: path,
                    permissions: "rwm".into(),
                })
                .collect();
        }
        if let Some(directory) = &self.driver_directory {
            given.envs.insert("LD_LIBRARY_PATH".into(), format!("{DRIVER_IN_CONTAINER}/lib64"));
            given.mounts.push(Mount {
                container_path: DRIVER_IN_CONTAINER.into(),
                host_path: directory.clone(),
                read_only: true,
            });
        }
    }
}

/// What gpu-manager's display reads from the runtime.
fn vcuda_notes(grant: &ContainerGrant, cards: &[String]) -> HashMap<String, String> {
    let (compute_percent, memory) =
        grant.holds.iter().fold((0, MiB::ZERO), |(compute_percent, memory), (_, hold)| match hold {
            Hold::Whole => (compute_percent + 100, memory),
            Hold::Share { compute_percent: more, memory: also } => (compute_percent + more.0, memory + *also),
        });
    HashMap::from([
        (vcuda::CORE.to_owned(), compute_percent.to_string()),
        (vcuda::MEMORY.to_owned(), (memory.0 << 20).to_string()),
        ("tencent.com/vcuda-device".to_owned(), cards.join(",")),
    ])
}

/// The node label that switches cGPU's isolation off.
#[must_use]
pub fn disables_cgpu(labels: &std::collections::BTreeMap<String, String>) -> bool {
    labels.get("cgpu.disable.isolation").is_some_and(|value| value == "true")
}

/// How many units of `aliyun.com/gpu-mem` memory is.
#[must_use]
pub fn memory_units(memory: MiB, unit: MemoryUnit) -> u64 {
    memory.0 / unit.mib()
}

#[cfg(test)]
mod tests;
