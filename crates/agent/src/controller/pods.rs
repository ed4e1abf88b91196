//! The pods of the node: as the API server's watch tells them, and as they are read where the kubelet seems to know more.
//!
//! By the time a reading arrives the watch may have told of what came after it. Of such pods its word stands, else the living would be
//! taken for gone and the gone for living, with nobody to tell otherwise.

use std::collections::BTreeSet;

use tessera_core::units::PodUid;
use tessera_wire::foreign::objects::Pod;

use super::{Action, Agent, Dirty, uid_of};

/// A reading that is on its way.
#[derive(Debug)]
pub(super) struct Reading {
    /// The kubelet's questions up to this number had come when it began.
    pub(super) covers: u64,
    /// Pods of which the watch has told since.
    told: BTreeSet<PodUid>,
    /// Whether the watch has told all pods anew since: then there is nothing to learn from it.
    is_overtaken: bool,
}

impl Reading {
    pub(super) fn begin(covers: u64) -> Self {
        Self { covers, told: BTreeSet::new(), is_overtaken: false }
    }
}

impl Agent {
    pub(super) fn on_pods(&mut self, pods: Vec<Pod>, actions: &mut Vec<Action>) -> Dirty {
        if let Some(reading) = &mut self.reading {
            reading.is_overtaken = true;
        }
        self.set_pods(pods, actions)
    }

    pub(super) fn on_pods_read(
        &mut self,
        read: Result<Vec<Pod>, String>,
        actions: &mut Vec<Action>,
    ) -> Dirty {
        let Some(Reading { covers, told, is_overtaken }) = self.reading.take() else {
            return Dirty::Nothing;
        };
        let (Ok(mut pods), false) = (read, is_overtaken) else { return Dirty::Nothing };
        pods.retain(|pod| !told.contains(&uid_of(pod)));
        pods.extend(told.iter().filter_map(|uid| self.pods.remove(uid)));
        self.calls.pods_were_read(covers);
        self.set_pods(pods, actions)
    }

    fn set_pods(&mut self, pods: Vec<Pod>, actions: &mut Vec<Action>) -> Dirty {
        self.pods = pods.into_iter().map(|pod| (uid_of(&pod), pod)).collect();
        self.read_pods();
        self.pods_or_gpus_changed();
        if !std::mem::replace(&mut self.pods_known, true) {
            // What the kubelet holds belongs to these pods.
            self.calls.want_list(actions);
        }
        Dirty::Pods
    }

    pub(super) fn on_pod(&mut self, pod: Pod) -> Dirty {
        let uid = uid_of(&pod);
        self.watch_has_told(&uid);
        self.pods.insert(uid.clone(), pod);
        self.read_pod(&uid);
        self.pods_or_gpus_changed();
        Dirty::Pod(uid)
    }

    pub(super) fn on_pod_deleted(&mut self, uid: &PodUid) -> Dirty {
        self.watch_has_told(uid);
        self.pods.remove(uid);
        self.read.remove(uid);
        self.pods_or_gpus_changed();
        Dirty::Pods
    }

    fn watch_has_told(&mut self, uid: &PodUid) {
        if let Some(reading) = &mut self.reading {
            reading.told.insert(uid.clone());
        }
    }
}
