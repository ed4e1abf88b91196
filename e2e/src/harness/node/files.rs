//! The configuration files of a node's programs.

use anyhow::Result;
use serde_json::json;

use super::Place;
use crate::{
    enclosure::pod_subnet,
    harness::{IMAGE, free_port},
};

impl Place<'_> {
    pub(super) fn containerd_configuration(&self) -> String {
        let directory = self.directory.display();
        let socket = self.containerd_socket();
        let plugins = self.harness.tool("cni", "/usr/lib/cni");
        format!(
            r#"version = 3
root = "{directory}/containerd/root"
state = "{directory}/containerd/state"
disabled_plugins = ["io.containerd.nri.v1.nri"]

[grpc]
address = "{socket}"

[ttrpc]
address = "{socket}.ttrpc"

[plugins."io.containerd.internal.v1.opt"]
path = "{directory}/containerd/opt"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "native"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{image}"

[plugins."io.containerd.cri.v1.runtime"]
cdi_spec_dirs = ["{directory}/cdi"]
enable_cdi = true
# Without the right to lower its own score, runc could start no container.
restrict_oom_score_adj = true

# Stands for NVIDIA's runtime, which the shipped runtime class names. It adds no driver.
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{plugins}"]
conf_dir = "{directory}/cni"
"#,
            image = IMAGE,
            plugins = plugins.display(),
        )
    }

    /// Returns the network configuration: a bridge for each node.
    pub(super) fn network(&self) -> serde_json::Value {
        json!({
            "cniVersion": "0.4.0",
            "name": self.name,
            "plugins": [{
                "type": "bridge",
                "bridge": format!("e2e-pods-{}", self.number),
                "isGateway": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{ "subnet": pod_subnet(self.number) }]],
                    "routes": [{ "dst": "0.0.0.0/0" }],
                    "dataDir": self.directory.join("cni/addresses"),
                },
            }],
        })
    }

    pub(super) fn kubelet_configuration(&self) -> Result<serde_json::Value> {
        Ok(json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": format!("unix://{}", self.containerd_socket()),
            "port": free_port()?,
            "healthzPort": free_port()?,
            "authentication": { "anonymous": { "enabled": true }, "webhook": { "enabled": false } },
            "authorization": { "mode": "AlwaysAllow" },
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": format!("/{}", self.cgroup().unwrap_or_default()),
            "failCgroupV1": false,
            "failSwapOn": false,
            "enforceNodeAllocatable": [],
            "podLogsDir": self.directory.join("pod-logs"),
            "volumePluginDir": self.directory.join("volume-plugins"),
            "resolvConf": "",
            // Device changes reach the node's object with the next status update. A short interval
            // keeps tests fast.
            "nodeStatusUpdateFrequency": "1s",
            // A host with a full disk must not evict our pods or delete the only image.
            "evictionHard": { "memory.available": "1Mi", "nodefs.available": "1Mi" },
            "imageGCHighThresholdPercent": 100,
        }))
    }
}
