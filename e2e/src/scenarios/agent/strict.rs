//! An agent that passes GPUs and library by CDI and kills escaped processes.

use std::fs;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::LogParams;
use serde_json::json;
use tessera_limits::{files, futex};

use super::{
    library::{ROUNDS, SMALL, escape_of, process_in, rounds, show_on_gpu},
    stage::{SIMULATED, SOON, Stage, eight_gpus},
};

/// CDI kind of the GPUs.
const KIND: &str = "e2e.tessera.dev/gpu";

/// Variable that the runtime sets from the CDI description of the GPU.
const GPU_VARIABLE: &str = "E2E_GPU";

/// Runs the scenario. `pod` creates a pod with this name and script and a share of 5 GiB.
pub(super) async fn run(stage: &Stage, pod: impl Fn(&str, &str) -> Result<Pod>) -> Result<()> {
    describe_gpus(stage)?;
    stage.agent.stop().await?;
    stage.agent.start_again_with(&[
        "--device-list-strategy=cdi-cri".to_owned(),
        format!("--cdi-kind={KIND}"),
        "--on-escape=kill".to_owned(),
    ])?;
    stage.wait_until_served().await?;

    let by_cdi = pod("by-cdi", &format!("echo ${GPU_VARIABLE}; {ROUNDS}"))?;
    stage.create_bound(by_cdi, &[("main", &[SIMULATED])]).await?;
    let seen = rounds(stage, "by-cdi", SMALL, 3).await?;
    let log = stage.cluster.pods().logs("by-cdi", &LogParams::default()).await?;
    let expected = stage.uuid(SIMULATED);
    ensure!(log.lines().next() == Some(expected.as_str()), "the GPU was not passed by CDI: {log}");
    stage.harness.note("by CDI: the runtime added the GPU and the library, and the share is enforced");

    stage
        .create_bound(pod("escaping", "while true; do sleep 1000; done")?, &[("main", &[SIMULATED])])
        .await?;
    stage.cluster.wait_for_phase("escaping", "Running", SOON).await?;
    let shown = show_on_gpu(stage, process_in(&stage.pod("escaping").await?.metadata.uid)?, 6000)?;
    stage.cluster.wait_for_phase("escaping", "Failed", SOON).await?;
    fs::remove_file(shown)?;
    let message = escape_of(stage, "escaping").await?;
    ensure!(message.ends_with("; it is killed"), "{message}");
    rounds(stage, "by-cdi", SMALL, seen + 2).await?;
    stage.harness.note("a process that used the GPU without the library was killed, the others keep running");

    stage.agent.restart().await?;
    stage.wait_until_served().await?;
    // Without the flags, containers that were started by CDI keep running unchanged.
    let uid = stage.pod("by-cdi").await?.metadata.uid;
    let control = files::open_control(&stage.grants.join(uid).join("main"))?;
    let arbiter = async || Ok(control.has_arbiter(futex::now()).then_some(()));
    stage.harness.wait_for("windows to be granted", SOON, arbiter).await
}

/// Writes one CDI device for each GPU by its UUID, which sets a variable in the container.
fn describe_gpus(stage: &Stage) -> Result<()> {
    let device =
        |uuid: &str| json!({ "name": uuid, "containerEdits": { "env": [format!("{GPU_VARIABLE}={uuid}")] } });
    let devices: Vec<_> = eight_gpus().gpus.iter().map(|gpu| device(&gpu.uuid.0)).collect();
    let description = json!({ "cdiVersion": "0.6.0", "kind": KIND, "devices": devices });
    fs::write(stage.node.cdi().join("e2e.json"), description.to_string())?;
    Ok(())
}
