//! How far a plan is carried out, and what comes next. It does no IO: each decision follows from the cluster as it was
//! just read.

use std::collections::BTreeSet;

use tessera_core::defragment::Fixed;
use tessera_core::units::{NodeName, PodUid};

/// One eviction of the confirmed plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlannedMove {
    /// The wanted pod that the move makes room for, or a node of the shape.
    pub(super) wanted: PodUid,
    pub(super) pod: PodUid,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) node: NodeName,
    /// UID of the controller that creates the pod again.
    pub(super) controller: String,
}

/// A pod that is to be evicted, as the cluster shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) node: NodeName,
    pub(super) fixed: Option<Fixed>,
}

/// The cluster as it was just read.
pub(super) trait ClusterNow {
    /// Returns whether the pod waits for GPUs, or is a node of the shape.
    fn is_wanted(&self, pod: &PodUid) -> bool;

    /// Returns a pod that holds GPUs.
    fn victim(&self, pod: &PodUid) -> Option<Victim>;

    /// Returns whether the pod fits on another place beside all reservations.
    fn has_other_place(&self, pod: &PodUid) -> bool;

    /// Returns the pods of a controller, and whether each has a node.
    fn pods_of(&self, controller: &str) -> Vec<(PodUid, bool)>;
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// Evict the pod, then report [`Progress::record_eviction`].
    Evict(PlannedMove),
    /// Read the cluster again after a moment. The text says what is awaited.
    Wait(String),
    /// All moves are done, and all wanted pods have their GPUs.
    Done,
    /// Nothing more can be done. The text says why.
    Stop(String),
}

/// The confirmed moves, and how many of them are done.
#[derive(Debug)]
pub(super) struct Progress {
    moves: Vec<PlannedMove>,
    /// Wanted pods with a place in the plan, with their names. Nodes of a shape are not among them.
    awaited: Vec<(PodUid, String)>,
    position: usize,
    /// The pods of the controller before the eviction under way.
    known: Option<BTreeSet<PodUid>>,
    waits_since: Option<i64>,
    step_timeout_seconds: i64,
    /// Evicted pods, as NAMESPACE/NAME.
    pub(super) evicted: Vec<String>,
}

impl Progress {
    pub(super) fn new(
        moves: Vec<PlannedMove>,
        awaited: Vec<(PodUid, String)>,
        step_timeout_seconds: i64,
    ) -> Self {
        Self {
            moves,
            awaited,
            position: 0,
            known: None,
            waits_since: None,
            step_timeout_seconds,
            evicted: Vec::new(),
        }
    }

    /// Returns what to do next.
    pub(super) fn next(&mut self, cluster: &impl ClusterNow, now_seconds: i64) -> NextStep {
        while let Some(step) = self.moves.get(self.position).cloned() {
            let name = format!("{}/{}", step.namespace, step.name);
            match (cluster.victim(&step.pod), self.known.clone()) {
                (Some(_), Some(_)) => return self.wait(format!("pod {name} to end"), now_seconds),
                (None, Some(known)) => {
                    let replacements = cluster.pods_of(&step.controller);
                    let mut new = replacements.iter().filter(|(uid, _)| !known.contains(uid));
                    match new.clone().next() {
                        None => {
                            return self.wait(format!("pod {name} to be created again"), now_seconds);
                        }
                        Some(_) if !new.any(|(_, is_bound)| *is_bound) => {
                            let what = format!("the pod that replaces {name} to get a node");
                            return self.wait(what, now_seconds);
                        }
                        Some(_) => self.advance(),
                    }
                }
                // The pod ended by itself, or what it makes room for needs none any more.
                (None, None) => self.advance(),
                (Some(_), None) if !cluster.is_wanted(&step.wanted) => self.advance(),
                (Some(victim), None) if victim.fixed == Some(Fixed::Ending) => {
                    return self.wait(format!("pod {name} to end"), now_seconds);
                }
                (Some(victim), None) => return check(cluster, step, &name, &victim),
            }
        }
        let waiting = self.awaited.iter().find(|(uid, _)| cluster.is_wanted(uid)).cloned();
        match waiting {
            Some((_, name)) => self.wait(format!("pod {name} to get its GPUs"), now_seconds),
            None => NextStep::Done,
        }
    }

    /// Records that the API server has accepted the eviction of a pod.
    pub(super) fn record_eviction(&mut self, step: &PlannedMove, cluster: &impl ClusterNow) {
        self.evicted.push(format!("{}/{}", step.namespace, step.name));
        let known = cluster.pods_of(&step.controller).into_iter().map(|(uid, _)| uid);
        self.known = Some(known.chain([step.pod.clone()]).collect());
        self.waits_since = None;
    }

    fn advance(&mut self) {
        self.position += 1;
        self.known = None;
        self.waits_since = None;
    }

    fn wait(&mut self, what: String, now_seconds: i64) -> NextStep {
        let since = *self.waits_since.get_or_insert(now_seconds);
        let waited = now_seconds.saturating_sub(since);
        if waited >= self.step_timeout_seconds {
            return NextStep::Stop(format!("waited {waited} s in vain for {what}"));
        }
        NextStep::Wait(what)
    }
}

/// Returns the eviction, or why the plan does not hold any more.
fn check(cluster: &impl ClusterNow, step: PlannedMove, name: &str, victim: &Victim) -> NextStep {
    if let Some(fixed) = victim.fixed {
        return NextStep::Stop(format!("pod {name} must stay now: {}", fixed.describe()));
    }
    if victim.node != step.node {
        return NextStep::Stop(format!("pod {name} is on node {} now, not on {}", victim.node, step.node));
    }
    if !cluster.has_other_place(&step.pod) {
        return NextStep::Stop(format!("pod {name} has no other place any more"));
    }
    NextStep::Evict(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Scripted {
        wanted: Vec<&'static str>,
        victims: Vec<(&'static str, Option<Fixed>)>,
        has_room: bool,
        pods: Vec<(&'static str, bool)>,
    }

    impl ClusterNow for Scripted {
        fn is_wanted(&self, pod: &PodUid) -> bool {
            self.wanted.iter().any(|wanted| *wanted == pod.0)
        }

        fn victim(&self, pod: &PodUid) -> Option<Victim> {
            let found = self.victims.iter().find(|(uid, _)| *uid == pod.0)?;
            Some(Victim { node: "a".into(), fixed: found.1 })
        }

        fn has_other_place(&self, _: &PodUid) -> bool {
            self.has_room
        }

        fn pods_of(&self, _: &str) -> Vec<(PodUid, bool)> {
            self.pods.iter().map(|(uid, is_bound)| ((*uid).into(), *is_bound)).collect()
        }
    }

    fn step(pod: &str) -> PlannedMove {
        PlannedMove {
            wanted: "large".into(),
            pod: pod.into(),
            namespace: "team".to_owned(),
            name: pod.to_owned(),
            node: "a".into(),
            controller: "web".to_owned(),
        }
    }

    fn progress() -> Progress {
        Progress::new(vec![step("one"), step("two")], vec![("large".into(), "team/large".to_owned())], 60)
    }

    fn before() -> Scripted {
        Scripted {
            wanted: vec!["large"],
            victims: vec![("one", None), ("two", None)],
            has_room: true,
            pods: vec![("one", true), ("two", true)],
        }
    }

    fn wait(what: &str) -> NextStep {
        NextStep::Wait(what.to_owned())
    }

    #[test]
    fn evicts_one_pod_after_the_other() {
        let (mut progress, mut cluster) = (progress(), before());
        assert_eq!(progress.next(&cluster, 0), NextStep::Evict(step("one")));
        progress.record_eviction(&step("one"), &cluster);
        assert_eq!(progress.next(&cluster, 1), wait("pod team/one to end"));
        cluster.victims.remove(0);
        cluster.pods = vec![("two", true)];
        assert_eq!(progress.next(&cluster, 2), wait("pod team/one to be created again"));
        cluster.pods.push(("three", false));
        assert_eq!(progress.next(&cluster, 3), wait("the pod that replaces team/one to get a node"));
        cluster.pods[1].1 = true;
        assert_eq!(progress.next(&cluster, 4), NextStep::Evict(step("two")));
        progress.record_eviction(&step("two"), &cluster);
        cluster.victims.clear();
        cluster.pods = vec![("three", true), ("four", true)];
        assert_eq!(progress.next(&cluster, 5), wait("pod team/large to get its GPUs"));
        cluster.wanted.clear();
        assert_eq!(progress.next(&cluster, 6), NextStep::Done);
        assert_eq!(progress.evicted, ["team/one", "team/two"]);
    }

    #[test]
    fn evicts_no_pod_that_need_not_go() {
        let (mut progress, mut cluster) = (progress(), before());
        cluster.wanted.clear();
        assert_eq!(progress.next(&cluster, 0), NextStep::Done, "the wanted pod has its GPUs already");
        let (mut progress, mut cluster) = (self::progress(), before());
        cluster.victims.remove(0);
        assert_eq!(progress.next(&cluster, 0), NextStep::Evict(step("two")), "the first pod ended by itself");
    }

    #[test]
    fn stops_where_the_plan_does_not_hold() {
        let stops = |change: &dyn Fn(&mut Scripted), expected: &str| {
            let (mut progress, mut cluster) = (progress(), before());
            change(&mut cluster);
            assert_eq!(progress.next(&cluster, 0), NextStep::Stop(expected.to_owned()));
        };
        stops(&|cluster| cluster.has_room = false, "pod team/one has no other place any more");
        stops(
            &|cluster| cluster.victims[0].1 = Some(Fixed::NoController),
            "pod team/one must stay now: no controller would create the pod again",
        );
        let (mut progress, cluster) = (progress(), before());
        progress.record_eviction(&step("one"), &cluster);
        assert_eq!(progress.next(&cluster, 100), wait("pod team/one to end"));
        assert_eq!(progress.next(&cluster, 159), wait("pod team/one to end"));
        let expected = "waited 60 s in vain for pod team/one to end";
        assert_eq!(progress.next(&cluster, 160), NextStep::Stop(expected.to_owned()));
    }
}
