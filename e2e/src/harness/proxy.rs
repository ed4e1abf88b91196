//! kube-proxy, which makes the addresses of Services reachable.

use std::{fs, process::Command};

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Cluster, Component, cluster::SERVICE_RANGE, free_port};
use crate::enclosure::NODE_DEVICE;

impl Cluster {
    /// Starts kube-proxy for this node. Pods then reach the API server, and the host reaches all Services.
    pub(crate) fn start_proxy(&self, node: &str) -> Result<Component> {
        // The host has no default route. Connections to Services go nowhere before kube-proxy changes their address.
        let route = ["route", "add", SERVICE_RANGE, "dev", NODE_DEVICE];
        ensure!(Command::new("ip").args(route).status()?.success(), "cannot add a route to Services");
        let kubeconfig = self.kubeconfig("system:kube-proxy", "e2e")?.display().to_string();
        let configuration = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "hostnameOverride": node,
            "clientConnection": { "kubeconfig": kubeconfig },
            "clusterCIDR": "10.89.0.0/16",
            "healthzBindAddress": format!("127.0.0.1:{}", free_port()?),
            "metricsBindAddress": format!("127.0.0.1:{}", free_port()?),
            // The limits of the kernel belong to the host.
            "conntrack": {
                "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"
            },
        });
        let file = self.harness.state("kube-proxy")?.join("configuration.json");
        fs::write(&file, configuration.to_string())?;
        let program = self.harness.kubernetes("kube-proxy").argument(format!("--config={}", file.display()));
        self.harness.start("kube-proxy", program)
    }
}
