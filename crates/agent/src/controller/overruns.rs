//! Reports of containers that make their account file grow.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::units::PodUid;

use super::{Action, EventTime, PodContainer, Warning, pods::Pods};

/// Time between two reports about the same container. The metric counts every time.
const REPORT_INTERVAL: Duration = Duration::from_secs(600);

/// When containers were last reported.
#[derive(Debug, Default)]
pub(super) struct AccountOverruns {
    reported: BTreeMap<PodContainer, Duration>,
}

impl AccountOverruns {
    /// Reports to the log and to the owner of the pod that an account file was cut.
    pub(super) fn report(
        &mut self,
        now: EventTime,
        pods: &Pods,
        container: PodContainer,
        bytes: u64,
        actions: &mut Vec<Action>,
    ) {
        let is_recent = |at: &Duration| now.elapsed < *at + REPORT_INTERVAL;
        let (uid, name) = &container;
        let Some(pod) = pods.get(uid) else { return };
        if self.reported.get(&container).is_some_and(is_recent) {
            return;
        }
        let kib = bytes >> 10;
        let warning = Warning::new("a container made its account file grow; the file was cut")
            .pod(pod)
            .container(name)
            .detail(format!("{kib} KiB"));
        actions.push(Action::Warn(warning));
        actions.push(Action::RecordPodEvent {
            uid: uid.clone(),
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            reason: "AccountFileGrew",
            message: format!(
                "container {name} made /etc/tessera/account {kib} KiB large; only the library writes this file, and \
                 the agent cuts it"
            ),
        });
        self.reported.insert(container, now.elapsed);
    }

    /// Forgets pods that are not in `active`.
    pub(super) fn remove_ended(&mut self, active: &BTreeSet<PodUid>) {
        self.reported.retain(|(uid, _), _| active.contains(uid));
    }
}
