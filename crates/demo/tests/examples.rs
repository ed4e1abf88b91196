//! Applies manifests to the cluster of the demo with kubectl: every one of `examples/`, and many alike shares.
//!
//! The embedded API server has no controllers, so the pods of a Job, a Deployment and the like are made here from their
//! templates.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tessera_demo::{DemoOptions, built_in_models, run};

/// Examples of which a pod waits in the demo: the file, the pod, and a part of kube-scheduler's message.
const WAITING: [(&str, &str, &str); 2] = [
    ("quota", "late-homework", "ExceedsGPUQuota"),
    ("mig-instance", "mig-instance", "nvidia.com/mig-1g.10gb"),
];

/// Kinds without pods that the embedded API server does not have, with their versions.
const WITHOUT_PODS: [(&str, &str); 2] = [("Service", "v1"), ("HorizontalPodAutoscaler", "autoscaling/v2")];

/// How often pods are listed until they must run. A list takes a tenth of a second or more.
const MAX_POLLS: usize = 1_000;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples")
}

/// Returns the name and the objects of every manifest.
fn manifests() -> Vec<(String, Vec<Value>)> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    let read = |file: &PathBuf| {
        let text = std::fs::read_to_string(file).unwrap();
        assert!(text.starts_with("# "), "{} begins with what it shows", file.display());
        let objects =
            serde_saphyr::from_multiple(&text).unwrap_or_else(|bad| panic!("{}: {bad}", file.display()));
        (file.file_stem().unwrap().to_str().unwrap().to_owned(), objects)
    };
    files.iter().map(read).collect()
}

/// Returns the templates of the pods that a controller would make of an object, each with the number of pods.
fn templates(object: &Value) -> Vec<(&Value, u64)> {
    let spec = &object["spec"];
    let number = |value: &Value| value.as_u64().unwrap_or(1);
    match object["kind"].as_str().unwrap() {
        "Job" => vec![(&spec["template"], number(&spec["parallelism"]))],
        "CronJob" => vec![(&spec["jobTemplate"]["spec"]["template"], 1)],
        "Deployment" | "StatefulSet" => vec![(&spec["template"], number(&spec["replicas"]))],
        "JobSet" => {
            let jobs = spec["replicatedJobs"].as_array().unwrap().iter();
            jobs.map(|job| (&job["template"]["spec"]["template"], number(&job["replicas"]))).collect()
        }
        "PyTorchJob" => {
            let roles = spec["pytorchReplicaSpecs"].as_object().unwrap().values();
            roles.map(|role| (&role["template"], number(&role["replicas"]))).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the objects to apply for one object of an example: itself, or the pods of its controller.
fn applied(example: &str, object: &Value) -> Vec<Value> {
    let name = object["metadata"]["name"].as_str().unwrap();
    let labelled = |mut pod: Value| {
        pod["metadata"]["labels"]["example"] = example.into();
        pod
    };
    match object["kind"].as_str().unwrap() {
        "Pod" => vec![labelled(object.clone())],
        "Namespace" | "ConfigMap" | "PriorityClass" | "PodDisruptionBudget" => vec![object.clone()],
        kind => {
            let templates = templates(object);
            let version = object["apiVersion"].as_str().unwrap();
            assert!(
                !templates.is_empty() || WITHOUT_PODS.contains(&(kind, version)),
                "{example}: {kind} of {version}"
            );
            let pods = templates.into_iter().enumerate().flat_map(|(role, (template, count))| {
                (0..count).map(move |number| {
                    let mut pod = template.clone();
                    pod["apiVersion"] = "v1".into();
                    pod["kind"] = "Pod".into();
                    pod["metadata"]["name"] = format!("{name}-{role}-{number}").into();
                    pod
                })
            });
            pods.map(labelled).collect()
        }
    }
}

async fn kubectl(kubeconfig: &Path, arguments: &[&str]) -> String {
    let home = kubeconfig.parent().unwrap();
    let mut command = tokio::process::Command::new("kubectl");
    command.args(arguments).env("KUBECONFIG", kubeconfig).env("HOME", home);
    let output = command.output().await.unwrap_or_else(|error| {
        panic!("this test needs kubectl; install it (on Debian, the package kubernetes-client): {error}")
    });
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Applies one example, checks what became of its pods, and deletes them.
async fn try_example(kubeconfig: &Path, example: &str, objects: &[Value]) {
    let all: Vec<Value> = objects.iter().flat_map(|object| applied(example, object)).collect();
    let pods = all.iter().filter(|object| object["kind"] == "Pod");
    let waits = WAITING.iter().find(|(waiting, ..)| *waiting == example);
    let (waiting, running): (Vec<&Value>, Vec<&Value>) =
        pods.partition(|pod| waits.is_some_and(|(_, name, _)| pod["metadata"]["name"] == *name));
    assert!(!waiting.is_empty() || !running.is_empty(), "{example} has no pod");
    let names = |pods: &[&Value]| -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or("default").to_owned();
        let name = |pod: &&Value| (text(&pod["metadata"]["namespace"]), text(&pod["metadata"]["name"]));
        pods.iter().map(name).collect()
    };
    let apply = async |objects: &[&Value]| {
        if objects.is_empty() {
            return;
        }
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        let file = kubeconfig.with_file_name(format!("{example}.json"));
        std::fs::write(&file, list.to_string()).unwrap();
        kubectl(kubeconfig, &["apply", "-f", file.to_str().unwrap()]).await;
    };
    // Pods that wait come last, so that the others have taken what is missing.
    let others: Vec<&Value> = all.iter().filter(|object| !waiting.contains(object)).collect();
    apply(&others).await;
    for (namespace, name) in names(&running) {
        let pod = format!("pod/{name}");
        let until = "--for=jsonpath={.status.phase}=Running";
        kubectl(kubeconfig, &["wait", "-n", &namespace, &pod, until, "--timeout=60s"]).await;
        let grant =
            ["get", "-n", &namespace, &pod, "-o", r"jsonpath={.metadata.annotations.tessera\.dev/grant}"];
        assert!(!kubectl(kubeconfig, &grant).await.is_empty(), "{example}: {name} has no grant");
    }
    if let Some((_, name, reason)) = waits {
        apply(&waiting).await;
        let namespace = names(&waiting)[0].0.clone();
        let pod = format!("pod/{name}");
        kubectl(
            kubeconfig,
            &["wait", "-n", &namespace, &pod, "--for=condition=PodScheduled=false", "--timeout=60s"],
        )
        .await;
        let message = ["get", "-n", &namespace, &pod, "-o", "jsonpath={.status.conditions[0].message}"];
        let message = kubectl(kubeconfig, &message).await;
        assert!(message.contains(reason), "{example}: {message}");
    }
    kubectl(kubeconfig, &["delete", "pods", "-A", "-l", &format!("example={example}")]).await;
}

#[test]
fn the_readme_lists_every_example() {
    let readme = std::fs::read_to_string(folder().join("README.md")).unwrap();
    let listed: BTreeSet<&str> = readme.split(['(', ')']).filter(|link| link.ends_with(".yaml")).collect();
    let mut present: BTreeSet<String> =
        manifests().into_iter().map(|(name, _)| format!("{name}.yaml")).collect();
    assert!(present.len() >= 20, "{present:?}");
    for page in ["README.md", "docs/getting-started.md"] {
        let text = std::fs::read_to_string(folder().join("..").join(page)).unwrap();
        assert!(text.contains(&format!(" {} manifests", present.len())), "{page}: not {}", present.len());
    }
    let of_hami = std::fs::read_dir(folder().join("hami")).unwrap();
    present.extend(of_hami.map(|entry| format!("hami/{}", entry.unwrap().file_name().to_str().unwrap())));
    assert_eq!(listed, present.iter().map(String::as_str).collect());
}

/// Starts a demo of this many nodes without pods of its own, and ends it after `play`, which gets its kubeconfig.
async fn with_demo(nodes: usize, play: impl AsyncFnOnce(&Path)) {
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    let options = DemoOptions {
        nodes,
        machine_models: built_in_models(),
        pods_per_second: Some(0.0),
        steps: false,
        seed: 1,
        speed: 1.0,
        listen: "127.0.0.1:0".parse().unwrap(),
        kubeconfig_out: Some(kubeconfig.clone()),
        duration: None,
    };
    let up = tokio::sync::Notify::new();
    let played = async {
        up.notified().await;
        play(&kubeconfig).await;
    };
    run(options, |_| up.notify_one(), played).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_example_runs_on_the_demo() {
    with_demo(3, async |kubeconfig| {
        for (example, objects) in manifests() {
            try_example(kubeconfig, &example, &objects).await;
        }
    })
    .await;
}

/// Alike shares of 80 GPUs in total use at most a tenth more GPUs on 21 nodes, and pods with eight GPUs still fit.
#[tokio::test(flavor = "multi_thread")]
async fn many_alike_shares_leave_whole_nodes_idle() {
    with_demo(21, async |kubeconfig| {
        let pod = |name: String, limits: Value| {
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "labels": { "app": "alike" } },
                "spec": { "containers": [{ "name": "main", "image": "i", "resources": { "limits": limits } }] },
            })
        };
        let start = async |pods: Vec<Value>| {
            let file = kubeconfig.with_file_name("pods.json");
            let list = json!({ "apiVersion": "v1", "kind": "List", "items": pods });
            std::fs::write(&file, list.to_string()).unwrap();
            kubectl(kubeconfig, &["create", "-f", file.to_str().unwrap()]).await;
            let waiting = ["get", "pods", "-l", "app=alike", "--field-selector=status.phase!=Running", "-o", "name"];
            for _ in 0..MAX_POLLS {
                if kubectl(kubeconfig, &waiting).await.is_empty() {
                    return;
                }
            }
            panic!("pods still wait: {}", kubectl(kubeconfig, &waiting).await);
        };
        let quarter = json!({ "tencent.com/vcuda-core": "25", "tencent.com/vcuda-memory": "60" });
        start((0..320).map(|number| pod(format!("quarter-{number}"), quarter.clone())).collect()).await;
        let index = r"{.metadata.annotations.tencent\.com/predicate-gpu-idx-0}";
        let column = format!("jsonpath={{range .items[*]}}{{.spec.nodeName}} {index}{{\"\\n\"}}{{end}}");
        let places = kubectl(kubeconfig, &["get", "pods", "-l", "app=alike", "-o", &column]).await;
        assert_eq!(places.lines().count(), 320);
        let used: BTreeSet<&str> = places.lines().collect();
        assert!(used.iter().all(|place| place.split(' ').nth(1).is_some_and(|gpu| !gpu.is_empty())), "{used:?}");
        assert!((80..=88).contains(&used.len()), "{} GPUs have shares", used.len());
        let whole = json!({ "nvidia.com/gpu": "8" });
        start((0..8).map(|number| pod(format!("whole-{number}"), whole.clone())).collect()).await;
    })
    .await;
}
