//! Before a container starts: whose it is, and its limits on disk.

use std::collections::BTreeSet;

use tessera_core::{
    gpu_set::GpuSet,
    grant::Hold,
    request::ContainerRole,
    units::{GpuIndex, Percent, PodUid},
};
use tessera_limits::{GpuLimit, UuidBytes, limits::ShareMeaning};
use tessera_node::pod_resources::ContainerDevices;
use tessera_wire::{foreign::objects::Pod, kubelet::device_id::Resource};

use super::{
    Action, Agent, CallAnswer, CallId, Dirty, EventTime,
    calls::{Judgement, Question},
    has_ended,
    holdings::{Holding, Source},
};

/// gpu-manager's annotation for shares that may grow where others leave some compute.
const CEILING: &str = "tencent.com/vcuda-core-limit";

/// What a container with shares of GPUs may use. Containers with whole GPUs have no limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerLimits {
    /// The pod's UID.
    pub pod: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The container's name.
    pub container: String,
    /// What a percentage of compute means.
    pub meaning: ShareMeaning,
    /// By ascending index of the GPUs.
    pub gpus: Vec<GpuLimit>,
}

impl ContainerLimits {
    /// Whose they are.
    pub(super) fn key(&self) -> (PodUid, String) {
        (self.pod.clone(), self.container.clone())
    }
}

impl Agent {
    pub(super) fn on_pre_start(
        &mut self,
        now: EventTime,
        call: CallId,
        resource: Resource,
        ids: BTreeSet<String>,
        actions: &mut Vec<Action>,
    ) {
        self.ask_list_for(now, call, Question::PreStart(resource, ids), actions);
    }

    /// Finds the container and has its limits written. The kubelet comes again after an error, and only this container waits.
    pub(super) fn start(
        &mut self,
        call: CallId,
        resource: Resource,
        ids: &BTreeSet<String>,
        actions: &mut Vec<Action>,
    ) -> Option<Judgement> {
        let mut holders = self.holders(resource, ids);
        let is_news = holders.is_empty();
        if is_news {
            holders = self.init_holders(resource, ids);
        }
        let uids: BTreeSet<&PodUid> = holders.iter().map(|(uid, _)| uid).collect();
        if uids.len() > 1 {
            let several = format!("several pods seem to hold these {resource}");
            return Some(Judgement::Answer(CallAnswer::Started(Err(several))));
        }
        let Some(uid) = uids.into_iter().next().cloned() else {
            let as_before = self.starts_as_before(resource, ids);
            return as_before.then_some(Judgement::Answer(CallAnswer::Started(Ok(()))));
        };
        for (uid, container) in holders.iter().filter(|_| is_news) {
            self.admission.learn(uid, container, resource, ids);
            self.changed(uid);
        }
        let pod = self.pods.get(&uid)?;
        let limits: Result<Vec<ContainerLimits>, String> = self
            .holdings_of(&uid, pod)
            .into_iter()
            // Init and main container of equal requests hold the same devices: both may be the one.
            .filter(|held| holders.iter().any(|(_, container)| *container == held.grant.container))
            .filter_map(|held| self.limits(&uid, pod, &held).transpose())
            .collect();
        match limits {
            Ok(limits) => {
                self.truth.begin(call, uid, &limits);
                actions.push(Action::CreateGrants(call, limits));
                Some(Judgement::Later)
            }
            Err(reason) => Some(Judgement::Answer(CallAnswer::Started(Err(reason)))),
        }
    }

    /// The containers that hold exactly these devices, by the kubelet's list and by our record of ordinary init containers,
    /// which the kubelet does not list.
    fn holders(&self, resource: Resource, ids: &BTreeSet<String>) -> Vec<(PodUid, String)> {
        let mut holders: Vec<(PodUid, String)> = Vec::new();
        for (uid, pod) in self.pods.iter().filter(|(_, pod)| !has_ended(pod)) {
            let containers = self.entry_of(uid, pod).into_iter().flat_map(|entry| &entry.containers);
            let holding = containers.filter(|container| container.ids.get(resource.name()) == Some(ids));
            holders.extend(holding.map(|container| (uid.clone(), container.name.clone())));
        }
        let listed: BTreeSet<PodUid> = holders.iter().map(|(uid, _)| uid.clone()).collect();
        for (uid, container) in self.admission.holders(resource, ids) {
            let alive = self.pods.get(&uid).is_some_and(|pod| !has_ended(pod));
            let contradicted = !listed.is_empty() && !listed.contains(&uid);
            let listed_otherwise = self.pods.get(&uid).is_some_and(|pod| {
                let entry = self.entry_of(&uid, pod);
                let shown = entry.and_then(|entry| entry.containers.iter().find(|c| c.name == container));
                shown.and_then(|shown| shown.ids.get(resource.name())).is_some_and(|other| other != ids)
            });
            if alive
                && !contradicted
                && !listed_otherwise
                && !holders.contains(&(uid.clone(), container.clone()))
            {
                holders.push((uid, container));
            }
        }
        holders
    }

    /// The ordinary init containers for which an earlier agent may have answered with these devices: the kubelet lists no such, and what that agent
    /// remembered is gone. Their pods have been admitted, and their annotations name these GPUs.
    fn init_holders(&self, resource: Resource, ids: &BTreeSet<String>) -> Vec<(PodUid, String)> {
        let Some(cards) = &self.cards else { return Vec::new() };
        let gpus: GpuSet = cards.of_ids(resource, ids).into_iter().collect();
        let is_admitted = |pod: &Pod| pod.status.phase == "Pending" && pod.status.start_time.is_some();
        let mut holders = Vec::new();
        for (uid, pod) in self.pods.iter().filter(|(_, pod)| is_admitted(pod)) {
            let inits = pod.spec.containers_with_roles().filter(|(_, role)| *role == ContainerRole::Init);
            for (container, _) in inits.filter(|(container, _)| resource.asked_by(container) == ids.len()) {
                let granted = self.annotated(pod).iter().find(|granted| granted.container == container.name);
                let is_unknown = self.admission.recorded(uid, &container.name, resource).is_none();
                // A few blocks of memory beside whole GPUs need not lie on each of them.
                if is_unknown && granted.is_some_and(|granted| granted.gpus().is_superset(gpus)) {
                    holders.push((uid.clone(), container.name.clone()));
                }
            }
        }
        holders
    }

    /// Without the API server a container that ran before may start again: it has whole GPUs, or its grant is still there.
    fn starts_as_before(&self, resource: Resource, ids: &BTreeSet<String>) -> bool {
        if self.pods_known {
            return false;
        }
        let mut holding = self.listed.iter().flat_map(|pod| pod.containers.iter().map(move |c| (pod, c)));
        holding.any(|(pod, container)| {
            container.ids.get(resource.name()) == Some(ids)
                && (has_whole_gpus(container)
                    || self.truth.on_disk.values().any(|limits| {
                        (&limits.namespace, &limits.name, &limits.container)
                            == (&pod.namespace, &pod.name, &container.name)
                    }))
        })
    }

    /// The limits of a container; none where it has whole GPUs.
    pub(super) fn limits(
        &self,
        uid: &PodUid,
        pod: &Pod,
        held: &Holding,
    ) -> Result<Option<ContainerLimits>, String> {
        let ceiling = pod.metadata.annotations.get(CEILING).and_then(|text| text.trim().parse::<u32>().ok());
        let card = |index: GpuIndex, compute_percent: Percent, memory: u64| {
            let gpu = self.cards.as_ref().and_then(|cards| cards.node.gpu(index));
            let uuid = gpu.and_then(|gpu| UuidBytes::parse(&gpu.uuid.0));
            let uuid = uuid.ok_or_else(|| {
                format!("GPU {index} has no UUID by which a container could be held to its share of it")
            })?;
            let most = ceiling
                .map_or(compute_percent, |limit| Percent(limit.min(Percent::WHOLE.0)).max(compute_percent));
            // What a context takes is not known here: the library has a guess.
            Ok(GpuLimit {
                uuid,
                memory_bytes: memory,
                context_bytes: 0,
                compute_percent: compute_percent.0,
                compute_ceiling_percent: most.0,
            })
        };
        let shares = held.grant.holds.iter().filter_map(|(index, hold)| match hold {
            Hold::Whole => None,
            Hold::Share { compute_percent, memory } => Some(card(*index, *compute_percent, memory.0 << 20)),
        });
        let gpus: Vec<GpuLimit> = shares.collect::<Result<_, String>>()?;
        Ok((!gpus.is_empty()).then(|| ContainerLimits {
            pod: uid.clone(),
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            container: held.grant.container.clone(),
            meaning: self.settings.isolation.meaning,
            gpus,
        }))
    }

    pub(super) fn on_grants_begun(
        &mut self,
        call: CallId,
        outcome: Result<(), String>,
        actions: &mut Vec<Action>,
    ) -> Dirty {
        let uid = self.truth.starting.remove(&call);
        let answer = outcome.map_err(|reason| format!("cannot write the limits of the container: {reason}"));
        if let (Ok(()), Some(uid)) = (&answer, &uid) {
            self.truth.started.insert(uid.clone());
        }
        actions.push(Action::Answer(call, CallAnswer::Started(answer)));
        uid.map_or(Dirty::Nothing, Dirty::Pod)
    }

    /// Whether everything a pod asks for beside its init containers is in the kubelet's books. Of a pod where nobody else
    /// asks, only our own record tells.
    pub(super) fn is_settled(holdings: &[Holding]) -> bool {
        let (inits, lasting): (Vec<_>, Vec<_>) =
            holdings.iter().partition(|held| held.grant.role == ContainerRole::Init);
        if lasting.is_empty() {
            return !inits.is_empty() && inits.iter().all(|held| held.source == Source::Recorded);
        }
        lasting.iter().all(|held| held.source == Source::Listed)
    }
}

/// Whether a container has whole GPUs, by the devices it holds.
fn has_whole_gpus(container: &ContainerDevices) -> bool {
    let count = |resource: Resource| container.ids.get(resource.name()).map_or(0, BTreeSet::len);
    let compute_percent = count(Resource::VcudaCore);
    count(Resource::NvidiaGpu) + count(Resource::AliyunGpu) > 0
        || (compute_percent > 0 && compute_percent.is_multiple_of(100))
}
