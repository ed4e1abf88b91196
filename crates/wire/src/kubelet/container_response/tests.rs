use std::collections::BTreeMap;

use tessera_core::gpu::{Gpu, Health};
use tessera_core::request::ContainerRole;
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MilliCpu, Percent};

use super::*;

/// A node whose minor numbers descend with the index, so that a test fails if code confuses them.
fn node() -> Node {
    let gpu = |index: u8| Gpu {
        index: GpuIndex(index),
        uuid: format!("GPU-{index}").as_str().into(),
        minor: 3 - u32::from(index),
        model: "T4".into(),
        memory: MiB(16_276),
        numa: None,
        health: Health::Healthy,
    };
    Node::new("n".into(), (0..4).map(gpu).collect(), Topology::unknown(4), MilliCpu::ZERO, MiB::ZERO).unwrap()
}

fn response(
    settings: &InjectionSettings,
    dialect: Dialect,
    gpus: &[(u8, Hold)],
) -> ContainerAllocateResponse {
    let holds = gpus.iter().map(|(index, hold)| (GpuIndex(*index), *hold)).collect();
    let grant = ContainerGrant { container: "main".into(), role: ContainerRole::Main, holds };
    let container = GrantedContainer { dialect, grant: &grant, memory_units: (2, 5), priority: Some(1) };
    settings.response(&container, &node(), MemoryUnit::GiB)
}

fn check(settings: &InjectionSettings, dialect: Dialect, gpus: &[(u8, Hold)], expected: &[(&str, &str)]) {
    let response = response(settings, dialect, gpus);
    let envs: BTreeMap<_, _> =
        response.envs.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(envs, expected.iter().copied().collect(), "{dialect}");
    assert!(response.mounts.is_empty());
}

#[test]
fn sets_the_environment_of_each_dialect() {
    let plain = InjectionSettings::default();
    let two = [(1, Hold::Whole), (2, Hold::Whole)];
    check(&plain, Dialect::Nvidia, &two, &[("NVIDIA_VISIBLE_DEVICES", "GPU-1,GPU-2")]);
    check(&plain, Dialect::Gputopology, &two, &[("NVIDIA_VISIBLE_DEVICES", "GPU-1,GPU-2")]);
    let indexes = InjectionSettings { visible: VisibleDevices::Index, ..InjectionSettings::default() };
    check(&indexes, Dialect::Gputopology, &two, &[("NVIDIA_VISIBLE_DEVICES", "1,2")]);
    let part = Hold::Share { compute_percent: Percent(30), memory: MiB(3000) };
    let limits = [
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "3000m"),
        ("CUDA_DEVICE_MEMORY_LIMIT_1", "3000m"),
        ("CUDA_DEVICE_SM_LIMIT", "30"),
        ("CUDA_TASK_PRIORITY", "1"),
        ("NVIDIA_VISIBLE_DEVICES", "GPU-1,GPU-2"),
    ];
    check(&plain, Dialect::Hami, &[(1, part), (2, part)], &limits);
    let memory = Hold::Share { compute_percent: Percent::ZERO, memory: MiB(2048) };
    check(
        &InjectionSettings { cgpu_disabled: true, ..InjectionSettings::default() },
        Dialect::Gpushare,
        &[(3, memory)],
        &[
            ("ALIYUN_COM_GPU_MEM_CONTAINER", "2"),
            ("ALIYUN_COM_GPU_MEM_DEV", "15"),
            ("ALIYUN_COM_GPU_MEM_IDX", "3"),
            ("ALIYUN_COM_GPU_MEM_POD", "5"),
            ("CGPU_DISABLE", "true"),
            ("NVIDIA_VISIBLE_DEVICES", "GPU-3"),
        ],
    );
}

#[test]
fn vcuda_gets_device_nodes_by_minor_number_and_annotations() {
    let share = Hold::Share { compute_percent: Percent(30), memory: MiB(7680) };
    let full = InjectionSettings {
        device_nodes: true,
        driver_directory: Some("/etc/gpu-manager/vdriver/nvidia".into()),
        driver_directory_of_whole_gpus: Some("/etc/gpu-manager/vdriver/origin".into()),
        extra_devices: vec!["/dev/infiniband/uverbs0".into()],
        ..InjectionSettings::default()
    };
    let whole = response(&full, Dialect::Vcuda, &[(0, Hold::Whole)]);
    assert_eq!(whole.mounts[0].host_path, "/etc/gpu-manager/vdriver/origin");
    let response = response(&full, Dialect::Vcuda, &[(0, share)]);
    assert_eq!(response.mounts[0].host_path, "/etc/gpu-manager/vdriver/nvidia");
    let paths: Vec<&str> = response.devices.iter().map(|device| device.host_path.as_str()).collect();
    assert_eq!(paths, ["/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/infiniband/uverbs0"]);
    assert_eq!(response.annotations["tencent.com/vcuda-core"], "30");
    assert_eq!(response.annotations["tencent.com/vcuda-memory"], "8053063680");
    assert_eq!(response.annotations["tencent.com/vcuda-device"], "/dev/nvidia3");
    assert_eq!(response.envs["LD_LIBRARY_PATH"], "/usr/local/nvidia/lib64");
    assert_eq!(response.mounts[0].container_path, "/usr/local/nvidia");
}

#[test]
fn every_dialect_gets_devices_and_driver_on_a_plain_runtime() {
    let plain = InjectionSettings {
        device_nodes: true,
        is_plain_runtime: true,
        driver_directory: Some("/var/lib/tessera/driver".into()),
        ..InjectionSettings::default()
    };
    let memory = Hold::Share { compute_percent: Percent::ZERO, memory: MiB(2048) };
    for (dialect, hold) in
        [(Dialect::Nvidia, Hold::Whole), (Dialect::Gputopology, Hold::Whole), (Dialect::Gpushare, memory)]
    {
        let response = response(&plain, dialect, &[(0, hold)]);
        let paths: Vec<&str> = response.devices.iter().map(|device| device.host_path.as_str()).collect();
        assert_eq!(paths, ["/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm"], "{dialect:?}");
        assert_eq!(response.mounts[0].host_path, "/var/lib/tessera/driver", "{dialect:?}");
        assert_eq!(response.annotations.len(), 0, "{dialect:?}");
    }
    let instances = plain.instances_response(&["MIG-1".into()], ["/dev/nvidia3".to_owned()].into_iter());
    assert_eq!((instances.devices.len(), instances.mounts.len()), (3, 1));
}

#[test]
fn cdi_replaces_device_nodes_and_the_environment() {
    let cdi = InjectionSettings {
        cdi_kind: Some("nvidia.com/gpu".into()),
        device_nodes: true,
        ..InjectionSettings::default()
    };
    let response = response(&cdi, Dialect::Vcuda, &[(2, Hold::Whole)]);
    assert_eq!(response.cdi_devices[0].name, "nvidia.com/gpu=GPU-2");
    assert_eq!(response.envs["NVIDIA_VISIBLE_DEVICES"], "void");
    assert!(response.devices.is_empty());
}

#[test]
fn extra_devices_do_not_depend_on_the_nodes_of_gpus() {
    let extra_devices = vec!["/dev/infiniband/uverbs0".to_owned()];
    for cdi_kind in [None, Some("nvidia.com/gpu".to_owned())] {
        let device_nodes = cdi_kind.is_some();
        let extra_devices = extra_devices.clone();
        let settings =
            InjectionSettings { cdi_kind, device_nodes, extra_devices, ..InjectionSettings::default() };
        let paths = |dialect| {
            let response = response(&settings, dialect, &[(2, Hold::Whole)]);
            response.devices.into_iter().map(|device| device.host_path).collect::<Vec<_>>()
        };
        assert_eq!(paths(Dialect::Vcuda), ["/dev/infiniband/uverbs0"]);
        assert_eq!(paths(Dialect::Gputopology), [""; 0], "gpu-manager serves vcuda containers only");
    }
}
