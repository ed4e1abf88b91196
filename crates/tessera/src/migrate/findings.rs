//! Decides what a migration means for a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use tessera_wire::foreign::pod_spec::MIG_PREFIX;

use super::cluster::{Cluster, Node, Pod};
use super::fit::{self, Misfit};

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

/// Programs that handle GPUs, by parts of their images' names, with what to do about them. The first entry counts for
/// an image.
const PROGRAMS: [(&[&str], &str); 10] = [
    (&["vgpu-scheduler", "4pdosc/", "k8s-vdevice"], "HAMi's predecessor: remove it (docs/migrate-hami.md)"),
    (&["hami"], "HAMi: remove its device plugin, scheduler and webhook (docs/migrate-hami.md)"),
    (
        &["nvidia-gpu-device-plugin"],
        "GKE's device plugin: agents leave nvidia.com/gpu to it; label the nodes \
         gke-no-default-nvidia-gpu-device-plugin=true to let Tessera serve that (docs/clusters.md)",
    ),
    (
        &["k8s-device-plugin"],
        "NVIDIA's device plugin: agents leave nvidia.com/gpu to it; remove it from a node to let Tessera serve that",
    ),
    (
        &["dra-driver-gpu", "dra-driver-nvidia-gpu"],
        "NVIDIA's DRA driver: its claims and Tessera do not know of each other; remove it from the nodes that Tessera \
         is to serve (docs/dra.md)",
    ),
    (
        &["gpushare-plugin", "gpushare-device-plugin"],
        "gpushare's device plugin: Tessera replaces it (docs/migrate-gpushare.md)",
    ),
    (
        &["gpushare-sch"],
        "gpushare's scheduler extender: remove it from kube-scheduler's configuration (docs/migrate-gpushare.md)",
    ),
    (&["gpu-manager"], "gpu-manager: Tessera replaces it (docs/migrate-gpu-manager.md)"),
    (
        &["gpu-admission", "gpu-quota-admission"],
        "gpu-admission: remove it from kube-scheduler's configuration (docs/migrate-gpu-manager.md)",
    ),
    (&["gputopology"], "gputopology: Tessera replaces it (docs/migrate-gpushare.md)"),
];

/// The value with which the chart's agents serve HAMi's resources.
const HAMI_SETTING: &str = "agent.dialects={hami,gputopology,gpushare,vcuda}    # HAMi's resources, in the place of whole GPUs alone";

/// Annotations and labels that other projects leave behind, by prefix.
const LEFTOVERS: [&str; 4] = ["hami.io/", "4pd.io/", "gpushare", "gputopology"];

/// Annotations of HAMi that users and administrators write and that Tessera obeys. They stay.
const OBEYED: [&str; 4] = [
    "hami.io/device-cordon",
    "hami.io/node-scheduler-policy",
    "hami.io/gpu-scheduler-policy",
    "hami.io/device-scoring-weights",
];

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
    resources: BTreeMap<String, (usize, u64)>,
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
        findings.resources.insert(resource.to_owned(), held(&pods, resource));
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
    findings.add_mig_instances(cluster);
    for pod in &cluster.pods {
        let programs: BTreeSet<&str> = pod.images().filter_map(program).collect();
        for advice in programs {
            *findings.programs.entry(advice).or_default() += 1;
        }
    }
    for pod in &cluster.pods {
        let error = fit::bad_request(pod);
        findings.problems.extend(error.map(|error| format!("pod {} is not served: {error}", pod.name())));
    }
    for node in &cluster.nodes {
        let misfit = fit::misfit(node, cluster.pods_of(node));
        findings.problems.extend(misfit.map(|misfit| described(node, &misfit)));
        let meta = &node.0.metadata;
        for (verb, found) in [("annotate", &meta.annotations), ("label", &meta.labels)] {
            let command = format!("kubectl {verb} node {}", meta.name);
            findings.leftovers.extend(removal(&command, found.keys()));
        }
    }
    let mut by_namespace: BTreeMap<&str, BTreeSet<&String>> = BTreeMap::new();
    for pod in &cluster.pods {
        by_namespace.entry(&pod.object.metadata.namespace).or_default().extend(pod.annotations().keys());
    }
    for (namespace, keys) in by_namespace {
        let command = format!("kubectl annotate pods --all -n {namespace}");
        findings.leftovers.extend(removal(&command, keys.into_iter()));
    }
    findings.settings.extend(memory_unit(&cluster.nodes));
    let foreign: Vec<&Pod> =
        cluster.pods.iter().filter(|pod| pod.object.spec.scheduler_name.contains("hami")).collect();
    if !foreign.is_empty() {
        let named = some(foreign.iter().map(|pod| pod.name()));
        findings.problems.push(format!("schedulerName of HAMi's scheduler, which will not run: {named}"));
    }
    findings
}

impl Findings {
    /// Adds the MIG instances that pods request, and the setting with which agents offer them.
    fn add_mig_instances(&mut self, cluster: &Cluster) {
        let names = cluster.pods.iter().flat_map(Pod::resources).filter(|name| name.starts_with(MIG_PREFIX));
        let names: BTreeSet<&str> = names.collect();
        for name in &names {
            let pods: Vec<&Pod> = cluster.pods.iter().filter(|pod| pod.requests(name) > 0).collect();
            self.resources.insert((*name).to_owned(), held(&pods, name));
        }
        let is_single = cluster.nodes.iter().any(|node| node.label(fit::MIG_STRATEGY) == "single");
        for (strategy, is_used) in [("mixed", !names.is_empty()), ("single", is_single)] {
            if is_used {
                let why = "MIG instances under the names of NVIDIA's plugin";
                self.settings.push(format!("agent.extraArgs={{--mig-strategy={strategy}}}    # {why}"));
            }
        }
    }
}

/// Returns what to do about the program of an image, if it handles GPUs.
fn program(image: &str) -> Option<&'static str> {
    let is_of = |(parts, _): &&(&[&str], _)| parts.iter().any(|part| image.contains(part));
    PROGRAMS.iter().find(is_of).map(|(_, advice)| *advice)
}

/// Returns the number of pods and the sum of a resource that they hold.
fn held(pods: &[&Pod], resource: &str) -> (usize, u64) {
    (pods.len(), pods.iter().map(|pod| pod.requests(resource)).sum())
}

/// Returns the problem of a node whose pods do not all fit when each gets what it requests.
fn described(node: &Node, misfit: &Misfit) -> String {
    let Misfit { gpus, memory, pods } = misfit;
    let each = memory.map_or_else(String::new, |memory| format!(" of {} MiB", memory.0));
    let sliced = node.number(fit::REPLICAS).filter(|replicas| *replicas > 1);
    let sliced = sliced.map_or_else(String::new, |replicas| format!(", each offered {replicas} times"));
    let (plural, name) = (if *gpus == 1 { "" } else { "s" }, node.name());
    format!(
        "node {name} has {gpus} GPU{plural}{each}{sliced}, and {} of its pods would wait if each pod got what it requests. \
         Request shares (tencent.com/vcuda-core), or move pods to other nodes: {}",
        pods.len(),
        some(pods.iter().cloned())
    )
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

/// Returns the command that removes what other projects have written to objects.
fn removal<'a>(command: &str, keys: impl Iterator<Item = &'a String>) -> Option<String> {
    let is_leftover = |key: &&String| {
        LEFTOVERS.iter().any(|prefix| key.starts_with(prefix)) && !OBEYED.contains(&key.as_str())
    };
    let keys: Vec<String> = keys.filter(is_leftover).map(|key| format!("{key}-")).collect();
    (!keys.is_empty()).then(|| format!("{command} {}", keys.join(" ")))
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
        let expected = "node n has 2 GPUs, each offered 4 times, and 1 of its pods would wait";
        assert!(text.contains(expected) && text.contains(": team/c\n"), "{text}");
    }

    /// Returns the problems of a node with these amounts and two pods.
    fn problems(capacity: Value, first: Value, second: Value) -> Vec<String> {
        let node = json!({ "kind": "Node", "metadata": { "name": "n" }, "status": { "capacity": capacity } });
        found(json!([node, pod("a", first), pod("b", second)])).problems
    }

    #[test]
    fn the_pods_of_a_node_are_compared_in_every_dialect() {
        let vcuda = |core: &str| json!({ "tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": "8" });
        let amounts = json!({ "tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "64" });
        assert!(problems(amounts.clone(), vcuda("50"), vcuda("50")).is_empty());
        let crowded = problems(amounts, vcuda("60"), vcuda("50"));
        assert!(
            crowded[0].starts_with("node n has 1 GPU of 16384 MiB, and 1 of its pods would wait"),
            "{crowded:?}"
        );
        assert!(crowded[0].ends_with(": team/b"), "the largest is placed first: {crowded:?}");

        let gpushare = |memory: &str| json!({ "aliyun.com/gpu-mem": memory });
        let amounts = json!({ "aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "2" });
        assert!(problems(amounts.clone(), gpushare("15"), gpushare("15")).is_empty());
        assert_eq!(problems(amounts.clone(), gpushare("16"), gpushare("15")).len(), 1, "no GPU has 16 GiB");
        // Memory and whole GPUs of the same node come from the same GPUs.
        assert!(problems(amounts.clone(), gpushare("15"), json!({ "aliyun.com/gpu": "1" })).is_empty());
        assert_eq!(problems(amounts, gpushare("15"), json!({ "aliyun.com/gpu": "2" })).len(), 1);
    }

    #[test]
    fn the_memory_of_hamis_gpus_is_compared() {
        let register = "GPU-a,10,16384,100,NVIDIA-Tesla T4,0,true:";
        let node = json!({
            "kind": "Node",
            "metadata": { "name": "n", "annotations": { "hami.io/node-nvidia-register": register } },
            "status": { "capacity": { "nvidia.com/gpu": "10" } },
        });
        let hami = |name: &str, memory: &str| {
            pod(name, json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": memory }))
        };
        assert!(!found(json!([node, hami("a", "8192"), hami("b", "8192")])).must_change());
        let text = found(json!([node, hami("a", "8192"), hami("b", "8193")])).to_string();
        assert!(text.contains("node n has 1 GPU of 16384 MiB, and 1 of its pods would wait"), "{text}");
    }

    #[test]
    fn init_containers_count_once() {
        let mut init = pod("a", json!({ "nvidia.com/gpu": "1" }));
        init["spec"]["initContainers"] = json!([{ "name": "load", "image": "gpu-manager", "resources": { "limits": { "nvidia.com/gpu": "2" } } }]);
        let findings = found(json!([init]));
        assert_eq!(findings.resources["nvidia.com/gpu"], (1, 2));
        assert_eq!(findings.programs.len(), 1);
    }

    #[test]
    fn images_of_other_projects_are_recognised() {
        for (image, expected) in [
            ("acs/k8s-gpushare-plugin:v2-1.11-aff8a23", "gpushare's device plugin"),
            ("acs/k8s-gpushare-schd-extender:1.11-d170d8a", "gpushare's scheduler extender"),
            ("lijj/gputopology-device-plugin:v2", "gputopology"),
            ("lijj/gputopology-scheduler-extender:v1.3", "gputopology"),
            ("tkestack/gpu-manager:1.1.0", "gpu-manager"),
            ("tkestack/gpu-quota-admission:v1.0.0", "gpu-admission"),
            ("nvidia-gpu-device-plugin@sha256:0842734032018be1", "GKE's device plugin"),
            ("nvidia/k8s-device-plugin:v0.20.0", "NVIDIA's device plugin"),
            ("nvidia/k8s-dra-driver-gpu:v25.8.0", "NVIDIA's DRA driver"),
            ("dra-driver-nvidia/dra-driver-nvidia-gpu:v0.4.0", "NVIDIA's DRA driver"),
            ("4pdosc/k8s-vdevice:v2.2", "HAMi's predecessor"),
            ("4pdosc/k8s-device-plugin:latest", "HAMi's predecessor"),
            ("projecthami/hami:v2.10.0", "HAMi"),
            ("projecthami/volcano-vgpu-device-plugin:v1.9.4", "HAMi"),
        ] {
            let found = program(image).and_then(|advice| advice.split(':').next());
            assert_eq!(found, Some(expected), "{image}");
        }
        assert_eq!(program("nvidia/dcgm-exporter:4.5.0"), None);
    }

    #[test]
    fn requests_that_no_node_can_serve_are_named() {
        let both = json!({ "nvidia.com/gpu": "1", "aliyun.com/gpu-mem": "8" });
        let findings = found(json!([pod("a", both), pod("web", json!({ "cpu": "much" }))]));
        assert_eq!(findings.problems.len(), 1);
        assert!(findings.problems[0].starts_with("pod team/a is not served: "), "{findings}");
    }

    #[test]
    fn annotations_of_pods_are_removed_and_those_that_tessera_obeys_stay() {
        let mut hami = pod("a", json!({ "nvidia.com/gpu": "1" }));
        hami["metadata"]["annotations"] =
            json!({ "hami.io/vgpu-node": "n", "hami.io/gpu-scheduler-policy": "spread" });
        let annotations = json!({ "hami.io/device-cordon": "GPU-a" });
        let node = json!({ "kind": "Node", "metadata": { "name": "n", "annotations": annotations } });
        assert_eq!(
            found(json!([hami, node])).leftovers,
            ["kubectl annotate pods --all -n team hami.io/vgpu-node-"]
        );
    }

    #[test]
    fn mig_instances_need_the_strategy() {
        let labels = json!({ "nvidia.com/mig.strategy": "single", "nvidia.com/gpu.count": "1" });
        let node = json!({ "kind": "Node", "metadata": { "name": "n", "labels": labels } });
        let one = |name: &str| pod(name, json!({ "nvidia.com/gpu": "1" }));
        let single = found(json!([node, one("a"), one("b")]));
        assert!(!single.must_change(), "two instances of one GPU: {single}");
        assert!(single.settings[0].starts_with("agent.extraArgs={--mig-strategy=single} "), "{single}");
        let mixed = found(json!([pod("m", json!({ "nvidia.com/mig-1g.10gb": "1" }))]));
        assert_eq!(mixed.resources["nvidia.com/mig-1g.10gb"], (1, 1));
        assert!(mixed.settings[0].starts_with("agent.extraArgs={--mig-strategy=mixed} "), "{mixed}");
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
