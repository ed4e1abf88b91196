//! The manifests in `deploy`: they can be read, and what they say of the program is so.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tessera_agent::controller::{IncidentEffect, incident_effect};
use tessera_node::gpus::IncidentKind;

use super::tessera;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// The objects of all manifests in a folder, with the file they are from.
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

/// The containers that run `tessera`, with their command lines.
fn containers(part: &str) -> Vec<Value> {
    let pods = objects(part).into_iter().map(|(_, object)| object["spec"]["template"]["spec"].clone());
    let all = pods.flat_map(|pod| pod["containers"].as_array().cloned().unwrap_or_default());
    all.filter(|container| container["image"].as_str().is_some_and(|image| image.starts_with("tessera:")))
        .collect()
}

#[test]
fn everything_can_be_read_and_says_what_it_is() {
    for part in ["agent", "scheduler", "monitoring"] {
        for (path, object) in objects(part) {
            for key in ["apiVersion", "kind"] {
                assert!(object[key].is_string(), "{}: no {key}", path.display());
            }
        }
    }
}

/// The alert, and the page about health, name the errors after which a GPU is out of use for good.
#[test]
fn fatal_errors_are_the_same_everywhere() {
    let is_fatal = |xid: &u64| incident_effect(IncidentKind::Xid(*xid)) == IncidentEffect::Fatal;
    let fatal: Vec<String> = (0..1000).filter(is_fatal).map(|xid| xid.to_string()).collect();
    assert!(!fatal.is_empty());
    let alerts = std::fs::read_to_string(folder().join("monitoring/alerts.yaml")).unwrap();
    assert!(alerts.contains(&format!("xid=~\"{}\"", fatal.join("|"))), "alerts.yaml: not {fatal:?}");
    let page = std::fs::read_to_string(folder().join("../docs/agent.md")).unwrap();
    assert!(page.contains(&format!("| XID {}; ", fatal.join(", "))), "docs/agent.md: not {fatal:?}");
}

/// The image that is built is the one that is started, and it is of this version: `latest` would be pulled from who knows where.
#[test]
fn the_image_is_of_this_version() {
    let image = concat!("tessera:", env!("CARGO_PKG_VERSION"));
    for part in ["agent", "scheduler"] {
        assert!(containers(part).iter().all(|container| container["image"] == image), "{part}: not {image}");
    }
    let told = std::fs::read_to_string(folder().join("../docs/install.md")).unwrap();
    assert!(told.contains(image), "docs/install.md: not {image}");
    let builder = std::process::Command::new(folder().join("image/build")).arg("--help").output().unwrap();
    assert!(String::from_utf8_lossy(&builder.stdout).contains(image), "deploy/image/build: not {image}");
}

#[test]
fn what_a_kustomization_lists_is_there() {
    for part in ["agent", "scheduler", "monitoring"] {
        let kustomizations =
            objects(part).into_iter().filter(|(_, object)| object["kind"] == "Kustomization");
        for (path, object) in kustomizations {
            for resource in object["resources"].as_array().unwrap() {
                let file = folder().join(part).join(resource.as_str().unwrap());
                assert!(file.is_file(), "{} lists {resource}", path.display());
            }
        }
    }
}

#[test]
fn the_program_takes_the_flags_it_is_started_with() {
    for part in ["agent", "scheduler"] {
        let all = containers(part);
        assert!(!all.is_empty(), "{part}");
        for container in all {
            let arguments = container["args"].as_array().unwrap().iter();
            // Flags before --help are read first, and a wrong one is told.
            let arguments = arguments.map(|argument| argument.as_str().unwrap()).chain(["--help"]);
            let output = tessera(&arguments.collect::<Vec<_>>());
            assert!(output.status.success(), "{part}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
    assert!(!tessera(&["agent", "--no-such-flag", "--help"]).status.success(), "this test cannot fail");
    assert!(!tessera(&["agent", "--dialects=none", "--help"]).status.success(), "this test cannot fail");
}

/// Probes ask a port that the container names, which is the one its program listens on unless told otherwise.
#[test]
fn probes_and_services_lead_to_the_port_the_program_listens_on() {
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
    assert_eq!(service["spec"]["ports"][0]["targetPort"], containers("scheduler")[0]["ports"][0]["name"]);
    let port = &service["spec"]["ports"][0]["port"];
    let prefix = format!("http://tessera-scheduler.kube-system.svc:{port}/scheduler");
    for file in ["kube-scheduler-edit.yaml", "kube-scheduler-second.yaml"] {
        let text = std::fs::read_to_string(folder().join("scheduler").join(file)).unwrap();
        assert!(text.contains(&prefix), "{file}: {prefix}");
    }
}

/// The two ways to tell kube-scheduler differ in how it is started, not in how it asks.
#[test]
fn both_configurations_of_kube_scheduler_ask_alike() {
    let all = objects("scheduler");
    let (_, edit) = all.iter().find(|(_, object)| object["kind"] == "KubeSchedulerConfiguration").unwrap();
    let (_, map) = all.iter().find(|(_, object)| object["kind"] == "ConfigMap").unwrap();
    let second: Value = serde_saphyr::from_str(map["data"]["configuration.yaml"].as_str().unwrap()).unwrap();
    assert_eq!(edit["extenders"], second["extenders"]);
    assert_eq!(edit["percentageOfNodesToScore"], second["percentageOfNodesToScore"]);
}
