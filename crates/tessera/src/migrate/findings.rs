//! Decides what a migration means for a cluster.

use std::collections::BTreeMap;
use std::fmt;

use super::cluster::{Cluster, Node, Pod};

/// Resources of GPUs, with what becomes of them.
const RESOURCES: [(&str, Fate); 10] = [
    ("nvidia.com/gpu", Fate::Served),
    ("aliyun.com/gpu", Fate::Served),
    ("aliyun.com/gpu-mem", Fate::Served),
    ("tencent.com/vcuda-core", Fate::Served),
    ("tencent.com/vcuda-memory", Fate::Served),
    (
        "nvidia.com/gpu.shared",
        Fate::Rewritten("tencent.com/vcuda-core and tencent.com/vcuda-memory, as a share of a GPU"),
    ),
    ("nvidia.com/gpumem", Fate::ServedByHami),
    ("nvidia.com/gpumem-percentage", Fate::ServedByHami),
    ("nvidia.com/gpucores", Fate::ServedByHami),
    ("nvidia.com/priority", Fate::ServedByHami),
];

/// Programs that handle GPUs, by a part of their image's name, with what to do about them.
const PROGRAMS: [(&str, &str); 8] = [
    (
        "k8s-device-plugin",
        "NVIDIA's device plugin: agents leave nvidia.com/gpu to it; remove it from a node to let Tessera serve that",
    ),
    ("hami", "HAMi: remove its device plugin, scheduler and webhook (docs/migrate-hami.md)"),
    ("vgpu-scheduler", "HAMi's predecessor: remove it (docs/migrate-hami.md)"),
    ("gpushare-device-plugin", "gpushare's device plugin: Tessera replaces it (docs/migrate-gpushare.md)"),
    (
        "gpushare-sch",
        "gpushare's scheduler extender: remove it from kube-scheduler's configuration (docs/migrate-gpushare.md)",
    ),
    ("gpu-manager", "gpu-manager: Tessera replaces it (docs/migrate-gpu-manager.md)"),
    (
        "gpu-admission",
        "gpu-admission: remove it from kube-scheduler's configuration (docs/migrate-gpu-manager.md)",
    ),
    ("gputopology", "gputopology: Tessera replaces it (docs/migrate-gpushare.md)"),
];

/// The value with which the chart's agents serve HAMi's resources.
const HAMI_SETTING: &str = "agent.dialects={hami,gputopology,gpushare,vcuda}    # HAMi's resources, in the place of whole GPUs alone";

/// Annotations and labels that other projects leave behind, by prefix.
const LEFTOVERS: [&str; 3] = ["hami.io/", "4pd.io/", "gpushare"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Served,
    /// Served with the dialect `hami`, which is off by default.
    ServedByHami,
    /// Not served; what to write instead.
    Rewritten(&'static str),
}

/// The result of a check.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Findings {
    /// Resources that pods request: number of pods and the amount.
    resources: BTreeMap<&'static str, (usize, u64)>,
    /// Programs found, with the number of their pods.
    programs: BTreeMap<&'static str, usize>,
    /// Problems that must be solved first.
    problems: Vec<String>,
    /// Settings that fit the cluster.
    settings: Vec<String>,
    /// Annotations and labels to remove, as commands.
    leftovers: Vec<String>,
}

impl Findings {
    /// Returns whether something has to be changed before the migration.
    pub(super) fn must_change(&self) -> bool {
        !self.problems.is_empty()
    }
}

/// Checks a cluster.
pub(super) fn of(cluster: &Cluster) -> Findings {
    let mut findings = Findings::default();
    let mut has_hami = false;
    for (resource, fate) in RESOURCES {
        let pods: Vec<&Pod> = cluster.pods.iter().filter(|pod| pod.requests(resource) > 0).collect();
        if pods.is_empty() {
            continue;
        }
        let sum = pods.iter().map(|pod| pod.requests(resource)).sum();
        findings.resources.insert(resource, (pods.len(), sum));
        match fate {
            Fate::Served => {}
            Fate::ServedByHami => has_hami = true,
            Fate::Rewritten(instead) => {
                let named = some(pods.iter().map(|pod| pod.name()));
                findings.problems.push(format!("{resource} is not served; write {instead}: {named}"));
            }
        }
    }
    if has_hami {
        findings.settings.push(HAMI_SETTING.to_owned());
    }
    for (part, advice) in PROGRAMS {
        let images = |pod: &&Pod| pod.spec.containers.iter().any(|container| container.image.contains(part));
        let pods = cluster.pods.iter().filter(images).count();
        if pods > 0 {
            findings.programs.insert(advice, pods);
        }
    }
    for node in &cluster.nodes {
        findings.problems.extend(oversubscription(cluster, node));
        findings.leftovers.extend(leftovers(
            "node",
            &node.metadata.name,
            "",
            &node.metadata.annotations,
            "annotate",
        ));
        findings.leftovers.extend(leftovers("node", &node.metadata.name, "", &node.metadata.labels, "label"));
    }
    findings.settings.extend(memory_unit(&cluster.nodes));
    let foreign: Vec<&Pod> =
        cluster.pods.iter().filter(|pod| pod.spec.scheduler_name.contains("hami")).collect();
    if !foreign.is_empty() {
        let named = some(foreign.iter().map(|pod| pod.name()));
        findings.problems.push(format!("schedulerName of HAMi's scheduler, which will not run: {named}"));
    }
    findings
}

/// A node on which more pods hold `nvidia.com/gpu` than it has GPUs, because its plugin offers each GPU several times.
/// Such pods get whole GPUs of Tessera, so some of them would wait.
fn oversubscription(cluster: &Cluster, node: &Node) -> Option<String> {
    let resource = "nvidia.com/gpu";
    let replicas = node.number("nvidia.com/gpu.replicas").filter(|replicas| *replicas > 1)?;
    let gpus = node.number("nvidia.com/gpu.count").unwrap_or_else(|| node.capacity(resource) / replicas);
    let here = cluster
        .pods
        .iter()
        .filter(|pod| pod.spec.node_name == node.metadata.name && pod.requests(resource) > 0);
    let pods: Vec<&Pod> = here.collect();
    let held: u64 = pods.iter().map(|pod| pod.requests(resource)).sum();
    let name = &node.metadata.name;
    (held > gpus).then(|| {
        format!(
            "node {name} offers each of its {gpus} GPUs {replicas} times, and pods hold {held}; with whole GPUs {} would \
             wait. Request shares (tencent.com/vcuda-core) in: {}",
            held - gpus,
            some(pods.iter().map(|pod| pod.name()))
        )
    })
}

/// Returns the setting for the unit of `aliyun.com/gpu-mem`, told from the amounts as kubectl inspect does.
fn memory_unit(nodes: &[Node]) -> Option<String> {
    let per_gpu = |node: &Node| {
        let (memory, gpus) =
            (node.capacity("aliyun.com/gpu-mem"), node.capacity("aliyun.com/gpu-count").max(1));
        (memory > 0).then_some(memory / gpus)
    };
    let amounts: Vec<u64> = nodes.iter().filter_map(per_gpu).collect();
    let unit = if amounts.iter().any(|amount| *amount >= 1000) { "MiB" } else { "GiB" };
    (!amounts.is_empty())
        .then(|| format!("agent.memoryUnit={unit}    # the unit of aliyun.com/gpu-mem on the nodes"))
}

/// Returns commands that remove what other projects have written to an object.
fn leftovers(
    kind: &str,
    name: &str,
    flags: &str,
    found: &BTreeMap<String, String>,
    verb: &str,
) -> Vec<String> {
    let is_leftover = |key: &&String| LEFTOVERS.iter().any(|prefix| key.starts_with(prefix));
    let keys: Vec<String> = found.keys().filter(is_leftover).map(|key| format!("{key}-")).collect();
    if keys.is_empty() {
        Vec::new()
    } else {
        vec![format!("kubectl {verb} {kind} {name}{flags} {}", keys.join(" "))]
    }
}

/// Lists the first few names.
fn some(names: impl Iterator<Item = String>) -> String {
    const SHOWN: usize = 5;
    let names: Vec<String> = names.collect();
    let more = names.len().saturating_sub(SHOWN);
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let none = |f: &mut fmt::Formatter<'_>, is_empty: bool| {
            if is_empty { writeln!(f, "  none") } else { Ok(()) }
        };
        writeln!(f, "GPU resources that pods request:")?;
        for (resource, (pods, sum)) in &self.resources {
            writeln!(f, "  {resource}: {sum} in {pods} {}", if *pods == 1 { "pod" } else { "pods" })?;
        }
        none(f, self.resources.is_empty())?;
        writeln!(f, "Programs that handle GPUs:")?;
        for (advice, pods) in &self.programs {
            writeln!(f, "  {advice} ({pods} running)")?;
        }
        none(f, self.programs.is_empty())?;
        for (title, lines) in [
            ("To change first:", &self.problems),
            ("Values for the chart:", &self.settings),
            ("To clean up afterwards:", &self.leftovers),
        ] {
            writeln!(f, "{title}")?;
            for line in lines {
                writeln!(f, "  {line}")?;
            }
            none(f, lines.is_empty())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::cluster::Objects;
    use super::*;

    fn found(objects: Value) -> Findings {
        let mut all = Objects::default();
        for object in objects.as_array().unwrap() {
            all.add(object.clone()).unwrap();
        }
        of(&Cluster::new(all))
    }

    fn pod(name: &str, limits: Value) -> Value {
        let container = json!({ "image": "app", "resources": { "limits": limits } });
        let spec = json!({ "nodeName": "n", "containers": [container] });
        json!({ "kind": "Pod", "metadata": { "name": name, "namespace": "team" }, "spec": spec })
    }

    #[test]
    fn a_cluster_without_gpus_needs_nothing() {
        let findings = found(json!([pod("web", json!({ "cpu": "1" }))]));
        assert_eq!(findings, Findings::default());
        assert!(!findings.must_change());
    }

    #[test]
    fn served_resources_are_counted_and_ended_pods_are_not() {
        let mut ended = pod("ended", json!({ "tencent.com/vcuda-core": "50" }));
        ended["status"] = json!({ "phase": "Succeeded" });
        let findings = found(json!([
            pod("a", json!({ "tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "8" })),
            pod("b", json!({ "tencent.com/vcuda-core": "1k", "tencent.com/vcuda-memory": "8" })),
            ended,
        ]));
        assert_eq!(findings.resources["tencent.com/vcuda-core"], (2, 1030));
        assert!(!findings.must_change());
    }

    #[test]
    fn requests_of_hami_need_its_dialect_and_its_traces_are_removed() {
        let mut hami = pod(
            "train",
            json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30" }),
        );
        hami["spec"]["schedulerName"] = "hami-scheduler".into();
        let annotations = json!({ "hami.io/node-nvidia-register": "x", "other": "y" });
        let findings = found(json!([
            hami,
            { "kind": "Node", "metadata": { "name": "n", "annotations": annotations } },
            { "kind": "Pod", "metadata": { "name": "d" }, "spec": { "containers": [{ "image": "projecthami/hami:v2" }] } },
        ]));
        let text = findings.to_string();
        assert!(findings.must_change());
        for expected in [
            "agent.dialects={hami,gputopology,gpushare,vcuda}",
            "nvidia.com/gpumem: 3000 in 1 pod",
            "schedulerName of HAMi's scheduler, which will not run: team/train",
            "kubectl annotate node n hami.io/node-nvidia-register-\n",
            "HAMi: remove its device plugin",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }

    #[test]
    fn pods_on_time_sliced_gpus_that_would_wait_are_named() {
        let labels = json!({ "nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.count": "2" });
        let node = json!({ "kind": "Node", "metadata": { "name": "n", "labels": labels } });
        let one = |name: &str| pod(name, json!({ "nvidia.com/gpu": "1" }));
        assert!(!found(json!([node, one("a"), one("b")])).must_change(), "two pods on two GPUs");
        let text = found(json!([node, one("a"), one("b"), one("c")])).to_string();
        assert!(text.contains("pods hold 3; with whole GPUs 1 would wait"), "{text}");
    }

    #[test]
    fn the_memory_unit_is_told_from_the_amounts() {
        let node = |memory: &str| {
            let capacity = json!({ "aliyun.com/gpu-mem": memory, "aliyun.com/gpu-count": "2" });
            json!([{ "kind": "Node", "metadata": { "name": "n" }, "status": { "capacity": capacity } }])
        };
        assert!(found(node("32")).settings[0].starts_with("agent.memoryUnit=GiB "));
        assert!(found(node("32510")).settings[0].starts_with("agent.memoryUnit=MiB "));
    }
}
