//! The claims that are prepared on the node: allocations, records, limits, CDI devices and podresources agree.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context, Result, ensure};
use kube::api::ListParams;
use tessera_core::{
    claim::{ClaimUid, grants},
    grant::PodGrant,
    units::{GpuIndex, MiB, MilliCpu},
};
use tessera_limits::GpuLimit;
use tessera_node::pod_resources::ClaimedDevice;
use tessera_wire::{
    foreign::{dra::ResourceClaim, objects::Pod},
    kubelet::cdi,
    tessera::dra::{DRIVER, PreparedClaim, claim_holds, claim_parts, gpu_of_device, request_directory},
};

use super::stage::{Stage, core_node};

/// What the claims of running pods hold.
#[derive(Default)]
pub(super) struct Prepared {
    /// UIDs of the claims.
    pub(super) uids: BTreeSet<String>,
    /// The claims as holders of GPUs.
    pub(super) grants: Vec<PodGrant>,
    /// GPUs of each container, by the UID of its pod and its name.
    pub(super) containers: BTreeMap<(String, String), BTreeSet<GpuIndex>>,
}

/// Compares all claims of these pods with what the agent and the kubelet have.
pub(super) async fn agree(stage: &Stage, pods: impl Iterator<Item = &Pod> + Clone) -> Result<Prepared> {
    let mut prepared = Prepared::default();
    if pods.clone().all(|pod| pod.spec.resource_claims.is_empty()) && records(stage)?.is_empty() {
        return Ok(prepared);
    }
    let uids: BTreeSet<&str> = pods.clone().map(|pod| pod.metadata.uid.as_str()).collect();
    let list = stage.cluster.resources("ResourceClaim").list(&ListParams::default()).await?;
    let mut claims: BTreeMap<String, ResourceClaim> = BTreeMap::new();
    for claim in list.items {
        let claim: ResourceClaim = serde_json::from_value(serde_json::to_value(claim)?)?;
        if claim.consumer_pods().any(|pod| uids.contains(pod.uid.as_str())) {
            claims.insert(claim.metadata.name.clone(), claim);
        }
    }
    let records: BTreeMap<String, PreparedClaim> =
        records(stage)?.into_iter().map(|record| (record.uid.clone(), record)).collect();
    let recorded: BTreeSet<&String> = records.keys().collect();
    let expected: BTreeSet<&String> = claims.values().map(|claim| &claim.metadata.uid).collect();
    ensure!(recorded == expected, "{recorded:?} are prepared, the claims of pods are {expected:?}");
    for claim in claims.values() {
        let record = records.get(&claim.metadata.uid).context("no record")?;
        claim_agrees(stage, claim, record)?;
        let node = core_node()?;
        prepared.uids.insert(claim.metadata.uid.clone());
        prepared.grants.push(PodGrant {
            pod: ClaimUid(claim.metadata.uid.clone()).holder(),
            node: node.name.clone(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers: grants(&claim_parts(claim, &node)?),
        });
    }
    let listed = stage.pod_resources.list().await?;
    for pod in pods {
        let name = &pod.metadata.name;
        let entry = listed.iter().find(|entry| entry.name == *name && entry.namespace == "default");
        for used in pod.claimed_requests() {
            let claim = claims.get(used.claim).with_context(|| format!("{name} has no {}", used.claim))?;
            let is_used = |request: &str| used.request.is_none_or(|only| only == request);
            let given: BTreeSet<ClaimedDevice> = claim
                .results(DRIVER)
                .filter(|result| is_used(result.main_request()))
                .map(|result| ClaimedDevice {
                    claim: used.claim.to_owned(),
                    driver: DRIVER.to_owned(),
                    device: result.device.clone(),
                    share_id: result.share_id.clone(),
                })
                .collect();
            let entry = entry.with_context(|| format!("{name} is not listed"))?;
            let container = entry.containers.iter().find(|container| container.name == used.container);
            let container = container.with_context(|| format!("{name}/{} is not listed", used.container))?;
            let listed: BTreeSet<ClaimedDevice> =
                container.claimed.iter().filter(|device| device.claim == used.claim).cloned().collect();
            ensure!(listed == given, "{name}: the kubelet lists {listed:?}, the claim has {given:?}");
            let gpus = given.iter().filter_map(|device| gpu_of_device(&device.device));
            let key = (pod.metadata.uid.clone(), used.container.to_owned());
            prepared.containers.entry(key).or_default().extend(gpus);
        }
    }
    Ok(prepared)
}

/// Compares a claim with its record, its limits and its CDI devices.
fn claim_agrees(stage: &Stage, claim: &ResourceClaim, record: &PreparedClaim) -> Result<()> {
    let name = &claim.metadata.name;
    let holds = claim_holds(claim, &core_node()?)?;
    let allocated: Vec<_> = holds.iter().map(|held| (&held.request, held.gpu, held.hold)).collect();
    let recorded: Vec<_> = record
        .devices
        .iter()
        .map(|device| Ok((&device.request, gpu_of_device(&device.device).context("no device")?, device.hold)))
        .collect::<Result<_>>()?;
    ensure!(allocated == recorded, "{name}: {allocated:?} are allocated, {recorded:?} are prepared");
    let grants = record.requests().into_iter().filter(|request| record.grant_of(request) == *request);
    for grant in grants {
        let limits = stage.limits(&record.uid, &request_directory(grant))?;
        let limited: BTreeMap<GpuIndex, (Option<u64>, u32)> = limits
            .gpus
            .iter()
            .filter_map(|gpu| {
                let memory = (gpu.memory != GpuLimit::WHOLE).then(|| gpu.memory.whole_mib());
                Some((stage.gpu(&gpu.uuid)?, (memory, gpu.compute_percent)))
            })
            .collect();
        let held = record.of_grant(grant).into_iter().filter_map(|granted| {
            let amounts = match granted.usage.whole {
                true => (None, 100),
                false => (Some(granted.usage.memory.0), granted.usage.compute_percent.0),
            };
            Some((gpu_of_device(&granted.device.device)?, amounts))
        });
        let held: BTreeMap<_, _> = held.collect();
        ensure!(limited == held, "{name}/{grant}: the limits are {limited:?}, the claim holds {held:?}");
    }
    let devices = stage.node.cdi().join(cdi::claim_file(&record.uid));
    ensure!(devices.exists(), "{name} has no CDI devices at {}", devices.display());
    Ok(())
}

/// Returns the records of all prepared claims.
pub(super) fn records(stage: &Stage) -> Result<Vec<PreparedClaim>> {
    let mut records = Vec::new();
    for entry in fs::read_dir(stage.grants.join(".claims")).into_iter().flatten().flatten() {
        // A record may go while it is read.
        if let Ok(text) = fs::read_to_string(entry.path()) {
            records.push(PreparedClaim::parse(&text)?);
        }
    }
    Ok(records)
}
