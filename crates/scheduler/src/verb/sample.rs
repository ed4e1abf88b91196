//! kube-scheduler's sample of nodes, and what happens when it misses the nodes that fit.
//!
//! In a cluster of 100 or more nodes, kube-scheduler stops its search when enough nodes fit by its own count:
//! half of them in a small cluster, a twentieth in a large one, but at least 100. The next search continues
//! where this one ended. kube-scheduler counts the sums of a node, so a whole sample may consist of nodes
//! without a suitable GPU while another node has one. If filter rejected them all, kube-scheduler would evict
//! pods and then wait for a change of the cluster. An error makes it search the next nodes soon.

use std::collections::VecDeque;

use tessera_core::units::PodUid;

/// Nodes that kube-scheduler offers at least if it does not offer all of them.
pub(super) const MIN_SAMPLE: usize = 100;

/// Times that a pod is sent back for another sample. Other nodes may not be allowed for the pod, which only
/// kube-scheduler knows, so the pod must be rejected in the end. Most pods fit in the second sample.
const MAX_SEARCHES: u32 = 3;

/// Pods remembered. The oldest one is forgotten first.
const MAX_PODS: usize = 1024;

/// The pods whose samples had no node that fits, and how often.
#[derive(Debug, Default)]
pub(super) struct SampleMisses(VecDeque<(PodUid, u32)>);

impl SampleMisses {
    /// Counts a sample without a node that fits. Returns whether the pod should try another sample.
    pub(super) fn should_search_on(&mut self, pod: &PodUid) -> bool {
        if let Some((_, searches)) = self.0.iter_mut().find(|(known, _)| known == pod) {
            *searches += 1;
            return *searches <= MAX_SEARCHES;
        }
        if self.0.len() == MAX_PODS {
            self.0.pop_front();
        }
        self.0.push_back((pod.clone(), 1));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_sent_back_a_few_times_and_the_oldest_pod_is_forgotten() {
        let mut misses = SampleMisses::default();
        let pod = |number: usize| PodUid(number.to_string());
        let searches: Vec<bool> = (0..5).map(|_| misses.should_search_on(&pod(0))).collect();
        assert_eq!(searches, [true, true, true, false, false]);
        for number in 1..=MAX_PODS {
            assert!(misses.should_search_on(&pod(number)));
        }
        assert!(misses.should_search_on(&pod(0)), "this pod was forgotten");
        assert_eq!(misses.0.len(), MAX_PODS);
    }
}
