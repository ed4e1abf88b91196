//! The reasons of the scheduler in the language of the page.

use anyhow::{Result, ensure};
use serde_json::json;
use tessera_core::admission::RejectReason;
use tessera_core::constraint::UnmetConstraint;
use tessera_core::gpu::Health;
use tessera_core::placement::{GpuRejectReason, PlacementError};
use tessera_core::quota::OverQuota;
use tessera_core::request::{MemoryRequest, Share};
use tessera_core::units::{MiB, NodeName, Percent};
use tessera_wire::foreign::objects::PodSpec;
use tessera_wire::tessera::gang::{GangKey, GangOrigin, GangProgress};

use super::{small, visit};
use crate::webdriver::Browser;

/// Why nodes reject pods.
fn of_nodes() -> Vec<String> {
    let share = |count, percent| Share {
        count,
        compute_percent: Percent(percent),
        memory: MemoryRequest::Amount(MiB(4096)),
    };
    let placement = [
        PlacementError::Cpu,
        PlacementError::Memory,
        PlacementError::NoGpu,
        PlacementError::WholeOnly,
        PlacementError::Model,
        PlacementError::FewerSelected(2),
        PlacementError::NumaNode(2),
        PlacementError::FewerGpus(1),
        PlacementError::FewerIdle(2),
        PlacementError::TooLarge(MiB(4096)),
        PlacementError::FewerLarge { count: 2, memory: MiB(4096) },
        PlacementError::NoShare(share(1, 30)),
        PlacementError::NoShare(share(2, 30)),
        PlacementError::NoShare(share(1, 0)),
        PlacementError::NoShare(share(2, 0)),
        PlacementError::NoSlot(1),
        PlacementError::NoSlot(2),
        PlacementError::Required,
        PlacementError::Unlisted(2),
    ];
    let quota =
        [OverQuota::Pool, OverQuota::Model, OverQuota::GpuCount, OverQuota::Memory, OverQuota::Compute];
    let nodes = [
        RejectReason::UnknownNode,
        RejectReason::BadNode("odd".to_owned()),
        RejectReason::NotServed,
        RejectReason::Withdrawn,
        RejectReason::NoAgent,
    ];
    let name = || "zone".to_owned();
    let unmet = [
        UnmetConstraint::Unschedulable,
        UnmetConstraint::Selector { key: name(), value: name() },
        UnmetConstraint::Affinity,
        UnmetConstraint::Pods(110),
        UnmetConstraint::Resource { resource: name(), offered: 1, requested: 2 },
        UnmetConstraint::Resource { resource: "ephemeral-storage".to_owned(), offered: 0, requested: 2048 },
        UnmetConstraint::InUse { resource: name(), left: 1, offered: 2, requested: 3 },
        UnmetConstraint::HostPort { port: 80, protocol: "TCP".to_owned() },
        UnmetConstraint::ExcludedPod(name()),
        UnmetConstraint::ExcludingPod(name()),
    ];
    let placement = placement.into_iter().map(RejectReason::from);
    let all = nodes.into_iter().chain(placement).chain(quota.into_iter().map(RejectReason::from));
    all.map(|reason| reason.to_string()).chain(unmet.iter().map(ToString::to_string)).collect()
}

/// Why GPUs reject containers.
fn of_gpus() -> Vec<String> {
    let health = [Health::Unhealthy, Health::InMigMode, Health::AwaitingReset, Health::Cordoned];
    let problems = health.into_iter().filter_map(Health::problem).map(GpuRejectReason::Unhealthy);
    let others = [
        GpuRejectReason::Model,
        GpuRejectReason::NotSelected,
        GpuRejectReason::InUse,
        GpuRejectReason::NoSlot(10),
        GpuRejectReason::HeldWhole,
        GpuRejectReason::Shared { compute_percent: Percent(30), memory: MiB(4096) },
        GpuRejectReason::Compute { left: Percent(10), asked: Percent(30) },
        GpuRejectReason::Memory { left: MiB(10), asked: MiB(4096) },
    ];
    problems.chain(others).map(|reason| reason.to_string()).collect()
}

/// What only kube-scheduler checks, and what is said of gangs.
fn of_pods() -> Result<Vec<String>> {
    let term = r#"{"topologyKey":"zone","labelSelector":{}}"#;
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let spec = format!(
        r#"{{"affinity":{{"podAffinity":{{"{required}":[{term}]}},"podAntiAffinity":{{"{required}":[{term}]}}}},
            "topologySpreadConstraints":[{{"whenUnsatisfiable":"DoNotSchedule"}}],
            "volumes":[{{"persistentVolumeClaim":{{}}}}],"resourceClaims":[{{"name":"gpu"}}],
            "containers":[{{"name":"main","ports":[{{"hostPort":80}}],
              "resources":{{"limits":{{"rdma/hca":"1"}}}}}}]}}"#
    );
    let spec: PodSpec = serde_json::from_str(&spec)?;
    let mut all: Vec<String> = spec.unchecked_constraints().into_iter().map(str::to_owned).collect();
    ensure!(all.len() == 7, "{all:?}");
    all.push("required pod anti-affinity".to_owned());
    let gang =
        GangKey { namespace: "team".to_owned(), name: "train".to_owned(), origin: GangOrigin::Tessera };
    let node = NodeName("n".to_owned());
    for (present, settled, reserved_on) in [(1, 0, None), (2, 0, Some(&node)), (2, 2, None), (2, 0, None)] {
        let progress = GangProgress { size: 2, present, settled };
        let unplaced = "no nodes have GPUs for all of them at the same time";
        all.push(progress.describe(&gang, reserved_on, unplaced));
    }
    let held = "namespace team holds 800% of 2400%, 800% of 800% guaranteed";
    all.extend(
        ["evictions are off", "it borrows, so the pod waits for free GPUs"]
            .map(|end| format!("{held}; {end}")),
    );
    Ok(all)
}

/// A Chinese page has no English sentence about why a pod waits.
pub(super) async fn every_reason_is_translated(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    visit(browser, &cluster, "").await?;
    let translate = async |text: &str| {
        let text = json!(text);
        browser.eval(&format!("import('/assets/text.js').then((texts) => {{ texts.setLanguage('zh'); return texts.reason({text}); }})")).await
    };
    for text in [of_nodes(), of_gpus(), of_pods()?].concat() {
        let shown = translate(&text).await?;
        let shown = shown.as_str().unwrap_or_default();
        // Names and numbers stay as they are. What is left of English sentences are spaces between two lower-case words.
        let has_chinese = shown.chars().any(|letter| ('\u{4e00}'..='\u{9fff}').contains(&letter));
        let words: Vec<&str> = shown.split(' ').collect();
        let is_word = |word: &str| word.len() > 1 && word.chars().all(|letter| letter.is_ascii_lowercase());
        let has_english = words.windows(2).any(|pair| is_word(pair[0]) && is_word(pair[1]));
        ensure!(has_chinese && !has_english, "{text:?} is shown as {shown:?}");
    }
    browser.eval("localStorage.clear()").await.map(drop)
}
