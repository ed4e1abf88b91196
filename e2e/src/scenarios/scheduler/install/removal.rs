//! The commands of `docs/install.md` that remove what Tessera has written to the objects of the nodes and to their disks.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};

use super::{Installation, NAMESPACE, SOON};
use crate::harness::deploy;

/// Parts of the keys and resource names that Tessera and the projects it replaces write to nodes.
const OURS: [&str; 5] = ["tessera", "GPU_TOPOLOGY", "NODE_TYPE", "gaia.tencent.com", "aliyun.com/gpu-count"];

/// Directory of the agent's files on a host, by default.
const STATE: &str = "/var/lib/tessera";
/// Directory of CDI specifications on a host, by default.
const CDI: &str = "/var/run/cdi";

impl Installation {
    /// Runs the documented commands and checks that the nodes have nothing of ours but resources with an amount of 0.
    pub(super) async fn remove_traces(&self) -> Result<()> {
        ensure!(!self.traces().await?.is_empty(), "the nodes have nothing to remove");
        let script = documented(0)?;
        self.cluster().shell(&script).await?;
        let left = self.traces().await?;
        ensure!(left.is_empty(), "the documented commands leave {left:?}");
        self.note("the documented commands remove what was written to the nodes");
        Ok(())
    }

    /// Ends all pods, runs the documented commands on the node, and checks that its disk has nothing of ours.
    pub(super) async fn remove_host_files(&self) -> Result<()> {
        let pods = self.cluster().pods();
        pods.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        self.site
            .harness
            .wait_for("all pods to be gone", SOON, async || {
                Ok(pods.list_metadata(&ListParams::default()).await?.items.is_empty().then_some(()))
            })
            .await?;
        let cdi = self.node.cdi().display().to_string();
        let before = self.host_files().await?;
        for expected in [format!("{cdi}/tessera.dev-library.json"), format!("{STATE}/grants")] {
            ensure!(before.contains(&expected), "the node has no {expected}, only {before:?}");
        }
        self.node.shell(&documented(1)?.replace(CDI, &cdi)).await?;
        let left = self.host_files().await?;
        ensure!(left.is_empty(), "the documented commands leave {left:?}");
        self.note("the documented commands remove what was written to the disk of the node");
        Ok(())
    }

    /// Returns our files and directories on the node, as its programs see them.
    async fn host_files(&self) -> Result<Vec<String>> {
        let (cdi, kubelet) = (self.node.cdi(), Path::new(crate::harness::KUBELET_ROOT));
        let script = format!(
            "find {STATE} -maxdepth 1 2>/dev/null || true; find {} {} {} {} -name '*tessera*' -o -name '*vcuda*' -o -name \
             '*aliyun*' -o -name 'nvidia.com-*' 2>/dev/null || true; grep -o ' {STATE}[^ ]* ' /proc/self/mounts || true",
            cdi.display(),
            kubelet.join("device-plugins").display(),
            kubelet.join("plugins_registry").display(),
            kubelet.join("plugins").display(),
        );
        Ok(self.node.shell(&script).await?.lines().map(|line| line.trim().to_owned()).collect())
    }

    /// Returns what the nodes and their ConfigMaps have of ours.
    async fn traces(&self) -> Result<Vec<String>> {
        let is_ours = |key: &str| OURS.iter().any(|part| key.contains(part));
        let mut found = Vec::new();
        for node in Api::<Node>::all(self.cluster().client()).list(&ListParams::default()).await?.items {
            let meta = node.metadata;
            let keys = [meta.labels, meta.annotations].into_iter().flatten().flatten().map(|(key, _)| key);
            found.extend(keys.filter(|key| is_ours(key)));
            let status = node.status.unwrap_or_default();
            let amounts = [status.capacity, status.allocatable].into_iter().flatten().flatten();
            let present = amounts.filter(|(key, _)| is_ours(key));
            found.extend(present.map(|(key, amount)| format!("{key}: {}", amount.0)));
        }
        let maps: Api<ConfigMap> = Api::namespaced(self.cluster().client(), NAMESPACE);
        let names =
            maps.list(&ListParams::default()).await?.items.into_iter().filter_map(|map| map.metadata.name);
        found.extend(names.filter(|name| name.starts_with("unhealthy-gpu-")));
        Ok(found)
    }
}

/// Returns the commands of a code block of the section about the removal, as a script.
fn documented(block: usize) -> Result<String> {
    let page = fs::read_to_string(deploy().join("../docs/install.md"))?;
    let (_, section) = page.split_once("## Uninstall").context("no section")?;
    let block = section.split("```").skip(1).step_by(2).nth(block).context("no commands")?;
    Ok(block.lines().filter_map(|line| line.strip_prefix("$ ")).map(|line| format!("{line}\n")).collect())
}
