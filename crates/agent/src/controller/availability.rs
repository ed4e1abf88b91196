//! Whether the scheduler may bind pods to the node: from the registration with the kubelet until an orderly end.
//!
//! The kubelet rejects a pod for good if no plugin serves its devices, also while an agent is replaced. Two agents cannot
//! take turns: when the stream of an earlier plugin ends, the kubelet disconnects whichever plugin serves the resource. So
//! an agent that ends announces it first, and goes on serving until the pods that were bound before have been admitted.
//! Later pods wait in the scheduler until the next agent serves.

use std::time::Duration;

use super::{
    Action, Agent, EventTime,
    kubelet::KubeletView,
    pods::{Pods, has_ended},
};

/// Time after the announcement in which Bindings may still arrive. The scheduler sees the announcement within
/// milliseconds, and a Binding takes it as long.
const BINDING_PERIOD: Duration = Duration::from_secs(2);

/// Longest time between the request to stop and the end. Kubernetes kills a pod 30 seconds after the request.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Time that the kubelet has to take in the first list of devices after it has opened a stream.
const SETTLING_TIME: Duration = Duration::from_secs(1);

/// Time after which an agent counts as serving even if the kubelet has not opened all streams. Pods can use the others.
const STREAMS_TIMEOUT: Duration = Duration::from_secs(30);

/// What the agent announces to schedulers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// The kubelet may not know the devices yet.
    #[default]
    Starting,
    Serving,
    Stopping,
}

/// Progress of the start and of the end of an agent.
#[derive(Debug, Default)]
pub(super) struct Availability {
    phase: Phase,
    /// When the kubelet last opened a stream.
    stream_opened: Option<Duration>,
    /// When the agent was asked to stop.
    asked: Option<Duration>,
    /// When the announcement was found on the node.
    announced: Option<Duration>,
    is_over: bool,
}

impl Availability {
    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// Notes that the kubelet has opened a stream.
    pub(super) fn stream_opened(&mut self, now: EventTime) {
        self.stream_opened = Some(now.elapsed);
    }

    /// Notes what has become known of the kubelet. Returns true if the agent serves from now on.
    pub(super) fn update(
        &mut self,
        now: EventTime,
        kubelet: &KubeletView,
        has_all_streams: bool,
        pods: &Pods,
    ) -> bool {
        let Some(opened) = self.stream_opened.filter(|_| self.phase == Phase::Starting) else { return false };
        let is_serving = pods.is_complete()
            && kubelet.has_listed()
            && now.elapsed >= opened + SETTLING_TIME
            && (has_all_streams || now.elapsed >= STREAMS_TIMEOUT);
        if is_serving {
            self.phase = Phase::Serving;
        }
        is_serving
    }
}

impl Agent {
    /// Begins an orderly end. An agent that cannot announce it, or has not served yet, ends at once.
    pub(super) fn on_stop_requested(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        let may_announce = self.settings.advertise.is_some() && self.publication.node_uid().is_some();
        if self.availability.phase == Phase::Serving && may_announce {
            self.availability.phase = Phase::Stopping;
            self.availability.asked = Some(now.elapsed);
        } else if !std::mem::replace(&mut self.availability.is_over, true) {
            actions.push(Action::Stop);
        }
    }

    /// Ends the agent once the pods that were bound before its announcement have been admitted.
    pub(super) fn continue_stop(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        let Some(asked) = self.availability.asked.filter(|_| !self.availability.is_over) else { return };
        if self.publication.is_unavailable(&self.settings) {
            self.availability.announced.get_or_insert(now.elapsed);
        }
        let is_late = |since: Duration, period: Duration| now.elapsed >= since + period;
        let is_drained = self.calls.is_empty() && !self.awaits_admission();
        let is_done = match self.availability.announced {
            Some(announced) => is_late(announced, BINDING_PERIOD) && is_drained,
            // Without the API server no pod is bound either.
            None => self.publication.has_failed(),
        };
        if is_done || is_late(asked, STOP_TIMEOUT) {
            self.availability.is_over = true;
            actions.push(Action::Stop);
        }
    }

    /// Returns whether the kubelet has yet to admit a pod that requests devices of this agent.
    fn awaits_admission(&self) -> bool {
        let requests = |uid| self.pods.parsed(uid).is_some_and(|parsed| !parsed.claims.is_empty());
        self.pods.iter().any(|(uid, pod)| {
            let is_new = pod.status.start_time.is_none() && !has_ended(pod);
            is_new && pod.metadata.deletion_timestamp.is_none() && requests(uid)
        })
    }
}
