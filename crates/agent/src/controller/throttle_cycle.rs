//! Decides for which part of the time a throttled process may run.
//!
//! Work that a process has queued runs on while the process is stopped. So the part of the time in which
//! a process runs is not the part in which the GPU is busy for it, and the cycle is corrected by what the
//! driver measures.

use std::time::Duration;

/// Phases of a throttled process, which alternate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DutyCycle {
    /// Time for which the process runs.
    pub run: Duration,
    /// Time for which the process is stopped.
    pub pause: Duration,
}

/// Time for which a process runs before it is stopped again. It is long enough for a process to answer a
/// probe step by step, and short enough that one phase queues little work.
const RUN: Duration = Duration::from_millis(10);

/// Longest pause. A process that is stopped for longer would seem dead to its peers.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// Largest change of a pause at once, as a factor. The driver reports late, so larger changes would
/// oscillate.
const MAX_CHANGE: f64 = 4.0;

impl DutyCycle {
    /// Returns the first cycle of a process that has this share of the time, from 0 to 1.
    pub(super) fn first(share: f64) -> Self {
        Self { run: RUN, pause: Self::pause_for(share) }
    }

    /// Returns the cycle after a measurement in which the container was busy for the part `busy`.
    pub(super) fn corrected(self, share: f64, busy: f64) -> Self {
        let change = (busy / share.max(f64::MIN_POSITIVE)).clamp(1.0 / MAX_CHANGE, MAX_CHANGE);
        let longest = self.pause.max(RUN).mul_f64(change).min(MAX_PAUSE);
        // A process that computes less than its share in all of its running time has no use for more.
        Self { run: RUN, pause: longest.max(Self::pause_for(share)) }
    }

    /// Returns the pause with which a process runs for this part of the time.
    fn pause_for(part: f64) -> Duration {
        let factor = (1.0 / part.clamp(1e-3, 1.0)) - 1.0;
        RUN.mul_f64(factor).min(MAX_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the busy part of the GPU under a cycle, for a process that queues `queued` seconds of work
    /// in each running phase.
    fn busy(cycle: DutyCycle, queued: f64) -> f64 {
        let period = (cycle.run + cycle.pause).as_secs_f64();
        ((cycle.run.as_secs_f64() + queued) / period).min(1.0)
    }

    #[test]
    fn a_process_gets_its_share_however_much_it_queues() {
        for share in [0.01, 0.05, 0.25, 0.7] {
            for queued in [0.0, 0.005, 0.05, 0.3] {
                let mut cycle = DutyCycle::first(share);
                for _ in 0..20 {
                    cycle = cycle.corrected(share, busy(cycle, queued));
                }
                let part = busy(cycle, queued);
                let least = busy(DutyCycle { run: RUN, pause: MAX_PAUSE }, queued);
                assert!(part <= share.max(least) * 1.01, "{share} {queued}: {part}");
                assert!(part >= share * 0.5, "{share} {queued}: {part}");
            }
        }
    }

    #[test]
    fn no_pause_exceeds_the_longest() {
        let cycle = DutyCycle::first(0.0);
        assert_eq!(cycle.pause, Duration::from_millis(9990));
        assert_eq!(cycle.corrected(0.0, 1.0).pause, MAX_PAUSE);
    }
}
