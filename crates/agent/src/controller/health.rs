//! Which troubles make a GPU unusable, and for how long.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::gpu::GpuUuid;
use tessera_node::gpus::{Incident, IncidentKind};

use super::{Action, Agent, Dirty, EventTime};

/// What a trouble means for a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncidentEffect {
    /// A mistake of the program on it: the GPU is fine.
    Ignored,
    /// The GPU should be left alone until it has been quiet for a while.
    Transient,
    /// The GPU needs a reset or a repair, and comes back only when the driver finds it again.
    Fatal,
    /// The GPU is there again.
    Recovered,
}

/// The verdict on an incident. XIDs by NVIDIA's catalogue of errors; those of the application are the ones that the original
/// plugins and NVIDIA's own pass over.
#[must_use]
pub fn incident_effect(kind: IncidentKind) -> IncidentEffect {
    match kind {
        IncidentKind::Back => IncidentEffect::Recovered,
        IncidentKind::Lost | IncidentKind::DoubleBitEcc => IncidentEffect::Fatal,
        IncidentKind::Xid(number) => match number {
            // 13 graphics exception, 31 page fault, 43 stopped processing, 45 preemptive cleanup, 68 video exception,
            // 109 context switch timeout: an application did something wrong.
            13 | 31 | 43 | 45 | 68 | 109 => IncidentEffect::Ignored,
            // 48 double bit ECC, 62 and 61 microcontroller halt, 64 and 156 page retirement or row remapping failed,
            // 74 NVLink, 79 fallen off the bus, 95 uncontained ECC, 119 and 120 GSP, 140 unrecovered ECC, 143 and 158 reset needed.
            48 | 61 | 62 | 64 | 74 | 79 | 95 | 119 | 120 | 140 | 143 | 156 | 158 => IncidentEffect::Fatal,
            _ => IncidentEffect::Transient,
        },
    }
}

/// The GPUs in trouble.
#[derive(Debug)]
pub(super) struct HealthBook {
    quiet_time: Duration,
    ignored: BTreeSet<u64>,
    /// Until when each is out of use; `None`: until it is found again.
    bad: BTreeMap<GpuUuid, Option<Duration>>,
}

impl HealthBook {
    pub(super) fn new(quiet_time: Duration, ignored: BTreeSet<u64>) -> Self {
        Self { quiet_time, ignored, bad: BTreeMap::new() }
    }

    pub(super) fn is_bad(&self, gpu: &GpuUuid) -> bool {
        self.bad.contains_key(gpu)
    }

    /// The driver had lost the GPU, and has it again.
    pub(super) fn found_again(&mut self, gpu: &GpuUuid) {
        self.bad.remove(gpu);
    }

    /// Notes an incident on one GPU; whether that changed anything to be told.
    fn note(&mut self, elapsed: Duration, gpu: &GpuUuid, kind: IncidentKind) -> bool {
        if matches!(kind, IncidentKind::Xid(number) if self.ignored.contains(&number)) {
            return false;
        }
        let until = match incident_effect(kind) {
            IncidentEffect::Ignored => return false,
            IncidentEffect::Recovered => return self.bad.remove(gpu).is_some(),
            IncidentEffect::Transient => Some(elapsed + self.quiet_time),
            IncidentEffect::Fatal => None,
        };
        match self.bad.get_mut(gpu) {
            None => {
                self.bad.insert(gpu.clone(), until);
                true
            }
            // Already fatal: nothing transient makes it better.
            Some(None) => false,
            Some(known) => {
                *known = until;
                false
            }
        }
    }

    /// What happened to a GPU, and what follows.
    fn describe(&self, kind: IncidentKind) -> String {
        let what = match kind {
            IncidentKind::Xid(number) => format!("reported XID {number}"),
            IncidentKind::DoubleBitEcc => "reported a double-bit ECC error".to_owned(),
            IncidentKind::Lost => "does not answer any more".to_owned(),
            IncidentKind::Back => "answers again".to_owned(),
        };
        match incident_effect(kind) {
            IncidentEffect::Ignored | IncidentEffect::Recovered => what,
            IncidentEffect::Transient => {
                format!("{what}: out of use until it has been quiet for {} s", self.quiet_time.as_secs())
            }
            IncidentEffect::Fatal => {
                format!("{what}: out of use until the driver finds it anew or the agent restarts")
            }
        }
    }

    /// Trusts those again that have been quiet long enough; whether there were any.
    pub(super) fn recover(&mut self, elapsed: Duration) -> bool {
        let before = self.bad.len();
        self.bad.retain(|_, until| until.is_none_or(|until| until > elapsed));
        self.bad.len() < before
    }
}

impl Agent {
    pub(super) fn on_incident(
        &mut self,
        now: EventTime,
        incident: &Incident,
        actions: &mut Vec<Action>,
    ) -> Dirty {
        let Some(cards) = &self.cards else { return Dirty::Nothing };
        // An incident of nobody in particular concerns all.
        let all = || cards.found.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let gpus: Vec<GpuUuid> = incident.gpu.clone().map_or_else(all, |gpu| vec![gpu]);
        let mut changed = false;
        for gpu in gpus {
            if self.health.note(now.elapsed, &gpu, incident.kind) {
                changed = true;
                actions.push(Action::Warn(format!("GPU {gpu} {}", self.health.describe(incident.kind))));
            }
        }
        if !changed {
            return Dirty::Nothing;
        }
        self.refresh_gpus(actions);
        Dirty::All
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table() {
        let of = |number| incident_effect(IncidentKind::Xid(number));
        for application in [31, 43, 45, 13] {
            assert_eq!(of(application), IncidentEffect::Ignored);
        }
        assert_eq!(of(79), IncidentEffect::Fatal);
        assert_eq!(of(63), IncidentEffect::Transient);
        assert_eq!(of(999), IncidentEffect::Transient);
        assert_eq!(incident_effect(IncidentKind::Lost), IncidentEffect::Fatal);
    }

    #[test]
    fn quiet_gpus_come_back_and_broken_ones_do_not() {
        let second = Duration::from_secs;
        let mut book = HealthBook::new(second(100), [63].into());
        assert!(
            !book.note(second(0), &"a".into(), IncidentKind::Xid(63)),
            "the administrator passes it over"
        );
        let mut book = HealthBook::new(second(100), BTreeSet::new());
        let (a, b) = (GpuUuid::from("a"), GpuUuid::from("b"));
        assert!(book.note(second(0), &a, IncidentKind::Xid(63)));
        assert!(book.note(second(0), &b, IncidentKind::Xid(79)));
        // Not quiet: it happened again.
        assert!(!book.note(second(50), &a, IncidentKind::Xid(63)));
        assert!(!book.recover(second(100)));
        assert!(book.recover(second(150)));
        assert!(!book.is_bad(&a) && book.is_bad(&b));
        assert!(!book.note(second(200), &b, IncidentKind::Xid(63)));
        assert!(!book.recover(second(10_000)));
        assert!(book.note(second(10_000), &b, IncidentKind::Back));
        assert!(!book.is_bad(&b));
    }
}
