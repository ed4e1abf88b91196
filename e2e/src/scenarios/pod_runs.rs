//! The control plane starts, a pod runs on a real kubelet and its log is read. A second node does
//! the same.

use std::time::Duration;

use anyhow::{Result, ensure};
use kube::api::{LogParams, PostParams};

use crate::harness::{Cluster, Harness, Parts, pod};

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts::ALL).await?;
    let nodes = [cluster.add_node(1).await?, cluster.add_node(2).await?];
    let pods = cluster.pods();

    for node in &nodes {
        let name = format!("hello-{}", node.name);
        let mut hello = pod(&name, "echo hello from $HOSTNAME; cat /proc/self/cgroup", &[]);
        if let Some(spec) = &mut hello.spec {
            let label = ("kubernetes.io/hostname".to_owned(), node.name.clone());
            spec.node_selector = Some([label].into());
        }
        pods.create(&PostParams::default(), &hello).await?;
        cluster.wait_for_phase(&name, "Succeeded", Duration::from_secs(60)).await?;
        let log = pods.logs(&name, &LogParams::default()).await?;
        ensure!(log.starts_with(&format!("hello from {name}\n")), "the log of {name} is {log:?}");
        // Tools rely on this path to find the pod of a process. With cgroups of version 2 a container sees only its own
        // part of the path.
        ensure!(
            log.contains("/kubepods/besteffort/pod") || log.ends_with("\n0::/\n"),
            "the cgroups of {name} have an unexpected path: {log}"
        );
        harness.note(&format!("{name} ran and its log was read"));
    }
    Ok(())
}
