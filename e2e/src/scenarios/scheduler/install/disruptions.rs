//! Evictions of the scheduler's replicas, as a drain of their nodes makes them.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Pod, Toleration},
    policy::v1::PodDisruptionBudget,
};
use kube::{
    Api,
    api::{EvictParams, ListParams},
};

use super::{Installation, NAMESPACE, SOON, name};

/// Name of the Deployment, the Lease and the disruption budget of the scheduler, and its label `app`.
const SCHEDULER: &str = "tessera-scheduler";
/// Taint that keeps new replicas away while a pod of the load can still be scheduled.
const HELD: &str = "e2e/held";

/// Returns the pod with a toleration of the taint that keeps replicas away.
pub(super) fn tolerating(mut pod: Pod) -> Pod {
    if let Some(spec) = &mut pod.spec {
        let toleration = Toleration {
            key: Some(HELD.to_owned()),
            operator: Some("Exists".to_owned()),
            ..Toleration::default()
        };
        spec.tolerations = Some(vec![toleration]);
    }
    pod
}

impl Installation {
    /// Evicts the leader while pods with shares come and go. Until its successor runs, the disruption budget refuses the
    /// eviction of the other replica, and all pods run. Afterwards the replicas are on different nodes again.
    pub(super) async fn disruptions(&self) -> Result<()> {
        self.replicas_are_apart().await?;
        let made = self.under_load("third", async || self.evict_leader().await).await?;
        self.replicas_are_apart().await?;
        self.note(&format!(
            "the leader was evicted, the budget kept the other replica, and both nodes have a replica again: {made}"
        ));
        Ok(())
    }

    async fn evict_leader(&self) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.cluster().client(), NAMESPACE);
        self.eviction_is_allowed().await?;
        let taint = format!("{HELD}=true:NoSchedule");
        self.cluster().kubectl(&["taint", "node", "--all", &taint]).await?;
        let replicas = self.replicas().await?;
        let leader = self.leader().await?;
        let (leading, other): (Vec<&Pod>, Vec<&Pod>) =
            replicas.iter().partition(|replica| leader.starts_with(name(replica)));
        let ([leading], [other]) = (&leading[..], &other[..]) else {
            bail!("{leader} leads, of {:?}", replicas.iter().map(name).collect::<Vec<_>>())
        };
        pods.evict(name(leading), &EvictParams::default()).await.context("the first eviction")?;
        match pods.evict(name(other), &EvictParams::default()).await {
            Err(kube::Error::Api(refusal)) if refusal.code == 429 => {}
            other => bail!("the second eviction was answered with {other:?}"),
        }
        self.site
            .harness
            .wait_for("the other replica to lead", SOON, async || {
                Ok(self.leader().await?.starts_with(name(other)).then_some(()))
            })
            .await?;
        // kube-scheduler takes the first node that is free, and kubectl frees one after the other. So the node that
        // has no replica comes first.
        let untaint = format!("{HELD}-");
        for replica in [leading, other] {
            let node = replica.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            let node = node.with_context(|| format!("{} has no node", name(replica)))?;
            self.cluster().kubectl(&["taint", "node", node, &untaint]).await?;
        }
        let rollout = format!("deployment/{SCHEDULER}");
        self.cluster().kubectl(&["-n", NAMESPACE, "rollout", "status", &rollout, "--timeout=60s"]).await?;
        self.eviction_is_allowed().await
    }

    /// Waits until there are two replicas, on two nodes.
    async fn replicas_are_apart(&self) -> Result<()> {
        self.site
            .harness
            .wait_for("replicas on two nodes", SOON, async || {
                let replicas = self.replicas().await?;
                let nodes: BTreeSet<&str> =
                    replicas.iter().filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref()).collect();
                ensure!(replicas.len() == 2 && nodes.len() == 2, "{} replicas on {nodes:?}", replicas.len());
                Ok(Some(()))
            })
            .await
    }

    /// Waits until the disruption budget allows an eviction.
    async fn eviction_is_allowed(&self) -> Result<()> {
        let budgets: Api<PodDisruptionBudget> = Api::namespaced(self.cluster().client(), NAMESPACE);
        self.site
            .harness
            .wait_for("the disruption budget to allow an eviction", SOON, async || {
                let status = budgets.get(SCHEDULER).await?.status.unwrap_or_default();
                Ok((status.disruptions_allowed == 1).then_some(()))
            })
            .await
    }

    /// Returns the replicas that are not ending.
    async fn replicas(&self) -> Result<Vec<Pod>> {
        let pods: Api<Pod> = Api::namespaced(self.cluster().client(), NAMESPACE);
        let mut found = pods.list(&ListParams::default().labels(&format!("app={SCHEDULER}"))).await?.items;
        found.retain(|pod| pod.metadata.deletion_timestamp.is_none());
        Ok(found)
    }

    /// Returns the identity of the leader, which begins with the name of its pod.
    async fn leader(&self) -> Result<String> {
        let leases: Api<Lease> = Api::namespaced(self.cluster().client(), NAMESPACE);
        let spec = leases.get(SCHEDULER).await?.spec.unwrap_or_default();
        Ok(spec.holder_identity.unwrap_or_default())
    }
}
