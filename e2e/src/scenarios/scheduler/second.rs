//! A second kube-scheduler beside the cluster's own, as
//! `deploy/scheduler/kube-scheduler-second.yaml` sets it up: with its own configuration, account,
//! rights and lease.

use std::fs;

use anyhow::{Context, Result, ensure};

use super::{Site, deploy, front::Front, pods::whole};

const FILE: &str = "kube-scheduler-second.yaml";

/// User of the second kube-scheduler.
const USER: &str = "system:serviceaccount:kube-system:tessera-kube-scheduler";

pub(super) async fn run(site: &Site, front: &Front) -> Result<()> {
    site.apply(FILE).await?;
    let kubeconfig = site.cluster.kubeconfig(USER, "e2e")?.display().to_string();
    let connection = format!("clientConnection:\n  kubeconfig: {kubeconfig}\n");
    let configuration = format!("{}{connection}", shipped_configuration()?);
    let second =
        site.start_kube_scheduler("kube-scheduler-second", configuration, &kubeconfig, front.address).await?;
    let (mut named, plain) = (whole("by-second", 1), whole("by-first", 1));
    if let Some(spec) = &mut named.spec {
        spec.scheduler_name = Some("tessera".to_owned());
    }
    site.make(&named).await?;
    site.make(&plain).await?;
    for (name, scheduler) in [("by-second", "tessera"), ("by-first", "default-scheduler")] {
        site.bound(name).await?;
        let event = site.event_about(name, "Scheduled").await?;
        let by = event.reporting_component.unwrap_or_default();
        ensure!(by == scheduler, "{name} was bound by {by:?}");
        site.end(name).await?;
    }
    site.harness.note("the second kube-scheduler binds the pods that name it, the first one all others");
    second.kill()
}

/// Returns the configuration in the ConfigMap.
fn shipped_configuration() -> Result<String> {
    let text = fs::read_to_string(deploy().join("scheduler").join(FILE)).context(FILE)?;
    let block = text.split_once("configuration.yaml: |\n").context("no configuration")?.1;
    let lines = block.lines().take_while(|line| *line != "---");
    Ok(lines.map(|line| format!("{}\n", line.strip_prefix("    ").unwrap_or(line))).collect())
}
