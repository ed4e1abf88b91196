//! Claims of dynamic resource allocation on a real kubelet, with kube-scheduler alone.

use std::fs;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Namespace, Pod, PodResourceClaim};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tessera_wire::{
    foreign::{
        dra::{ResourceClaim, ResourceSlice},
        objects,
    },
    tessera::dra::{DRIVER, PreparedClaim, slice_name},
};

use super::{
    health::happen,
    library::{build, on_simulated_gpu, rounds},
    pods::{Container, asking},
    prepared::records,
    stage::{SIMULATED, SOON, Stage},
};
use crate::harness::add_claim;

/// Script that repeats forever: initializes, reads the memory size, allocates pieces of 256 MiB until the limit, and
/// frees them.
const ROUNDS: &str = "\
while true; do
  echo \"begin
info
fill plain 256
free plain\" | /e2e/tenant dlsym | while read line; do echo -n \"$line / \"; done
  echo
  sleep 0.3
done";

/// Output of a round with 8 GiB, with 16 GiB, and with 4 GiB: a context takes 528 MiB.
const EIGHT: &str = "0 / 8192 8192 / 29 2 / 0 /";
const SIXTEEN: &str = "0 / 16384 16384 / 61 2 / 0 /";
const FOUR: &str = "0 / 4096 4096 / 13 2 / 0 /";

const WAIT: &str = "exec sleep 100000";

pub(super) async fn run(stage: &Stage) -> Result<()> {
    let claims = Claims { stage };
    claims
        .wait_for_slice("8 devices that can be shared", |slice| {
            let devices = &slice.spec.devices;
            devices.len() == 8 && devices.iter().all(|device| device.allow_multiple_allocations)
        })
        .await?;
    stage.harness.note("the node offers its GPUs in a slice, and the API server keeps all fields");

    let built = build(&stage.harness)?;
    let on_gpu = |name: &str, claim: &str| on_simulated_gpu(stage, &built, claiming(name, ROUNDS, &[claim]));
    claims.create("ResourceClaim", "eight", share("30", "8Gi")).await?;
    claims.create("ResourceClaim", "sixteen", share("50", "16Gi")).await?;
    stage.create(on_gpu("small", "eight")?).await?;
    stage.create(on_gpu("large", "sixteen")?).await?;
    let both = async |at_least: usize| -> Result<usize> {
        let seen = rounds(stage, "small", EIGHT, at_least).await?;
        Ok(seen.max(rounds(stage, "large", SIXTEEN, at_least).await?))
    };
    let seen = both(2).await?;
    let mut shares = Vec::new();
    for name in ["eight", "sixteen"] {
        let claim = claims.claim(name).await?;
        let result = claim.results(DRIVER).next().context("no allocation")?.clone();
        ensure!(result.device == format!("gpu-{SIMULATED}"), "{name} has {}", result.device);
        shares.push(result.share_id.context("no share ID")?);
    }
    ensure!(shares[0] != shares[1], "the share IDs are equal: {shares:?}");
    stage.harness.note("two claims share a GPU, each with a share ID, and the library enforces both");

    claims.create("ResourceClaim", "four", share("5", "4Gi")).await?;
    claims.create("ResourceClaim", "beside", share_of(4, "5", "1Gi")).await?;
    let double = claiming("double", ROUNDS, &["beside", "four"]);
    stage.create(on_simulated_gpu(stage, &built, double)?).await?;
    rounds(stage, "double", FOUR, 2).await?;
    stage.harness.note("a container with two claims is held to the share of each");

    let mut requests = share("2", "4Gi");
    let other = requests["devices"]["requests"][0].clone();
    requests["devices"]["requests"].as_array_mut().context("no requests")?.push(other);
    requests["devices"]["requests"][1]["name"] = "other".into();
    claims.create("ResourceClaim", "halves", requests).await?;
    stage.create(on_gpu("whole-of-halves", "halves")?).await?;
    rounds(stage, "whole-of-halves", EIGHT, 2).await?;
    stage.harness.note("a container with two requests of a claim on one GPU is held to their sum");

    unchanged_pods(&claims).await?;
    other_claims(&claims).await?;

    stage.agent.kill()?;
    let seen = both(seen + 2).await?;
    // As after a restart of the node: the CDI directory is empty.
    let files = || -> Result<usize> {
        let names = fs::read_dir(stage.node.cdi())?.flatten().map(|entry| entry.file_name());
        Ok(names.filter(|name| name.to_string_lossy().starts_with("tessera.dev-claim-")).count())
    };
    let before = files()?;
    for entry in fs::read_dir(stage.node.cdi())?.flatten() {
        fs::remove_file(entry.path())?;
    }
    stage.agent.start_again()?;
    stage.wait_until_ready().await?;
    let is_back = async || Ok((files()? == before).then_some(()));
    stage.harness.wait_for("the CDI devices of all claims to be back", SOON, is_back).await?;
    let seen = both(seen + 2).await?;
    stage.harness.note("the agent was killed, and has restored the CDI devices of all claims");

    stage.node.kubelet.restart().await?;
    claims.wait_for_slice("the slice to be back", |slice| slice.spec.devices.len() == 8).await?;
    claims.create("ResourceClaim", "later", share("10", "1Gi")).await?;
    stage.create(claiming("later", WAIT, &["later"])).await?;
    stage.cluster.wait_for_phase("later", "Running", SOON).await?;
    both(seen + 2).await?;
    stage.harness.note("the kubelet restarted, the slice is back, and new claims are prepared");

    replaced_by_force(&claims).await?;
    broken_gpu(&claims).await?;

    stage
        .cluster
        .pods()
        .delete_collection(&DeleteParams::default(), &kube::api::ListParams::default())
        .await?;
    let all_released = async || Ok((claims.records()?.is_empty() && files()? == 0).then_some(()));
    stage.harness.wait_for("all claims to be released", SOON, all_released).await?;
    stage.harness.note("all claims are released, and no file is left");
    Ok(())
}

/// Pods with `nvidia.com/gpu` run without a claim of their own.
async fn unchanged_pods(claims: &Claims<'_>) -> Result<()> {
    let stage = claims.stage;
    for (name, count) in [("one", 1), ("two", 2)] {
        let text = count.to_string();
        let container = Container::running("main", WAIT, &[("nvidia.com/gpu", text.as_str())]);
        stage.create(scheduled(asking(name, &[container]))).await?;
        stage.cluster.wait_for_phase(name, "Running", SOON).await?;
        // The typed pods of this release of the client library lack the field.
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"));
        let pods: Api<DynamicObject> = Api::default_namespaced_with(stage.cluster.client(), &resource);
        let pod: objects::Pod = serde_json::from_value(serde_json::to_value(pods.get(name).await?)?)?;
        let status = pod.status.extended_resource_claim_status.context("no claim was made")?;
        let claim = claims.claim(&status.resource_claim_name).await?;
        let devices: Vec<&str> = claim.results(DRIVER).map(|result| result.device.as_str()).collect();
        ensure!(devices.len() == count, "{name} has {devices:?}");
    }
    stage.harness.note("unchanged pods with nvidia.com/gpu: 1 and 2 run with whole GPUs");
    Ok(())
}

/// A template, a claim of two pods, alternatives, and administrative access.
async fn other_claims(claims: &Claims<'_>) -> Result<()> {
    let stage = claims.stage;
    let plain = |requests: Value| json!({ "devices": { "requests": requests } });
    let amounts = |cores: &str, memory: &str| json!({ "requests": { "cores": cores, "memory": memory } });
    let exactly = |capacity: Value| json!([{ "name": "gpu", "exactly": { "deviceClassName": "tessera", "capacity": capacity } }]);

    let template = json!({ "spec": plain(exactly(amounts("10", "1Gi"))) });
    claims.create("ResourceClaimTemplate", "template", template).await?;
    let mut pod = claiming("templated", WAIT, &[]);
    add_claim(
        &mut pod,
        PodResourceClaim {
            name: "gpu".into(),
            resource_claim_template_name: Some("template".into()),
            ..PodResourceClaim::default()
        },
    )?;
    stage.create(pod).await?;
    stage.cluster.wait_for_phase("templated", "Running", SOON).await?;

    claims.create("ResourceClaim", "shared", plain(exactly(amounts("20", "2Gi")))).await?;
    for name in ["first", "second"] {
        stage.create(claiming(name, WAIT, &["shared"])).await?;
        stage.cluster.wait_for_phase(name, "Running", SOON).await?;
    }
    let uid = claims.claim("shared").await?.metadata.uid;
    ensure!(claims.records()?.iter().filter(|record| record.uid == uid).count() == 1, "prepared twice");

    let selector = |product: &str| json!([{ "cel": { "expression": format!("device.attributes['{DRIVER}'].productName == '{product}'") } }]);
    let alternatives = json!([{ "name": "gpu", "firstAvailable": [
        { "name": "better", "deviceClassName": "tessera", "selectors": selector("NVIDIA H200") },
        { "name": "any", "deviceClassName": "tessera", "capacity": amounts("10", "1Gi") },
    ] }]);
    claims.create("ResourceClaim", "alternatives", plain(alternatives)).await?;
    stage.create(claiming("choosy", WAIT, &["alternatives"])).await?;
    stage.cluster.wait_for_phase("choosy", "Running", SOON).await?;
    let chosen = claims.claim("alternatives").await?;
    ensure!(chosen.results(DRIVER).next().is_some_and(|result| result.request == "gpu/any"), "{chosen:?}");

    let label = json!({ "metadata": { "labels": { "resource.kubernetes.io/admin-access": "true" } } });
    let namespaces: Api<Namespace> = Api::all(stage.cluster.client());
    namespaces.patch("default", &PatchParams::default(), &Patch::Merge(label)).await?;
    let all = json!([{ "name": "gpu", "exactly":
        { "deviceClassName": "tessera", "allocationMode": "All", "adminAccess": true } }]);
    let create = async || Ok(claims.create("ResourceClaim", "watching", plain(all.clone())).await.ok());
    stage.harness.wait_for("the label of the namespace to take effect", SOON, create).await?;
    stage.create(claiming("watching", WAIT, &["watching"])).await?;
    stage.cluster.wait_for_phase("watching", "Running", SOON).await?;
    let watched = claims.claim("watching").await?.results(DRIVER).count();
    // Kubernetes 1.36.4 leaves out GPUs whose capacities are held, although administrative access holds nothing.
    ensure!(watched > 0, "administrative access to {watched} GPUs");
    stage.harness.note("templates, shared claims, alternatives and administrative access work");
    Ok(())
}

/// A pod is deleted by force, and another one takes its GPU before the kubelet has released the claim.
async fn replaced_by_force(claims: &Claims<'_>) -> Result<()> {
    let stage = claims.stage;
    let spec = json!({ "devices": { "requests": [{ "name": "gpu", "exactly": {
        "deviceClassName": "tessera",
        "selectors": [{ "cel": { "expression": format!("device.attributes['{DRIVER}'].index == 6") } }],
    } }] } });
    for name in ["old", "new"] {
        claims.create("ResourceClaim", name, spec.clone()).await?;
    }
    let mut old = claiming("old", "trap '' TERM; sleep 100000 & wait; sleep 20", &["old"]);
    if let Some(spec) = &mut old.spec {
        spec.termination_grace_period_seconds = Some(5);
    }
    stage.create(old).await?;
    stage.cluster.wait_for_phase("old", "Running", SOON).await?;
    stage.create(claiming("new", WAIT, &["new"])).await?;
    let by_force = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    stage.cluster.pods().delete("old", &by_force).await?;
    stage.cluster.wait_for_phase("new", "Running", SOON * 2).await?;
    let uid = claims.claim("new").await?.metadata.uid;
    let holders: Vec<String> = claims
        .records()?
        .into_iter()
        .filter(|record| record.devices.iter().any(|one| one.device == "gpu-6" && one.hold.is_some()))
        .map(|record| record.uid)
        .collect();
    ensure!(holders == [uid], "GPU 6 is held by {holders:?}");
    stage.harness.note("the claim of a pod that replaced a force-deleted one waited for the release");
    Ok(())
}

/// A broken GPU is tainted, and the taint goes when it is back.
async fn broken_gpu(claims: &Claims<'_>) -> Result<()> {
    let taints = |slice: &ResourceSlice| -> usize {
        slice
            .spec
            .devices
            .iter()
            .filter(|device| device.name == "gpu-5")
            .map(|device| device.taints.len())
            .sum()
    };
    happen(claims.stage, "5 xid 79")?;
    claims.wait_for_slice("the taint of GPU 5", |slice| taints(slice) == 1).await?;
    happen(claims.stage, "5 back")?;
    claims.wait_for_slice("the taint of GPU 5 to go", |slice| taints(slice) == 0).await?;
    claims.stage.harness.note("a broken GPU is tainted until it is back");
    Ok(())
}

struct Claims<'a> {
    stage: &'a Stage,
}

impl Claims<'_> {
    async fn create(&self, kind: &str, name: &str, spec: Value) -> Result<()> {
        self.stage.cluster.create_resource(kind, name, spec).await
    }

    async fn claim(&self, name: &str) -> Result<ResourceClaim> {
        self.stage.cluster.claim(name).await
    }

    async fn wait_for_slice(&self, what: &str, is_it: impl Fn(&ResourceSlice) -> bool) -> Result<()> {
        let name = slice_name(&self.stage.node.name);
        self.stage
            .harness
            .wait_for(what, SOON, async || {
                let Some(found) = self.stage.cluster.resources("ResourceSlice").get_opt(&name).await? else {
                    return Ok(None);
                };
                let slice: ResourceSlice = serde_json::from_value(serde_json::to_value(found)?)?;
                Ok(is_it(&slice).then_some(()))
            })
            .await
    }

    /// Returns the records of all prepared claims.
    fn records(&self) -> Result<Vec<PreparedClaim>> {
        records(self.stage)
    }
}

/// Returns the specification of a claim for a share of the simulated driver's GPU.
fn share(cores: &str, memory: &str) -> Value {
    share_of(SIMULATED, cores, memory)
}

/// Returns the specification of a claim for a share of this GPU.
fn share_of(gpu: u8, cores: &str, memory: &str) -> Value {
    json!({ "devices": { "requests": [{ "name": "gpu", "exactly": {
        "deviceClassName": "tessera",
        "selectors": [{ "cel": { "expression": format!("device.attributes['{DRIVER}'].index == {gpu}") } }],
        "capacity": { "requests": { "cores": cores, "memory": memory } },
    } }] } })
}

/// Returns a pod for kube-scheduler whose container uses these claims.
fn claiming(name: &str, script: &str, claims: &[&str]) -> Pod {
    let mut pod = scheduled(asking(name, &[Container::running("main", script, &[])]));
    for claim in claims {
        let used = PodResourceClaim {
            name: (*claim).to_owned(),
            resource_claim_name: Some((*claim).to_owned()),
            ..PodResourceClaim::default()
        };
        // The pod has a specification with one container.
        let _has_container = add_claim(&mut pod, used);
    }
    pod
}

fn scheduled(mut pod: Pod) -> Pod {
    if let Some(spec) = &mut pod.spec {
        spec.scheduler_name = None;
    }
    pod
}
