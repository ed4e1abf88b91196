//! Decides which incidents make a GPU unusable, and for how long.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::gpu::GpuUuid;
use tessera_node::gpus::IncidentKind;

use super::Warning;

/// Consequence of an incident for a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncidentEffect {
    /// A program caused the error. The GPU stays in use.
    Ignored,
    /// The GPU is out of use until it has been free of errors for the quiet time.
    Transient,
    /// The GPU needs a reset or a repair. It is out of use until the driver finds it again.
    Fatal,
    /// The GPU answers again.
    Recovered,
}

/// Returns the consequence of an incident.
///
/// XIDs are classified by NVIDIA's catalogue of errors. The ignored ones are those that the
/// original device plugins and NVIDIA's own plugin attribute to applications.
#[must_use]
pub fn incident_effect(kind: IncidentKind) -> IncidentEffect {
    match kind {
        IncidentKind::Back => IncidentEffect::Recovered,
        IncidentKind::Lost | IncidentKind::DoubleBitEcc => IncidentEffect::Fatal,
        IncidentKind::Xid(number) => match number {
            // 13 graphics exception, 31 page fault, 43 stopped processing, 45 preemptive cleanup,
            // 68 video exception, 109 context switch timeout: an application did something wrong.
            13 | 31 | 43 | 45 | 68 | 109 => IncidentEffect::Ignored,
            // 48 double bit ECC, 62 and 61 microcontroller halt, 64 and 156 page retirement or row
            // remapping failed, 74 NVLink, 79 fallen off the bus, 95 uncontained ECC, 119 and 120
            // GSP, 140 unrecovered ECC, 143 and 158 reset needed.
            48 | 61 | 62 | 64 | 74 | 79 | 95 | 119 | 120 | 140 | 143 | 156 | 158 => IncidentEffect::Fatal,
            _ => IncidentEffect::Transient,
        },
    }
}

/// GPUs that are out of use because of incidents.
#[derive(Debug)]
pub(super) struct GpuHealth {
    quiet_time: Duration,
    ignored_xids: BTreeSet<u64>,
    /// End of each GPU's quiet time. `None` means until the driver finds the GPU again.
    out_of_use: BTreeMap<GpuUuid, Option<Duration>>,
}

impl GpuHealth {
    pub(super) fn new(quiet_time: Duration, ignored_xids: BTreeSet<u64>) -> Self {
        Self { quiet_time, ignored_xids, out_of_use: BTreeMap::new() }
    }

    pub(super) fn is_out_of_use(&self, gpu: &GpuUuid) -> bool {
        self.out_of_use.contains_key(gpu)
    }

    /// Puts a GPU back into use that the driver had lost and has found again.
    pub(super) fn restore(&mut self, gpu: &GpuUuid) {
        self.out_of_use.remove(gpu);
    }

    /// Records an incident of one GPU. Returns true if the GPU went out of use or came back.
    pub(super) fn record(&mut self, elapsed: Duration, gpu: &GpuUuid, kind: IncidentKind) -> bool {
        if matches!(kind, IncidentKind::Xid(number) if self.ignored_xids.contains(&number)) {
            return false;
        }
        let until = match incident_effect(kind) {
            IncidentEffect::Ignored => return false,
            IncidentEffect::Recovered => return self.out_of_use.remove(gpu).is_some(),
            IncidentEffect::Transient => Some(elapsed + self.quiet_time),
            IncidentEffect::Fatal => None,
        };
        match self.out_of_use.get_mut(gpu) {
            None => {
                self.out_of_use.insert(gpu.clone(), until);
                true
            }
            // A transient error does not shorten a fatal one.
            Some(None) => false,
            Some(known) => {
                *known = until;
                false
            }
        }
    }

    /// Returns a warning about an incident and its consequence.
    pub(super) fn warning(&self, gpu: &GpuUuid, kind: IncidentKind) -> Warning {
        let incident = match kind {
            IncidentKind::Xid(number) => format!("XID {number}"),
            IncidentKind::DoubleBitEcc => "double-bit ECC error".to_owned(),
            IncidentKind::Lost => "the GPU does not answer any more".to_owned(),
            IncidentKind::Back => "the GPU answers again".to_owned(),
        };
        let consequence = match incident_effect(kind) {
            IncidentEffect::Ignored | IncidentEffect::Recovered => "a GPU is back in use",
            IncidentEffect::Transient => {
                let detail = format!("{incident}; quiet time {} s", self.quiet_time.as_secs());
                let message = "a GPU is out of use until it has been free of errors for the quiet time";
                return Warning::new(message).gpu(gpu).detail(detail);
            }
            IncidentEffect::Fatal => {
                "a GPU is out of use until the driver finds it again or the agent restarts"
            }
        };
        Warning::new(consequence).gpu(gpu).detail(incident)
    }

    /// Puts GPUs back into use whose quiet time is over. Returns true if there were any.
    pub(super) fn restore_quiet(&mut self, elapsed: Duration) -> bool {
        let before = self.out_of_use.len();
        self.out_of_use.retain(|_, until| until.is_none_or(|until| until > elapsed));
        self.out_of_use.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xids_have_the_effects_of_the_catalogue() {
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
        let mut health = GpuHealth::new(second(100), [63].into());
        assert!(!health.record(second(0), &"a".into(), IncidentKind::Xid(63)), "ignored by configuration");
        let mut health = GpuHealth::new(second(100), BTreeSet::new());
        let (a, b) = (GpuUuid::from("a"), GpuUuid::from("b"));
        assert!(health.record(second(0), &a, IncidentKind::Xid(63)));
        assert!(health.record(second(0), &b, IncidentKind::Xid(79)));
        // A second error of the same GPU restarts its quiet time.
        assert!(!health.record(second(50), &a, IncidentKind::Xid(63)));
        assert!(!health.restore_quiet(second(100)));
        assert!(health.restore_quiet(second(150)));
        assert!(!health.is_out_of_use(&a) && health.is_out_of_use(&b));
        assert!(!health.record(second(200), &b, IncidentKind::Xid(63)));
        assert!(!health.restore_quiet(second(10_000)));
        assert!(health.record(second(10_000), &b, IncidentKind::Back));
        assert!(!health.is_out_of_use(&b));
    }
}
