//! Pages of the agent about processes on its GPUs.

use std::{io::Read as _, time::Duration};

use flate2::read::GzDecoder;
use serde_json::{Value, json};
use tessera_agent::shell::{Sampling, Standalone};
use tessera_core::gpu::GpuUuid;
use tessera_node::gpus::{
    DiscoveredGpus, GpuSample, Gpus, GpusError, Incident, ProcessMemory, SampleInterval, Simulated,
};
use tessera_wire::kubelet::gpu_manager_display::gpu_display_client::GpuDisplayClient;
use tonic::transport::Endpoint;

use super::{
    SHARE,
    common::fixtures::{a100s, container_id, uuid},
    common::gpus::CountedGpus,
    common::load::{fetch, page},
    common::{RegistrationWay, World},
};

#[tokio::test(flavor = "multi_thread")]
async fn shows_processes_with_their_container() {
    let world = World::new(RegistrationWay::Registry).await;
    world.running(1, "train", &SHARE, 3).await;
    world.process(41, 3, 2048, 40, &container_id(1));
    world.until_measured().await;
    let labels = format!(r#"{{namespace="team",pod="train",container="main",gpu="3",uuid="{}"}}"#, uuid(3));
    let text = world.page("/metrics").await;
    assert!(text.contains(&format!("tessera_container_busy_ratio{labels} 0.4\n")), "{text}");
    assert!(text.contains(&format!("tessera_container_memory_used_bytes{labels} 2147483648\n")), "{text}");
    let json_page = async |path| serde_json::from_str::<Value>(&world.page(path).await).unwrap();
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
    assert_eq!(usage["usage"]["uid-train"]["user"], "jane", "the variable SUBMITTER of the first container");
    let socket = world.directory.path().join("gpu-manager.sock");
    let channel = Endpoint::try_from(format!("unix:{}", socket.display())).unwrap().connect().await.unwrap();
    let mut client = GpuDisplayClient::new(channel);
    let by_rpc = client.print_usages(()).await.unwrap().into_inner().usage;
    assert_eq!((by_rpc["uid-train"].user.as_str(), by_rpc["uid-train"].project.as_str()), ("jane", "team"));
    assert_eq!(by_rpc["uid-train"].stat["main"].dev[0].pids, [41]);
    let graph = json_page("/graph").await;
    assert!(graph["graph"].as_str().unwrap().contains("41"), "{graph}");
    world.api.delete("uid-train");
    world.kubelet().remove("uid-train");
    world.until_handled().await;
    let text = world.page("/metrics").await;
    assert!(!text.contains("\"train\""), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_pages_in_the_accepted_format() {
    let world = World::new(RegistrationWay::Registry).await;
    let address = world.address;
    world.running(1, "train", &SHARE, 3).await;
    world.until_measured().await;
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
    assert!(nodes.contains("node_1_info{gpu_id=\"GPU-00000003-"), "{nodes}");
    let metric = page(address, "/metric").await.unwrap();
    assert!(metric.contains("container_request_gpu_utilization{container_name=\"main\""), "{metric}");
    assert!(!metric.contains("tessera_"), "{metric}");
}

#[tokio::test(flavor = "multi_thread")]
async fn exports_the_host_without_kubernetes() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gpus");
    std::fs::write(&file, a100s(8).to_string()).unwrap();
    let gpus = CountedGpus::new(Simulated::new(file));
    let sampling = Sampling {
        interval: Duration::from_millis(20),
        proc_root: directory.path().join("proc"),
        ..Sampling::default()
    };
    let standalone = Standalone::start("machine".into(), gpus.clone(), sampling).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let served = tokio::spawn(standalone.serve(listener, stop.clone()));
    gpus.sampled(1).await;
    let text = page(address, "/metrics").await.unwrap();
    assert!(text.contains("tessera_exporter_source_up{source=\"kubelet\"} 0\n"), "{text}");
    assert!(text.contains("tessera_exporter_source_up{source=\"gpus\"} 1\n"), "{text}");
    assert!(text.contains("\ntessera_gpu_memory_used_bytes{"), "{text}");
    stop.cancel();
    served.await.unwrap();
}

/// Simulated GPUs that hang in their second sample, and one of them already in its first.
struct Hanging(Simulated);

impl Gpus for Hanging {
    fn discover(&self) -> Result<DiscoveredGpus, GpusError> {
        self.0.discover()
    }

    fn sample(&self, gpu: &GpuUuid, interval: SampleInterval) -> Result<GpuSample, GpusError> {
        while gpu.0.as_ref() == uuid(2) || interval.since > 0 {
            std::thread::park();
        }
        self.0.sample(gpu, interval)
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError> {
        self.0.processes(gpu)
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
    std::fs::write(&file, a100s(8).to_string()).unwrap();
    let gpus = CountedGpus::new(Hanging(Simulated::new(file)));
    let sampling = Sampling {
        interval: Duration::ZERO,
        proc_root: directory.path().join("proc"),
        ..Sampling::default()
    };
    let standalone = Standalone::start("machine".into(), gpus.clone(), sampling).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let served = tokio::spawn(standalone.serve(listener, stop.clone()));
    // Each GPU has begun its first sample, and all but one their second.
    let all_samples = 8 + 7;
    gpus.until_begun(all_samples).await;
    let text = page(address, "/metrics").await.unwrap();
    for gpu in 0..8 {
        let (uuid, is) = (uuid(gpu), u8::from(gpu != 2));
        let line = format!("tessera_gpu_sample_success{{gpu=\"{gpu}\",uuid=\"{uuid}\"}} {is}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
    for _ in 0..50 {
        page(address, "/metrics").await.unwrap();
    }
    assert_eq!(gpus.begun(), all_samples, "scrapes do not sample the GPUs");
    stop.cancel();
    served.await.unwrap();
}
