//! GPUs that pods have just released.
//!
//! While a pod holds a GPU, the agent reports the devices of other dialects for this GPU as unhealthy. When the pod
//! ends, the agent and this scheduler learn of it at the same time. A pod of another dialect that is bound at once can
//! reach the kubelet before the agent's new list of devices, and the kubelet rejects it for lack of devices. So its
//! Binding waits for a moment. Its GPUs are booked meanwhile, and kube-scheduler goes on with other pods. The same
//! holds for a GPU that is uncordoned, whose devices come back in all dialects.

use std::collections::VecDeque;
use std::time::Duration;

use tessera_core::gpu_set::GpuSet;
use tessera_core::units::NodeName;
use tessera_wire::foreign::dialect::DialectSet;

/// Time from the end of a pod until the kubelet knows that the devices of its GPUs are back. The agent sends its list
/// within milliseconds on an idle node, and within some tenths of a second where compilers keep all cores busy.
const SETTLE_PERIOD: Duration = Duration::from_secs(1);

/// The releases of the last moment, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Releases(VecDeque<Release>);

#[derive(Debug)]
struct Release {
    node: NodeName,
    gpus: GpuSet,
    /// Dialects of the pod that ended, whose devices were never withdrawn. Empty if the GPUs were uncordoned.
    dialects: DialectSet,
    settled_at: Duration,
}

impl Releases {
    /// Records that a pod of these dialects released GPUs, and forgets releases that are over.
    pub(super) fn record(&mut self, now: Duration, node: NodeName, gpus: GpuSet, dialects: DialectSet) {
        while self.0.front().is_some_and(|release| release.settled_at <= now) {
            self.0.pop_front();
        }
        self.0.push_back(Release { node, gpus, dialects, settled_at: now + SETTLE_PERIOD });
    }

    /// Returns when a pod of these dialects may be bound to the GPUs. `None` means at once.
    pub(super) fn settled_at(
        &self,
        now: Duration,
        node: &NodeName,
        gpus: GpuSet,
        dialects: DialectSet,
    ) -> Option<Duration> {
        let concerns = |release: &&Release| {
            release.dialects != dialects
                && release.node == *node
                && !release.gpus.intersection(gpus).is_empty()
        };
        self.0.iter().filter(concerns).map(|release| release.settled_at).filter(|at| *at > now).max()
    }
}

#[cfg(test)]
mod tests {
    use tessera_core::units::GpuIndex;
    use tessera_wire::foreign::dialect::Dialect;

    use super::*;

    fn gpus(indexes: &[u8]) -> GpuSet {
        indexes.iter().map(|index| GpuIndex(*index)).collect()
    }

    #[test]
    fn a_pod_of_another_dialect_waits_for_a_gpu_that_was_just_released() {
        let (node, other) = (NodeName("a".to_owned()), NodeName("b".to_owned()));
        let [whole, memory] =
            [Dialect::Nvidia, Dialect::Gpushare].map(|dialect| DialectSet::default().with(dialect));
        let ms = Duration::from_millis;
        let mut releases = Releases::default();
        releases.record(ms(5_000), node.clone(), gpus(&[0, 1]), whole);
        let at = |now, node: &NodeName, of: &[u8], dialects| {
            releases.settled_at(ms(now), node, gpus(of), dialects)
        };
        assert_eq!(at(5_010, &node, &[1], memory), Some(ms(6_000)));
        assert_eq!(at(5_010, &node, &[1], whole), None, "the same dialect kept its devices");
        assert_eq!(at(5_010, &node, &[2], memory), None, "another GPU");
        assert_eq!(at(5_010, &other, &[1], memory), None, "another node");
        assert_eq!(at(6_000, &node, &[1], memory), None, "the kubelet knows by now");
    }

    #[test]
    fn old_releases_are_forgotten() {
        let mut releases = Releases::default();
        for second in 0..1_000 {
            let now = Duration::from_secs(second);
            releases.record(now, NodeName("a".to_owned()), gpus(&[0]), DialectSet::default());
        }
        assert_eq!(releases.0.len(), 1);
    }
}
