//! A real node: a kubelet and its containerd.
//!
//! A kubelet keeps its device plugins in `/var/lib/kubelet` and nowhere else. Each node has its own
//! mount namespace with this directory, so several nodes run side by side.

mod files;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;

use super::{Cluster, Component, Harness, Program, image};
use crate::enclosure::{NODE_ADDRESS, create_cgroup};

/// Directory of the kubelet's files.
pub(crate) const KUBELET_ROOT: &str = "/var/lib/kubelet";

/// A node that runs pods. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct RealNode {
    pub(crate) name: String,
    number: u8,
    directory: PathBuf,
    pub(crate) kubelet: Component,
    pub(crate) containerd: Component,
    /// Process that keeps the node's mount namespace open.
    mounts: Component,
}

impl RealNode {
    pub(super) async fn start(cluster: &Cluster, number: u8) -> Result<Self> {
        let harness = &cluster.harness;
        let name = format!("node-{number}");
        let directory = harness.state(&name)?;
        for part in ["kubelet", "cni", "cdi", "containerd", "pod-logs"] {
            fs::create_dir_all(directory.join(part))?;
        }
        let place = Place { harness, name: &name, directory: directory.clone(), number };
        let mounts = place.open_mount_namespace().await?;
        let namespace = mounts.id().context("the node's mount namespace is gone")?;
        let containerd = place.start_containerd(namespace).await?;
        let busybox = directory.join("image.tar");
        image::write_archive(&busybox, &harness.tool("busybox", "/bin/busybox"))?;
        place.import_image(namespace, &busybox)?;
        if let Some(group) = place.cgroup() {
            create_cgroup(&group)?;
        }
        let kubelet = place.start_kubelet(cluster, namespace)?;
        let node = Self { name, number, directory, kubelet, containerd, mounts };
        node.wait_until_ready(cluster).await?;
        harness.note(&format!("{} ready", node.name));
        Ok(node)
    }

    /// Returns the kubelet's root directory, as seen from outside the node's mount namespace.
    pub(crate) fn kubelet_root(&self) -> PathBuf {
        self.directory.join("kubelet")
    }

    /// Loads an image into containerd.
    pub(crate) fn import_image(&self, harness: &Harness, archive: &Path) -> Result<()> {
        let namespace = self.mounts.id().context("the node's mount namespace is gone")?;
        let place =
            Place { harness, name: &self.name, directory: self.directory.clone(), number: self.number };
        place.import_image(namespace, archive)
    }

    /// Runs a script of bash with the node's mounts, as an administrator does on a host. Returns its output.
    pub(crate) async fn shell(&self, script: &str) -> Result<String> {
        let namespace = self.mounts.id().context("the node's mount namespace is gone")?;
        let mut command = tokio::process::Command::new("nsenter");
        command.arg(format!("--mount=/proc/{namespace}/ns/mnt")).args(["--", "bash", "-eu", "-c", script]);
        let output = command.output().await.context("cannot run nsenter")?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{script}: {}", complaint.trim());
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Returns the directory where containerd reads CDI specifications.
    pub(crate) fn cdi(&self) -> PathBuf {
        self.directory.join("cdi")
    }

    /// Returns the socket of the podresources API.
    pub(crate) fn pod_resources(&self) -> PathBuf {
        self.kubelet_root().join("pod-resources/kubelet.sock")
    }

    /// Returns the allocatable amount of a resource, or `None` if the node does not have the
    /// resource.
    pub(crate) async fn allocatable(&self, cluster: &Cluster, resource: &str) -> Result<Option<String>> {
        let nodes: Api<Node> = Api::all(cluster.client());
        let status = nodes.get(&self.name).await?.status.unwrap_or_default();
        Ok(status.allocatable.unwrap_or_default().remove(resource).map(|quantity| quantity.0))
    }

    /// Waits until the node's object is ready.
    pub(crate) async fn wait_until_ready(&self, cluster: &Cluster) -> Result<()> {
        let nodes: Api<Node> = Api::all(cluster.client());
        cluster
            .harness
            .wait_for(&format!("{} to be ready", self.name), Duration::from_secs(60), async || {
                let status = nodes.get(&self.name).await?.status.unwrap_or_default();
                let conditions = status.conditions.unwrap_or_default();
                let ready = conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True");
                Ok(ready.then_some(()))
            })
            .await
    }
}

/// Paths and names that the parts of a node are started with.
struct Place<'a> {
    harness: &'a Harness,
    name: &'a str,
    directory: PathBuf,
    number: u8,
}

impl Place<'_> {
    /// Starts a process that only keeps the mount namespace in which `KUBELET_ROOT` belongs to this
    /// node.
    async fn open_mount_namespace(&self) -> Result<Component> {
        let (root, mounted) = (self.directory.join("kubelet"), self.directory.join("mounted"));
        fs::create_dir_all(KUBELET_ROOT)?;
        let script = format!(
            "mount --bind {} {KUBELET_ROOT} && touch {} && exec sleep infinity",
            root.display(),
            mounted.display()
        );
        // Volumes with mount propagation need shared mounts, as on an ordinary host.
        let program = Program::new("unshare")
            .arguments(["--mount", "--propagation", "shared", "--"])
            .arguments(["sh", "-c", &script]);
        let holder = self.harness.start(&format!("{}-mounts", self.name), program)?;
        self.harness
            .wait_for("the node's mounts", Duration::from_secs(10), async || {
                Ok(mounted.exists().then_some(()))
            })
            .await?;
        Ok(holder)
    }

    /// Returns a part of Kubernetes that runs with the node's mounts.
    fn program(&self, namespace: u32, part: &str) -> Program {
        let programs = self.harness.programs();
        Program::new("nsenter")
            .argument(format!("--mount=/proc/{namespace}/ns/mnt"))
            .argument("--")
            .argument(programs.join("kubernetes"))
            .argument(part)
            // containerd finds its shim on the path.
            .environment("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display()))
    }

    /// Returns the cgroup below which the kubelet makes those of its pods; `None` for the root, which the first node has
    /// as on an ordinary host. A kubelet ends what it does not know in its cgroup.
    fn cgroup(&self) -> Option<String> {
        (self.number > 1).then(|| self.name.to_owned())
    }

    fn containerd_socket(&self) -> String {
        self.directory.join("containerd/containerd.sock").display().to_string()
    }

    async fn start_containerd(&self, namespace: u32) -> Result<Component> {
        fs::write(self.directory.join("cni/10-e2e.conflist"), self.network().to_string())?;
        let configuration = self.directory.join("containerd/config.toml");
        fs::write(&configuration, self.containerd_configuration())?;
        let program =
            self.program(namespace, "containerd").argument("--config").argument(configuration.as_os_str());
        let containerd = self.harness.start(&format!("{}-containerd", self.name), program)?;
        let version = self.ctr(namespace).argument("version");
        self.harness
            .wait_for("containerd to answer", Duration::from_secs(30), async || {
                Ok(version.command().output()?.status.success().then_some(()))
            })
            .await?;
        Ok(containerd)
    }

    fn ctr(&self, namespace: u32) -> Program {
        self.program(namespace, "ctr")
            .arguments(["--namespace=k8s.io", "--address"])
            .argument(self.containerd_socket())
    }

    fn import_image(&self, namespace: u32, archive: &Path) -> Result<()> {
        let import = self
            .ctr(namespace)
            .arguments(["images", "import", "--local", "--snapshotter=native"])
            .argument(archive.as_os_str());
        let output = import.command().output().context("cannot run ctr")?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "containerd did not take the image: {}", complaint.trim());
        Ok(())
    }

    fn start_kubelet(&self, cluster: &Cluster, namespace: u32) -> Result<Component> {
        let kubeconfig = cluster.kubeconfig(&format!("system:node:{}", self.name), "system:nodes")?;
        let file = self.directory.join("kubelet.json");
        fs::write(&file, self.kubelet_configuration()?.to_string())?;
        let program = self.program(namespace, "kubelet").arguments([
            format!("--config={}", file.display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--root-dir={KUBELET_ROOT}"),
            format!("--hostname-override={}", self.name),
            format!("--node-ip={NODE_ADDRESS}"),
        ]);
        self.harness.start(&format!("{}-kubelet", self.name), program)
    }
}
