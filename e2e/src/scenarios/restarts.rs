//! Every component restarts. The running pod is not disturbed, and new pods run.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::api::PostParams;

use crate::harness::{Cluster, Component, Harness, Parts, pod};

const SOON: Duration = Duration::from_secs(60);

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts::ALL).await?;
    let node = cluster.add_node(1).await?;
    cluster.pods().create(&PostParams::default(), &pod("steady", "sleep 1000", &[])).await?;
    let before = container(cluster.wait_for_phase("steady", "Running", SOON).await?)?;

    let scheduler = cluster.scheduler.as_ref().context("no scheduler")?;
    let controllers = cluster.controllers.as_ref().context("no controllers")?;
    let components: [(&str, &Component); 6] = [
        ("etcd", &cluster.etcd),
        ("kube-apiserver", &cluster.api_server),
        ("kube-controller-manager", controllers),
        ("kube-scheduler", scheduler),
        ("containerd", &node.containerd),
        ("kubelet", &node.kubelet),
    ];
    for (index, (name, component)) in components.into_iter().enumerate() {
        // Components are stopped and killed in turn.
        if index % 2 == 0 {
            component.restart().await?;
        } else {
            component.kill()?;
            component.start_again()?;
        }
        a_new_pod_runs(&harness, &cluster, &format!("after-{name}")).await?;
        harness.note(&format!("{name} restarted"));
    }

    let after = container(cluster.wait_for_phase("steady", "Running", SOON).await?)?;
    ensure!(before.container_id == after.container_id, "the running container was replaced");
    Ok(())
}

async fn a_new_pod_runs(harness: &Harness, cluster: &Cluster, name: &str) -> Result<()> {
    // The API server may still be starting.
    harness
        .wait_for(&format!("{name} to be taken"), SOON, async || {
            let pods = cluster.pods();
            let taken = pods.get_opt(name).await?;
            if taken.is_none() {
                pods.create(&PostParams::default(), &pod(name, "true", &[])).await?;
            }
            Ok(Some(()))
        })
        .await?;
    cluster.wait_for_phase(name, "Succeeded", SOON).await?;
    Ok(())
}

fn container(pod: Pod) -> Result<ContainerStatus> {
    let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
    statuses.into_iter().next().context("the pod has no container")
}
