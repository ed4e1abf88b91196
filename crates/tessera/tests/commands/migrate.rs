//! `tessera migrate check` on a cluster with several projects, from a listing and from an API server, against the
//! expected text. `BLESS=1` writes it.

use std::path::Path;

use serde_json::{Value, json};
use tessera_sim::apiserver::ApiServer;
use tokio::runtime::Runtime;

use super::tessera;

/// Pods without GPUs, more than one page of a list.
const PLAIN_PODS: usize = 1_200;

fn check(name: &str, code: i32) {
    let output = tessera(&["migrate", "check", &format!("migrate/{name}.json")]);
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{error}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/migrate/{name}.txt"));
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&file, text.as_bytes()).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(text, expected, "BLESS=1 updates {}", file.display());
}

#[test]
fn a_cluster_of_several_projects_is_described() {
    check("mixed-cluster", 1);
}

#[test]
fn a_cluster_whose_pods_fit_needs_nothing() {
    check("small-cluster", 0);
}

/// Creates an object with its status, and with an image for each container.
fn create(api: &ApiServer, mut object: Value) {
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
    let path = match object["kind"].as_str().unwrap() {
        "Node" => "/api/v1/nodes".to_owned(),
        "Pod" => format!("/api/v1/namespaces/{namespace}/pods"),
        kind => panic!("a {kind} cannot be created"),
    };
    for list in ["initContainers", "containers"] {
        for container in object["spec"][list].as_array_mut().into_iter().flatten() {
            let image = container["image"].as_str().unwrap_or("image").to_owned();
            container["image"] = image.into();
        }
    }
    let status = object["status"].take();
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    api.create(&path, object).unwrap_or_else(|refused| panic!("{name}: {refused}"));
    api.patch(&format!("{path}/{name}/status"), &json!({ "status": status })).unwrap();
}

/// The findings are the same as those from a listing, also if the pods are more than one page.
#[test]
fn a_running_cluster_is_described_like_its_listing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/migrate");
    let listing = std::fs::read_to_string(folder.join("mixed-cluster.json")).unwrap();
    let listing: Value = serde_json::from_str(&listing).unwrap();
    let runtime = Runtime::new().unwrap();
    let api = runtime.block_on(ApiServer::start()).unwrap();
    // Most of them are listed before the pods of the listing, by their namespace.
    for number in 0..PLAIN_PODS {
        let name = format!("plain-{number:04}");
        create(
            &api,
            json!({ "kind": "Pod", "metadata": { "name": name, "namespace": "a" },
                    "spec": { "containers": [{ "name": "main" }] }, "status": { "phase": "Running" } }),
        );
    }
    listing["items"].as_array().unwrap().iter().for_each(|object| create(&api, object.clone()));
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    std::fs::write(&kubeconfig, api.kubeconfig()).unwrap();
    let output = tessera(&["migrate", "check", "--kubeconfig", kubeconfig.to_str().unwrap()]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let expected = std::fs::read_to_string(folder.join("mixed-cluster.txt")).unwrap();
    // Nodes are described in the order in which they are listed.
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&String::from_utf8_lossy(&output.stdout)), sorted(&expected));
}
