//! What pods use of the GPUs they hold, from the agents' samples: the use of each pod, since when it is idle, and a
//! history of the cluster. The leader reads every agent in turn.
//!
//! [`UsageLog`] is a pure value; time is an argument. Its memory is bounded: one entry for each pod with GPUs, and
//! [`MAX_POINTS`] points of history.

mod poll;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

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
    /// Use of each node in the current round, in percent of one GPU.
    round: BTreeMap<String, f64>,
}

/// Measured use of one pod.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PodUse {
    /// Busy time in percent of one GPU, over all GPUs of the pod.
    pub busy_percent: f64,
    /// Memory in MiB, if known.
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
    /// Number of GPUs that are busy. Absent if no agent answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<f64>,
}

impl UsageLog {
    /// Adds the answer of one agent about the pods that hold GPUs of its node; what it says of others is ignored. Pods
    /// with a share whose busy time is unknown are left out, because unknown is not idle.
    pub fn observe(&mut self, now_millis: u64, node: &str, holders: &HashSet<String>, used: &NodeUse) {
        let mut pods: HashMap<&str, (Option<f64>, Option<u64>)> = HashMap::new();
        for container in used.containers.iter().filter(|container| holders.contains(&container.uid)) {
            for share in &container.gpus {
                let (sum, memory) = pods.entry(&container.uid).or_insert((Some(0.0), None));
                *sum = sum.zip(share.busy_percent).map(|(sum, busy)| sum + busy);
                *memory = share.memory_used_mib.map_or(*memory, |more| Some(memory.unwrap_or(0) + more));
            }
        }
        let known = pods.into_iter().filter_map(|(uid, (busy, memory))| Some((uid, busy?, memory)));
        for (uid, busy_percent, memory_mib) in known {
            let idle_before = self.pods.get(uid).and_then(|known| known.idle_since_millis);
            let is_idle = busy_percent < IDLE_PERCENT;
            let idle_since_millis = is_idle.then(|| idle_before.unwrap_or(now_millis));
            let entry = PodUse { busy_percent, memory_mib, idle_since_millis, sampled_millis: now_millis };
            self.pods.insert(uid.to_owned(), entry);
        }
        let busy: Vec<f64> = used.gpus.iter().filter_map(|gpu| gpu.busy_percent).collect();
        if !busy.is_empty() {
            self.round.insert(node.to_owned(), busy.iter().sum());
        }
    }

    /// Ends a round over all agents that began at `begun_millis`. Pods without a sample in this round are forgotten:
    /// they have ended, or their use is unknown. The newest point is replaced until it is a minute old.
    pub fn end_round(&mut self, begun_millis: u64, held: f64) {
        self.pods.retain(|_, used| used.sampled_millis >= begun_millis);
        let used = (!self.round.is_empty()).then(|| self.round.values().sum::<f64>() / 100.0);
        self.round.clear();
        let point = HistoryPoint { unix_millis: begun_millis, held, used };
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

    /// Returns the history, oldest first.
    pub fn points(&self) -> impl Iterator<Item = &HistoryPoint> {
        self.points.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_is_in_order_after_the_clock_was_set_back() {
        let mut log = UsageLog::default();
        for begun in [10 * POINT_MILLIS, 20 * POINT_MILLIS, 12 * POINT_MILLIS, 13 * POINT_MILLIS] {
            log.end_round(begun, 1.0);
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
            log.observe(now, "node", &holders(), &answer("u", busy));
            log.end_round(now, 1.0);
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
                log.observe(second * 1000, "node", &holders(), &answer("u", Some(50.0)));
                log.end_round(second * 1000, 2.0);
            }
        }
        let points: Vec<&HistoryPoint> = log.points().collect();
        assert_eq!((points.len(), points[0].used, points[0].held), (MAX_POINTS, Some(0.5), 2.0));
        let gaps: Vec<u64> =
            points.windows(2).map(|pair| pair[1].unix_millis - pair[0].unix_millis).collect();
        assert!(gaps[..gaps.len() - 1].iter().all(|gap| *gap == POINT_MILLIS), "{gaps:?}");
        log.end_round(60 * 400 * 1000, 2.0);
        assert_eq!(log.points().last().unwrap().used, None, "no agent answered");
        assert!(log.pod("u").is_none());
    }
}
