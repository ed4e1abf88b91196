//! Processes on the GPUs of the node, and access to its pages.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    time::Duration,
};

use serde_json::json;
use tessera_wire::foreign::objects::Pod;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{World, fixtures::container_id, with_timeout};

/// Number of pods of a full node.
const PODS: u32 = 100;

/// Time between two requests to a program of another project.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

fn gpu_of(pod: u32) -> u8 {
    u8::try_from(pod % 8).unwrap()
}

/// Returns an address with a free port, for a program that cannot choose one itself.
pub(crate) fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Fetches a page and returns its head and body.
pub(crate) async fn fetch(address: SocketAddr, path: &str, headers: &str) -> Option<(String, Vec<u8>)> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n{headers}\r\n").as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.ok()?;
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
    head.starts_with("http/1.0 200").then(|| (head, answer[end + 4..].to_vec()))
}

/// Fetches a page as text.
pub(crate) async fn page(address: SocketAddr, path: &str) -> Option<String> {
    String::from_utf8(fetch(address, path, "").await?.1).ok()
}

/// Asks until there is an answer. Only for programs of other projects, which report no events;
/// everything else has an event to wait for.
pub(crate) async fn poll_foreign<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    with_timeout(what, async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    })
    .await
}

impl World {
    /// Adds a process of a container on a GPU: `memory` in MiB, `busy` in percent. The next sample
    /// contains it.
    pub(crate) fn process(&self, pid: u32, gpu: u8, memory: u64, busy: u32, container: &str) {
        let own = self.directory.path().join(format!("proc/{pid}"));
        fs::create_dir_all(&own).unwrap();
        let numbers = "S 1 7 7 0 -1 4194560 1 0 0 0 3 4 0 0 20 0 1 0 4711 1000 50";
        fs::write(own.join("stat"), format!("{pid} (train) {numbers}\n")).unwrap();
        fs::write(own.join("comm"), "train\n").unwrap();
        fs::write(own.join("cgroup"), format!("0::/../cri-containerd-{container}.scope\n")).unwrap();
        let file = self.directory.path().join("gpus.processes");
        let before = fs::read_to_string(&file).unwrap_or_default();
        let line = json!({ "pid": pid, "gpu": gpu, "memoryMiB": memory, "busyPercent": busy });
        let new = self.directory.path().join("gpus.processes.new");
        fs::write(&new, format!("{before}{line}\n")).unwrap();
        fs::rename(new, file).unwrap();
    }

    /// Runs a pod with the container ID made from `number`.
    pub(crate) async fn running(&self, number: u32, name: &str, limits: &[(&str, &str)], gpu: u8) -> Pod {
        let pod = self.bind(name, limits, Some(gpu));
        self.run(&pod).await.unwrap();
        self.api.set_containers(&pod.metadata.uid, &[("main", &container_id(number))]);
        pod
    }

    /// Runs 100 pods with shares of the GPUs.
    pub(crate) async fn pods_with_shares(&self) {
        let share = [("tencent.com/vcuda-core", "7"), ("tencent.com/vcuda-memory", "20")];
        for number in 0..PODS {
            self.running(number, &format!("job-{number}"), &share, gpu_of(number)).await;
        }
    }

    /// Adds two processes for each of the 100 pods.
    pub(crate) fn processes_of_all(&self) {
        for number in 0..PODS {
            for pid in [1000 + number, 2000 + number] {
                let memory = 1000 + u64::from(number);
                self.process(pid, gpu_of(number), memory, number % 5, &container_id(number));
            }
        }
    }

    /// Fetches a page of the agent as text.
    pub(crate) async fn page(&self, path: &str) -> String {
        page(self.address, path).await.unwrap_or_else(|| panic!("the agent does not serve {path}"))
    }

    /// Waits until the agent has handled every event of the API server.
    pub(crate) async fn until_handled(&self) {
        self.api.until_taken().await;
        // The main loop answers this request after the events before it.
        self.page("/healthz").await;
    }

    /// Waits until the exporter knows all pods and has sampled each GPU twice since, so that there
    /// are values over time.
    pub(crate) async fn until_measured(&self) {
        self.until_handled().await;
        // The exporter learns about new pods when a page is fetched.
        self.page("/metrics").await;
        self.gpus.sampled(2).await;
    }
}
