//! Pods whose GPUs are held by claims of dynamic resource allocation.

use anyhow::Result;
use serde_json::json;

use super::visit;
use crate::cluster::{Cluster, H100, V100, made, node, pod};
use crate::webdriver::Browser;

/// The state keeps nothing of such a pod but the claims that are reserved for it.
pub(super) async fn a_pod_with_the_gpus_of_a_claim_has_a_page(browser: &Browser) -> Result<()> {
    let cluster = Cluster::start([node("h1", H100), node("v1", V100)]).await?;
    let mut user = pod("team", "user", json!({}));
    user["spec"]["nodeName"] = "v1".into();
    user["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "half"}]);
    let user = cluster.make(&user)?;
    let result = json!({"request": "gpu", "driver": "gpu.tessera.dev", "pool": "v1", "device": "gpu-3",
        "consumedCapacity": {"cores": "50", "memory": "16Gi"}});
    let exactly = json!({"deviceClassName": "tessera", "allocationMode": "ExactCount", "count": 1});
    let claim = json!({
        "metadata": {"name": "half", "namespace": "team"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "user", "uid": user["metadata"]["uid"]}],
        },
    });
    made(cluster.api.create("/apis/resource.k8s.io/v1/namespaces/team/resourceclaims", claim))?;
    visit(browser, &cluster, "#/node/v1").await?;
    browser.until_text("claim team/half").await?;
    visit(browser, &cluster, "#/pod/team/user").await?;
    for text in ["Where it is, and why", "they are the devices of claim half", "claim half", "GPU 3", "50%"] {
        browser.until_text(text).await?;
    }
    browser.until("document.querySelector('.explanation a').innerText === 'v1'").await
}
