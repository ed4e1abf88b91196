//! What the agent's pages say of processes on its cards.

use std::net::{SocketAddr, TcpListener};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{SHARE, common::Way, common::World};

const MAIN: &str = "13f12d5b8a9e2b7f55f6d58a8ba5f0a3ad4d6e1f3b2c4d5e6f708192a3b4c5d6";

/// A port nobody listens on.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A process of a container, as the kernel would show it.
fn process(world: &World, pid: u32, container: &str) {
    let own = world.directory.path().join(format!("proc/{pid}"));
    std::fs::create_dir_all(&own).unwrap();
    let numbers = "S 1 7 7 0 -1 4194560 1 0 0 0 3 4 0 0 20 0 1 0 4711 1000 50";
    std::fs::write(own.join("stat"), format!("{pid} (train) {numbers}\n")).unwrap();
    std::fs::write(own.join("comm"), "train\n").unwrap();
    std::fs::write(own.join("cgroup"), format!("0::/../cri-containerd-{container}.scope\n")).unwrap();
}

async fn page(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = tokio::net::TcpStream::connect(address).await.ok()?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.starts_with("HTTP/1.0 200").then(|| body.to_owned())
}

async fn json_page(address: SocketAddr, path: &str) -> Option<Value> {
    serde_json::from_str(&page(address, path).await?).ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_are_shown_with_the_container_they_belong_to() {
    let address = free_address();
    let world = World::listening(Way::Registry, Some(address)).await;
    let pod = world.bind("train", &SHARE, Some(3));
    world.run(&pod).await.unwrap();
    world.api.set_containers("uid-train", &[("main", MAIN)]);
    process(&world, 41, MAIN);
    let line = r#"{"pid":41,"gpu":3,"memoryMiB":2048,"busyPercent":40}"#;
    std::fs::write(world.directory.path().join("gpus.processes"), line).unwrap();
    let mut shown = json!(null);
    super::common::within_reason("the process to be shown", async {
        while shown["containers"][0]["gpus"][0]["busyPercent"] != json!(40.0) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            shown = json_page(address, "/v1/use").await.unwrap_or_default();
        }
    })
    .await;
    let card = json!({
        "uuid": super::uuid(3), "index": 3, "grantedPercent": 30, "grantedMiB": 10240, "memoryUsedMiB": 2048,
        "busyPercent": 40.0,
    });
    assert_eq!(shown["containers"][0]["gpus"], json!([card]));
    assert_eq!(
        (&shown["containers"][0]["pod"], &shown["containers"][0]["uid"]),
        (&json!("train"), &json!("uid-train"))
    );
    assert_eq!(shown["gpus"][3]["memoryUsedMiB"], 2048 + 64);
    assert_eq!(shown["gpus"][0]["memoryUsedMiB"], 0);
    let usage = json_page(address, "/usage").await.unwrap();
    let device = json!({
        "id": "00000000:04:00.0", "card_idx": "3", "gpu": 40, "mem": 2048, "pids": [41], "device_mem": 81920,
    });
    assert_eq!(usage["usage"]["uid-train"]["stat"]["main"]["dev"], json!([device]));
    assert_eq!(usage["usage"]["uid-train"]["spec"]["main"], json!({ "gpu": 0.3, "mem": 10240 }));
    let graph = json_page(address, "/graph").await.unwrap();
    assert!(graph["graph"].as_str().unwrap().contains("41"), "{graph}");
}
