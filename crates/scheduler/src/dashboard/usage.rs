//! What pods use of the GPUs they hold, from the agents' samples: the use of each pod, since when it is idle, and a
//! history of the cluster. The leader reads every agent in turn.
//!
//! [`UsageLog`] is a pure value; time is an argument. Its memory is bounded: one entry for each pod with GPUs, and
//! [`MAX_POINTS`] points of history.

mod poll;

use std::collections::{HashMap, HashSet, VecDeque};

use serde::Serialize;
use tessera_wire::tessera::node_use::NodeUse;

pub(crate) use self::poll::poll;

/// Points of history, one a minute for six hours.
pub const MAX_POINTS: usize = 360;

/// Shortest time between two points of history in milliseconds.
const POINT_MILLIS: u64 = 60_000;

/// Percent of a GPU below which a pod counts as idle. The driver reports noise below it.
const IDLE_PERCENT: f64 = 1.0;

/// The measured use of pods, and its history.
#[derive(Debug, Default)]
pub struct UsageLog {
    pods: HashMap<String, PodUse>,
    points: VecDeque<HistoryPoint>,
    /// Time of the first sample of any pod, in milliseconds since 1970.
    observed_since_millis: Option<u64>,
}

/// Measured use of one pod.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PodUse {
    /// Busy time in percent of one GPU, over all GPUs of the pod.
    pub busy_percent: f64,
    /// Memory in MiB, over all GPUs of the pod, if all of it is known.
    pub memory_mib: Option<u64>,
    /// Time of the first sample of an unbroken series without work, in milliseconds since 1970.
    pub idle_since_millis: Option<u64>,
    /// Time of the last sample, in milliseconds since 1970.
    sampled_millis: u64,
}

/// The state of the cluster at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryPoint {
    /// Time in milliseconds since 1970.
    pub unix_millis: u64,
    /// Number of GPUs that pods hold.
    pub held: f64,
    /// Number of GPUs that pods keep busy. Absent if the use of no pod is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<f64>,
    /// Number of pods whose use is unknown. If there are any, `used` is a lower bound.
    #[serde(skip_serializing_if = "is_zero")]
    pub unknown_pods: usize,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl UsageLog {
    /// Adds the answer of one agent about the pods that hold GPUs of its node; what it says of others is ignored. Pods
    /// with a share whose busy time is unknown are left out, because unknown is not idle.
    pub fn observe(&mut self, now_millis: u64, holders: &HashSet<String>, used: &NodeUse) {
        let mut pods: HashMap<&str, (Option<f64>, Option<u64>)> = HashMap::new();
        for container in used.containers.iter().filter(|container| holders.contains(&container.uid)) {
            for share in &container.gpus {
                let (busy, memory) = pods.entry(&container.uid).or_insert((Some(0.0), Some(0)));
                *busy = busy.zip(share.busy_percent).map(|(sum, more)| sum + more);
                *memory = memory.zip(share.memory_used_mib).map(|(sum, more)| sum.saturating_add(more));
            }
        }
        let known = pods.into_iter().filter_map(|(uid, (busy, memory))| Some((uid, busy?, memory)));
        for (uid, busy_percent, memory_mib) in known {
            let idle_before = self.pods.get(uid).and_then(|known| known.idle_since_millis);
            let is_idle = busy_percent < IDLE_PERCENT;
            let idle_since_millis = is_idle.then(|| idle_before.unwrap_or(now_millis));
            let entry = PodUse { busy_percent, memory_mib, idle_since_millis, sampled_millis: now_millis };
            self.pods.insert(uid.to_owned(), entry);
            self.observed_since_millis.get_or_insert(now_millis);
        }
    }

    /// Forgets pods without a sample since `begun_millis`, when a round over all agents began: they have ended, or their
    /// use is unknown.
    pub fn forget_unsampled(&mut self, begun_millis: u64) {
        self.pods.retain(|_, used| used.sampled_millis >= begun_millis);
    }

    /// Adds a point of history. The newest point is replaced until it is a minute old.
    pub fn add_point(&mut self, point: HistoryPoint) {
        let begun_millis = point.unix_millis;
        // A clock that was set back has left points of the future, which would hide all others in the chart.
        while self.points.back().is_some_and(|last| last.unix_millis > begun_millis) {
            self.points.pop_back();
        }
        let mut newest = self.points.iter().rev();
        if let (Some(last), Some(before)) = (newest.next(), newest.next())
            && last.unix_millis.saturating_sub(before.unix_millis) < POINT_MILLIS
        {
            self.points.pop_back();
        }
        if self.points.len() == MAX_POINTS {
            self.points.pop_front();
        }
        self.points.push_back(point);
    }

    /// Returns the measured use of a pod, or `None` if it is unknown.
    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<&PodUse> {
        self.pods.get(uid)
    }

    /// Returns whether use has been observed for this time, so that a pod that was idle all the while is known to be.
    #[must_use]
    pub fn has_observed_for(&self, millis: u64, now_millis: u64) -> bool {
        self.observed_since_millis.is_some_and(|since| now_millis.saturating_sub(since) >= millis)
    }

    /// Returns the time since when use is observed, in milliseconds since 1970.
    #[must_use]
    pub fn observed_since_millis(&self) -> Option<u64> {
        self.observed_since_millis
    }

    /// Returns the history, oldest first.
    pub fn points(&self) -> impl Iterator<Item = &HistoryPoint> {
        self.points.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(unix_millis: u64, used: Option<f64>) -> HistoryPoint {
        HistoryPoint { unix_millis, held: 2.0, used, unknown_pods: 0 }
    }

    #[test]
    fn history_is_in_order_after_the_clock_was_set_back() {
        let mut log = UsageLog::default();
        for begun in [10 * POINT_MILLIS, 20 * POINT_MILLIS, 12 * POINT_MILLIS, 13 * POINT_MILLIS] {
            log.add_point(point(begun, None));
        }
        let minutes: Vec<u64> = log.points().map(|point| point.unix_millis / POINT_MILLIS).collect();
        assert_eq!(minutes, [10, 12, 13]);
    }

    /// The pods that hold GPUs of the node.
    fn holders() -> HashSet<String> {
        HashSet::from(["u".to_owned()])
    }

    fn answer(uid: &str, busy: Option<f64>) -> NodeUse {
        let share = busy.map_or(String::new(), |busy| format!(r#","busyPercent":{busy},"memoryUsedMiB":5"#));
        serde_json::from_str(&format!(
            r#"{{"gpus":[{{"uuid":"g","index":0{}}}],"containers":[{{"namespace":"n","pod":"p","uid":"{uid}",
                "container":"c","gpus":[{{"uuid":"g","index":0{share}}}]}}]}}"#,
            busy.map_or(String::new(), |busy| format!(r#","busyPercent":{busy}"#)),
        ))
        .unwrap()
    }

    #[test]
    fn idle_begins_with_the_first_sample_without_work() {
        let mut log = UsageLog::default();
        let mut observe = |now, busy| {
            log.observe(now, &holders(), &answer("u", busy));
            log.forget_unsampled(now);
            log.pod("u").map(|used| used.idle_since_millis)
        };
        assert_eq!(observe(1, Some(40.0)), Some(None));
        assert_eq!(observe(2, Some(0.0)), Some(Some(2)));
        assert_eq!(observe(3, Some(0.5)), Some(Some(2)));
        assert_eq!(observe(4, Some(9.0)), Some(None));
        assert_eq!(observe(5, None), None, "unknown use is not idle");
    }

    #[test]
    fn history_is_bounded_and_has_one_point_a_minute() {
        let mut log = UsageLog::default();
        for second in 0..60 * 400 {
            if second % 10 == 0 {
                log.add_point(point(second * 1000, Some(0.5)));
            }
        }
        let points: Vec<&HistoryPoint> = log.points().collect();
        assert_eq!((points.len(), points[0].used, points[0].held), (MAX_POINTS, Some(0.5), 2.0));
        let gaps: Vec<u64> =
            points.windows(2).map(|pair| pair[1].unix_millis - pair[0].unix_millis).collect();
        assert!(gaps[..gaps.len() - 1].iter().all(|gap| *gap == POINT_MILLIS), "{gaps:?}");
    }

    /// A sum without the memory on one of the GPUs would be too low.
    #[test]
    fn memory_is_unknown_if_a_part_of_it_is() {
        let memory = |parts: [&str; 2]| {
            let [a, b] = parts.map(|part| format!(r#"{{"uuid":"g","index":0,"busyPercent":1{part}}}"#));
            let answer = format!(
                r#"{{"gpus":[],"containers":[{{"namespace":"n","pod":"p","uid":"u","container":"c","gpus":[{a},{b}]}}]}}"#
            );
            let mut log = UsageLog::default();
            log.observe(1, &holders(), &serde_json::from_str(&answer).unwrap());
            log.pod("u").unwrap().memory_mib
        };
        let known = r#","memoryUsedMiB":5"#;
        assert_eq!(memory([known, known]), Some(10));
        assert_eq!((memory([known, ""]), memory(["", known])), (None, None));
    }

    #[test]
    fn observation_begins_with_the_first_known_use() {
        let mut log = UsageLog::default();
        log.observe(5, &holders(), &answer("u", None));
        assert!(!log.has_observed_for(0, 100), "nothing is known");
        log.observe(10, &holders(), &answer("u", Some(0.0)));
        log.observe(20, &holders(), &answer("u", Some(0.0)));
        assert_eq!(log.observed_since_millis(), Some(10));
        assert!(log.has_observed_for(90, 100) && !log.has_observed_for(91, 100));
    }
}
