//! Starts kube-schedulers: the standard one, and others beside it.

use std::fs;

use anyhow::Result;
use serde_json::{Value, json};

use super::{Cluster, Component, Program, free_port};

impl Cluster {
    /// Starts a kube-scheduler with these parts of a `KubeSchedulerConfiguration`. The connection
    /// to the cluster is added.
    pub(crate) fn start_scheduler(&self, name: &str, mut configuration: Value) -> Result<Component> {
        let kubeconfig = self.kubeconfig("system:kube-scheduler", "e2e")?.display().to_string();
        configuration["apiVersion"] = "kubescheduler.config.k8s.io/v1".into();
        configuration["kind"] = "KubeSchedulerConfiguration".into();
        configuration["leaderElection"] = json!({ "leaderElect": false });
        // The default of 50 requests per second would limit measurements.
        configuration["clientConnection"] = json!({ "kubeconfig": kubeconfig, "qps": 5000, "burst": 5000 });

        self.start_configured_scheduler(name, &configuration.to_string(), &kubeconfig)
    }

    /// Starts a kube-scheduler with a complete configuration in JSON or YAML.
    pub(crate) fn start_configured_scheduler(
        &self,
        name: &str,
        configuration: &str,
        kubeconfig: &str,
    ) -> Result<Component> {
        self.harness.start(name, self.scheduler_program(name, configuration, kubeconfig)?)
    }

    /// Returns a kube-scheduler with a complete configuration in JSON or YAML, which is stored under this name.
    pub(crate) fn scheduler_program(
        &self,
        name: &str,
        configuration: &str,
        kubeconfig: &str,
    ) -> Result<Program> {
        let file = self.harness.state(name)?.join("configuration.yaml");
        fs::write(&file, configuration)?;
        Ok(self.harness.kubernetes("kube-scheduler").arguments([
            format!("--config={}", file.display()),
            format!("--authentication-kubeconfig={kubeconfig}"),
            format!("--authorization-kubeconfig={kubeconfig}"),
            format!("--secure-port={}", free_port()?),
            "--bind-address=127.0.0.1".into(),
        ]))
    }
}

/// An extender in the configuration of kube-scheduler.
#[derive(Debug, Clone)]
pub(crate) struct Extender {
    pub(crate) url: String,
    /// Resource of the extender. kube-scheduler calls it only for pods that request this resource.
    pub(crate) resource: String,
    /// True if the extender receives the names of nodes instead of whole nodes.
    pub(crate) node_cache_capable: bool,
}

impl Extender {
    /// Returns the configuration of a kube-scheduler with this name and extender.
    pub(crate) fn scheduler_configuration(&self, scheduler_name: &str) -> Value {
        json!({
            "profiles": [{ "schedulerName": scheduler_name }],
            "extenders": [{
                "urlPrefix": self.url,
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "bindVerb": "bind",
                "weight": 5,
                "nodeCacheCapable": self.node_cache_capable,
                "managedResources": [{ "name": self.resource, "ignoredByScheduler": false }],
            }],
        })
    }
}
