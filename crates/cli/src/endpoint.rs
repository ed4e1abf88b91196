//! Builds the state of the cluster from a scheduler's API, for users who may not read nodes and pods.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};
use tessera_core::gpu::Health;
use tessera_wire::foreign::dialect::vcuda;
use tessera_wire::tessera::reservation::{self, NodeReservation};
use tessera_wire::tessera::rules::Rules;
use tessera_wire::tessera::{gpu_cordon, grant, inventory, parsed_node};

use crate::load::{from_scheduler, now_seconds};
use crate::options::NodeSelection;
use crate::survey::{Survey, UnhealthyGpus};

/// Largest page of the scheduler's lists.
const PAGE_ITEMS: usize = 500;

#[derive(Deserialize)]
struct Page {
    total: usize,
    items: Vec<Value>,
}

/// Reads the selected nodes and their pods from a scheduler.
pub(crate) async fn survey(endpoint: &str, selection: &NodeSelection) -> Result<Survey> {
    let names = match &selection.node {
        Some(node) => vec![node.clone()],
        None => names(endpoint).await?,
    };
    let mut details = Vec::new();
    for name in names {
        let detail: Value = from_scheduler(endpoint, "", &format!("/api/v1/nodes/{name}")).await?;
        details.push(detail);
    }
    let nodes = details.iter().map(node).collect::<Result<Vec<_>, _>>()?;
    let mut survey = Survey::of_nodes(Rules::default(), nodes, &UnhealthyGpus::new());
    survey.now_seconds = now_seconds();
    for detail in &details {
        pods(detail)
            .into_iter()
            .try_for_each(|pod| serde_json::from_value(pod).map(|pod| survey.add(pod)))?;
    }
    for row in all_items(endpoint, "/api/v1/pods?state=waiting").await? {
        survey.add_waiting(serde_json::from_value(waiting_pod(&row))?);
    }
    Ok(survey.finish())
}

async fn names(endpoint: &str) -> Result<Vec<String>> {
    let nodes = all_items(endpoint, "/api/v1/nodes?").await?;
    Ok(nodes.iter().filter_map(|node| node["name"].as_str()).map(str::to_owned).collect())
}

/// Reads all pages of a list. `path` ends where further parameters follow.
async fn all_items(endpoint: &str, path: &str) -> Result<Vec<Value>> {
    let mut items = Vec::new();
    loop {
        let path = format!("{path}&offset={}&limit={PAGE_ITEMS}", items.len());
        let page: Page = from_scheduler(endpoint, "", &path).await?;
        let is_last = page.items.is_empty();
        items.extend(page.items);
        if is_last || items.len() >= page.total {
            return Ok(items);
        }
    }
}

/// Returns the node object that an agent with these GPUs would publish.
fn node(detail: &Value) -> Result<tessera_wire::foreign::objects::Node, serde_json::Error> {
    let identities = detail["identities"].as_array().cloned().unwrap_or_default();
    let gpus: Vec<Value> = detail["gpus"]
        .as_array()
        .into_iter()
        .flatten()
        .zip(&identities)
        .map(|(gpu, identity)| {
            let problem = gpu["problem"].as_str();
            let is_unhealthy = gpu["healthy"] == false && problem != Health::Cordoned.problem();
            json!({"uuid": identity["uuid"], "minor": identity["minor"], "numa": identity["numa"],
                   "model": gpu["model"], "memoryMiB": gpu["memoryMiB"], "unhealthy": is_unhealthy,
                   "reason": problem.and_then(inventory::reason_of)})
        })
        .collect();
    let cordoned = detail["gpus"].as_array().into_iter().flatten().zip(&identities);
    let cordoned = cordoned.filter(|(gpu, _)| gpu["problem"].as_str() == Health::Cordoned.problem());
    let cordoned: Vec<&str> = cordoned.filter_map(|(_, identity)| identity["uuid"].as_str()).collect();
    let link = |link: &Value| json!([link["a"], link["b"], link["pcie"], link["nvlinks"]]);
    let links: Vec<Value> = detail["links"].as_array().into_iter().flatten().map(link).collect();
    let unit = detail["memoryUnit"].as_str().unwrap_or("GiB");
    let published = json!({"memoryUnit": unit, "gpus": gpus, "links": links}).to_string();
    let host = &detail["host"];
    let cpu = format!("{}m", host["cpuMilli"].as_u64().unwrap_or(0));
    let memory = format!("{}Mi", host["memoryMiB"].as_u64().unwrap_or(0));
    let conditions = match detail["ready"].as_bool() {
        Some(ready) => json!([{"type": "Ready", "status": if ready { "True" } else { "False" }}]),
        None => json!([]),
    };
    let mut annotations = json!({inventory::KEY: published, gpu_cordon::KEYS[0]: cordoned.join(",")});
    if let Some(kind) = detail["instanceType"].as_str() {
        annotations[parsed_node::TYPE_KEY] = kind.into();
    }
    if detail["reservations"].is_array() {
        annotations[reservation::KEY] = detail["reservations"].to_string().into();
    }
    let mut allocatable = json!({"cpu": cpu, "memory": memory, vcuda::CORE: (100 * gpus.len()).to_string()});
    for (resource, instances) in detail["instances"].as_object().into_iter().flatten() {
        allocatable[resource] = instances["offered"].to_string().into();
    }
    serde_json::from_value(json!({
        "metadata": {"name": detail["name"], "annotations": annotations},
        "spec": {"unschedulable": detail["cordoned"] == true},
        "status": {"allocatable": allocatable, "conditions": conditions},
    }))
}

/// Returns the pods on a node, each with the grant that its slices of the GPUs stand for, and the pods with MIG
/// instances. What the node's reservations keep is left out: the survey enters the reservations itself.
fn pods(detail: &Value) -> Vec<Value> {
    let identities = &detail["identities"];
    let reservations: Vec<NodeReservation> =
        serde_json::from_value(detail["reservations"].clone()).unwrap_or_default();
    let kept: Vec<String> =
        reservations.iter().map(|entry| format!("{}/reserved", entry.beneficiary())).collect();
    let mut grants: std::collections::BTreeMap<(String, String), Vec<Value>> =
        std::collections::BTreeMap::new();
    for gpu in detail["gpus"].as_array().into_iter().flatten() {
        let index = gpu["index"].as_u64().unwrap_or(0);
        let uuid = &identities[usize::try_from(index).unwrap_or(usize::MAX)]["uuid"];
        let is_kept = |slice: &&Value| {
            let name = slice["pod"].as_str().unwrap_or_default();
            slice["namespace"] == "" && kept.iter().any(|kept| kept == name)
        };
        for slice in gpu["pods"].as_array().into_iter().flatten().filter(|slice| !is_kept(slice)) {
            let text = |key: &str| slice[key].as_str().unwrap_or_default().to_owned();
            let mut entry = json!({"uuid": uuid, "index": index, "cores": slice["compute"]});
            if gpu["whole"] != true {
                entry["memoryMiB"] = slice["memoryMiB"].clone();
            }
            grants.entry(holder(text("namespace"), text("pod"))).or_default().push(entry);
        }
    }
    let pod = |((namespace, name), gpus): ((String, String), Vec<Value>)| {
        let is_whole = gpus.iter().all(|gpu| gpu["memoryMiB"].is_null());
        let limits = match is_whole {
            true => json!({"nvidia.com/gpu": gpus.len().to_string()}),
            false => json!({vcuda::CORE: "1", vcuda::MEMORY: "1"}),
        };
        json!({
            "metadata": {"name": name, "namespace": namespace, "uid": format!("{namespace}/{name}"),
                         "annotations": {grant::KEY: json!({"main": gpus}).to_string()}},
            "spec": {"nodeName": detail["name"], "containers": [{"name": "main", "resources": {"limits": limits}}]},
        })
    };
    grants.into_iter().map(pod).chain(instance_pods(detail)).collect()
}

/// Returns the pods that hold MIG instances of a node.
fn instance_pods(detail: &Value) -> Vec<Value> {
    let mut pods = Vec::new();
    for (resource, instances) in detail["instances"].as_object().into_iter().flatten() {
        for holder in instances["pods"].as_array().into_iter().flatten() {
            let (namespace, name) = (&holder["namespace"], &holder["name"]);
            let limits = json!({resource: holder["count"].to_string()});
            pods.push(json!({
                "metadata": {"name": name, "namespace": namespace, "uid": format!("{namespace}/{name} {resource}")},
                "spec": {"nodeName": detail["name"], "containers": [{"name": "main", "resources": {"limits": limits}}]},
            }));
        }
    }
    pods
}

/// Returns namespace and name of a holder of GPUs. The name of a claim or of a reserved place begins with the namespace.
fn holder(namespace: String, name: String) -> (String, String) {
    match name.split_once('/') {
        Some((namespace, name)) => (namespace.to_owned(), name.to_owned()),
        None => (namespace, name),
    }
}

/// Returns the object of a waiting pod with the fields that the list of pods shows.
fn waiting_pod(row: &Value) -> Value {
    let report = &row["kubeScheduler"];
    let conditions = match report.is_null() {
        true => json!([]),
        false => json!([{"type": "PodScheduled", "status": "False",
            "reason": report["reason"], "message": report["message"]}]),
    };
    json!({
        "metadata": {"name": row["name"], "namespace": row["namespace"], "uid": row["uid"],
                     "creationTimestamp": row["created"]},
        "spec": {"containers": [], "schedulerName": row["unreported"]},
        "status": {"phase": "Pending", "conditions": conditions},
    })
}
