//! The token of an agent writes the agent's own fields of its own node, and nothing else.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use axum::http::Method;
use serde_json::{Value, json};
use tessera_cluster::{Notice, NoticeKind, connect, node_agent::NodeClient};
use tessera_wire::tessera::agent_address::{CERTIFICATE_KEY, URL_KEY};
use tessera_wire::tessera::{grant, inventory};

use super::{ACCOUNT, Attempt, ELSEWHERE, Kubectl, NAMESPACE, NODE, all_refused};
use crate::harness::{Cluster, Harness};

const MAPS: &str = "/api/v1/namespaces/kube-system/configmaps";
const POD: &str = "/api/v1/namespaces/default/pods/here";
const EVENTS: &str = "/api/v1/namespaces/default/events";

pub(super) async fn check(harness: &Harness, cluster: &Cluster, kubectl: &Kubectl) -> Result<()> {
    let token = async |namespace: &str, node: Option<&str>| -> Result<_> {
        Ok(connect(Some(&cluster.service_account_kubeconfig(namespace, ACCOUNT, node).await?)).await?)
    };
    let agent = token(NAMESPACE, Some(NODE)).await?;
    let refused: Vec<Attempt> =
        elsewhere().into_iter().chain(own_node()).chain(own_pods()).chain(other_objects()).collect();
    all_refused(cluster, &agent, &refused).await?;
    harness.note(&format!("{} writes with the agent's token are refused", refused.len()));

    allowed(cluster, NodeClient::new(agent, NODE.to_owned())).await?;
    harness.note("what an agent writes is permitted");

    let nowhere = token(NAMESPACE, None).await?;
    let text = "the token of this agent names no node, so it may write nothing";
    let writes = [
        (Method::PATCH, format!("/api/v1/nodes/{NODE}"), annotation(inventory::KEY)),
        (Method::PATCH, POD.to_owned(), annotation(grant::KEY)),
        (Method::POST, MAPS.to_owned(), json!({ "metadata": { "name": format!("unhealthy-gpu-{NODE}") } })),
    ];
    let writes = writes.map(|(method, path, body)| Attempt::new(&method, &path, body, text));
    all_refused(cluster, &nowhere, &writes).await?;
    harness.note("a token that names no node writes nothing");

    // An account of the same name that may edit pods, but has no rights of the agent.
    kubectl.run(&["-n", "team", "create", "serviceaccount", ACCOUNT])?;
    let account = format!("--serviceaccount=team:{ACCOUNT}");
    kubectl.run(&["create", "role", "team", "--verb=patch", "--resource=pods"])?;
    kubectl.run(&["create", "rolebinding", "team", "--role=team", &account])?;
    cluster.wait_for_rights(&format!("system:serviceaccount:team:{ACCOUNT}")).await?;
    let namesake = token("team", Some(NODE)).await?;
    let text = "annotation tessera.dev/grant is written by the scheduler and the agent only";
    let forged = Attempt::new(&Method::PATCH, POD, annotation(grant::KEY), text);
    all_refused(cluster, &namesake, &[forged]).await?;
    harness.note("an account of the same name in another namespace writes no grants");
    Ok(())
}

/// Verifies that everything an agent writes is permitted.
async fn allowed(cluster: &Cluster, agent: NodeClient) -> Result<()> {
    let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let keys = [inventory::KEY, URL_KEY, CERTIFICATE_KEY, "GPU_TOPOLOGY", "NODE_TYPE"];
    let annotations = map(&keys.map(|key| (key, "x")));
    let labels = map(&[("gaia.tencent.com/gpu-model", "H200")]);
    agent.patch_node(&annotations, &labels, &map(&[("aliyun.com/gpu-count", "8")])).await?;
    let uid = cluster.pods().get("here").await?.metadata.uid.context("a pod without a UID")?;
    let keys =
        [grant::KEY, "ALIYUN_COM_GPU_MEM_ASSIGNED", "tencent.com/predicate-node", "tencent.com/gpu-assigned"];
    ensure!(keys.iter().all(|key| grant::is_key(key)), "not all of {keys:?} belong to a grant");
    agent.patch_pod("default", "here", &uid, &map(&keys.map(|key| (key, "x")))).await?;
    agent.set_unhealthy(&[1, 2]).await?;
    agent.set_unhealthy(&[]).await?;
    let notice = Notice {
        kind: NoticeKind::Pod,
        namespace: "default".to_owned(),
        name: "here".to_owned(),
        uid,
        is_warning: true,
        reason: "Tested".to_owned(),
        message: "an event of the agent".to_owned(),
    };
    agent.write_pod_event(&notice).await?;
    Ok(())
}

fn annotation(key: &str) -> Value {
    json!({ "metadata": { "annotations": { key: "{}" } } })
}

fn elsewhere() -> Vec<Attempt> {
    let no_node = format!("the agent of node {NODE} may not write to another node");
    let no_pod = format!("the agent of node {NODE} may not write to pods on another node");
    let node = format!("/api/v1/nodes/{ELSEWHERE}");
    let capacity = json!({ "status": { "capacity": { "aliyun.com/gpu-count": "8" } } });
    let pod = "/api/v1/namespaces/default/pods/elsewhere";
    vec![
        Attempt::new(&Method::PATCH, &node, annotation(inventory::KEY), &no_node),
        Attempt::new(&Method::PATCH, &format!("{node}/status"), capacity, &no_node),
        Attempt::new(&Method::PATCH, pod, annotation(grant::KEY), no_pod),
    ]
}

fn own_node() -> Vec<Attempt> {
    let node = format!("/api/v1/nodes/{NODE}");
    let status = format!("{node}/status");
    let label = |key: &str, value: Value| json!({ "metadata": { "labels": { key: value } } });
    let amount = |field: &str, key: &str| json!({ "status": { field: { key: "900" } } });
    let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "False" }] } });
    let address = json!({ "status": { "addresses": [{ "type": "InternalIP", "address": "10.0.0.1" }] } });
    let taint = json!({ "spec": { "taints": [{ "key": "a", "effect": "NoExecute" }] } });
    let own = json!({ "metadata": { "finalizers": ["example.com/never"] } });
    let isolated = "node-restriction.kubernetes.io/zone";
    let attempts = [
        (&node, label(isolated, json!("a")), format!("the label {isolated} of nodes")),
        (&status, label(isolated, json!("a")), format!("the label {isolated} of nodes")),
        (&node, label("tessera.dev/gpu", json!("true")), "the label tessera.dev/gpu of nodes".into()),
        (&node, label("kubernetes.io/hostname", json!(null)), "the label kubernetes.io/hostname".into()),
        (&node, annotation("example.com/note"), "the annotation example.com/note of nodes".into()),
        (&node, own, "metadata.finalizers of nodes".into()),
        (&node, taint, "the field spec of nodes".into()),
        (&node, json!({ "spec": { "unschedulable": true } }), "the field spec of nodes".into()),
        (&status, ready, "status.conditions of nodes".into()),
        (&status, address, "status.addresses of nodes".into()),
        (&status, amount("capacity", "cpu"), "the capacity of cpu".into()),
        (&status, amount("allocatable", "memory"), "the allocatable amount of memory".into()),
        (&status, amount("capacity", "nvidia.com/gpu"), "the capacity of nvidia.com/gpu".into()),
    ];
    attempts.map(may_not_change).into()
}

fn own_pods() -> Vec<Attempt> {
    let pod = POD.to_owned();
    let image = json!({ "spec": { "containers": [{ "name": "main", "image": "other" }] } });
    let deadline = json!({ "spec": { "activeDeadlineSeconds": 1 } });
    let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": "elsewhere", "uid": "1" });
    let ceiling = "tencent.com/vcuda-core-limit";
    let attempts = [
        (&pod, image, "the field spec of pods".to_owned()),
        (&pod, deadline, "the field spec of pods".to_owned()),
        (&pod, json!({ "metadata": { "labels": { "app": "a" } } }), "the label app of pods".to_owned()),
        (
            &pod,
            json!({ "metadata": { "ownerReferences": [owner] } }),
            "metadata.ownerReferences of pods".to_owned(),
        ),
    ];
    // Two policies refuse this, and either may answer.
    let ceiling = Attempt::new(&Method::PATCH, &pod, annotation(ceiling), format!("annotation {ceiling}"));
    attempts.map(may_not_change).into_iter().chain([ceiling]).collect()
}

fn may_not_change((path, body, what): (&String, Value, String)) -> Attempt {
    Attempt::new(&Method::PATCH, path, body, format!("the agent of node {NODE} may not change {what}"))
}

fn other_objects() -> Vec<Attempt> {
    let no_map =
        format!("the agent of node {NODE} may write only the ConfigMap kube-system/unhealthy-gpu-{NODE}");
    let no_key = format!("the agent of node {NODE} may write only the key gpus of its ConfigMap");
    let no_event = format!("the agent of node {NODE} may write only events of its own about pods");
    let map = |name: &str, data: Value| json!({ "metadata": { "name": name }, "data": data });
    let own = format!("unhealthy-gpu-{NODE}");
    let event = |kind: &str, component: &str, host: &str| {
        json!({
            "metadata": { "generateName": "here." },
            "involvedObject": { "kind": kind, "namespace": "default", "name": "here" },
            "reportingComponent": component, "reportingInstance": host, "source": { "host": host },
        })
    };
    let in_own_namespace = format!("/api/v1/namespaces/{NAMESPACE}/configmaps");
    vec![
        Attempt::new(&Method::POST, MAPS, map("settings", json!({})), &no_map),
        Attempt::new(&Method::POST, MAPS, map(&format!("unhealthy-gpu-{ELSEWHERE}"), json!({})), &no_map),
        Attempt::new(&Method::POST, &in_own_namespace, map(&own, json!({})), no_map),
        Attempt::new(&Method::POST, MAPS, map(&own, json!({ "gpus": "1", "more": "x" })), no_key),
        Attempt::new(&Method::GET, MAPS, json!({}), "is forbidden"),
        Attempt::new(&Method::POST, EVENTS, event("Pod", "kubelet", NODE), &no_event),
        Attempt::new(&Method::POST, EVENTS, event("Pod", ACCOUNT, ELSEWHERE), &no_event),
        Attempt::new(&Method::POST, EVENTS, event("Service", ACCOUNT, NODE), no_event),
    ]
}
