//! The manifests in `deploy` are valid and match the program.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tessera_agent::controller::{IncidentEffect, incident_effect};
use tessera_node::gpus::IncidentKind;
use tessera_wire::tessera::page_rights;

use super::tessera;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// Returns the objects of all manifests in a directory, with their files.
fn objects(part: &str) -> Vec<(PathBuf, Value)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder().join(part)).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            let text = std::fs::read_to_string(&path).unwrap();
            let documents: Vec<Value> = serde_saphyr::from_multiple(&text)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(!documents.is_empty(), "{}", path.display());
            found.extend(documents.into_iter().map(|document| (path.clone(), document)));
        }
    }
    assert!(!found.is_empty(), "{part}");
    found
}

/// Returns the containers that run `tessera` for as long as their pod.
fn containers(part: &str) -> Vec<Value> {
    containers_in(part, "containers")
}

/// Returns the containers in a field of the pods that run `tessera`.
fn containers_in(part: &str, field: &str) -> Vec<Value> {
    let pods = objects(part).into_iter().map(|(_, object)| object["spec"]["template"]["spec"].clone());
    let all = pods.flat_map(|pod| pod[field].as_array().cloned().unwrap_or_default());
    all.filter(|container| container["image"].as_str().is_some_and(|image| image.starts_with("tessera:")))
        .collect()
}

#[test]
fn every_manifest_has_a_kind() {
    for part in ["agent", "scheduler", "scheduler-second", "monitoring"] {
        for (path, object) in objects(part) {
            for key in ["apiVersion", "kind"] {
                assert!(object[key].is_string(), "{}: no {key}", path.display());
            }
        }
    }
}

/// The alert and the page about health name the errors that disable a GPU for good.
#[test]
fn fatal_errors_agree_in_code_alert_and_documentation() {
    let is_fatal = |xid: &u64| incident_effect(IncidentKind::Xid(*xid)) == IncidentEffect::Fatal;
    let fatal: Vec<String> = (0..1000).filter(is_fatal).map(|xid| xid.to_string()).collect();
    assert!(!fatal.is_empty());
    let alerts = std::fs::read_to_string(folder().join("monitoring/alerts.yaml")).unwrap();
    assert!(alerts.contains(&format!("xid=~\"{}\"", fatal.join("|"))), "alerts.yaml: not {fatal:?}");
    let page = std::fs::read_to_string(folder().join("../docs/agent.md")).unwrap();
    assert!(page.contains(&format!("| XID {}; ", fatal.join(", "))), "docs/agent.md: not {fatal:?}");
}

/// The manifests use the image that is built, with the version of the program. `latest` could be
/// any image.
#[test]
fn the_image_has_the_version_of_the_program() {
    let image = concat!("tessera:", env!("CARGO_PKG_VERSION"));
    for part in ["agent", "scheduler"] {
        let all = [containers(part), containers_in(part, "initContainers")].concat();
        assert!(all.iter().all(|container| container["image"] == image), "{part}: not {image}");
    }
    let page = std::fs::read_to_string(folder().join("../docs/install.md")).unwrap();
    let of_others: Vec<&str> =
        page.lines().filter(|line| line.contains("tessera")).flat_map(versions).collect();
    assert!(of_others.len() > 5, "{of_others:?}");
    assert!(
        of_others.iter().all(|version| *version == env!("CARGO_PKG_VERSION")),
        "docs/install.md: {of_others:?}"
    );
    let builder = std::process::Command::new(folder().join("image/build")).arg("--help").output().unwrap();
    assert!(String::from_utf8_lossy(&builder.stdout).contains(image), "deploy/image/build: not {image}");
}

/// Returns the words of a line that are versions: three numbers with dots.
fn versions(line: &str) -> impl Iterator<Item = &str> {
    let words = line.split(|letter: char| !(letter.is_ascii_digit() || letter == '.'));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let words = words.map(|word| word.trim_matches('.'));
    words.filter(move |word| word.split('.').count() == 3 && word.split('.').all(is_number))
}

/// The schema of the chart accepts the policies that the program has.
#[test]
fn the_chart_knows_the_policies_of_the_scheduler() {
    let schema = std::fs::read_to_string(folder().join("chart/values.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let policies = &schema["properties"]["scheduler"]["properties"]["policy"]["enum"];
    let policies: Vec<&str> =
        policies.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let refused = tessera(&["scheduler", "--policy=unknown"]);
    let complaint = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(complaint.contains(&format!("choose one of {}\n", policies.join(", "))), "{complaint}");
}

#[test]
fn resources_of_kustomizations_exist() {
    for part in ["agent", "scheduler", "scheduler-second", "monitoring"] {
        let kustomizations =
            objects(part).into_iter().filter(|(_, object)| object["kind"] == "Kustomization");
        for (path, object) in kustomizations {
            for resource in object["resources"].as_array().unwrap() {
                let file = folder().join(part).join(resource.as_str().unwrap());
                assert!(file.exists(), "{} lists {resource}", path.display());
            }
        }
    }
}

#[test]
fn the_program_accepts_the_flags_of_the_manifests() {
    for part in ["agent", "scheduler"] {
        let all = containers(part);
        assert!(!all.is_empty(), "{part}");
        for container in [all, containers_in(part, "initContainers")].concat() {
            let arguments = container["args"].as_array().unwrap().iter();
            // Flags before --help are parsed first, and a wrong one is an error.
            let arguments = arguments.map(|argument| argument.as_str().unwrap()).chain(["--help"]);
            let output = tessera(&arguments.collect::<Vec<_>>());
            assert!(output.status.success(), "{part}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
    assert!(!tessera(&["agent", "--no-such-flag", "--help"]).status.success(), "the check accepts anything");
    assert!(!tessera(&["agent", "--dialects=none", "--help"]).status.success(), "the check accepts anything");
}

/// Probes use a named port of the container, which is the default port of its program.
#[test]
fn probes_and_services_use_the_port_of_the_program() {
    for part in ["agent", "scheduler"] {
        let help = String::from_utf8(tessera(&[part, "--help"]).stdout).unwrap();
        for container in containers(part) {
            let port = &container["ports"][0];
            let default = format!("[default: :{}]", port["containerPort"]);
            assert!(help.contains(&default), "{part}: {default}");
            for (probe, path) in [("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")] {
                let get = &container[probe]["httpGet"];
                assert_eq!(
                    (&get["port"], get["path"].as_str()),
                    (&port["name"], Some(path)),
                    "{part}: {probe}"
                );
            }
        }
    }
    let all = objects("scheduler");
    let (_, service) = all.iter().find(|(_, object)| object["kind"] == "Service").unwrap();
    let scheduler = &containers("scheduler")[0];
    for served in service["spec"]["ports"].as_array().unwrap() {
        let mut ports = scheduler["ports"].as_array().unwrap().iter();
        let same = ports.find(|port| port["name"] == served["targetPort"]).unwrap();
        assert_eq!(same["containerPort"], served["port"]);
        let help = String::from_utf8(tessera(&["scheduler", "--help"]).stdout).unwrap();
        assert!(help.contains(&format!("[default: :{}", served["port"])), "{served}");
    }
    let port = &service["spec"]["ports"][0]["port"];
    let prefix = format!("https://tessera-scheduler.kube-system.svc:{port}/scheduler");
    let text = std::fs::read_to_string(folder().join("scheduler/kube-scheduler-edit.yaml")).unwrap();
    assert!(text.contains(&prefix), "kube-scheduler-edit.yaml: {prefix}");
}

/// The second kube-scheduler and the extender in its pod agree about ports and leases.
#[test]
fn the_second_kube_scheduler_finds_its_extender() {
    let all = objects("scheduler-second");
    let kind = |kind: &str| &all.iter().find(|(_, object)| object["kind"] == kind).unwrap().1;
    let pod = &kind("Deployment")["spec"]["template"]["spec"]["containers"];
    let (extender, kube_scheduler) = (&pod[0], &pod[1]);
    let arguments: Vec<&str> =
        extender["args"].as_array().unwrap().iter().map(|argument| argument.as_str().unwrap()).collect();
    let output = tessera(&[&arguments[..], &["--help"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let value = |flag: &str| {
        let found = arguments.iter().find_map(|argument| argument.strip_prefix(flag));
        found.unwrap_or_else(|| panic!("{flag}"))
    };
    let text = kind("ConfigMap")["data"]["configuration.yaml"].as_str().unwrap();
    let configuration: Value = serde_saphyr::from_str(text).unwrap();
    let prefix = format!("http://127.0.0.1:{}/scheduler", value("--verbs-on-loopback="));
    assert_eq!(configuration["extenders"][0]["urlPrefix"], prefix);
    assert_eq!(configuration["profiles"][0]["schedulerName"], value("--scheduler-name="));
    let lease = value("--neighbour-lease=");
    assert_eq!(configuration["leaderElection"]["resourceName"], lease);
    let role = kind("Role");
    assert_eq!(role["rules"][0]["resourceNames"], serde_json::json!([lease]));
    let probe = &kube_scheduler["livenessProbe"]["httpGet"];
    let health = &containers("scheduler")[0]["ports"][0];
    assert_eq!(
        (&probe["port"], probe["path"].as_str()),
        (&health["containerPort"], Some("/healthz/kube-scheduler"))
    );
    let removed = &extender["ports"][0];
    assert_eq!(
        (removed["$patch"].as_str(), &removed["containerPort"]),
        (Some("delete"), &serde_json::json!(12345))
    );
}

/// A Prometheus that was set up for gpu-manager finds the agents, on the nodes that were labelled for it.
#[test]
fn agents_take_the_place_of_gpu_manager() {
    let all = objects("agent");
    let kind = |kind: &str| all.iter().find(|(_, object)| object["kind"] == kind).unwrap().1.clone();
    let (service, pods) = (kind("Service"), kind("DaemonSet")["spec"]["template"].clone());
    let annotations = &service["metadata"]["annotations"];
    assert_eq!(annotations["prometheus.io/scrape"], "true");
    assert_eq!(annotations["prometheus.io/path"], "/metrics");
    assert_eq!(service["spec"]["selector"], pods["metadata"]["labels"]);
    let target = &service["spec"]["ports"][0]["targetPort"];
    let mut ports = pods["spec"]["containers"][0]["ports"].as_array().unwrap().iter();
    let port = ports.find(|port| port["name"] == *target).unwrap();
    assert_eq!(annotations["prometheus.io/port"], port["containerPort"].to_string());
    let affinity =
        &pods["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = affinity["nodeSelectorTerms"].as_array().unwrap();
    let label = |term: &Value| {
        let one = &term["matchExpressions"][0];
        let values = one["values"].as_array().cloned().unwrap_or_default();
        let values: Vec<&str> = values.iter().map(|value| value.as_str().unwrap()).collect();
        format!("{} {} {}", one["key"].as_str().unwrap(), one["operator"].as_str().unwrap(), values.join(","))
    };
    let labels: Vec<String> = terms.iter().map(label).collect();
    let expected = [
        "tessera.dev/gpu In true",
        "nvidia-device-enable In enable",
        "nvidia.com/gpu.present In true",
        "feature.node.kubernetes.io/pci-10de.present In true",
        "feature.node.kubernetes.io/pci-0300_10de.present In true",
        "feature.node.kubernetes.io/pci-0302_10de.present In true",
        "cloud.google.com/gke-accelerator Exists ",
        "k8s.amazonaws.com/accelerator Exists ",
        "karpenter.k8s.aws/instance-gpu-manufacturer In nvidia",
        "kubernetes.azure.com/accelerator In nvidia",
    ];
    assert_eq!(labels, expected);
    // The other labels are those of tools that find GPUs by themselves; a node can be left out.
    for term in &terms[1..] {
        assert_eq!(term["matchExpressions"].as_array().unwrap().len(), 2, "{term}");
        let out = serde_json::json!({ "key": "tessera.dev/gpu", "operator": "NotIn", "values": ["false"] });
        assert_eq!(term["matchExpressions"][1], out);
    }
}

/// The two configurations of kube-scheduler differ in how it starts, not in how it calls the
/// extender.
#[test]
fn both_configurations_of_kube_scheduler_call_the_extender_alike() {
    let all = [objects("scheduler"), objects("scheduler-second")].concat();
    let (_, edit) = all.iter().find(|(_, object)| object["kind"] == "KubeSchedulerConfiguration").unwrap();
    let (_, map) = all.iter().find(|(_, object)| object["kind"] == "ConfigMap").unwrap();
    let second: Value = serde_saphyr::from_str(map["data"]["configuration.yaml"].as_str().unwrap()).unwrap();
    let without_address = |configuration: &Value| {
        let mut extender = configuration["extenders"][0].as_object().unwrap().clone();
        for key in ["urlPrefix", "enableHTTPS", "tlsConfig"] {
            extender.remove(key);
        }
        extender
    };
    assert_eq!(without_address(edit), without_address(&second));
    assert_eq!(edit["percentageOfNodesToScore"], second["percentageOfNodesToScore"]);
}

/// An overlay changes namespaces of objects, but not those in expressions. Only the ConfigMaps that
/// other tools read stay in `kube-system`.
#[test]
fn admission_policies_do_not_depend_on_the_namespace_of_the_installation() {
    for part in ["agent", "scheduler"] {
        for (path, object) in objects(part) {
            if object["kind"] != "ValidatingAdmissionPolicy" {
                continue;
            }
            let text = object.to_string().replace("request.namespace == 'kube-system'", "");
            let text = text.replace("ConfigMap kube-system/unhealthy-gpu-", "");
            assert!(!text.contains("kube-system"), "{}: {text}", path.display());
        }
    }
}

/// The roles of readers name the rights that the programs ask for, and no path of other programs.
#[test]
fn readers_have_rights_to_the_pages_of_tessera_only() {
    let expected: [(&str, &str, &[&str]); 4] = [
        ("agent", "tessera-agent-reader", &[page_rights::AGENT, page_rights::METRICS, page_rights::USE]),
        ("scheduler", "tessera-dashboard-reader", &[page_rights::DASHBOARD, page_rights::METRICS]),
        ("scheduler", "tessera-scheduler", &[page_rights::USE]),
        ("monitoring", "tessera-metrics", &[page_rights::METRICS]),
    ];
    for (part, name, urls) in expected {
        let all = objects(part);
        let is_it = |object: &Value| object["kind"] == "ClusterRole" && object["metadata"]["name"] == name;
        let (_, role) = all.iter().find(|(_, object)| is_it(object)).unwrap();
        let rules = role["rules"].as_array().unwrap().iter();
        let granted: Vec<&Value> =
            rules.map(|rule| &rule["nonResourceURLs"]).filter(|urls| !urls.is_null()).collect();
        assert_eq!(granted, [&serde_json::json!(urls)], "{part}: {name}");
    }
}

/// The dashboard's token for agents is mounted where the flag says, and made for agents only.
#[test]
fn the_scheduler_has_a_token_for_agents() {
    let all = objects("scheduler");
    let (_, deployment) = all
        .iter()
        .find(|(_, object)| {
            object["kind"] == "Deployment" && object["metadata"]["name"] == "tessera-scheduler"
        })
        .unwrap();
    let pod = &deployment["spec"]["template"]["spec"];
    let source = &pod["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"];
    assert_eq!(source["audience"], tessera_wire::tessera::agent_address::AUDIENCE);
    let mount = &pod["containers"][0]["volumeMounts"][0];
    assert_eq!(mount["name"], pod["volumes"][0]["name"]);
    let file = format!("{}/{}", mount["mountPath"].as_str().unwrap(), source["path"].as_str().unwrap());
    let arguments = pod["containers"][0]["args"].as_array().unwrap();
    assert!(arguments.contains(&serde_json::json!(format!("--agent-token={file}"))), "{arguments:?}");
}

/// The policies and the program name the same annotations and the same right.
#[test]
fn admission_policies_know_the_keys_of_grants() {
    let policies: Vec<String> = ["agent", "scheduler"]
        .into_iter()
        .flat_map(objects)
        .map(|(_, object)| object.to_string())
        .filter(|text| text.contains("predicate-"))
        .collect();
    assert_eq!(policies.len(), 3);
    for key in [
        "tessera[.]dev/grant",
        "ALIYUN_COM_GPU_.*",
        "tencent[.]com/predicate-.*",
        "tencent[.]com/gpu-assigned",
    ] {
        assert!(policies.iter().all(|text| text.contains(key)), "{key}");
    }
    // Only the scheduler writes why it chose the GPUs of a pod.
    let of_reason = policies.iter().filter(|text| text.contains("tessera[.]dev/placement-reason"));
    assert_eq!(of_reason.count(), 2);
    let (_, role) = objects("agent").into_iter().find(|(_, object)| object["kind"] == "ClusterRole").unwrap();
    let right =
        serde_json::json!({ "apiGroups": ["tessera.dev"], "resources": ["grants"], "verbs": ["write"] });
    assert!(role["rules"].as_array().unwrap().contains(&right), "{role}");
}
