//! Who holds what, by the kubelet's books, by our answers, and by what was granted: in this order.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tessera_core::{
    grant::{ContainerGrant, Hold, PodGrant},
    ledger::Ledger,
    node::NodeState,
    request::ContainerRole,
    units::{GpuIndex, MiB, MilliCpu, Percent, PodUid},
};
use tessera_node::pod_resources::PodDevices;
use tessera_wire::{
    foreign::{dialect::vcuda, objects::Pod, pod_spec::Claim},
    kubelet::device_id::Resource,
    tessera::grant,
};

use super::{Agent, NodeGpus, has_ended};

/// What a container holds, and who says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holding {
    pub(super) grant: ContainerGrant,
    pub(super) source: Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The kubelet.
    Listed,
    /// Our own answer, which the kubelet does not list (yet).
    Recorded,
    /// Only the annotations: it will come for it.
    Annotated,
}

/// What a pod's texts say.
#[derive(Clone, Debug, Default)]
pub(super) struct Read {
    claims: Vec<Claim>,
    annotated: Vec<ContainerGrant>,
}

impl Agent {
    /// Reads the texts of all pods.
    pub(super) fn read_pods(&mut self) {
        self.read.clear();
        let uids: Vec<PodUid> = self.pods.keys().cloned().collect();
        uids.iter().for_each(|uid| self.read_pod(uid));
    }

    /// Reads the texts of a pod. What cannot be read asks for nothing and grants nothing.
    pub(super) fn read_pod(&mut self, uid: &PodUid) {
        let (Some(cards), Some(pod)) = (&self.cards, self.pods.get(uid)) else { return };
        let unit = cards.ids.unit();
        let annotated = grant::parse(&pod.spec, &pod.metadata.annotations, &cards.node, unit);
        let read = Read {
            claims: pod.spec.claims(unit).unwrap_or_default(),
            annotated: annotated.ok().flatten().unwrap_or_default(),
        };
        self.read.insert(uid.clone(), read);
    }

    /// The book of all grants of this node.
    pub(super) fn ledger(&mut self) -> Ledger {
        if self.books_lack.is_some() {
            self.books = None;
        }
        self.ledger_but_for(None).clone()
    }

    /// The book, in which `uid` may not be up to date.
    fn ledger_but_for(&mut self, uid: Option<&PodUid>) -> &Ledger {
        let good = self.books_lack.is_none() || self.books_lack.as_ref() == uid;
        let known = self.books.take().filter(|_| good);
        let books = known.unwrap_or_else(|| {
            self.books_lack = None;
            self.count()
        });
        self.books.insert(books)
    }

    /// What was answered for a pod has changed.
    pub(super) fn changed(&mut self, uid: &PodUid) {
        match &self.books_lack {
            Some(other) if other != uid => (self.books, self.books_lack) = (None, None),
            _ => self.books_lack = Some(uid.clone()),
        }
    }

    fn count(&self) -> Ledger {
        let mut ledger = Ledger::default();
        let Some(cards) = &self.cards else { return ledger };
        ledger.set_node(cards.node.clone());
        let mut owned: BTreeSet<*const PodDevices> = BTreeSet::new();
        let mut ended: BTreeSet<(&str, &str)> = BTreeSet::new();
        for (uid, pod) in &self.pods {
            if has_ended(pod) {
                ended.insert(super::admission::name_of(pod));
                continue;
            }
            owned.extend(self.entry_of(uid, pod).map(std::ptr::from_ref));
            let containers: Vec<_> = self.holdings_of(uid, pod).into_iter().map(|held| held.grant).collect();
            if !containers.is_empty() {
                ledger.observe(self.pod_grant(uid.clone(), containers));
            }
        }
        // Devices of pods that the API server does not know (any more) are taken all the same. The kubelet's older
        // versions also list pods that have ended, whose devices are free.
        for (number, entry) in self.listed.iter().enumerate() {
            let name = (entry.namespace.as_str(), entry.name.as_str());
            if owned.contains(&std::ptr::from_ref(entry)) || ended.contains(&name) {
                continue;
            }
            let containers = strangers_holdings(cards, entry);
            if !containers.is_empty() {
                let uid = PodUid(format!("unknown:{}/{}#{number}", entry.namespace, entry.name));
                ledger.observe(self.pod_grant(uid, containers));
            }
        }
        ledger
    }

    fn pod_grant(&self, pod: PodUid, containers: Vec<ContainerGrant>) -> PodGrant {
        let node = self.settings.node.clone();
        PodGrant { pod, node, cpu: MilliCpu::ZERO, memory: MiB::ZERO, containers }
    }

    /// What every container of a pod holds that asks for GPUs.
    pub(super) fn holdings_of(&self, uid: &PodUid, pod: &Pod) -> Vec<Holding> {
        let Some(cards) = &self.cards else { return Vec::new() };
        let Some(Read { claims, annotated }) = self.read.get(uid).filter(|read| !read.claims.is_empty())
        else {
            return Vec::new();
        };
        let entry = self.entry_of(uid, pod);
        let holding = |claim: &Claim| {
            let hold = Hold::of(claim.request);
            let grant = |gpus: BTreeSet<GpuIndex>| ContainerGrant {
                container: claim.container.clone(),
                role: claim.role,
                holds: gpus.into_iter().map(|gpu| (gpu, hold)).collect(),
            };
            let listed = entry.and_then(|entry| entry.containers.iter().find(|c| c.name == claim.container));
            for resource in Resource::of(claim.dialect) {
                let by_kubelet = listed.and_then(|container| container.ids.get(resource.name()));
                let by_us = self.admission.recorded(uid, &claim.container, resource);
                for (ids, source) in [(by_kubelet, Source::Listed), (by_us, Source::Recorded)] {
                    let gpus = ids.map(|ids| cards.of_ids(resource, ids)).unwrap_or_default();
                    if !gpus.is_empty() {
                        return Some(Holding { grant: grant(gpus), source });
                    }
                }
            }
            let granted = annotated.iter().find(|granted| granted.container == claim.container)?;
            Some(Holding { grant: granted.clone(), source: Source::Annotated })
        };
        claims.iter().filter_map(holding).collect()
    }

    /// What the pod's annotations grant; nothing where they cannot be read.
    pub(super) fn annotated(&self, pod: &Pod) -> &[ContainerGrant] {
        self.read.get(&super::uid_of(pod)).map(|read| read.annotated.as_slice()).unwrap_or_default()
    }

    /// What the kubelet lists for this very pod. An entry of its name with devices may belong to an earlier one that is
    /// still on its way out: it is this one's if this one has been taken, or if it fits what we answered or was granted.
    pub(super) fn entry_of(&self, uid: &PodUid, pod: &Pod) -> Option<&PodDevices> {
        let holding =
            |entry: &&PodDevices| entry.containers.iter().any(|container| !container.ids.is_empty());
        let mut entries: Vec<&PodDevices> = self.entries_named(pod).filter(holding).collect();
        if entries.len() == 1 && pod.status.start_time.is_some() {
            return entries.pop();
        }
        let cards = self.cards.as_ref()?;
        // Of two under this name, one without devices yet, that one is on its way in.
        let arriving = self.entries_named(pod).count() > entries.len();
        let annotated = if arriving { &[] } else { self.annotated(pod) };
        let fits = |entry: &&PodDevices| {
            entry.containers.iter().any(|container| {
                let mut ids =
                    container.ids.iter().filter_map(|(name, ids)| Some((Resource::named(name)?, ids)));
                let granted = annotated.iter().find(|granted| granted.container == container.name);
                ids.any(|(resource, ids)| match self.admission.recorded(uid, &container.name, resource) {
                    Some(recorded) => recorded == ids,
                    None => granted.is_some_and(|granted| {
                        let gpus: BTreeSet<GpuIndex> = granted.holds.iter().map(|(gpu, _)| *gpu).collect();
                        gpus == cards.of_ids(resource, ids)
                    }),
                })
            })
        };
        entries.into_iter().find(fits)
    }

    /// What a container of a pod finds: everything others hold, and what stands beside it in its own pod. An init
    /// container's share is free again for those after it.
    pub(super) fn beside(&mut self, uid: &PodUid, container: &str, role: ContainerRole) -> Option<NodeState> {
        let mut ledger = self.ledger_but_for(Some(uid)).clone();
        ledger.release(uid);
        let cards = self.cards.as_ref()?;
        let mut state = match ledger.node(&self.settings.node) {
            Some(state) => state.clone(),
            None => NodeState::empty(Arc::new(cards.node.clone())),
        };
        let pod = self.pods.get(uid)?;
        let stands_beside = |held: &Holding| {
            let beside = match role {
                ContainerRole::Main => held.grant.role != ContainerRole::Init,
                ContainerRole::Init | ContainerRole::Sidecar => held.grant.role == ContainerRole::Sidecar,
            };
            beside && held.grant.container != container && held.source != Source::Annotated
        };
        let own: Vec<ContainerGrant> =
            self.holdings_of(uid, pod).into_iter().filter(stands_beside).map(|held| held.grant).collect();
        state.add(&self.pod_grant(uid.clone(), own));
        Some(state)
    }
}

/// What a pod that nobody knows holds, counted by its devices.
fn strangers_holdings(cards: &NodeGpus, entry: &PodDevices) -> Vec<ContainerGrant> {
    let of = |container: &tessera_node::pod_resources::ContainerDevices| {
        let mut held: BTreeMap<GpuIndex, Hold> = BTreeMap::new();
        for (name, ids) in &container.ids {
            let Some(resource) = Resource::named(name) else { continue };
            for (gpu, _) in ids.iter().filter_map(|id| cards.ids.read(resource, id)) {
                let (more_cores, more_memory) = match resource {
                    Resource::NvidiaGpu | Resource::AliyunGpu => {
                        held.insert(gpu, Hold::Whole);
                        continue;
                    }
                    Resource::GpuMemory => (0, cards.ids.unit().mib()),
                    Resource::VcudaCore => (1, 0),
                    Resource::VcudaMemory => (0, vcuda::BLOCK.0),
                };
                let nothing = Hold::Share { compute_percent: Percent::ZERO, memory: MiB::ZERO };
                if let Hold::Share { compute_percent, memory } = held.entry(gpu).or_insert(nothing) {
                    *compute_percent += Percent(more_cores);
                    *memory += MiB(more_memory);
                }
            }
        }
        ContainerGrant {
            container: container.name.clone(),
            role: ContainerRole::Main,
            holds: held.into_iter().collect(),
        }
    };
    entry.containers.iter().map(of).filter(|grant| !grant.holds.is_empty()).collect()
}
