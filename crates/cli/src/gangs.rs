//! Gangs as their pods show them. Places that the scheduler reserves are known to the scheduler alone.

use std::collections::{BTreeMap, HashMap};

use tessera_core::units::PodUid;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::gang::{self, GangKey, GangProgress};

/// All gangs, counted by their pods.
#[derive(Debug, Default)]
pub(crate) struct Gangs {
    by_key: BTreeMap<GangKey, GangCount>,
    /// The gangs of pods that have no node.
    of_waiting: HashMap<PodUid, GangKey>,
}

#[derive(Debug, Default)]
struct GangCount {
    /// Size that a pod states.
    stated: Option<u32>,
    /// Size that the PodGroup object states.
    of_group: Option<u32>,
    present: usize,
    waiting: usize,
}

impl Gangs {
    /// Counts a pod of any phase. Like the scheduler, a pod that has ended with success still counts for the size.
    pub(crate) fn add(&mut self, pod: &Pod) {
        let Ok(Some(membership)) = gang::membership(pod) else { return };
        if pod.status.phase == "Failed" {
            return;
        }
        let count = self.by_key.entry(membership.gang.clone()).or_default();
        count.stated = count.stated.max(membership.size);
        count.present += 1;
        let wants_gpus = pod.spec.asks_for_gpus() || !pod.spec.other_gpu_resources().is_empty();
        if wants_gpus && pod.spec.node_name.is_empty() && pod.status.phase != "Succeeded" {
            count.waiting += 1;
            self.of_waiting.insert(PodUid(pod.metadata.uid.clone()), membership.gang);
        }
    }

    /// Enters the size that a PodGroup object states.
    pub(crate) fn set_size(&mut self, gang: &GangKey, size: Option<u32>) {
        self.by_key.entry(gang.clone()).or_default().of_group = size;
    }

    /// Returns how far the gang of a waiting pod is, if the gang has more than one pod and a known size.
    pub(crate) fn progress(&self, uid: &PodUid) -> Option<(&GangKey, GangProgress)> {
        let key = self.of_waiting.get(uid)?;
        let count = self.by_key.get(key)?;
        let size = usize::try_from(count.stated.or(count.of_group)?).unwrap_or(usize::MAX);
        let settled = count.present - count.waiting;
        (size > 1).then_some((key, GangProgress { size, present: count.present, settled }))
    }
}
