//! Calls of the kubelet that wait for an answer, and the podresources lists they wait for.
//!
//! A call is decided by a list that was requested after the call arrived. One list serves all calls
//! that wait for it, and only one list is requested at a time: the kubelet answers 100 lists a
//! second, over all clients.

use std::{collections::BTreeSet, time::Duration};

use tessera_node::device_plugin::PreferenceRequest;
use tessera_wire::kubelet::device_id::Resource;

use super::{Action, CallAnswer, CallError, CallId, EventTime, ShellError, error::Undecided};

/// Interval at which undecided calls are tried again.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// How long a call may stay undecided. The kubelet admits no other pod meanwhile.
const CALL_TIMEOUT: Duration = Duration::from_secs(4);

/// How long the start of a container may wait for borrowed memory. The kubelet itself waits 30 s.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(20);

/// Interval at which the pods are read from the API server while a call is undecided.
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// Interval at which the kubelet's list is compared with our records while no call needs it.
const ROUTINE_INTERVAL: Duration = Duration::from_secs(10);

/// A call of the kubelet's device manager.
#[derive(Clone, Debug)]
pub(super) enum KubeletCall {
    Prefer(Resource, PreferenceRequest),
    Allocate(Resource, BTreeSet<String>),
    PreStart(Resource, BTreeSet<String>),
}

/// A call that waits for an answer.
#[derive(Clone, Debug)]
pub(super) struct PendingCall {
    pub(super) id: CallId,
    pub(super) call: KubeletCall,
    since: Duration,
    number: u64,
    /// Whether a list has arrived that was requested after the call.
    is_covered: bool,
    /// Whether the pods have been read from the API server since the call.
    has_fresh_pods: bool,
    /// Whether the call has timed out and must be decided by what is known.
    pub(super) is_last_chance: bool,
    /// Whether only memory that others have borrowed keeps the container from its start.
    pub(super) awaits_memory: bool,
}

impl PendingCall {
    fn timeout(&self) -> Duration {
        if self.awaits_memory { MEMORY_TIMEOUT } else { CALL_TIMEOUT }
    }

    pub(super) fn is_covered(&self) -> bool {
        self.is_covered
    }

    /// Returns whether the call may be refused.
    ///
    /// A refusal is final, and the watch may lag behind the kubelet, so the pods are read first.
    pub(super) fn is_well_informed(&self) -> bool {
        self.has_fresh_pods || self.is_last_chance
    }
}

/// Pending calls and the state of the lists they wait for.
#[derive(Debug, Default)]
pub(super) struct PendingCalls {
    waiting: Vec<PendingCall>,
    /// Number of calls so far. It numbers the calls.
    count: u64,
    /// Number of the newest call that the requested list covers. `None` if no list is requested.
    list_covers: Option<u64>,
    /// Whether another list must follow the requested one.
    is_list_wanted: bool,
    last_list: Duration,
    last_read: Option<Duration>,
    list_error: Option<ShellError>,
}

impl PendingCalls {
    /// Returns whether no call waits for a list of the kubelet.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.iter().all(|call| call.awaits_memory)
    }

    /// Returns whether a call waits for memory that others have borrowed.
    pub(super) fn await_memory(&self) -> bool {
        self.waiting.iter().any(|call| call.awaits_memory)
    }

    /// Returns the error of the last list, if it failed.
    pub(super) fn list_error(&self) -> Option<&ShellError> {
        self.list_error.as_ref()
    }

    /// Adds a call that waits for a list.
    pub(super) fn add(&mut self, now: EventTime, id: CallId, call: KubeletCall, actions: &mut Vec<Action>) {
        self.count += 1;
        self.waiting.push(PendingCall {
            id,
            call,
            since: now.elapsed,
            number: self.count,
            is_covered: false,
            has_fresh_pods: false,
            is_last_chance: false,
            awaits_memory: false,
        });
        self.request_list(actions);
    }

    /// Puts a call back that could not be decided.
    pub(super) fn put_back(&mut self, call: PendingCall) {
        self.waiting.push(call);
    }

    /// Takes all calls out, to decide them.
    pub(super) fn take_all(&mut self) -> Vec<PendingCall> {
        std::mem::take(&mut self.waiting)
    }

    /// Takes the calls out that have timed out.
    pub(super) fn take_expired(&mut self, now: EventTime) -> Vec<PendingCall> {
        let (mut expired, waiting): (Vec<_>, Vec<_>) =
            self.take_all().into_iter().partition(|call| now.elapsed >= call.since + call.timeout());
        self.waiting = waiting;
        expired.iter_mut().for_each(|call| call.is_last_chance = true);
        expired
    }

    /// Notes that the pods were read after the calls up to number `covers` had arrived.
    pub(super) fn pods_were_read(&mut self, covers: u64) {
        for call in self.waiting.iter_mut().filter(|call| call.number <= covers) {
            call.has_fresh_pods = true;
        }
    }

    /// Requests a list, now or after the one that is being made.
    pub(super) fn request_list(&mut self, actions: &mut Vec<Action>) {
        if self.list_covers.is_some() {
            self.is_list_wanted = true;
            return;
        }
        self.list_covers = Some(self.count);
        self.is_list_wanted = false;
        actions.push(Action::ListPodResources);
    }

    /// Notes the result of a list, and requests another one if calls have arrived meanwhile.
    pub(super) fn list_arrived(
        &mut self,
        now: EventTime,
        outcome: Result<(), ShellError>,
        actions: &mut Vec<Action>,
    ) {
        let covers = self.list_covers.take().unwrap_or_default();
        self.last_list = now.elapsed;
        if outcome.is_ok() {
            for call in self.waiting.iter_mut().filter(|call| call.number <= covers) {
                call.is_covered = true;
            }
        }
        self.list_error = outcome.err();
        let has_uncovered = self.waiting.iter().any(|call| call.number > covers);
        if has_uncovered || std::mem::take(&mut self.is_list_wanted) {
            self.request_list(actions);
        }
    }

    /// Requests a list if calls wait for one, or if the routine comparison is due.
    pub(super) fn request_due_list(&mut self, now: EventTime, has_gpus: bool, actions: &mut Vec<Action>) {
        if self.is_empty() {
            if now.elapsed >= self.last_list + ROUTINE_INTERVAL && has_gpus {
                self.request_list(actions);
            }
        } else if self.list_covers.is_none() {
            self.request_list(actions);
        }
    }

    /// Starts a read of the pods for undecided calls, unless the last one was too recent.
    ///
    /// Returns the number of the newest call that the read covers.
    pub(super) fn start_due_read(&mut self, now: EventTime) -> Option<u64> {
        let since_read = self.last_read.map(|last| now.elapsed.saturating_sub(last));
        if self.is_empty() || since_read.is_some_and(|since| since < READ_INTERVAL) {
            return None;
        }
        self.last_read = Some(now.elapsed);
        Some(self.count)
    }

    /// Returns the refusal of a call that could not be decided in time.
    pub(super) fn timeout_answer(&self, call: &KubeletCall, has_pods: bool) -> CallAnswer {
        let cause = match (&self.list_error, has_pods) {
            (Some(error), _) => Undecided::NoList(error.clone()),
            (None, false) => Undecided::NoPods,
            (None, true) => Undecided::NoMatch,
        };
        match *call {
            KubeletCall::Prefer(resource, _) => {
                CallAnswer::Preferred(Err(CallError::UnknownPod { resource, cause }))
            }
            KubeletCall::Allocate(resource, _) => {
                CallAnswer::Allocated(Err(CallError::UnknownPod { resource, cause }))
            }
            KubeletCall::PreStart(resource, _) => {
                CallAnswer::Started(Err(CallError::UnknownContainer { resource, cause }))
            }
        }
    }
}
