//! Questions of the kubelet that wait for an answer, and the podresources lists they wait for.
//!
//! A question is judged by a list that was asked for after the question came. One list serves all questions that wait for
//! it, and only one is asked for at a time: the kubelet answers 100 a second, to all who ask together.

use std::{collections::BTreeSet, time::Duration};

use tessera_node::{device_plugin::PreferenceRequest, pod_resources::PodDevices};
use tessera_wire::kubelet::device_id::Resource;

use super::{Action, Agent, CallAnswer, CallId, Dirty, EventTime, pods::Reading};

/// How soon an undecided question is looked at again.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How long a question may stay undecided: meanwhile the kubelet admits nobody.
const PATIENCE: Duration = Duration::from_secs(4);

/// How often pods are read afresh while a question is undecided.
const READ_EVERY: Duration = Duration::from_millis(500);

/// How often the kubelet's books are compared with ours when nothing else asks for it.
const ROUTINE: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub(super) enum Question {
    Prefer(Resource, PreferenceRequest),
    Allocate(Resource, BTreeSet<String>),
    PreStart(Resource, BTreeSet<String>),
}

/// What became of a question.
#[derive(Debug)]
pub(super) enum Judgement {
    /// It is answered.
    Answer(CallAnswer),
    /// Its answer follows what had to be done for it.
    Later,
}

#[derive(Clone, Debug)]
pub(super) struct Call {
    id: CallId,
    pub(super) question: Question,
    since: Duration,
    number: u64,
    /// Whether a list asked for after it came has arrived.
    covered: bool,
    /// Whether the pods have been read from the API server since it came.
    fresh: bool,
    /// Patience is at its end: judge by what there is.
    pub(super) last_chance: bool,
}

impl Call {
    /// Whether it is judged by all that can be known: the watch may be behind the kubelet, and refusals are final.
    pub(super) fn is_well_informed(&self) -> bool {
        self.fresh || self.last_chance
    }
}

#[derive(Debug, Default)]
pub(super) struct Calls {
    waiting: Vec<Call>,
    count: u64,
    /// The list on its way covers questions up to this number.
    list_covers: Option<u64>,
    list_wanted: bool,
    last_list: Duration,
    last_read: Option<Duration>,
    /// Why the last list failed.
    list_failure: Option<String>,
}

impl Calls {
    pub(super) fn waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Why the last list failed, if it did.
    pub(super) fn list_failure(&self) -> Option<&str> {
        self.list_failure.as_deref()
    }

    /// The pods were read after the questions up to this number had come.
    pub(super) fn pods_were_read(&mut self, covers: u64) {
        for call in self.waiting.iter_mut().filter(|call| call.number <= covers) {
            call.fresh = true;
        }
    }

    pub(super) fn want_list(&mut self, actions: &mut Vec<Action>) {
        if self.list_covers.is_some() {
            self.list_wanted = true;
            return;
        }
        self.list_covers = Some(self.count);
        self.list_wanted = false;
        actions.push(Action::ListPodResources);
    }
}

impl Agent {
    /// Lets a question wait for a list.
    pub(super) fn ask_list_for(
        &mut self,
        now: EventTime,
        id: CallId,
        question: Question,
        actions: &mut Vec<Action>,
    ) {
        self.calls.count += 1;
        self.calls.waiting.push(Call {
            id,
            question,
            since: now.elapsed,
            number: self.calls.count,
            covered: false,
            fresh: false,
            last_chance: false,
        });
        self.calls.want_list(actions);
    }

    pub(super) fn on_listed(
        &mut self,
        now: EventTime,
        listed: Result<Vec<PodDevices>, String>,
        actions: &mut Vec<Action>,
    ) -> Dirty {
        let covers = self.calls.list_covers.take().unwrap_or_default();
        self.calls.last_list = now.elapsed;
        let mut news = false;
        match listed {
            Ok(listed) => {
                news = !std::mem::replace(&mut self.listed_once, true) || listed != self.listed;
                if news {
                    self.take_list(listed);
                }
                self.calls.list_failure = None;
                for call in self.calls.waiting.iter_mut().filter(|call| call.number <= covers) {
                    call.covered = true;
                }
            }
            Err(reason) => self.calls.list_failure = Some(reason),
        }
        let uncovered = self.calls.waiting.iter().any(|call| call.number > covers);
        if uncovered || std::mem::take(&mut self.calls.list_wanted) {
            self.calls.want_list(actions);
        }
        // Also the same list may be what a question has waited for.
        if news || self.calls.waiting() { Dirty::Pods } else { Dirty::Nothing }
    }

    fn take_list(&mut self, listed: Vec<PodDevices>) {
        self.listed_names.clear();
        for (place, pod) in listed.iter().enumerate() {
            let name = (pod.namespace.clone(), pod.name.clone());
            self.listed_names.entry(name).or_default().push(place);
        }
        self.listed = listed;
        self.pods_or_gpus_changed();
    }

    /// Looks at the undecided questions again: something has changed.
    pub(super) fn retry_calls(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        for call in std::mem::take(&mut self.calls.waiting) {
            let answer = if call.covered { self.judge(now, &call, actions) } else { None };
            match answer {
                Some(Judgement::Answer(answer)) => actions.push(Action::Answer(call.id, answer)),
                Some(Judgement::Later) => {}
                None => self.calls.waiting.push(call),
            }
        }
    }

    /// What to answer, if that is clear.
    fn judge(&mut self, now: EventTime, call: &Call, actions: &mut Vec<Action>) -> Option<Judgement> {
        match call.question.clone() {
            Question::Prefer(resource, wish) => {
                let (uid, container) = self.identify(call, resource, wish.count)?;
                let answer = self.prefer(&uid, &container, resource, &wish, call.is_well_informed())?;
                Some(Judgement::Answer(answer))
            }
            Question::Allocate(resource, ids) => {
                let (uid, container) = self.identify(call, resource, ids.len())?;
                let answer = self.allocate(now, &uid, &container, resource, &ids, call.is_well_informed())?;
                Some(Judgement::Answer(answer))
            }
            Question::PreStart(resource, ids) => self.start(call.id, resource, &ids, actions),
        }
    }

    /// Undecided questions look at fresh lists and pods, for as long as there is patience.
    pub(super) fn retry_lists(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        if self.calls.waiting.is_empty() {
            if now.elapsed >= self.calls.last_list + ROUTINE && self.cards.is_some() {
                self.calls.want_list(actions);
            }
            return;
        }
        if self.calls.list_covers.is_none() {
            self.calls.want_list(actions);
        }
        let since_read = self.calls.last_read.map(|last| now.elapsed.saturating_sub(last));
        if self.reading.is_none() && since_read.is_none_or(|since| since >= READ_EVERY) {
            self.calls.last_read = Some(now.elapsed);
            self.reading = Some(Reading::begin(self.calls.count));
            actions.push(Action::ReadPods);
        }
    }

    /// Decides what has waited long enough.
    pub(super) fn expire_calls(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        let (expired, waiting): (Vec<Call>, Vec<Call>) = std::mem::take(&mut self.calls.waiting)
            .into_iter()
            .partition(|call| now.elapsed >= call.since + PATIENCE);
        self.calls.waiting = waiting;
        for mut call in expired {
            call.last_chance = true;
            let answer = if call.covered { self.judge(now, &call, actions) } else { None };
            match answer.unwrap_or_else(|| Judgement::Answer(self.give_up(&call.question))) {
                Judgement::Answer(answer) => actions.push(Action::Answer(call.id, answer)),
                Judgement::Later => {}
            }
        }
    }

    fn give_up(&self, question: &Question) -> CallAnswer {
        let why = match (&self.calls.list_failure, self.pods_known) {
            (Some(reason), _) => reason.clone(),
            (None, false) => "the API server has not told the pods of this node yet".to_owned(),
            (None, true) => "no single pod fits what the kubelet lists".to_owned(),
        };
        match question {
            Question::Prefer(resource, _) => {
                CallAnswer::Preferred(Err(format!("cannot tell which pod asks for {resource}: {why}")))
            }
            Question::Allocate(resource, _) => {
                CallAnswer::Allocated(Err(format!("cannot tell which pod asks for {resource}: {why}")))
            }
            Question::PreStart(resource, _) => {
                CallAnswer::Started(Err(format!("cannot tell yet whose {resource} this is: {why}")))
            }
        }
    }
}
