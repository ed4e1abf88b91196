//! Which pod the kubelet is admitting.
//!
//! The kubelet does not say. But it admits one pod at a time, adds it to its list just before, and shows it there without
//! the resource it is about to give it. So the pod is the listed one that asks for this much of the resource and does not
//! have it, once those are left out that look alike: ended ones, those turned away, those that were there before. Order of
//! creation or binding is never looked at.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::Duration,
};

use tessera_core::{
    gpu::Health,
    request::ContainerRole,
    units::{GpuIndex, PodUid},
};
use tessera_node::{device_plugin::PreferenceRequest, pod_resources::PodDevices};
use tessera_wire::{foreign::objects::Pod, kubelet::device_id::Resource};

use super::{
    Action, Agent, CallAnswer, CallId, EventTime,
    calls::{Call, Question},
    has_ended,
};

/// The calls for one pod follow each other at once. After this long a call may be another pod's.
const SAME_PULL: Duration = Duration::from_secs(2);

/// What was answered for pods.
#[derive(Debug, Default)]
pub(super) struct Admission {
    /// Counts the kubelet's connections: a new one may admit everybody anew.
    session: u64,
    records: BTreeMap<PodUid, Record>,
    /// The pod and container of the last answer.
    current: Option<Current>,
    /// A preference was told for this container, and the allocation has to follow.
    preferred: Option<(Resource, PodUid, String)>,
}

/// What was answered for one pod.
#[derive(Debug, Default)]
struct Record {
    answered: BTreeMap<(String, Resource), Answered>,
    /// We have turned it away in this session.
    refused: bool,
    /// It was listed when a call was another pod's: its own admission was over by then.
    passed_over: bool,
}

#[derive(Debug)]
struct Answered {
    ids: BTreeSet<String>,
    session: u64,
}

#[derive(Debug)]
struct Current {
    uid: PodUid,
    container: String,
    at: Duration,
}

// === impl Admission ===

impl Admission {
    /// The IDs given to a container of a pod, as far as we know.
    pub(super) fn recorded(
        &self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
    ) -> Option<&BTreeSet<String>> {
        let record = self.records.get(uid)?;
        record.answered.get(&(container.to_owned(), resource)).map(|answered| &answered.ids)
    }

    /// All containers that were given these IDs.
    pub(super) fn holders(&self, resource: Resource, ids: &BTreeSet<String>) -> Vec<(PodUid, String)> {
        let of = |(uid, record): (&PodUid, &Record)| {
            let given = record.answered.iter();
            let matching = given.filter(|((_, other), answered)| *other == resource && answered.ids == *ids);
            matching.map(|((container, _), _)| (uid.clone(), container.clone())).collect::<Vec<_>>()
        };
        self.records.iter().flat_map(of).collect()
    }

    /// All IDs of a resource that were given to anybody.
    pub(super) fn all_recorded(&self, resource: Resource) -> impl Iterator<Item = &String> {
        let given = self.records.values().flat_map(|record| &record.answered);
        given.filter(move |((_, other), _)| *other == resource).flat_map(|(_, answered)| &answered.ids)
    }

    pub(super) fn forget(&mut self, keep: impl Fn(&PodUid) -> bool) {
        self.records.retain(|uid, _| keep(uid));
    }

    fn answered_now(&self, uid: &PodUid, container: &str, resource: Resource) -> bool {
        let record = self.records.get(uid);
        let answered = record.and_then(|record| record.answered.get(&(container.to_owned(), resource)));
        answered.is_some_and(|answered| answered.session == self.session)
    }

    pub(super) fn answered(
        &mut self,
        now: EventTime,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        ids: BTreeSet<String>,
    ) {
        let session = self.session;
        let record = self.records.entry(uid.clone()).or_default();
        record.answered.insert((container.to_owned(), resource), Answered { ids, session });
        self.current = Some(Current { uid: uid.clone(), container: container.to_owned(), at: now.elapsed });
        self.preferred = None;
    }

    /// A container holds these IDs, whoever gave them.
    pub(super) fn learn(
        &mut self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        ids: &BTreeSet<String>,
    ) {
        let record = self.records.entry(uid.clone()).or_default();
        let answered = || Answered { ids: ids.clone(), session: self.session };
        record.answered.entry((container.to_owned(), resource)).or_insert_with(answered);
    }

    pub(super) fn prefers(&mut self, resource: Resource, uid: &PodUid, container: &str) {
        self.preferred = Some((resource, uid.clone(), container.to_owned()));
    }

    /// A refusal is final for a pod: what it was given before in this admission is free again.
    pub(super) fn refused(&mut self, uid: &PodUid) {
        let record = self.records.entry(uid.clone()).or_default();
        record.refused = true;
        record.answered.clear();
        self.current = None;
        self.preferred = None;
    }
}

// === impl Agent ===

impl Agent {
    /// A kubelet has come, perhaps a new one, which admits everybody anew.
    pub(super) fn on_stream(&mut self, resource: Resource) {
        self.asked_for.insert(resource);
        self.admission.session += 1;
        self.admission.current = None;
        self.admission.preferred = None;
        for record in self.admission.records.values_mut() {
            record.refused = false;
            record.passed_over = false;
        }
    }

    pub(super) fn on_prefer(
        &mut self,
        now: EventTime,
        call: CallId,
        resource: Resource,
        wish: PreferenceRequest,
        actions: &mut Vec<Action>,
    ) {
        let known = self.follow_up(now, resource, wish.count);
        let answer = known.and_then(|(uid, container)| self.prefer(&uid, &container, resource, &wish, false));
        match answer {
            Some(answer) => actions.push(Action::Answer(call, answer)),
            None => self.ask_list_for(now, call, Question::Prefer(resource, wish), actions),
        }
    }

    pub(super) fn on_allocate(
        &mut self,
        now: EventTime,
        call: CallId,
        resource: Resource,
        ids: BTreeSet<String>,
        actions: &mut Vec<Action>,
    ) {
        // Between a preference and its allocation the kubelet does nothing else.
        let expected = self.admission.preferred.take().filter(|(preferred, ..)| *preferred == resource);
        let known = match expected {
            Some((_, uid, container)) => Some((uid, container)),
            None => self.follow_up(now, resource, ids.len()),
        };
        let answer =
            known.and_then(|(uid, container)| self.allocate(now, &uid, &container, resource, &ids, false));
        match answer {
            Some(answer) => actions.push(Action::Answer(call, answer)),
            None => self.ask_list_for(now, call, Question::Allocate(resource, ids), actions),
        }
    }

    /// The container of the last answer, if this call can only be its next one: of another resource that it asks for. Whoever breaks off in
    /// between goes on with another pod, which may ask for as much. The kubelet does so where it runs short of a resource, ours or somebody
    /// else's; after a container, also where it finds no CPUs for it.
    fn follow_up(&self, now: EventTime, resource: Resource, count: usize) -> Option<(PodUid, String)> {
        let current = self.admission.current.as_ref()?;
        if now.elapsed.saturating_sub(current.at) > SAME_PULL || self.units_left(resource) < count {
            return None;
        }
        let pod = self.pods.get(&current.uid).filter(|pod| !has_ended(pod))?;
        let mut containers = pod.spec.containers_with_roles().map(|(container, _)| container);
        let container = containers.find(|container| container.name == current.container)?;
        let is_next = resource.asked_by(container) == count
            && !self.admission.answered_now(&current.uid, &container.name, resource)
            && container.resources.extended().all(|name| self.serves(name));
        is_next.then(|| (current.uid.clone(), container.name.clone()))
    }

    fn serves(&self, name: &str) -> bool {
        self.resources().any(|resource| resource.name() == name)
    }

    /// Healthy devices of a resource that nobody holds, by the kubelet's books and by ours.
    fn units_left(&self, resource: Resource) -> usize {
        let Some(cards) = &self.cards else { return 0 };
        let healthy = |gpu: GpuIndex| cards.node.gpu(gpu).is_some_and(|card| card.health == Health::Healthy);
        let listed = self.listed.iter().flat_map(|pod| &pod.containers);
        let listed = listed.filter_map(|container| container.ids.get(resource.name())).flatten();
        let ids = listed.chain(self.admission.all_recorded(resource));
        let held = ids.filter_map(|id| cards.ids.read(resource, id)).filter(|(gpu, _)| healthy(*gpu));
        let held: HashSet<(GpuIndex, u64)> = held.collect();
        let gpus = cards.node.topology().gpus().iter().filter(|gpu| healthy(*gpu));
        let all: u64 = gpus.map(|gpu| cards.ids.per_gpu(resource, gpu)).sum();
        usize::try_from(all).unwrap_or(usize::MAX).saturating_sub(held.len())
    }

    /// The pod that is being admitted, and its container that this call is for; `None` where that is not clear (yet).
    pub(super) fn identify(
        &mut self,
        call: &Call,
        resource: Resource,
        count: usize,
    ) -> Option<(PodUid, String)> {
        if !call.is_well_informed() && self.lists_strangers(resource) {
            return None;
        }
        let mut candidates = self.candidates(resource, count, call.last_chance);
        let only = candidates.pop().filter(|_| candidates.is_empty())?;
        for uid in self.listed_uids().into_iter().filter(|uid| *uid != only.0) {
            self.admission.records.entry(uid).or_default().passed_over = true;
        }
        Some(only)
    }

    /// Whether the kubelet lists a pod without this resource that the API server has not told us of yet.
    fn lists_strangers(&self, resource: Resource) -> bool {
        let known: BTreeSet<(&str, &str)> = self.pods.values().map(name_of).collect();
        let lacks = |pod: &&PodDevices| pod.containers.iter().any(|c| !c.ids.contains_key(resource.name()));
        let mut lacking = self.listed.iter().filter(lacks);
        lacking.any(|pod| !known.contains(&(pod.namespace.as_str(), pod.name.as_str())))
    }

    fn listed_uids(&self) -> Vec<PodUid> {
        let listed: BTreeSet<(&str, &str)> =
            self.listed.iter().map(|pod| (pod.namespace.as_str(), pod.name.as_str())).collect();
        let is_listed = |(_, pod): &(&PodUid, &Pod)| listed.contains(&name_of(pod));
        self.pods.iter().filter(is_listed).map(|(uid, _)| uid.clone()).collect()
    }

    /// All pods this call could be for. A pod that has a start time was taken long ago; it counts only at the end of all
    /// patience, when its kubelet must have lost its books.
    fn candidates(&self, resource: Resource, count: usize, last_chance: bool) -> Vec<(PodUid, String)> {
        let candidate = |(uid, pod): (&PodUid, &Pod)| {
            let record = self.admission.records.get(uid);
            let turned_away = record.is_some_and(|record| record.refused);
            let earlier = record.is_some_and(|record| record.passed_over) || pod.status.start_time.is_some();
            if has_ended(pod) || turned_away || (earlier && !last_chance) {
                return None;
            }
            let entries: Vec<&PodDevices> = self.entries_named(pod).collect();
            let has = |container: &str| {
                let mut shown =
                    entries.iter().flat_map(|entry| &entry.containers).filter(|c| c.name == container);
                shown.clone().next().is_some() && shown.all(|c| c.ids.contains_key(resource.name()))
            };
            let mut containers = pod.spec.containers_with_roles();
            let open = containers.find(|(container, role)| {
                resource.asked_by(container) == count
                    && !self.admission.answered_now(uid, &container.name, resource)
                    && (*role == ContainerRole::Init || !has(&container.name))
            });
            let (container, _) = open.filter(|_| !entries.is_empty())?;
            Some((uid.clone(), container.name.clone()))
        };
        self.pods.iter().filter_map(candidate).collect()
    }

    /// What the kubelet lists under a pod's name: twice, if one of the same name is still on its way out.
    pub(super) fn entries_named(&self, pod: &Pod) -> impl Iterator<Item = &PodDevices> {
        let name = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
        let places = self.listed_names.get(&name).into_iter().flatten();
        places.filter_map(|place| self.listed.get(*place))
    }

    /// What to answer; nothing yet where that is a refusal, which is final, by what may be old news.
    pub(super) fn prefer(
        &mut self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        wish: &PreferenceRequest,
        is_well_informed: bool,
    ) -> Option<CallAnswer> {
        let preferred = self.steer(uid, container, resource, wish);
        match &preferred {
            Ok(_) => self.admission.prefers(resource, uid, container),
            Err(_) if !is_well_informed => return None,
            Err(_) => self.admission.refused(uid),
        }
        self.changed(uid);
        Some(CallAnswer::Preferred(preferred))
    }

    /// Likewise.
    pub(super) fn allocate(
        &mut self,
        now: EventTime,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        ids: &BTreeSet<String>,
        is_well_informed: bool,
    ) -> Option<CallAnswer> {
        let given = self.hand_over(uid, container, resource, ids);
        match &given {
            Ok(_) => self.admission.answered(now, uid, container, resource, ids.clone()),
            Err(_) if !is_well_informed => return None,
            Err(_) => self.admission.refused(uid),
        }
        self.changed(uid);
        Some(CallAnswer::Allocated(given.map(Box::new)))
    }
}

pub(super) fn name_of(pod: &Pod) -> (&str, &str) {
    (&pod.metadata.namespace, &pod.metadata.name)
}
