//! The invariant of the agent: podresources, annotations, claims, grant directories and the agent's ledger
//! agree, and no GPU is overbooked.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tessera_core::{
    grant::PodGrant,
    ledger::Ledger,
    request::{ContainerRole, Request},
    units::{GpuIndex, MiB, MilliCpu, PodUid},
};
use tessera_wire::{
    foreign::{dialect::MemoryUnit, objects::Pod, pod_spec::Claim},
    kubelet::device_id::{DeviceIds, Resource},
    tessera::grant,
};

use super::{
    prepared,
    stage::{SOON, Stage, core_node, eight_gpus},
};

/// Waits until all allocations agree.
pub(in crate::scenarios) async fn check(stage: &Stage) -> Result<()> {
    stage
        .harness
        .wait_for("all allocations to agree", SOON, async || {
            compare(stage).await?;
            Ok(Some(()))
        })
        .await
}

async fn compare(stage: &Stage) -> Result<()> {
    let node = core_node()?;
    let pods: Vec<Pod> = stage.all_pods().await?;
    let alive = |pod: &&Pod| !matches!(pod.status.phase.as_str(), "Succeeded" | "Failed");
    let usage: Value = serde_json::from_str(&stage.page("/usage").await?)?;
    let usage = usage["usage"].as_object().context("no usage")?;
    let mut ledger = Ledger::default();
    ledger.set_node(node.clone());
    let (mut holders, mut sharing) = (BTreeSet::new(), BTreeSet::new());
    let claims = prepared::agree(stage, pods.iter().filter(alive)).await?;
    for claim in &claims.grants {
        ledger.observe(claim.clone());
    }
    sharing.extend(claims.uids.iter().cloned());
    for pod in pods.iter().filter(alive) {
        let mut containers = pod_agrees(stage, pod).await?;
        for ((uid, container), gpus) in &claims.containers {
            if *uid == pod.metadata.uid {
                containers.entry(container.clone()).or_default().extend(gpus);
            }
        }
        if containers.is_empty() {
            continue;
        }
        holders.insert(pod.metadata.uid.clone());
        let shares = |claim: &Claim| matches!(claim.request, Request::Share(_));
        if pod.spec.claims(MemoryUnit::GiB)?.iter().any(shares) {
            sharing.insert(pod.metadata.uid.clone());
        }
        let shown = usage
            .get(&pod.metadata.uid)
            .with_context(|| format!("{} is not in /usage", pod.metadata.name))?;
        for (container, gpus) in &containers {
            let devices = shown["stat"][container]["dev"].as_array().cloned().unwrap_or_default();
            let shown: BTreeSet<String> =
                devices.iter().filter_map(|device| Some(device["card_idx"].as_str()?.to_owned())).collect();
            let held: BTreeSet<String> = gpus.iter().map(|gpu| gpu.0.to_string()).collect();
            ensure!(
                shown == held,
                "{}: the agent reports {shown:?}, the kubelet {held:?}",
                pod.metadata.name
            );
        }
        let grants =
            grant::parse(&pod.spec, &pod.metadata.annotations, &node, MemoryUnit::GiB)?.unwrap_or_default();
        ledger.observe(PodGrant {
            pod: PodUid(pod.metadata.uid.clone()),
            node: node.name.clone(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers: grants,
        });
    }
    ensure!(ledger.overbooked().is_empty(), "overbooked: {:?}", ledger.overbooked());
    let in_usage: BTreeSet<String> = usage.keys().cloned().collect();
    ensure!(in_usage == holders, "the agent counts {in_usage:?}, the pods are {holders:?}");
    for place in [stage.grants.clone(), stage.grants.join(".memory")] {
        let directories: BTreeSet<String> = fs::read_dir(&place)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .filter(|name| name.as_ref().is_ok_and(|name| !name.starts_with('.')))
            .collect::<Result<_>>()?;
        let place = place.display();
        ensure!(
            directories == sharing,
            "there are grants of {directories:?} in {place}, the pods are {sharing:?}"
        );
    }
    Ok(())
}

/// Returns the GPUs of each running container of a pod, if kubelet, annotations and limits agree.
pub(super) async fn pod_agrees(stage: &Stage, pod: &Pod) -> Result<BTreeMap<String, BTreeSet<GpuIndex>>> {
    let ids = DeviceIds::new(&eight_gpus().gpus, MemoryUnit::GiB).with_slots(stage.slots);
    let name = &pod.metadata.name;
    let listed = stage.pod_resources.list().await?;
    let entry = listed.iter().find(|entry| entry.name == *name && entry.namespace == pod.metadata.namespace);
    let annotated = grant::parse(&pod.spec, &pod.metadata.annotations, &core_node()?, MemoryUnit::GiB)?;
    let annotated = annotated.unwrap_or_default();
    let handed = grant::assigned(&pod.spec, &pod.metadata.annotations, MemoryUnit::GiB)?;
    let mut found = BTreeMap::new();
    for claim in
        pod.spec.claims(MemoryUnit::GiB)?.into_iter().filter(|claim| claim.role != ContainerRole::Init)
    {
        let entry = entry.with_context(|| format!("{name} is not listed"))?;
        let container = entry.containers.iter().find(|c| c.name == claim.container);
        let container = container.with_context(|| format!("{name}/{} is not listed", claim.container))?;
        let mut gpus = BTreeSet::new();
        for resource in Resource::of(claim.dialect) {
            for id in container.ids.get(resource.name()).into_iter().flatten() {
                gpus.insert(ids.read(resource, id).with_context(|| format!("{id} is not a device"))?.0);
            }
        }
        let in_annotations =
            annotated.iter().find(|grant| grant.container == claim.container).context("no grant")?;
        let in_annotations: BTreeSet<GpuIndex> = in_annotations.holds.iter().map(|(gpu, _)| *gpu).collect();
        ensure!(
            in_annotations == gpus,
            "{name}: the annotations name {in_annotations:?}, the kubelet {gpus:?}"
        );
        let missing: Vec<_> =
            handed.iter().filter(|(key, value)| pod.metadata.annotations.get(*key) != Some(value)).collect();
        ensure!(missing.is_empty(), "{name}: {missing:?} are missing");
        if matches!(claim.request, Request::Share(_)) {
            let limits = stage.limits(&pod.metadata.uid, &claim.container);
            let limits = limits.with_context(|| format!("{name}/{}", claim.container))?;
            let written: BTreeSet<GpuIndex> =
                limits.gpus.iter().filter_map(|gpu| stage.gpu(&gpu.uuid)).collect();
            ensure!(written == gpus, "{name}: the limits name {written:?}, the kubelet {gpus:?}");
        }
        found.insert(claim.container, gpus);
    }
    Ok(found)
}
