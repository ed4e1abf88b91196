//! Pods of the node, from the API server's watch and from reads in between.
//!
//! The controller reads the pods when the kubelet seems to know more than the watch has reported.
//! By the time such a read arrives, the watch may have reported newer events. For those pods the
//! watch wins: otherwise a stale read would revive deleted pods or remove new ones.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{grant::ContainerGrant, units::PodUid};
use tessera_wire::{
    foreign::{objects::Pod, pod_spec::Claim},
    tessera::grant,
};

use super::{ShellError, bad_annotations, inventory::NodeGpus};

/// Pods of the node, and what their specifications and annotations say.
#[derive(Debug, Default)]
pub(super) struct Pods {
    pods: BTreeMap<PodUid, Pod>,
    parsed: BTreeMap<PodUid, PodGpus>,
    is_complete: bool,
    read: Option<PendingRead>,
}

/// GPU requests and granted GPUs of a pod.
#[derive(Clone, Debug, Default)]
pub(super) struct PodGpus {
    /// Requests of the pod's containers.
    pub(super) claims: Vec<Claim>,
    /// GPUs that the pod's annotations grant to its containers.
    pub(super) annotated: Vec<ContainerGrant>,
    /// Errors of the annotations of a pod that requests GPUs.
    pub(super) bad_annotations: Vec<String>,
}

/// A read of the pods that has not been answered yet.
#[derive(Debug)]
struct PendingRead {
    /// Number of the newest call of the kubelet that had arrived when the read began.
    covers: u64,
    /// Pods the watch has reported since then.
    reported: BTreeSet<PodUid>,
    /// Whether the watch has reported all pods since then, which makes the read worthless.
    is_outdated: bool,
}

impl Pods {
    pub(super) fn get(&self, uid: &PodUid) -> Option<&Pod> {
        self.pods.get(uid)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&PodUid, &Pod)> {
        self.pods.iter()
    }

    /// Returns the pods whose containers have not ended for good.
    pub(super) fn active(&self) -> impl Iterator<Item = (&PodUid, &Pod)> {
        self.pods.iter().filter(|(_, pod)| !has_ended(pod))
    }

    /// Returns whether the API server has reported all pods at least once.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns the requests and grants of a pod. They are known once the GPUs are.
    pub(super) fn parsed(&self, uid: &PodUid) -> Option<&PodGpus> {
        self.parsed.get(uid)
    }

    /// Returns the GPUs that the pod's annotations grant, or nothing if they cannot be parsed.
    pub(super) fn annotated(&self, uid: &PodUid) -> &[ContainerGrant] {
        self.parsed.get(uid).map(|parsed| parsed.annotated.as_slice()).unwrap_or_default()
    }

    /// Replaces all pods by those the watch reports. Returns true the first time.
    pub(super) fn replace(&mut self, pods: Vec<Pod>, gpus: Option<&NodeGpus>) -> bool {
        if let Some(read) = &mut self.read {
            read.is_outdated = true;
        }
        self.set(pods, gpus)
    }

    pub(super) fn apply(&mut self, pod: Pod, gpus: Option<&NodeGpus>) -> PodUid {
        let uid = PodUid(pod.metadata.uid.clone());
        self.note_reported(&uid);
        self.pods.insert(uid.clone(), pod);
        self.parse(&uid, gpus);
        uid
    }

    pub(super) fn delete(&mut self, uid: &PodUid) {
        self.note_reported(uid);
        self.pods.remove(uid);
        self.parsed.remove(uid);
    }

    pub(super) fn is_reading(&self) -> bool {
        self.read.is_some()
    }

    /// Notes that a read was requested which covers the calls up to number `covers`.
    pub(super) fn begin_read(&mut self, covers: u64) {
        self.read = Some(PendingRead { covers, reported: BTreeSet::new(), is_outdated: false });
    }

    /// Merges the answer of a read into the pods.
    ///
    /// Returns the number of the newest call that the read covers, and whether this was the first
    /// complete list. Returns `None` if the read failed or is outdated.
    pub(super) fn finish_read(
        &mut self,
        read: Result<Vec<Pod>, ShellError>,
        gpus: Option<&NodeGpus>,
    ) -> Option<(u64, bool)> {
        let PendingRead { covers, reported, is_outdated } = self.read.take()?;
        let mut pods = read.ok().filter(|_| !is_outdated)?;
        pods.retain(|pod| !reported.contains(&PodUid(pod.metadata.uid.clone())));
        pods.extend(reported.iter().filter_map(|uid| self.pods.remove(uid)));
        Some((covers, self.set(pods, gpus)))
    }

    /// Parses requests and annotations of all pods again, for example because the GPUs changed.
    pub(super) fn parse_all(&mut self, gpus: Option<&NodeGpus>) {
        self.parsed.clear();
        let uids: Vec<PodUid> = self.pods.keys().cloned().collect();
        uids.iter().for_each(|uid| self.parse(uid, gpus));
    }

    fn set(&mut self, pods: Vec<Pod>, gpus: Option<&NodeGpus>) -> bool {
        self.pods = pods.into_iter().map(|pod| (PodUid(pod.metadata.uid.clone()), pod)).collect();
        self.parse_all(gpus);
        !std::mem::replace(&mut self.is_complete, true)
    }

    /// Parses one pod. Texts that cannot be parsed count as no request and no grant.
    fn parse(&mut self, uid: &PodUid, gpus: Option<&NodeGpus>) {
        let (Some(gpus), Some(pod)) = (gpus, self.pods.get(uid)) else { return };
        let unit = gpus.ids.unit();
        let annotated = grant::parse(&pod.spec, &pod.metadata.annotations, &gpus.node, unit);
        let claims = pod.spec.claims(unit).unwrap_or_default();
        let bad_annotations = if claims.is_empty() {
            Vec::new()
        } else {
            let grant = grant::errors(&pod.spec, &pod.metadata.annotations, &gpus.node);
            bad_annotations::errors(&pod.metadata.annotations, &grant)
        };
        let annotated = annotated.ok().flatten().unwrap_or_default();
        let parsed = PodGpus { claims, annotated, bad_annotations };
        self.parsed.insert(uid.clone(), parsed);
    }

    fn note_reported(&mut self, uid: &PodUid) {
        if let Some(read) = &mut self.read {
            read.reported.insert(uid.clone());
        }
    }
}

/// Returns whether all containers of a pod have ended for good.
pub(super) fn has_ended(pod: &Pod) -> bool {
    matches!(pod.status.phase.as_str(), "Succeeded" | "Failed")
}

/// Returns namespace and name of a pod.
pub(super) fn name_of(pod: &Pod) -> (&str, &str) {
    (&pod.metadata.namespace, &pod.metadata.name)
}

/// Returns namespace and name of a pod in the form `namespace/name`, for messages.
pub(super) fn display_name(pod: &Pod) -> String {
    format!("{}/{}", pod.metadata.namespace, pod.metadata.name)
}
