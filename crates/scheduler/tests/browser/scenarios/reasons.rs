//! The reasons of the scheduler in the language of the page.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tessera_core::admission::RejectReason;
use tessera_core::constraint::{TaintText, UnmetConstraint};
use tessera_core::gang::GangWait;
use tessera_core::gpu::Health;
use tessera_core::gpu_set::GpuSet;
use tessera_core::node::NodeState;
use tessera_core::placement::{GpuRejectReason, PlacementError, Policy, PolicyPair, describe, place};
use tessera_core::quota::OverQuota;
use tessera_core::request::{MemoryRequest, PodRequest, Request, Share};
use tessera_core::taint::{Taint, TaintEffect};
use tessera_core::units::{MiB, NodeName, Percent};
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::PodSpec;
use tessera_wire::tessera::gang::{GangKey, GangOrigin, GangProgress};
use tessera_wire::tessera::parsed_node;
use tessera_wire::tessera::reservation::NodeReservation;

use super::{small, visit};
use crate::cluster::{H100, T4, V100, node};
use crate::webdriver::Browser;

/// Lists values of an enum by its variants. A variant that is not listed does not compile.
macro_rules! every {
    ($kind:ty: $($variant:pat => [$($value:expr),* $(,)?]),* $(,)?) => {{
        let _all_are_listed = |value: &$kind| match value {
            $($variant => {})*
        };
        let all: Vec<$kind> = vec![$($($value,)*)*];
        all
    }};
}

fn texts(all: impl IntoIterator<Item = impl ToString>) -> Vec<String> {
    all.into_iter().map(|reason| reason.to_string()).collect()
}

fn share(count: u8, percent: u32) -> Share {
    Share { count, compute_percent: Percent(percent), memory: MemoryRequest::Amount(MiB(4096)) }
}

/// Why nodes reject pods.
fn of_nodes() -> Vec<String> {
    let placement = every!(PlacementError:
        PlacementError::Cpu => [PlacementError::Cpu],
        PlacementError::Memory => [PlacementError::Memory],
        PlacementError::NoGpu => [PlacementError::NoGpu],
        PlacementError::WholeOnly => [PlacementError::WholeOnly],
        PlacementError::Model => [PlacementError::Model],
        PlacementError::FewerSelected(_) => [PlacementError::FewerSelected(2)],
        PlacementError::NumaNode(_) => [PlacementError::NumaNode(2)],
        PlacementError::FewerGpus(_) => [PlacementError::FewerGpus(1)],
        PlacementError::FewerIdle(_) => [PlacementError::FewerIdle(2)],
        PlacementError::TooLarge(_) => [PlacementError::TooLarge(MiB(4096))],
        PlacementError::FewerLarge { .. } => [PlacementError::FewerLarge { count: 2, memory: MiB(4096) }],
        PlacementError::NoShare(_) => [
            PlacementError::NoShare(share(1, 30)),
            PlacementError::NoShare(share(2, 30)),
            PlacementError::NoShare(share(1, 0)),
            PlacementError::NoShare(share(2, 0)),
        ],
        PlacementError::NoSlot(_) => [PlacementError::NoSlot(1), PlacementError::NoSlot(2)],
        PlacementError::Required => [PlacementError::Required],
        PlacementError::Unlisted(_) => [PlacementError::Unlisted(2)],
    );
    let quota = every!(OverQuota:
        OverQuota::Unreadable(_) => [OverQuota::Unreadable("odd; write {}".to_owned())],
        OverQuota::Pool => [OverQuota::Pool],
        OverQuota::Model => [OverQuota::Model],
        OverQuota::GpuCount => [OverQuota::GpuCount],
        OverQuota::Memory => [OverQuota::Memory],
        OverQuota::Compute => [OverQuota::Compute],
    );
    let gang = || "team/train (the annotation)".to_owned();
    let gangs = every!(GangWait:
        GangWait::NoGroup { .. } => [GangWait::NoGroup { gang: gang(), kind: "PodGroup" }],
        // The pages show these as parts of kube-scheduler's own message, which is not translated.
        GangWait::Incomplete { .. }
        | GangWait::NoRoom { .. }
        | GangWait::Quota { .. }
        | GangWait::NotOffered { .. }
        | GangWait::Paused { .. }
        | GangWait::Surplus { .. } => [],
    );
    let nodes = every!(RejectReason:
        RejectReason::UnknownNode => [RejectReason::UnknownNode],
        RejectReason::BadNode(_) => [RejectReason::BadNode("odd".to_owned())],
        RejectReason::NotServed => [RejectReason::NotServed],
        RejectReason::Withdrawn => [RejectReason::Withdrawn],
        RejectReason::NoAgent => [RejectReason::NoAgent],
        // The values of these are listed above.
        RejectReason::Placement(_) | RejectReason::Quota(_) | RejectReason::Gang(_) => [],
    );
    let name = || "zone".to_owned();
    let taint = Taint { key: name(), value: name(), effect: TaintEffect::NoSchedule };
    let unmet = every!(UnmetConstraint:
        UnmetConstraint::Unschedulable => [UnmetConstraint::Unschedulable],
        UnmetConstraint::Taint(_) => [UnmetConstraint::Taint(TaintText(taint))],
        UnmetConstraint::Selector { .. } => [UnmetConstraint::Selector { key: name(), value: name() }],
        UnmetConstraint::Affinity => [UnmetConstraint::Affinity],
        UnmetConstraint::Pods(_) => [UnmetConstraint::Pods(110)],
        UnmetConstraint::Resource { .. } => [
            UnmetConstraint::Resource { resource: name(), offered: 1, requested: 2 },
            UnmetConstraint::Resource { resource: "ephemeral-storage".to_owned(), offered: 0, requested: 2048 },
        ],
        UnmetConstraint::InUse { .. } =>
            [UnmetConstraint::InUse { resource: name(), left: 1, offered: 2, requested: 3 }],
        UnmetConstraint::HostPort { .. } =>
            [UnmetConstraint::HostPort { port: 80, protocol: "TCP".to_owned() }],
        UnmetConstraint::ExcludedPod(_) => [UnmetConstraint::ExcludedPod(name())],
        UnmetConstraint::ExcludingPod(_) => [UnmetConstraint::ExcludingPod(name())],
    );
    [texts(nodes), texts(placement), texts(quota), texts(gangs), texts(unmet)].concat()
}

/// Why GPUs reject containers.
fn of_gpus() -> Vec<String> {
    let health = every!(Health:
        Health::Healthy => [],
        Health::Unhealthy => [Health::Unhealthy],
        Health::InMigMode => [Health::InMigMode],
        Health::AwaitingReset => [Health::AwaitingReset],
        Health::Cordoned => [Health::Cordoned],
    );
    let others = every!(GpuRejectReason:
        // The problems are listed above.
        GpuRejectReason::Unhealthy(_) => [],
        GpuRejectReason::Model => [GpuRejectReason::Model],
        GpuRejectReason::NotSelected => [GpuRejectReason::NotSelected],
        GpuRejectReason::InUse => [GpuRejectReason::InUse],
        GpuRejectReason::NoSlot(_) => [GpuRejectReason::NoSlot(10)],
        GpuRejectReason::HeldWhole => [GpuRejectReason::HeldWhole],
        GpuRejectReason::Shared { .. } =>
            [GpuRejectReason::Shared { compute_percent: Percent(30), memory: MiB(4096) }],
        GpuRejectReason::Compute { .. } =>
            [GpuRejectReason::Compute { left: Percent(10), asked: Percent(30) }],
        GpuRejectReason::Memory { .. } => [GpuRejectReason::Memory { left: MiB(10), asked: MiB(4096) }],
    );
    let problems = health.into_iter().filter_map(Health::problem).map(GpuRejectReason::Unhealthy);
    texts(problems.chain(others))
}

/// Why pods got their GPUs: what every policy says of every kind of request on nodes of three models.
fn of_placements() -> Result<Vec<String>> {
    let pair = || PolicyPair { gpus: Policy::Binpack, nodes: Policy::Spread };
    let policies = every!(Policy:
        Policy::Tessera(_) => [Policy::Tessera(Arc::default())],
        Policy::Link => [Policy::Link],
        Policy::Fragment => [Policy::Fragment],
        Policy::Share => [Policy::Share],
        Policy::Simple => [Policy::Simple],
        Policy::Static(_) => [Policy::Static(Arc::default())],
        Policy::BestEffort => [Policy::BestEffort],
        Policy::Binpack => [Policy::Binpack],
        Policy::Spread => [Policy::Spread],
        Policy::Pair(_) => [Policy::Pair(Arc::new(pair()))],
    );
    let requests = [
        vec![],
        vec![Request::Whole(1)],
        vec![Request::Whole(2)],
        vec![Request::Whole(3)],
        vec![Request::Whole(4)],
        vec![Request::Whole(7)],
        vec![Request::Whole(8)],
        vec![Request::Share(share(1, 30))],
        vec![Request::Share(share(2, 30))],
        vec![Request::Share(share(1, 30)), Request::Whole(2)],
    ];
    let mut all = Vec::new();
    for kind in [H100, V100, T4] {
        let object = serde_json::from_value(node("n", kind))?;
        let node = NodeState::empty(parsed_node::parse(&object, MemoryUnit::GiB)?.node);
        for pod in requests.iter().map(|requests| PodRequest::of_mains(requests.iter().copied())) {
            let fits = pod.containers.iter().filter_map(|container| container.request);
            if fits.map(Request::gpu_count).sum::<usize>() > kind.gpu_count {
                continue;
            }
            for policy in &policies {
                let placement =
                    place(&node, &pod, policy, GpuSet::EMPTY).ok().context("the node is empty")?;
                all.push(describe(&node, &pod, policy, &placement));
            }
        }
    }
    let others = [
        "nearest group with enough idle GPUs: the whole node 0,1",
        "fullest branch with enough idle GPUs: the whole node 0,1",
        "first idle set listed for p4d.24xlarge",
        "first idle set listed for this node",
        "part of a larger idle set listed for p4d.24xlarge",
        "part of a larger idle set listed for this node",
        "gang team/train (the annotation tessera.dev/gang) of 2 pods is placed together on 1 node",
        "they are the devices of claim gpu",
        "kube-scheduler chose the node; it counts these resources itself",
    ];
    all.extend(texts(others));
    all.sort();
    all.dedup();
    Ok(all)
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
    let unplaced = [
        "no nodes have GPUs for all of them at the same time",
        "GPUs for all of them are free and kept for the gang",
        "it waits for the end of 1 pod, evicted to make room for it",
        "it waits for the end of 3 pods, evicted to make room for it",
    ];
    for unplaced in unplaced {
        for (present, settled, reserved_on) in [(1, 0, None), (2, 0, Some(&node)), (2, 2, None), (2, 0, None)]
        {
            let progress = GangProgress { size: 2, present, settled };
            all.push(progress.describe(&gang, reserved_on, unplaced));
        }
    }
    let held = "namespace team holds 800% of 2400%, 800% of 800% guaranteed";
    let ends = [
        "evictions are off",
        "it borrows, so the pod waits for free GPUs",
        "pods of namespaces that borrow are evicted for it within the guarantee",
    ];
    all.extend(ends.map(|end| format!("{held}; {end}")));
    all.extend(texts([
        "namespace team gets back GPUs that it is guaranteed: 1 pod still to end",
        "namespace team gets back GPUs that it is guaranteed: 3 pods still to end",
        "its GPUs on node n became free by evictions of pods of lower priority",
        "its GPUs on node n became free by evictions, within the guarantee of its namespace",
        // What the pages say where an agent does not answer.
        "the node does not say where its agent answers",
        "the agent at 10.0.0.1:5678 did not answer in time",
        "the agent at 10.0.0.1:5678 cannot be reached: refused",
        "the agent at 10.0.0.1:5678 answered 500",
    ]));
    let reservation = NodeReservation {
        name: "defragment".to_owned(),
        owner: "jane".to_owned(),
        until: "2026-01-02T03:04:05Z".to_owned(),
        pod: None,
        gpus: Vec::new(),
    };
    all.extend([true, false].map(|is_free| reservation.describe(&node, is_free)));
    Ok(all)
}

/// A Chinese page has no English sentence about why a pod waits.
pub(super) async fn every_reason_is_translated(browser: &Browser) -> Result<()> {
    let cluster = small().await?;
    visit(browser, &cluster, "").await?;
    let translate = async |text: &str| {
        let text = json!(text);
        browser.eval(&format!("import('/assets/text.js').then((texts) => {{ texts.setLanguage('zh'); return texts.placementReason({text}); }})")).await
    };
    let all = [of_nodes(), of_gpus(), of_pods()?, of_placements()?].concat();
    for text in &all {
        let shown = translate(text).await?;
        let shown = shown.as_str().unwrap_or_default();
        // Names and numbers stay as they are. What is left of English sentences are spaces between two lower-case words.
        let has_chinese = shown.chars().any(|letter| ('\u{4e00}'..='\u{9fff}').contains(&letter));
        let words: Vec<&str> = shown.split(' ').collect();
        let is_word = |word: &str| word.len() > 1 && word.chars().all(|letter| letter.is_ascii_lowercase());
        let has_english = words.windows(2).any(|pair| is_word(pair[0]) && is_word(pair[1]));
        ensure!(has_chinese && !has_english, "{text:?} is shown as {shown:?}");
    }
    // Every pattern is for a text in these lists, so that none is left over.
    let unused = format!(
        "import('/assets/text.js').then(({{ REASONS }}) => REASONS.filter(([pattern]) => !{}.some((text) => [text, ...text.split('; ')].some((part) => pattern.test(part)))).map(([, key]) => key))",
        json!(all)
    );
    let unused = browser.eval(&unused).await?;
    ensure!(unused == json!([]), "no listed text has these patterns: {unused}");
    browser.eval("localStorage.clear()").await.map(drop)
}
