//! The agent on a real kubelet, with eight cards that exist only in a file.

mod books;
mod exporter;
mod footprint;
mod health;
mod library;
mod outage;
mod pods;
mod rounds;
mod stage;

use anyhow::{Context, Result, bail, ensure};
use tessera_limits::{CardLimit, limits::uuid_bytes};

use self::{
    pods::{Container, asking},
    stage::{SOON, Stage},
};
use crate::harness::Harness;

/// Resources and how many of each.
type Asked<'a> = &'a [(&'a str, &'a str)];

/// A dialect, what is asked for in it, the environment expected, and the limits: MiB and percent; none for whole cards.
type Case<'a> = (&'a str, Asked<'a>, Vec<String>, Option<(u64, u32)>);

/// Every dialect, every kind of pod, one after the other.
pub(crate) async fn dialects(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    // As a manifest: no controller makes pods of it here.
    stage.cluster.create_shipped("agent/agent.yaml").await?;
    stage.node_tells_its_cards().await?;
    every_dialect_follows_its_grant(&stage).await?;
    equal_pods_are_not_swapped(&stage).await?;
    pods_nobody_placed_are_served_and_corrected(&stage).await?;
    several_containers(&stage).await?;
    what_does_not_fit_is_refused(&stage).await?;
    stage.delete_all().await?;
    health::withdrawn_and_back(&stage).await?;
    books::check(&stage).await?;
    harness.note("all books agree");
    Ok(())
}

/// Agent and kubelet die while pods come and go.
pub(crate) async fn restarts(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    rounds::run(&stage).await
}

/// The old way of registering, and an API server that is away.
pub(crate) async fn outage(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "kubelet-socket").await?;
    every_dialect_follows_its_grant(&stage).await?;
    outage::run(&stage).await
}

/// Containers are held to their shares.
pub(crate) async fn library(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    library::run(&stage).await
}

/// What the agent costs.
pub(crate) async fn footprint(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    footprint::run(&stage).await
}

/// Who uses which card.
pub(crate) async fn exporter(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    exporter::run(&stage).await
}

/// What a container of each dialect finds in its environment when it was granted card 5.
async fn every_dialect_follows_its_grant(stage: &Stage) -> Result<()> {
    let uuid = stage.uuid(5);
    let cases: [Case<'_>; 4] = [
        ("nvidia", &[("nvidia.com/gpu", "1")], vec![format!("NVIDIA_VISIBLE_DEVICES={uuid}")], None),
        ("gputopology", &[("aliyun.com/gpu", "1")], vec![format!("NVIDIA_VISIBLE_DEVICES={uuid}")], None),
        (
            "gpushare",
            &[("aliyun.com/gpu-mem", "8")],
            vec![
                format!("NVIDIA_VISIBLE_DEVICES={uuid}"),
                "ALIYUN_COM_GPU_MEM_IDX=5".into(),
                "ALIYUN_COM_GPU_MEM_POD=8".into(),
                "ALIYUN_COM_GPU_MEM_CONTAINER=8".into(),
                "ALIYUN_COM_GPU_MEM_DEV=80".into(),
            ],
            Some((8192, 0)),
        ),
        (
            "vcuda",
            &[("tencent.com/vcuda-core", "30"), ("tencent.com/vcuda-memory", "40")],
            vec![format!("NVIDIA_VISIBLE_DEVICES={uuid}")],
            Some((10_240, 30)),
        ),
    ];
    for (name, resources, expected, limits) in cases {
        let pod = asking(name, &[Container::main("main", resources)]);
        stage.create_bound(pod, &[("main", &[5])]).await?;
        stage.cluster.wait_for_phase(name, "Running", SOON).await?;
        let log = stage.log(name, "main").await?;
        for line in &expected {
            ensure!(log.lines().any(|found| found == line), "{name}: {line} is missing in {log}");
        }
        let uid = stage.pod(name).await?.metadata.uid;
        let found = stage.limits(&uid, "main").map(|found| found.cards);
        let mounted = log.contains("control\n") && log.contains("/usr/lib/tessera/libtessera.so");
        match (limits, found) {
            (None, Err(_)) => ensure!(!mounted, "{name}: whole cards come without a library: {log}"),
            (Some((memory, cores)), Ok(found)) => {
                let expected = CardLimit {
                    uuid: uuid_bytes(&uuid).context("no UUID")?,
                    memory: memory << 20,
                    context: 0,
                    cores,
                    ceiling: cores,
                };
                ensure!(found == [expected], "{name}: the limits are {found:?}");
                ensure!(mounted, "{name}: no library in {log}");
            }
            (expected, found) => bail!("{name}: the limits are {found:?}, expected {expected:?}"),
        }
        stage.wait_for_annotations(name, "main", &[5], true).await?;
        stage.delete(name).await?;
        stage.harness.note(&format!("{name}: environment, limits and annotations are those of card 5"));
    }
    Ok(())
}

/// Fifteen pods alike, bound in another order than they were made, to cards in yet another order.
async fn equal_pods_are_not_swapped(stage: &Stage) -> Result<()> {
    let share = [("tencent.com/vcuda-core", "40"), ("tencent.com/vcuda-memory", "20")];
    let card = |number: usize| u8::try_from((number * 5 + 3) % 8).unwrap_or_default();
    let names: Vec<String> = (0..15).map(|number| format!("equal-{number}")).collect();
    for name in &names {
        stage.create_unbound(asking(name, &[Container::main("main", &share)])).await?;
    }
    let bind = names
        .iter()
        .enumerate()
        .rev()
        .map(|(number, name)| async move { stage.bind(name, &[("main", &[card(number)])]).await });
    futures::future::try_join_all(bind).await?;
    for (number, name) in names.iter().enumerate() {
        stage.cluster.wait_for_phase(name, "Running", SOON).await?;
        let log = stage.log(name, "main").await?;
        let line = format!("NVIDIA_VISIBLE_DEVICES={}", stage.uuid(card(number)));
        ensure!(log.contains(&line), "{name} was granted card {}, but has {log}", card(number));
    }
    books::check(stage).await?;
    stage.delete_all().await?;
    stage.harness.note("15 equal pods bound at once: each has the card it was granted");
    Ok(())
}

/// Pods that chose their node themselves, with no grant.
async fn pods_nobody_placed_are_served_and_corrected(stage: &Stage) -> Result<()> {
    let pod = |name: &str, resources: &[(&str, &str)]| {
        let mut pod = asking(name, &[Container::main("main", resources)]);
        if let Some(spec) = &mut pod.spec {
            spec.node_name = Some(stage.node.name.clone());
        }
        pod
    };
    stage.create(pod("bypass-whole", &[("aliyun.com/gpu", "2")])).await?;
    stage.create(pod("bypass-memory", &[("aliyun.com/gpu-mem", "30")])).await?;
    stage
        .create(pod("bypass-share", &[("tencent.com/vcuda-core", "50"), ("tencent.com/vcuda-memory", "100")]))
        .await?;
    stage
        .create(pod("bypass-cores", &[("tencent.com/vcuda-core", "200"), ("tencent.com/vcuda-memory", "8")]))
        .await?;
    for name in ["bypass-whole", "bypass-memory", "bypass-share", "bypass-cores"] {
        stage.cluster.wait_for_phase(name, "Running", SOON).await?;
        stage.wait_for_truth(name).await?;
    }
    books::check(stage).await?;
    stage.delete_all().await?;
    stage.harness.note("pods nobody placed: served, and their annotations say what they hold");
    Ok(())
}

/// Init containers, a sidecar and two mains on two cards.
async fn several_containers(stage: &Stage) -> Result<()> {
    let share = |cores: &'static str, memory: &'static str| {
        [("tencent.com/vcuda-core", cores), ("tencent.com/vcuda-memory", memory)]
    };
    let pod = asking(
        "several",
        &[
            Container::init("load", &share("20", "50")),
            Container::sidecar("proxy", &share("10", "20")),
            Container::main("first", &share("30", "40")),
            Container::main("second", &share("60", "70")),
        ],
    );
    let grants: &[(&str, &[u8])] = &[("load", &[2]), ("proxy", &[2]), ("first", &[2]), ("second", &[6])];
    stage.create_bound(pod, grants).await?;
    stage.cluster.wait_for_phase("several", "Running", SOON).await?;
    for (container, card) in [("first", 2), ("second", 6)] {
        let log = stage.log("several", container).await?;
        let line = format!("NVIDIA_VISIBLE_DEVICES={}", stage.uuid(card));
        ensure!(log.contains(&line), "{container}: {line} is missing in {log}");
    }
    // Equal requests of init and main container: the kubelet gives both the same devices.
    let twice = [("aliyun.com/gpu-mem", "10")];
    let pod = asking("alike", &[Container::init("load", &twice), Container::main("main", &twice)]);
    stage.create_bound(pod, &[("load", &[4]), ("main", &[4])]).await?;
    stage.cluster.wait_for_phase("alike", "Running", SOON).await?;
    books::check(stage).await?;
    stage.delete_all().await?;
    stage.harness.note("init containers, sidecars and several mains hold what was granted");
    Ok(())
}

/// Pods that cannot be served fail with words for their owner, and harm nobody.
async fn what_does_not_fit_is_refused(stage: &Stage) -> Result<()> {
    let bypassing = |name: &str, resources: &[(&str, &str)]| {
        let mut pod = asking(name, &[Container::main("main", resources)]);
        if let Some(spec) = &mut pod.spec {
            spec.node_name = Some(stage.node.name.clone());
        }
        pod
    };
    stage.create(bypassing("all", &[("aliyun.com/gpu", "8")])).await?;
    stage.cluster.wait_for_phase("all", "Running", SOON).await?;
    let cases: [(&str, Asked<'_>, &str); 3] = [
        ("too-late", &[("aliyun.com/gpu-mem", "8")], "no GPU with 8192 MiB left"),
        ("between", &[("tencent.com/vcuda-core", "150")], "write 100 or 200 for whole GPUs"),
        ("lonely", &[("tencent.com/vcuda-core", "50")], "needs memory; add tencent.com/vcuda-memory"),
    ];
    for (name, resources, reason) in cases {
        stage.create(bypassing(name, resources)).await?;
        let failed = stage.cluster.wait_for_phase(name, "Failed", SOON).await?;
        let message = failed.status.and_then(|status| status.message).unwrap_or_default();
        ensure!(message.contains(reason), "{name}: {reason:?} is missing in {message:?}");
        stage.harness.note(&format!("{name}: {message}"));
    }
    Ok(())
}
