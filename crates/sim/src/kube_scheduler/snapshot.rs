//! The state that kube-scheduler has by itself: nodes, pods and the fitting of amounts.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::Value;
use tessera_wire::foreign::objects::{Amounts, Pod};
use tessera_wire::foreign::quantity::Quantity;

/// All nodes and pods.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    nodes: BTreeMap<String, NodeInfo>,
    pods: HashMap<String, PodInfo>,
    on_node: HashMap<String, BTreeSet<String>>,
}

#[derive(Debug)]
struct NodeInfo {
    allocatable: MilliAmounts,
    labels: BTreeMap<String, String>,
    is_open: bool,
}

/// A pod with the values derived from it.
#[derive(Debug, Clone)]
pub(super) struct PodInfo {
    /// The object as the API server sends it.
    pub(super) object: Value,
    /// The part of the object that Tessera reads.
    pub(super) pod: Pod,
    requests: MilliAmounts,
    selector: BTreeMap<String, String>,
    /// True while the pod terminates.
    pub(super) is_ending: bool,
}

/// Amounts in thousandths, by resource.
type MilliAmounts = BTreeMap<String, u64>;

impl PodInfo {
    /// Reads a pod. Returns `None` if the object is not a valid pod.
    pub(super) fn read(object: Value) -> Option<Self> {
        let pod: Pod = serde_json::from_value(object.clone()).ok()?;
        let mut requests = MilliAmounts::from([("pods".to_owned(), 1000)]);
        for container in &pod.spec.containers {
            for (resource, amount) in milli_amounts(&container.resources.requests) {
                *requests.entry(resource).or_default() += amount;
            }
        }
        for container in &pod.spec.init_containers {
            for (resource, amount) in milli_amounts(&container.resources.requests) {
                let sum = requests.entry(resource).or_default();
                *sum = amount.max(*sum);
            }
        }
        let selector = serde_json::from_value(object["spec"]["nodeSelector"].clone()).unwrap_or_default();
        let is_ending = !object["metadata"]["deletionTimestamp"].is_null();
        Some(Self { object, pod, requests, selector, is_ending })
    }

    pub(super) fn priority(&self) -> i32 {
        self.pod.spec.priority.unwrap_or(0)
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self.pod.status.phase.as_str(), "Succeeded" | "Failed")
    }

    pub(super) fn asks_for(&self, resource: &str) -> bool {
        self.requests.get(resource).is_some_and(|amount| *amount > 0)
    }
}

impl Snapshot {
    pub(super) fn set_node(&mut self, node: &Value) {
        let name = node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let read = |value: &Value| serde_json::from_value(value.clone()).unwrap_or_default();
        let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
        let ready = conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
        let info = NodeInfo {
            allocatable: milli_amounts(&read(&node["status"]["allocatable"])),
            labels: serde_json::from_value(node["metadata"]["labels"].clone()).unwrap_or_default(),
            is_open: ready && node["spec"]["unschedulable"] != true,
        };
        self.nodes.insert(name, info);
    }

    pub(super) fn remove_node(&mut self, node: &Value) {
        self.nodes.remove(node["metadata"]["name"].as_str().unwrap_or_default());
    }

    /// Adds or updates a pod that is on a node.
    pub(super) fn set_pod(&mut self, info: PodInfo) {
        let uid = info.pod.metadata.uid.clone();
        self.remove_pod(&uid);
        if !info.has_ended() {
            self.on_node.entry(info.pod.spec.node_name.clone()).or_default().insert(uid.clone());
            self.pods.insert(uid, info);
        }
    }

    /// Removes a pod. Returns whether the pod was on a node.
    pub(super) fn remove_pod(&mut self, uid: &str) -> bool {
        let Some(info) = self.pods.remove(uid) else { return false };
        if let Some(neighbours) = self.on_node.get_mut(&info.pod.spec.node_name) {
            neighbours.remove(uid);
        }
        true
    }

    pub(super) fn pod(&self, uid: &str) -> Option<&PodInfo> {
        self.pods.get(uid)
    }

    fn neighbours(&self, node: &str) -> impl Iterator<Item = &PodInfo> {
        self.on_node.get(node).into_iter().flatten().filter_map(|uid| self.pods.get(uid))
    }

    pub(super) fn has_ending_pods(&self, node: &str) -> bool {
        self.neighbours(node).any(|pod| pod.is_ending)
    }

    pub(super) fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the nodes whose amounts and labels fit, and the reasons of the others. The flag of a
    /// reason is true if evictions could help.
    pub(super) fn filter(&self, pod: &PodInfo) -> (Vec<String>, BTreeMap<String, (String, bool)>) {
        let mut fitting = Vec::new();
        let mut refused = BTreeMap::new();
        for (name, node) in &self.nodes {
            let verdict = match node.rejection_reason(pod) {
                Some(reason) => Some((reason.to_owned(), false)),
                None => node
                    .first_shortage(pod, self.neighbours(name))
                    .map(|what| (format!("Insufficient {what}"), true)),
            };
            match verdict {
                None => fitting.push(name.clone()),
                Some(verdict) => drop(refused.insert(name.clone(), verdict)),
            }
        }
        (fitting, refused)
    }

    /// Returns the pods of lower priority that kube-scheduler would evict from a node: as few as
    /// possible, the least important first. Empty if evictions do not help or are not needed.
    pub(super) fn victims(&self, node: &str, pod: &PodInfo) -> Vec<String> {
        let Some(info) = self.nodes.get(node) else { return Vec::new() };
        let (mut evicted, staying): (Vec<&PodInfo>, Vec<&PodInfo>) =
            self.neighbours(node).partition(|other| other.priority() < pod.priority());
        if info.first_shortage(pod, staying.iter().copied()).is_some() {
            return Vec::new();
        }
        evicted.sort_by_key(|other| (std::cmp::Reverse(other.priority()), other.pod.metadata.uid.clone()));
        let mut staying = staying;
        let mut victims = Vec::new();
        for other in evicted {
            staying.push(other);
            if info.first_shortage(pod, staying.iter().copied()).is_some() {
                staying.pop();
                victims.push(other.pod.metadata.uid.clone());
            }
        }
        victims
    }
}

impl NodeInfo {
    fn rejection_reason(&self, pod: &PodInfo) -> Option<&'static str> {
        if !self.is_open {
            return Some("node(s) were unschedulable");
        }
        let matches = |(label, value): (&String, &String)| self.labels.get(label) == Some(value);
        (!pod.selector.iter().all(matches)).then_some("node(s) didn't match Pod's node affinity/selector")
    }

    /// Returns the first resource that does not suffice.
    fn first_shortage<'a>(&self, pod: &PodInfo, others: impl Iterator<Item = &'a PodInfo>) -> Option<String> {
        let mut used = pod.requests.clone();
        for other in others {
            for (resource, sum) in &mut used {
                *sum += other.requests.get(resource).copied().unwrap_or_default();
            }
        }
        let available = |resource: &str| self.allocatable.get(resource).copied().unwrap_or_default();
        let short = used.into_iter().find(|(resource, sum)| *sum > available(resource));
        short.map(|(resource, _)| resource)
    }
}

fn milli_amounts(amounts: &Amounts) -> MilliAmounts {
    let milli = |text: &str| text.parse::<Quantity>().ok().and_then(Quantity::milli);
    amounts.iter().filter_map(|(resource, amount)| Some((resource.clone(), milli(&amount.0)?))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, node: &str, gpus: u32, priority: i32) -> PodInfo {
        PodInfo::read(json!({
            "metadata": { "uid": uid, "name": uid },
            "spec": { "nodeName": node, "priority": priority, "containers": [
                { "name": "c", "resources": { "requests": { "aliyun.com/gpu": gpus.to_string() } } }] },
        }))
        .unwrap()
    }

    fn cluster() -> Snapshot {
        let mut snapshot = Snapshot::default();
        for name in ["a", "b"] {
            snapshot.set_node(&json!({
                "metadata": { "name": name, "labels": { "name": name } },
                "status": {
                    "allocatable": { "aliyun.com/gpu": "8", "pods": "110" },
                    "conditions": [{ "type": "Ready", "status": "True" }],
                },
            }));
        }
        for (uid, gpus, priority) in [("low", 4, 0), ("lower", 2, -1), ("high", 2, 9)] {
            snapshot.set_pod(pod(uid, "a", gpus, priority));
        }
        snapshot
    }

    #[test]
    fn filters_nodes_by_free_amounts() {
        let mut snapshot = cluster();
        let (fitting, refused) = snapshot.filter(&pod("new", "", 1, 5));
        assert_eq!(fitting, ["b"]);
        assert_eq!(refused["a"], ("Insufficient aliyun.com/gpu".to_owned(), true));
        assert!(snapshot.remove_pod("lower") && !snapshot.remove_pod("lower"));
        assert_eq!(snapshot.filter(&pod("new", "", 2, 5)).0, ["a", "b"]);
        assert_eq!(snapshot.filter(&pod("new", "", 9, 5)).0, Vec::<String>::new());
    }

    #[test]
    fn evicts_the_least_important_pods_and_no_more_than_needed() {
        let snapshot = cluster();
        assert_eq!(snapshot.victims("a", &pod("new", "", 2, 5)), ["lower"]);
        assert_eq!(snapshot.victims("a", &pod("new", "", 4, 5)), ["low"]);
        assert_eq!(snapshot.victims("a", &pod("new", "", 6, 5)), ["low", "lower"]);
        assert_eq!(snapshot.victims("a", &pod("new", "", 7, 5)), Vec::<String>::new());
        assert_eq!(
            snapshot.victims("b", &pod("new", "", 1, 5)),
            Vec::<String>::new(),
            "no eviction is needed"
        );
    }
}
