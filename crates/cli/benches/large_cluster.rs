//! Compares `kubectl inspect gpu` with `kubectl get` of the same objects: 5,000 nodes with 8 GPUs
//! each and 50,000 pods, served by the in-memory API server over real connections.
//!
//! `cargo bench -p tessera-cli` prints wall time and peak memory of each program.
//! `TESSERA_INSPECT_GPU` selects another build of the plugin, such as the shipped one.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for developers")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_sim::apiserver::ApiServer;

const NODES: usize = 5_000;
const PODS: usize = 50_000;
/// Number of runs of the plugin. kubectl runs once, because it takes long.
const ROUNDS: usize = 3;

/// Resources that one run used.
#[derive(Clone, Copy)]
struct Run {
    wall: Duration,
    /// Peak memory in KiB.
    peak: u64,
    /// Number of printed bytes.
    printed: u64,
}

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(ApiServer::start()).unwrap();
    let begun = Instant::now();
    let bytes = fill(&server);
    println!(
        "{NODES} nodes and {PODS} pods, {} MB of JSON, made in {:.1} s",
        bytes / 1_000_000,
        begun.elapsed().as_secs_f64()
    );
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "main", "users": [{ "name": "main", "user": {} }],
        "clusters": [{ "name": "main", "cluster": { "server": server.url() } }],
        "contexts": [{ "name": "main", "context": { "cluster": "main", "user": "main" } }],
    });
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    let built = PathBuf::from(env!("CARGO_BIN_EXE_kubectl-inspect-gpu"));
    let gpu = std::env::var_os("TESSERA_INSPECT_GPU").map_or(built, PathBuf::from);
    let programs: [(&str, &Path, &[&str]); 5] = [
        ("kubectl inspect gpu", &gpu, &[]),
        ("kubectl inspect gpu -o json", &gpu, &["-o", "json"]),
        ("kubectl inspect gpu what-if", &gpu, &["what-if", "aliyun.com/gpu=8"]),
        ("kubectl get nodes,pods -A", Path::new("kubectl"), &["get", "nodes,pods", "-A"]),
        (
            "kubectl get nodes,pods -A -o json",
            Path::new("kubectl"),
            &["get", "nodes,pods", "-A", "-o", "json"],
        ),
    ];
    println!("{:<36} {:>9} {:>10} {:>12}", "", "best, s", "peak, MiB", "printed, kB");
    for (name, program, arguments) in programs {
        let rounds = if program == gpu { ROUNDS } else { 1 };
        let runs: Vec<Run> = (0..rounds).filter_map(|_| run(program, arguments, &kubeconfig)).collect();
        let Some(best) = runs.iter().min_by_key(|run| run.wall) else {
            println!("{name:<36} did not run: is there a kubectl in PATH?");
            continue;
        };
        let peak = runs.iter().map(|run| run.peak).max().unwrap_or(0);
        println!(
            "{name:<36} {:>9.2} {:>10} {:>12}",
            best.wall.as_secs_f64(),
            peak / 1024,
            best.printed / 1000
        );
    }
}

/// Runs a program and polls its peak memory, which the kernel reports while the process exists.
fn run(program: &Path, arguments: &[&str], kubeconfig: &Path) -> Option<Run> {
    let begun = Instant::now();
    let mut child = Command::new(program)
        .args(arguments)
        .env("KUBECONFIG", kubeconfig)
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    let mut out = child.stdout.take()?;
    let reader = std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()).unwrap_or(0));
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    let wall = loop {
        peak = peak_of(&status).unwrap_or(peak);
        if child.try_wait().ok()?.is_some() {
            break begun.elapsed();
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    Some(Run { wall, peak, printed: reader.join().unwrap_or(0) })
}

fn peak_of(status: &str) -> Option<u64> {
    let text = std::fs::read_to_string(status).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn fill(server: &ApiServer) -> usize {
    let mut bytes = 0;
    for index in 0..NODES {
        let node = node(index);
        bytes += node.to_string().len();
        let name = node["metadata"]["name"].as_str().unwrap().to_owned();
        let status = json!({ "status": node["status"] });
        server.create("/api/v1/nodes", node).unwrap();
        server.patch(&format!("/api/v1/nodes/{name}/status"), &status).unwrap();
    }
    for index in 0..PODS {
        let pod = pod(index);
        bytes += pod.to_string().len();
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        let status = json!({ "status": pod["status"] });
        server.create("/api/v1/namespaces/default/pods", pod).unwrap();
        server.patch(&format!("/api/v1/namespaces/default/pods/{name}/status"), &status).unwrap();
    }
    bytes
}

/// Returns a node of realistic size, with images, labels and managed fields.
fn node(index: usize) -> Value {
    let name = format!("node-{index:05}");
    let gpus: Vec<Value> = (0..8)
        .map(|gpu| json!({ "uuid": format!("GPU-{index:08x}-0000-4000-8000-{gpu:012x}"), "minor": gpu, "model": "NVIDIA H200", "memoryMiB": 143_771, "numa": gpu / 4 }))
        .collect();
    let links: Vec<Value> = (0..8).flat_map(|a| (a + 1..8).map(move |b| json!([a, b, "NODE", 18]))).collect();
    let inventory = json!({ "memoryUnit": "GiB", "gpus": gpus, "links": links }).to_string();
    let images: Vec<Value> = (0..20)
        .map(|image| json!({ "names": [format!("registry.example/team/image-{image}@sha256:{image:064x}")], "sizeBytes": 123_456_789 }))
        .collect();
    let resources = json!({ "cpu": "192", "memory": "2097152Mi", "pods": "110", "aliyun.com/gpu": "8", "aliyun.com/gpu-mem": "1120" });
    json!({
        "metadata": { "name": name, "labels": labels(index), "annotations": { "tessera.dev/inventory": inventory }, "managedFields": managed() },
        "status": { "capacity": resources, "allocatable": resources, "images": images,
                    "addresses": [{ "type": "InternalIP", "address": format!("10.{}.{}.{}", index >> 16, index >> 8 & 255, index & 255) }],
                    "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status" }] },
    })
}

/// Returns a pod. Two of five pods share a GPU; the others have none.
fn pod(index: usize) -> Value {
    let node = format!("node-{:05}", index % NODES);
    let (limits, annotations) = if index / NODES % 5 < 2 {
        let gpu = index / NODES;
        let annotations = json!({ "ALIYUN_COM_GPU_MEM_IDX": gpu.to_string(), "ALIYUN_COM_GPU_MEM_POD": "20", "ALIYUN_COM_GPU_MEM_ASSIGNED": "true" });
        (json!({ "cpu": "4", "memory": "16Gi", "aliyun.com/gpu-mem": "20" }), annotations)
    } else {
        (json!({ "cpu": "500m", "memory": "1Gi" }), json!({}))
    };
    let env: Vec<Value> = (0..10)
        .map(|number| json!({ "name": format!("SETTING_{number}"), "value": "a value of usual length" }))
        .collect();
    json!({
        "metadata": { "name": format!("pod-{index:05}"), "labels": labels(index), "annotations": annotations, "managedFields": managed() },
        "spec": { "nodeName": node, "serviceAccountName": "default", "tolerations": [{ "key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300 }],
                  "volumes": [{ "name": "token", "projected": { "sources": [{ "serviceAccountToken": { "expirationSeconds": 3607, "path": "token" } }] } }],
                  "containers": [{ "name": "main", "image": "registry.example/team/image-1:v1", "env": env, "resources": { "limits": limits, "requests": limits } }] },
        "status": { "phase": "Running", "podIP": "10.244.1.1", "startTime": "2026-01-01T00:00:00Z",
                    "conditions": [{ "type": "Ready", "status": "True" }, { "type": "PodScheduled", "status": "True" }],
                    "containerStatuses": [{ "name": "main", "ready": true, "restartCount": 0, "image": "registry.example/team/image-1:v1", "imageID": format!("sha256:{index:064x}"), "containerID": format!("containerd://{index:064x}"), "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } } }] },
    })
}

fn labels(index: usize) -> Value {
    json!({ "app": format!("app-{}", index % 100), "team": "research", "example.com/zone": "zone-a", "example.com/release": "stable" })
}

fn managed() -> Value {
    let fields = json!({ "f:metadata": { "f:labels": { ".": {}, "f:app": {}, "f:team": {} } }, "f:spec": { "f:containers": { "k:{\"name\":\"main\"}": { ".": {}, "f:env": {}, "f:image": {}, "f:resources": {} } } } });
    json!([{ "manager": "controller", "operation": "Update", "apiVersion": "v1", "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": fields }])
}
