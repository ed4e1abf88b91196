//! Records of admissions: what was answered for which pod, and which pod is being admitted.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::units::PodUid;
use tessera_wire::kubelet::device_id::Resource;

use super::EventTime;

/// Answers that were given to the kubelet, by pod.
#[derive(Debug, Default)]
pub(super) struct Admissions {
    /// Number of the kubelet's current connection. A new kubelet may admit all pods again.
    session: u64,
    records: BTreeMap<PodUid, Record>,
    current: Option<CurrentContainer>,
    /// Container for which a preference was answered. Its `Allocate` call must come next.
    preferred: Option<(Resource, PodUid, String)>,
}

/// Answers for one pod.
#[derive(Debug, Default)]
struct Record {
    answered: BTreeMap<(String, Resource), GivenDevices>,
    /// Whether the pod was refused in this session.
    is_refused: bool,
    /// Whether the pod was listed when a call was for another pod: its own admission was over.
    is_passed_over: bool,
}

/// Devices of one container, and the session in which they were given.
#[derive(Debug)]
struct GivenDevices {
    ids: BTreeSet<String>,
    session: u64,
}

/// Container of the last successful `Allocate` answer.
#[derive(Debug)]
pub(super) struct CurrentContainer {
    pub(super) uid: PodUid,
    pub(super) container: String,
    pub(super) at: Duration,
}

impl Admissions {
    /// Returns the device IDs that were given to a container, as far as they are known.
    pub(super) fn recorded(
        &self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
    ) -> Option<&BTreeSet<String>> {
        let record = self.records.get(uid)?;
        record.answered.get(&(container.to_owned(), resource)).map(|given| &given.ids)
    }

    /// Returns all containers that were given exactly these device IDs.
    pub(super) fn holders(&self, resource: Resource, ids: &BTreeSet<String>) -> Vec<(PodUid, String)> {
        let of = |(uid, record): (&PodUid, &Record)| {
            let given = record.answered.iter();
            let matching = given.filter(|((_, other), given)| *other == resource && given.ids == *ids);
            matching.map(|((container, _), _)| (uid.clone(), container.clone())).collect::<Vec<_>>()
        };
        self.records.iter().flat_map(of).collect()
    }

    /// Returns the device IDs of a resource that were given to the pods for which `is_counted` returns true.
    pub(super) fn held_by(
        &self,
        resource: Resource,
        is_counted: impl Fn(&PodUid) -> bool,
    ) -> BTreeSet<&String> {
        let records = self.records.iter().filter(|(uid, _)| is_counted(uid));
        let given = records.flat_map(|(_, record)| &record.answered);
        given.filter(|((_, other), _)| *other == resource).flat_map(|(_, given)| &given.ids).collect()
    }

    /// Returns all device IDs of a resource that were given to any container.
    pub(super) fn all_recorded(&self, resource: Resource) -> impl Iterator<Item = &String> {
        let given = self.records.values().flat_map(|record| &record.answered);
        given.filter(move |((_, other), _)| *other == resource).flat_map(|(_, given)| &given.ids)
    }

    /// Returns whether devices of a resource were given to a container in this session.
    pub(super) fn is_answered(&self, uid: &PodUid, container: &str, resource: Resource) -> bool {
        let record = self.records.get(uid);
        let given = record.and_then(|record| record.answered.get(&(container.to_owned(), resource)));
        given.is_some_and(|given| given.session == self.session)
    }

    pub(super) fn is_refused(&self, uid: &PodUid) -> bool {
        self.records.get(uid).is_some_and(|record| record.is_refused)
    }

    pub(super) fn is_passed_over(&self, uid: &PodUid) -> bool {
        self.records.get(uid).is_some_and(|record| record.is_passed_over)
    }

    /// Returns the container of the last successful `Allocate` answer.
    pub(super) fn current(&self) -> Option<&CurrentContainer> {
        self.current.as_ref()
    }

    /// Begins a new session: a kubelet, perhaps a restarted one, has connected.
    pub(super) fn begin_session(&mut self) {
        self.session += 1;
        self.current = None;
        self.preferred = None;
        for record in self.records.values_mut() {
            record.is_refused = false;
            record.is_passed_over = false;
        }
    }

    /// Records a successful `Allocate` answer.
    pub(super) fn record_answer(
        &mut self,
        now: EventTime,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        ids: BTreeSet<String>,
    ) {
        let session = self.session;
        let record = self.records.entry(uid.clone()).or_default();
        record.answered.insert((container.to_owned(), resource), GivenDevices { ids, session });
        let container = container.to_owned();
        self.current = Some(CurrentContainer { uid: uid.clone(), container, at: now.elapsed });
        self.preferred = None;
    }

    /// Records devices that an earlier agent gave to a container, unless other ones are recorded.
    pub(super) fn record_earlier_answer(
        &mut self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        ids: &BTreeSet<String>,
    ) {
        let session = self.session;
        let record = self.records.entry(uid.clone()).or_default();
        let given = || GivenDevices { ids: ids.clone(), session };
        record.answered.entry((container.to_owned(), resource)).or_insert_with(given);
    }

    /// Records a preference, after which the kubelet allocates for the same container.
    pub(super) fn record_preference(&mut self, resource: Resource, uid: &PodUid, container: &str) {
        self.preferred = Some((resource, uid.clone(), container.to_owned()));
    }

    /// Takes the container of the last preference, if it was for this resource.
    pub(super) fn take_preferred(&mut self, resource: Resource) -> Option<(PodUid, String)> {
        let (preferred, uid, container) = self.preferred.take()?;
        (preferred == resource).then_some((uid, container))
    }

    /// Records a refusal. It is final for the pod, so devices it was given before are free again.
    pub(super) fn record_refusal(&mut self, uid: &PodUid) {
        let record = self.records.entry(uid.clone()).or_default();
        record.is_refused = true;
        record.answered.clear();
        self.current = None;
        self.preferred = None;
    }

    /// Notes that a pod was listed while the kubelet admitted another one.
    pub(super) fn pass_over(&mut self, uid: PodUid) {
        self.records.entry(uid).or_default().is_passed_over = true;
    }

    /// Drops the records of pods for which `keep` returns false.
    pub(super) fn retain(&mut self, keep: impl Fn(&PodUid) -> bool) {
        self.records.retain(|uid, _| keep(uid));
    }
}
