//! MIG instances of GPUs, as containers can receive them.

use std::{fs, path::Path};

use tessera_core::{
    gpu::{Gpu, GpuUuid, Health},
    units::{GpuIndex, MiB},
};

/// An instance of a GPU in MIG mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInstance {
    /// Index of the GPU.
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    pub gpu_uuid: GpuUuid,
    /// UUID of the instance, such as `MIG-4e0c...`.
    pub uuid: GpuUuid,
    /// Profile of the instance, such as `1g.10gb`.
    pub profile: String,
    /// Memory of the GPU instance.
    pub memory: MiB,
    /// ID of the GPU instance.
    pub gpu_instance: u32,
    /// ID of the compute instance.
    pub compute_instance: u32,
    /// Device nodes of the instance: of its GPU and of its capabilities. Empty if it has none.
    pub device_nodes: Vec<String>,
}

impl GpuInstance {
    /// Returns the instance as a GPU of its own. `gpu` is the GPU to which it belongs.
    #[must_use]
    pub fn as_gpu(&self, index: GpuIndex, gpu: &Gpu) -> Gpu {
        Gpu {
            index,
            uuid: self.uuid.clone(),
            minor: gpu.minor,
            model: format!("{} MIG {}", gpu.model, self.profile).as_str().into(),
            memory: self.memory,
            numa: gpu.numa,
            health: match gpu.health {
                Health::InMigMode => Health::Healthy,
                Health::AwaitingReset => Health::AwaitingReset,
                Health::Healthy | Health::Unhealthy | Health::Cordoned => Health::Unhealthy,
            },
        }
    }
}

/// Returns the device nodes of an instance: of the GPU with this minor number, and of the two capabilities
/// that the driver describes below `capabilities`, which is `/proc/driver/nvidia/capabilities`.
pub(super) fn device_nodes(
    capabilities: &Path,
    minor: u32,
    gpu_instance: u32,
    compute_instance: u32,
) -> Vec<String> {
    let of_gpu_instance = capabilities.join(format!("gpu{minor}/mig/gi{gpu_instance}"));
    let of_compute_instance = of_gpu_instance.join(format!("ci{compute_instance}"));
    let node = |directory: &Path| {
        let text = fs::read_to_string(directory.join("access")).ok()?;
        Some(format!("/dev/nvidia-caps/nvidia-cap{}", capability_minor(&text)?))
    };
    let capabilities = [of_gpu_instance, of_compute_instance].into_iter().filter_map(|path| node(&path));
    std::iter::once(format!("/dev/nvidia{minor}")).chain(capabilities).collect()
}

/// Parses the minor number of a capability's device node from its file `access`.
fn capability_minor(text: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_device_nodes_of_an_instance_by_its_capabilities() {
        let folder = tempfile::tempdir().unwrap();
        let instance = folder.path().join("gpu3/mig/gi7");
        fs::create_dir_all(instance.join("ci0")).unwrap();
        fs::write(instance.join("access"), "DeviceFileMinor: 66\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
            .unwrap();
        fs::write(instance.join("ci0/access"), "DeviceFileMinor: 67\nDeviceFileMode: 292\n").unwrap();
        let nodes = |compute_instance| device_nodes(folder.path(), 3, 7, compute_instance);
        assert_eq!(
            nodes(0),
            ["/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67"]
        );
        assert_eq!(nodes(1), ["/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap66"], "unknown instance");
        assert_eq!(capability_minor("DeviceFileMode: 292"), None);
    }
}
