//! Pages of the agent about processes on its GPUs.

use std::{io::Read as _, sync::Arc, time::Duration};

use flate2::read::GzDecoder;
use serde_json::{Value, json};
use tessera_agent::shell::{Sampling, Standalone};
use tessera_core::gpu::GpuUuid;
use tessera_node::gpus::{
    DiscoveredGpus, GpuSample, Gpus, GpusError, Incident, ProcessMemory, SampleInterval, Simulated,
};

use super::{
    SHARE,
    common::load::{container_id, fetch, free_address, page},
    common::{RegistrationWay, World, uuid, with_timeout},
};

async fn world() -> (World, std::net::SocketAddr) {
    let address = free_address();
    (World::listening(RegistrationWay::Registry, Some(address)).await, address)
}

#[tokio::test(flavor = "multi_thread")]
async fn shows_processes_with_their_container() {
    let (world, address) = world().await;
    world.running(1, "train", &SHARE, 3).await;
    world.process(41, 3, 2048, 40, &container_id(1));
    let labels = format!(r#"{{namespace="team",pod="train",container="main",gpu="3",uuid="{}"}}"#, uuid(3));
    let text = world.until_shown("/metrics", &format!("tessera_container_busy_ratio{labels} 0.4")).await;
    assert!(text.contains(&format!("tessera_container_memory_used_bytes{labels} 2147483648\n")), "{text}");
    let json_page = async |path| serde_json::from_str::<Value>(&page(address, path).await.unwrap()).unwrap();
    let shown = json_page("/v1/use").await;
    let gpu = json!({
        "uuid": uuid(3), "index": 3, "grantedPercent": 30, "grantedMiB": 10240, "memoryUsedMiB": 2048,
        "busyPercent": 40.0,
    });
    assert_eq!(shown["containers"][0]["gpus"], json!([gpu]));
    assert_eq!(shown["containers"][0]["uid"], json!("uid-train"));
    assert_eq!(shown["gpus"][3]["memoryUsedMiB"], 2048 + 64);
    assert_eq!(shown["gpus"][0]["memoryUsedMiB"], 0);
    let usage = json_page("/usage").await;
    let device = json!({
        "id": "00000000:04:00.0", "card_idx": "3", "gpu": 40, "mem": 2048, "pids": [41], "device_mem": 81920,
    });
    assert_eq!(usage["usage"]["uid-train"]["stat"]["main"]["dev"], json!([device]));
    assert_eq!(usage["usage"]["uid-train"]["spec"]["main"], json!({ "gpu": 0.3, "mem": 10240 }));
    let graph = json_page("/graph").await;
    assert!(graph["graph"].as_str().unwrap().contains("41"), "{graph}");
    world.api.delete("uid-train");
    world.kubelet().remove("uid-train");
    with_timeout("the series of the pod to end", async {
        while page(address, "/metrics").await.unwrap().contains("\"train\"") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_pages_in_the_accepted_format() {
    let (world, address) = world().await;
    world.running(1, "train", &SHARE, 3).await;
    world.until_shown("/metrics", "tessera_container_memory_used_bytes").await;
    let (head, _) = fetch(address, "/metrics", "").await.unwrap();
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    let accept =
        "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\nAccept-Encoding: gzip\r\n";
    let (head, body) = fetch(address, "/metrics", accept).await.unwrap();
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(head.contains("content-encoding: gzip"), "{head}");
    let mut text = String::new();
    GzDecoder::new(body.as_slice()).read_to_string(&mut text).unwrap();
    assert!(text.ends_with("# EOF\n"));
    assert!(page(address, "/nowhere").await.is_none());
    let index = page(address, "/").await.unwrap();
    for path in index.lines().skip(1).filter_map(|line| line.split_whitespace().next()) {
        assert!(page(address, path).await.is_some(), "{path} is listed and is not there");
    }
    let nodes = page(address, "/metrics/nodes").await.unwrap();
    assert!(nodes.contains("node_1_info{gpu_id=\"3\""), "{nodes}");
    let metric = page(address, "/metric").await.unwrap();
    assert!(metric.contains("container_request_gpu_utilization{container_name=\"main\""), "{metric}");
    assert!(!metric.contains("tessera_"), "{metric}");
}

#[tokio::test(flavor = "multi_thread")]
async fn exports_the_host_without_kubernetes() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gpus");
    std::fs::write(&file, super::common::eight_gpus()).unwrap();
    let sampling = Sampling {
        interval: Duration::from_millis(20),
        proc_root: directory.path().join("proc"),
        ..Sampling::default()
    };
    let standalone = Standalone::start("machine".into(), Arc::new(Simulated::new(file)), sampling).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let served = tokio::spawn(standalone.serve(listener, stop.clone()));
    with_timeout("the first look", async {
        while !page(address, "/metrics").await.unwrap_or_default().contains("tessera_gpu_memory_used_bytes") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let text = page(address, "/metrics").await.unwrap();
    assert!(text.contains("tessera_exporter_source_up{source=\"kubelet\"} 0\n"), "{text}");
    assert!(text.contains("tessera_exporter_source_up{source=\"gpus\"} 1\n"), "{text}");
    stop.cancel();
    served.await.unwrap();
}

/// Simulated GPUs of which one hangs. They count their samples.
struct OneHangs {
    inner: Simulated,
    samples: std::sync::atomic::AtomicU64,
}

impl Gpus for OneHangs {
    fn discover(&self) -> Result<DiscoveredGpus, GpusError> {
        self.inner.discover()
    }

    fn sample(&self, gpu: &GpuUuid, interval: SampleInterval) -> Result<GpuSample, GpusError> {
        self.samples.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        while gpu.0.as_ref() == uuid(2) {
            std::thread::park();
        }
        self.inner.sample(gpu, interval)
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError> {
        self.inner.processes(gpu)
    }

    fn watch(
        &self,
        _report: &mut dyn FnMut(Option<Incident>) -> std::ops::ControlFlow<()>,
    ) -> Result<std::ops::ControlFlow<()>, GpusError> {
        Ok(std::ops::ControlFlow::Break(()))
    }

    fn have_device_nodes(&self) -> bool {
        false
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_hangs_blocks_no_other_and_scrapes_do_not_sample() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gpus");
    std::fs::write(&file, super::common::eight_gpus()).unwrap();
    let gpus = Arc::new(OneHangs { inner: Simulated::new(file), samples: 0.into() });
    // Each GPU is sampled once during this test.
    let sampling = Sampling {
        interval: Duration::from_secs(3600),
        proc_root: directory.path().join("proc"),
        ..Sampling::default()
    };
    let standalone = Standalone::start("machine".into(), gpus.clone(), sampling).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let served = tokio::spawn(standalone.serve(listener, stop.clone()));
    let fine = |gpu: u8, is: u8| {
        format!("tessera_gpu_sample_success{{gpu=\"{gpu}\",uuid=\"{}\"}} {is}\n", uuid(gpu))
    };
    with_timeout("all GPUs but one", async {
        loop {
            let text = page(address, "/metrics").await.unwrap_or_default();
            if (0..8).all(|gpu| text.contains(&fine(gpu, u8::from(gpu != 2)))) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    for _ in 0..50 {
        page(address, "/metrics").await.unwrap();
    }
    assert_eq!(gpus.samples.load(std::sync::atomic::Ordering::Relaxed), 8, "scrapes do not sample the GPUs");
    stop.cancel();
    served.await.unwrap();
}
