//! The Allocate response of a container: environment variables, device nodes, mounts and
//! annotations in the form of its dialect.

use std::collections::HashMap;

use tessera_core::grant::{ContainerGrant, Hold};
use tessera_core::node::Node;
use tessera_core::units::MiB;

use crate::foreign::dialect::{Dialect, MemoryUnit, vcuda};
use crate::kubelet::device_plugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};

/// Settings of a node for injecting GPUs into containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InjectionSettings {
    /// Form of the GPU names in `NVIDIA_VISIBLE_DEVICES`.
    pub visible: VisibleDevices,
    /// CDI kind of the GPUs, such as `nvidia.com/gpu`. `Some` makes the runtime inject the GPUs by
    /// CDI.
    pub cdi_kind: Option<String>,
    /// True if the kubelet passes `/dev/nvidia*` to containers of the vcuda dialect.
    pub device_nodes: bool,
    /// True if the container runtime adds nothing of NVIDIA's by itself. Then containers of every dialect
    /// get device nodes and the driver directory, otherwise only those of the vcuda dialect.
    pub is_plain_runtime: bool,
    /// Host directory with the driver's libraries, mounted into containers of the vcuda dialect.
    pub driver_directory: Option<String>,
    /// The same for containers with whole GPUs, if they get another directory.
    pub driver_directory_of_whole_gpus: Option<String>,
    /// Device nodes that containers get in addition to those of their GPUs.
    pub extra_devices: Vec<String>,
    /// True if a label of the node disables cGPU's isolation.
    pub cgpu_disabled: bool,
}

/// Form of the GPU names in `NVIDIA_VISIBLE_DEVICES`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VisibleDevices {
    /// UUID, which does not depend on the order of the GPUs.
    #[default]
    Uuid,
    /// Index, as the device plugins of gpushare and gputopology write it.
    Index,
}

/// A container and its grant.
#[derive(Clone, Copy, Debug)]
pub struct GrantedContainer<'a> {
    /// Dialect of the container's request.
    pub dialect: Dialect,
    /// Grant of the container.
    pub grant: &'a ContainerGrant,
    /// Units of `aliyun.com/gpu-mem` of the container and of its whole pod.
    pub memory_units: (u64, u64),
    /// Priority of the container in HAMi's dialect, if it names one.
    pub priority: Option<u64>,
}

const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Container path at which gpu-manager mounts the driver.
const DRIVER_IN_CONTAINER: &str = "/usr/local/nvidia";

impl InjectionSettings {
    /// Returns the Allocate response of a container.
    #[must_use]
    pub fn response(
        &self,
        container: &GrantedContainer<'_>,
        node: &Node,
        unit: MemoryUnit,
    ) -> ContainerAllocateResponse {
        let gpus =
            || container.grant.holds.iter().filter_map(|(index, hold)| Some((node.gpu(*index)?, *hold)));
        let join = |names: Vec<String>| names.join(",");
        let uuids: Vec<String> = gpus().map(|(gpu, _)| gpu.uuid.to_string()).collect();
        let mut response = ContainerAllocateResponse::default();
        let mut put = |key: &str, value: String| response.envs.insert(key.to_owned(), value);
        match (&self.cdi_kind, self.visible) {
            // `void` prevents the runtime's hook from adding the image's default, often all GPUs.
            (Some(_), _) => put(VISIBLE, "void".to_owned()),
            (None, VisibleDevices::Uuid) => put(VISIBLE, join(uuids.clone())),
            (None, VisibleDevices::Index) => put(VISIBLE, container.grant.gpus().to_string()),
        };
        if container.dialect == Dialect::Gpushare {
            let (container_units, pod_units) = container.memory_units;
            let gpu_units = gpus().next().map_or(0, |(gpu, _)| gpu.memory.0 / unit.mib());
            put("ALIYUN_COM_GPU_MEM_IDX", container.grant.gpus().to_string());
            put("ALIYUN_COM_GPU_MEM_POD", pod_units.to_string());
            put("ALIYUN_COM_GPU_MEM_CONTAINER", container_units.to_string());
            put("ALIYUN_COM_GPU_MEM_DEV", gpu_units.to_string());
            if self.cgpu_disabled {
                put("CGPU_DISABLE", "true".to_owned());
            }
        }
        if container.dialect == Dialect::Hami {
            for (key, value) in hami_variables(container) {
                put(&key, value);
            }
        }
        if let Some(kind) = &self.cdi_kind {
            response.cdi_devices =
                uuids.iter().map(|uuid| CdiDevice { name: format!("{kind}={uuid}") }).collect();
        }
        let paths: Vec<String> = gpus().map(|(gpu, _)| format!("/dev/nvidia{}", gpu.minor)).collect();
        if container.dialect == Dialect::Vcuda {
            response.annotations = vcuda_annotations(container.grant, &paths);
        }
        if container.dialect == Dialect::Vcuda || self.is_plain_runtime {
            let is_whole = container.grant.holds.iter().all(|(_, hold)| *hold == Hold::Whole);
            self.add_nodes(&mut response, paths.into_iter());
            // They are not the GPUs', so neither CDI nor simulated GPUs replace them.
            response.devices.extend(device_specs(self.extra_devices.iter().cloned()));
            self.add_driver(&mut response, is_whole);
        }
        response
    }

    /// Returns the Allocate response of a container with MIG instances. `device_nodes` are those of the
    /// instances alone.
    #[must_use]
    pub fn instances_response(
        &self,
        uuids: &[String],
        device_nodes: impl Iterator<Item = String>,
    ) -> ContainerAllocateResponse {
        let mut response = ContainerAllocateResponse::default();
        let visible = if self.cdi_kind.is_some() { "void".to_owned() } else { uuids.join(",") };
        response.envs.insert(VISIBLE.to_owned(), visible);
        if let Some(kind) = &self.cdi_kind {
            response.cdi_devices =
                uuids.iter().map(|uuid| CdiDevice { name: format!("{kind}={uuid}") }).collect();
        }
        self.add_nodes(&mut response, device_nodes);
        if self.is_plain_runtime {
            self.add_driver(&mut response, true);
        }
        response
    }

    /// Adds device nodes and those that all GPUs of a host share, unless the runtime adds them by CDI.
    fn add_nodes(&self, response: &mut ContainerAllocateResponse, nodes: impl Iterator<Item = String>) {
        if self.device_nodes && self.cdi_kind.is_none() {
            response.devices = device_specs(nodes.chain(shared_nodes()));
        }
    }

    /// Adds the driver's files.
    fn add_driver(&self, response: &mut ContainerAllocateResponse, is_whole: bool) {
        let of_whole_gpus = self.driver_directory_of_whole_gpus.as_ref().filter(|_| is_whole);
        if let Some(directory) = of_whole_gpus.or(self.driver_directory.as_ref()) {
            response.envs.insert("LD_LIBRARY_PATH".into(), format!("{DRIVER_IN_CONTAINER}/lib64"));
            response.mounts.push(Mount {
                container_path: DRIVER_IN_CONTAINER.into(),
                host_path: directory.clone(),
                read_only: true,
            });
        }
    }
}

/// Returns the variables by which tools for HAMi's containers know the limits. Nothing enforces them: the
/// limits that hold are in the control file.
fn hami_variables(container: &GrantedContainer<'_>) -> Vec<(String, String)> {
    let mut variables = Vec::new();
    for (number, (_, hold)) in container.grant.holds.iter().enumerate() {
        let Hold::Share { compute_percent, memory } = hold else { continue };
        variables.push((format!("CUDA_DEVICE_MEMORY_LIMIT_{number}"), format!("{}m", memory.0)));
        if number == 0 {
            variables.push(("CUDA_DEVICE_SM_LIMIT".to_owned(), compute_percent.0.to_string()));
        }
    }
    if let Some(priority) = container.priority {
        variables.push(("CUDA_TASK_PRIORITY".to_owned(), priority.to_string()));
    }
    variables
}

/// Returns the device nodes that all GPUs of a host share.
fn shared_nodes() -> impl Iterator<Item = String> {
    ["/dev/nvidiactl", "/dev/nvidia-uvm"].map(str::to_owned).into_iter()
}

/// Returns device nodes as the kubelet passes them to a container, under their own paths.
fn device_specs(paths: impl Iterator<Item = String>) -> Vec<DeviceSpec> {
    let specification = |path: String| DeviceSpec {
        container_path: path.clone(),
        host_path: path,
        permissions: "rwm".into(),
    };
    paths.map(specification).collect()
}

/// Returns the annotations that gpu-manager's display reads from the runtime.
fn vcuda_annotations(grant: &ContainerGrant, paths: &[String]) -> HashMap<String, String> {
    let (compute_percent, memory) =
        grant.holds.iter().fold((0, MiB::ZERO), |(compute_percent, memory), (_, hold)| match hold {
            Hold::Whole => (compute_percent + 100, memory),
            Hold::Share { compute_percent: more, memory: also } => (compute_percent + more.0, memory + *also),
        });
    HashMap::from([
        (vcuda::CORE.to_owned(), compute_percent.to_string()),
        (vcuda::MEMORY.to_owned(), (memory.0 << 20).to_string()),
        ("tencent.com/vcuda-device".to_owned(), paths.join(",")),
    ])
}

/// Returns whether the node's labels disable cGPU's isolation.
#[must_use]
pub fn disables_cgpu(labels: &std::collections::BTreeMap<String, String>) -> bool {
    labels.get("cgpu.disable.isolation").is_some_and(|value| value == "true")
}

/// Converts memory to whole units of `aliyun.com/gpu-mem`.
#[must_use]
pub fn memory_units(memory: MiB, unit: MemoryUnit) -> u64 {
    memory.0 / unit.mib()
}

#[cfg(test)]
mod tests;
