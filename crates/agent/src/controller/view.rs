//! What the agent shows of itself.

use std::collections::BTreeSet;

use tessera_core::{grant::Hold, node::NodeState, units::PodUid};
use tessera_wire::{
    foreign::{dialect::Dialect, objects::Pod},
    kubelet::device_id::Resource,
    tessera::inventory::Inventory,
};

use super::{Agent, Escape, has_ended};

/// A look at the agent.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Whether the pods of the node are known.
    pub pods_known: bool,
    /// Whether the kubelet has told its books.
    pub listed: bool,
    /// The GPUs and what is left of them.
    pub node: Option<NodeState>,
    /// What is published.
    pub inventory: Option<Inventory>,
    /// PCI addresses of the GPUs.
    pub pci: Vec<String>,
    /// The driver's version, where there is one.
    pub driver: Option<String>,
    /// All pods of the node, whatever they ask for.
    pub pods: Vec<PodView>,
    /// Who holds what.
    pub containers: Vec<ContainerView>,
    /// Containers that hold GPUs by somebody else's device plugin, whose devices do not say which: namespace, pod, container.
    pub served_by_others: BTreeSet<(String, String, String)>,
    /// GPUs that carry more than they have.
    pub overbooked: Vec<u8>,
    /// Containers of which something used what it was not given, how, and how often.
    pub escapes: Vec<(PodUid, String, Escape, u64)>,
}

/// A pod, as far as finding its processes needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodView {
    /// Its UID.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The UID by which the kubelet knows it, if it is another: static pods have two.
    pub kubelet_uid: Option<String>,
    /// IDs of its containers, each with the container's name.
    pub containers: Vec<(String, String)>,
    /// Whether it is over.
    pub ended: bool,
}

/// What one container holds.
#[derive(Clone, Debug)]
pub struct ContainerView {
    /// Its pod.
    pub uid: PodUid,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The annotation `clusterName`, which gpu-manager shows.
    pub cluster: String,
    /// The container's name.
    pub container: String,
    /// The vocabulary it asked in.
    pub dialect: Option<Dialect>,
    /// Its GPUs.
    pub gpus: Vec<(u8, Hold)>,
    /// Whether the kubelet says so itself.
    pub listed: bool,
}

impl Agent {
    /// Whether pods can be served, or else what is waited for.
    pub fn readiness(&self) -> Result<(), String> {
        match (&self.cards, &self.missing) {
            (None, Some(reason)) => return Err(format!("no GPUs: {reason}")),
            (None, None) => return Err("looking for GPUs".to_owned()),
            (Some(_), _) => {}
        }
        if self.absent.node {
            return Err(self.no_node());
        }
        if !self.pods_known {
            return Err("the API server has not told the pods of this node yet".to_owned());
        }
        if !self.listed_once {
            return Err("the kubelet has not told its pod resources yet".to_owned());
        }
        match self.resources().find(|resource| !self.asked_for.contains(resource)) {
            // It turns pods away that want them.
            Some(resource) => Err(format!("the kubelet has not asked for the devices of {resource} yet")),
            None => Ok(()),
        }
    }

    /// A look at the agent, for its pages and metrics.
    #[must_use]
    pub fn view(&mut self) -> View {
        let ledger = self.ledger();
        let mut containers = Vec::new();
        for (uid, pod) in self.pods.iter().filter(|(_, pod)| !has_ended(pod)) {
            let unit = self.cards.as_ref().map(|cards| cards.ids.unit()).unwrap_or_default();
            let claims = pod.spec.claims(unit).unwrap_or_default();
            for held in self.holdings_of(uid, pod) {
                let claim = claims.iter().find(|claim| claim.container == held.grant.container);
                containers.push(ContainerView {
                    uid: uid.clone(),
                    namespace: pod.metadata.namespace.clone(),
                    pod: pod.metadata.name.clone(),
                    cluster: pod.metadata.annotations.get("clusterName").cloned().unwrap_or_default(),
                    container: held.grant.container.clone(),
                    dialect: claim.map(|claim| claim.dialect),
                    gpus: held.grant.holds.iter().map(|(gpu, hold)| (gpu.0, *hold)).collect(),
                    listed: held.source == super::holdings::Source::Listed,
                });
            }
        }
        let overbooked = ledger.overbooked().into_values().flatten().map(|gpu| gpu.0).collect();
        View {
            pods_known: self.pods_known,
            listed: self.listed_once,
            node: ledger.node(&self.settings.node).cloned(),
            inventory: self.inventory(),
            driver: self.cards.as_ref().and_then(|cards| cards.found.driver.clone()),
            pods: self.pods.iter().map(|(uid, pod)| pod_view(uid, pod)).collect(),
            pci: self.cards.as_ref().map(|cards| cards.found.pci.clone()).unwrap_or_default(),
            containers,
            served_by_others: self.served_by_others(),
            overbooked,
            escapes: self
                .watch
                .escapes
                .iter()
                .map(|(((uid, container), escape), count)| (uid.clone(), container.clone(), *escape, *count))
                .collect(),
        }
    }

    /// Containers that hold GPUs by somebody else's device plugin.
    pub(super) fn served_by_others(&self) -> BTreeSet<(String, String, String)> {
        let ours = |name: &str, id: &String| {
            let cards = self.cards.as_ref();
            Resource::named(name)
                .zip(cards)
                .is_some_and(|(resource, cards)| cards.ids.read(resource, id).is_some())
        };
        let of_others = |(name, ids): (&String, &BTreeSet<String>)| {
            let of_gpus = name.starts_with("nvidia.com/") || name.contains("gpu");
            of_gpus && ids.iter().any(|id| !ours(name, id))
        };
        let mut found = BTreeSet::new();
        for pod in &self.listed {
            for container in pod.containers.iter().filter(|container| container.ids.iter().any(of_others)) {
                found.insert((pod.namespace.clone(), pod.name.clone(), container.name.clone()));
            }
        }
        found
    }
}

/// Where a static pod's mirror keeps the UID that the kubelet made for it.
const STATIC_UID: &str = "kubernetes.io/config.hash";

fn pod_view(uid: &PodUid, pod: &Pod) -> PodView {
    let ids = pod.status.container_ids();
    PodView {
        uid: uid.clone(),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
        kubelet_uid: pod.metadata.annotations.get(STATIC_UID).cloned(),
        containers: ids.map(|(id, name)| (id.to_owned(), name.to_owned())).collect(),
        ended: has_ended(pod),
    }
}
