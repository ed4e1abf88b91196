//! A test cluster, and helpers that run the plugins against it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;
use tessera_sim::apiserver::ApiServer;
use tokio::runtime::Runtime;

pub(crate) const GPU: &str = env!("CARGO_BIN_EXE_kubectl-inspect-gpu");
pub(crate) const SHARE: &str = env!("CARGO_BIN_EXE_kubectl-inspect-gpushare");

/// An API server with a kubeconfig for it.
pub(crate) struct Stage {
    pub(crate) server: ApiServer,
    pub(crate) runtime: Runtime,
    pub(crate) folder: TempDir,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let runtime = Runtime::new().unwrap();
        let server = runtime.block_on(ApiServer::start()).unwrap();
        let folder = TempDir::new().unwrap();
        let stage = Self { server, runtime, folder };
        std::fs::write(stage.kubeconfig(), kubeconfig(&stage.server.url())).unwrap();
        stage
    }

    /// Creates a stage with these nodes and pods.
    pub(crate) fn of(nodes: &[Value], pods: &[Value]) -> Self {
        let stage = Self::new();
        nodes.iter().for_each(|node| stage.node(node));
        pods.iter().for_each(|pod| stage.pod(pod));
        stage
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    pub(crate) fn node(&self, node: &Value) {
        self.server.create("/api/v1/nodes", node.clone()).unwrap();
        let name = node["metadata"]["name"].as_str().unwrap();
        let status = json!({ "status": node["status"] });
        self.server.patch(&format!("/api/v1/nodes/{name}/status"), &status).unwrap();
    }

    pub(crate) fn pod(&self, pod: &Value) {
        let namespace = pod["metadata"]["namespace"].as_str().unwrap();
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        self.server.create(&pods, pod.clone()).unwrap();
        let name = pod["metadata"]["name"].as_str().unwrap();
        let status = json!({ "status": pod["status"] });
        self.server.patch(&format!("{pods}/{name}/status"), &status).unwrap();
    }

    /// Creates the lease of a scheduler with its published rules.
    pub(crate) fn scheduler(&self, annotations: &Value) {
        let lease = json!({
            "metadata": { "name": "tessera-scheduler", "annotations": annotations },
            "spec": { "holderIdentity": "somebody" },
        });
        self.server.create("/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", lease).unwrap();
    }

    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> Output {
        self.command(program).args(arguments).output().unwrap()
    }

    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("KUBECONFIG", self.kubeconfig()).env_remove("NO_COLOR").env("HOME", self.folder.path());
        command
    }

    /// Runs a command that must succeed and returns its standard output.
    pub(crate) fn text(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.run(program, arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Compares the output of a command with a golden file. `BLESS=1` writes the file.
    pub(crate) fn golden(&self, name: &str, program: &str, arguments: &[&str]) {
        golden(name, &self.text(program, arguments));
    }
}

pub(crate) fn golden(name: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&file, text).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        text == expected,
        "{name} differs (BLESS=1 rewrites it)\n--- expected\n{expected}\n--- found\n{text}"
    );
}

pub(crate) fn kubeconfig(url: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "main",
        "clusters": [{ "name": "main", "cluster": { "server": url } }],
        "users": [{ "name": "main", "user": {} }],
        "contexts": [
            { "name": "main", "context": { "cluster": "main", "user": "main" } },
            { "name": "team", "context": { "cluster": "main", "user": "main", "namespace": "team" } },
        ],
    })
    .to_string()
}

impl Stage {
    /// Begins the deletion of a pod like `kubectl delete`. The kubelet has not ended the pod yet.
    pub(crate) fn end_gently(&self, namespace: &str, name: &str) {
        let url = self.server.url();
        let address = url.strip_prefix("http://").unwrap();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        let request = format!(
            "DELETE {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        );
        std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
        let mut answer = String::new();
        std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}
