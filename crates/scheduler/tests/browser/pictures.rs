//! A sample cluster, and screenshots of it for the documentation.

use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use crate::cluster::{Cluster, H100, T4, V100, agent, memory, node, pod, share, whole};
use crate::webdriver::Browser;

/// Starts a cluster of 16 nodes of three models, with pods of five teams, two waiting pods and a
/// broken GPU.
pub(crate) async fn sample() -> Result<Cluster> {
    let numbered = |prefix: &str, count: usize, kind| {
        (1..=count).map(move |number| node(&format!("{prefix}-{number:02}"), kind)).collect::<Vec<Value>>()
    };
    let mut nodes = numbered("h100", 6, H100);
    nodes.extend(numbered("v100", 4, V100));
    nodes.extend(numbered("t4", 6, T4));
    let inventory = &mut nodes[15]["metadata"]["annotations"]["tessera.dev/inventory"];
    let mut broken: Value = serde_json::from_str(inventory.as_str().unwrap_or_default())?;
    broken["gpus"][2]["unhealthy"] = json!(true);
    *inventory = broken.to_string().into();
    for (place, name, gpu_count, memory) in [(0, "h100-01", 8, 71_000), (7, "v100-02", 7, 9_100)] {
        nodes[place]["metadata"]["annotations"]["tessera.dev/agent"] =
            agent(busy(name, gpu_count, memory)).await?.into();
    }
    let cluster = Cluster::start(nodes).await?;
    let jobs = [
        ("h100", "research", "llama-pretrain", whole(8), 2),
        ("h100", "team-vision", "detector-train", whole(4), 3),
        ("h100", "inference", "embedder", share(50, 30_720), 7),
        ("h100", "ci", "smoke", share(10, 4_096), 5),
        ("v100", "research", "ablation", whole(2), 5),
        ("v100", "team-lab", "notebook", share(25, 7_680), 9),
        ("v100", "team-vision", "labeler", memory(10), 6),
        ("t4", "inference", "reranker", memory(6), 6),
        ("t4", "team-lab", "course", share(30, 4_096), 7),
        ("t4", "inference", "translate", share(40, 6_144), 8),
    ];
    for (prefix, namespace, name, limits, count) in jobs {
        for number in 0..count {
            cluster.run_among(prefix, &pod(namespace, &format!("{name}-{number}"), limits.clone())).await?;
        }
    }
    cluster.make_waiting(&pod("research", "llama-finetune-0", whole(16))).await?;
    cluster.make_waiting(&pod("team-lab", "sweep-7", share(60, 40_960))).await?;
    cluster.set_use(|pod| match pod["metadata"]["name"].as_str().unwrap_or_default() {
        name if name.starts_with("llama-pretrain") => Some(690.0),
        "detector-train-1" => Some(0.0),
        name if name.starts_with("detector") => Some(260.0),
        "ablation-3" => Some(0.2),
        name if name.starts_with("notebook") => Some(3.0),
        name if name.starts_with("smoke") => None,
        _ => Some(35.0),
    });
    Ok(cluster)
}

/// Starts a cluster of `nodes` nodes of three models. Every second node has a pod, each with
/// another fullness.
pub(crate) async fn large(nodes: usize) -> Result<Cluster> {
    let name = |number: usize| format!("node-{number:05}");
    let kind = |number: usize| [H100, H100, V100, T4][number * 4 / nodes.max(1)];
    let cluster = Cluster::start((0..nodes).map(|number| node(&name(number), kind(number)))).await?;
    for number in (0..nodes).step_by(2) {
        let gpu_count = 1 + number as u64 / 2 % kind(number).gpu_count as u64;
        let namespace = ["research", "inference", "ci"][number / 2 % 3];
        let made = cluster.make(&pod(namespace, &format!("job-{number}"), whole(gpu_count)))?;
        cluster.bind(&made, &name(number)).await?;
    }
    Ok(cluster)
}

/// Returns the answer of an agent whose first `gpu_count` GPUs are busy.
fn busy(node: &str, gpu_count: u8, memory: u64) -> Value {
    let gpus: Vec<Value> = (0..gpu_count)
        .map(|index| json!({"uuid": format!("GPU-{node}-{index:04}"), "index": index, "memoryUsedMiB": memory + 137 * u64::from(index), "busyPercent": 97.5 - 9.0 * f64::from(index)}))
        .collect();
    json!({"gpus": gpus, "containers": []})
}

/// Takes the screenshots.
pub(crate) async fn take(browser: &Browser, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let cluster = sample().await?;
    let url = |page: &str| cluster.replica.url(page);
    let shots = [
        ("overview-light", "#/overview", "light", "en", 1280, 1250, "Latest decisions"),
        ("waste-light", "#/waste", "light", "en", 1280, 800, "Wasted GPUs"),
        ("nodes-light", "#/nodes", "light", "en", 1280, 800, "16 nodes"),
        ("node-dark", "#/node/v100-02", "dark", "en", 1280, 1400, "busy"),
        (
            "pending-chinese-narrow",
            "#/pod/team-lab/sweep-7",
            "light",
            "zh",
            375,
            812,
            "0/16 nodes are available",
        ),
    ];
    for (name, page, scheme, language, width, height, text) in shots {
        browser.size(width, height).await?;
        browser.prefer(scheme).await?;
        browser.open(&url("")).await?;
        browser.eval(&format!("localStorage.setItem('tessera.language', '{language}')")).await?;
        browser.open(&url(page)).await?;
        browser.until_text(text).await?;
        // The screenshot waits until the bars have their widths and the map is painted.
        browser.until("document.getAnimations().length === 0").await?;
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        browser.screenshot(&folder.join(format!("{name}.png"))).await?;
    }
    Ok(())
}
