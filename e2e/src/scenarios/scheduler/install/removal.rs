//! The commands of `docs/install.md` that remove what Tessera has written to the nodes.

use std::fs;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::{Api, api::ListParams};

use super::{Installation, NAMESPACE};
use crate::harness::deploy;

/// Parts of the keys and resource names that Tessera and the projects it replaces write to nodes.
const OURS: [&str; 5] = ["tessera", "GPU_TOPOLOGY", "NODE_TYPE", "gaia.tencent.com", "aliyun.com/gpu-count"];

impl Installation {
    /// Runs the documented commands and checks that the nodes have nothing of ours but resources with an amount of 0.
    pub(super) async fn remove_traces(&self) -> Result<()> {
        ensure!(!self.traces().await?.is_empty(), "the nodes have nothing to remove");
        let page = fs::read_to_string(deploy().join("../docs/install.md"))?;
        let (_, section) = page.split_once("## Uninstall").context("no section")?;
        let (_, block) = section.split_once("```\n").context("no commands")?;
        let (block, _) = block.split_once("```").context("the commands do not end")?;
        let script: String = block
            .lines()
            .filter_map(|line| line.strip_prefix("$ "))
            .map(|line| format!("{line}\n"))
            .collect();
        self.cluster().shell(&script).await?;
        let left = self.traces().await?;
        ensure!(left.is_empty(), "the documented commands leave {left:?}");
        self.note("the documented commands remove what was written to the nodes");
        Ok(())
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
