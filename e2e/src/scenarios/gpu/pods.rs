//! Pods that run programs of the host on a GPU.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::host::Python;
use crate::harness::{IMAGE, repository};

/// Prints what nvidia-smi says in the container, once in a second.
const NVIDIA_SMI: &str = "while :; do echo smi $(nvidia-smi --query-gpu=memory.total,memory.used \
    --format=csv,noheader,nounits); sleep 1; done &";

/// A pod with one container.
#[derive(Debug, Clone)]
pub(super) struct GpuPod {
    name: String,
    script: String,
    resources: Vec<(&'static str, String)>,
    /// Name of a ResourceClaim that the container uses.
    claim: Option<String>,
    /// Mounted directories: on the host, and in the container.
    mounts: Vec<(String, String)>,
}

impl GpuPod {
    /// Returns a pod that runs a shell script, with nothing of the host.
    pub(super) fn script(name: &str, script: &str) -> Self {
        Self {
            name: name.to_owned(),
            script: script.to_owned(),
            resources: Vec::new(),
            claim: None,
            mounts: Vec::new(),
        }
    }

    /// Returns a pod that runs a script with the programs of the host: nvidia-smi, `$PYTHON`, and the files
    /// of `gpu/` in `/e2e`.
    pub(super) fn python(name: &str, script: &str, python: &Python) -> Result<Self> {
        let script = format!(
            "export HOME=/tmp USER=root PATH=$PATH:/usr/local/nvidia/bin:/usr/bin PYTHON={}; {script}",
            python.program.display()
        );
        let mut pod = Self::script(name, &script);
        let same = |path: &Path| (path.display().to_string(), path.display().to_string());
        for libraries in ["lib64", "lib/x86_64-linux-gnu"] {
            pod.mounts.push((format!("/usr/{libraries}"), format!("/{libraries}")));
        }
        // A share may not cover /usr, /usr/lib and /lib, where the library is. The driver's libraries come from the
        // agent.
        let parts = ["/usr/bin", "/usr/local", "/usr/share"].map(PathBuf::from).into_iter();
        let libraries = fs::read_dir("/usr/lib")?.filter_map(|entry| Some(entry.ok()?.path()));
        for part in parts.chain(libraries.filter(|path| path.is_dir())) {
            pod.mounts.push(same(&part));
        }
        pod.mounts.push((repository().join("gpu").display().to_string(), "/e2e".into()));
        pod.mounts.extend(python.directories.iter().map(|directory| same(directory)));
        for optional in ["/etc/alternatives", "/etc/ld.so.cache"] {
            if Path::new(optional).exists() {
                pod.mounts.push((optional.into(), optional.into()));
            }
        }
        Ok(pod)
    }

    /// Returns a pod that runs a program of `gpu/training.py` for ever. It prints "ready", the seconds of the
    /// GPU that a step needs, and then the steps per second of each second.
    pub(super) fn program(name: &str, kind: &str, python: &Python) -> Result<Self> {
        let script = format!(
            "{NVIDIA_SMI} (echo need; while :; do echo 1; done) | $PYTHON /e2e/training.py {kind} 2>&1"
        );
        Self::python(name, &script, python)
    }

    /// Returns a pod like [`Self::program`] that does not ask for the need of a step.
    pub(super) fn rates(name: &str, kind: &str, python: &Python) -> Result<Self> {
        let script =
            format!("{NVIDIA_SMI} (while :; do echo 1; done) | $PYTHON /e2e/training.py {kind} 2>&1");
        Self::python(name, &script, python)
    }

    pub(super) fn asking(mut self, resource: &'static str, amount: u64) -> Self {
        self.resources.push((resource, amount.to_string()));
        self
    }

    /// Asks for a share of vcuda: a percentage of time, and memory in blocks of 256 MiB.
    pub(super) fn share(self, compute_percent: u64, blocks: u64) -> Self {
        self.asking("tencent.com/vcuda-core", compute_percent).asking("tencent.com/vcuda-memory", blocks)
    }

    pub(super) fn claiming(mut self, claim: &str) -> Self {
        self.claim = Some(claim.to_owned());
        self
    }

    pub(super) fn mounting(mut self, host: &Path, container: &str) -> Self {
        self.mounts.push((host.display().to_string(), container.to_owned()));
        self
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn object(&self) -> Result<Pod> {
        let named = |place: usize| format!("mount-{place}");
        let volumes: Vec<Value> = (0..)
            .zip(&self.mounts)
            .map(|(place, (host, _))| json!({ "name": named(place), "hostPath": { "path": host } }))
            .collect();
        let mounts: Vec<Value> = (0..)
            .zip(&self.mounts)
            .map(|(place, (_, container))| json!({ "name": named(place), "mountPath": container }))
            .collect();
        let amounts: Value =
            self.resources.iter().map(|(name, amount)| ((*name).to_owned(), json!(amount))).collect();
        let claims: Vec<Value> =
            self.claim.iter().map(|claim| json!({ "name": "gpu", "resourceClaimName": claim })).collect();
        let used: Vec<Value> = self.claim.iter().map(|_| json!({ "name": "gpu" })).collect();
        Ok(serde_json::from_value(json!({
            "metadata": { "name": self.name },
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": false,
                "volumes": volumes,
                "resourceClaims": claims,
                "containers": [{
                    "name": "main",
                    "image": IMAGE,
                    "imagePullPolicy": "Never",
                    "command": ["sh", "-c", self.script],
                    "resources": { "limits": amounts, "claims": used },
                    "volumeMounts": mounts,
                }],
            },
        }))?)
    }
}
