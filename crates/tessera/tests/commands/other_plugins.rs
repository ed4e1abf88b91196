//! The agent on a node where another device plugin serves `nvidia.com/gpu`, and after a restart of its own. The kubelet and
//! the API server are embedded.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tessera_node::device_plugin::{
    Allocation, DevicePlugin, PluginDevice, PluginRefusal, PreferenceRequest, RegistrationMode, ServedPlugin,
    serve,
};
use tessera_sim::apiserver::ApiServer;
use tessera_sim::kubelet::node::{SimulatedNode, SimulatedNodeSettings};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::command;

const WARNING: &str = "another device plugin of this node serves this resource";

/// Time after which a test gives up. Far longer than anything takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A device plugin with two devices, like NVIDIA's.
struct OtherPlugin(watch::Sender<Vec<PluginDevice>>);

impl OtherPlugin {
    fn new() -> Self {
        let device = |id: &str| PluginDevice { id: id.into(), healthy: true, numa_node: None };
        Self(watch::Sender::new(["GPU-x", "GPU-y"].map(device).to_vec()))
    }
}

impl DevicePlugin for OtherPlugin {
    fn devices(&self) -> watch::Receiver<Vec<PluginDevice>> {
        self.0.subscribe()
    }

    async fn prefer(&self, wish: PreferenceRequest) -> Result<Vec<String>, PluginRefusal> {
        Ok(wish.available.into_iter().take(wish.count).collect())
    }

    async fn allocate(&self, _: Vec<String>) -> Result<Allocation, PluginRefusal> {
        Ok(Allocation::default())
    }

    async fn pre_start(&self, _: Vec<String>) -> Result<(), PluginRefusal> {
        Ok(())
    }
}

/// A node without an agent.
struct Host {
    folder: tempfile::TempDir,
    node: SimulatedNode,
    runtime: Runtime,
}

impl Host {
    fn new() -> Self {
        let (folder, runtime) = (tempfile::tempdir().unwrap(), Runtime::new().unwrap());
        let _entered = runtime.enter();
        let api = Arc::new(runtime.block_on(ApiServer::start()).unwrap());
        std::fs::write(folder.path().join("kubeconfig"), api.kubeconfig()).unwrap();
        let settings = SimulatedNodeSettings {
            name: "n".into(),
            labels: [].into(),
            root: folder.path().join("kubelet"),
            gpu_file: folder.path().join("gpus"),
            gpus: Vec::new(),
            proc_root: folder.path().join("proc"),
            seed: 1,
        };
        let node = SimulatedNode::start(api, settings).unwrap();
        Self { folder, node, runtime }
    }

    /// Starts another plugin for `nvidia.com/gpu`, which calls the kubelet as NVIDIA's does.
    fn start_other_plugin(&self) {
        let served = ServedPlugin {
            plugin: Arc::new(OtherPlugin::new()),
            resource: "nvidia.com/gpu".into(),
            registration: RegistrationMode::KubeletSocket(self.folder.path().join("kubelet/device-plugins")),
        };
        self.runtime.spawn(serve(served, CancellationToken::new()));
        self.until_allocatable("nvidia.com/gpu", 2);
    }

    fn until_allocatable(&self, resource: &str, count: usize) {
        until(&format!("{count} of {resource}"), || self.node.kubelet().allocatable(resource) == count);
    }
}

/// A running agent with what it has logged. Dropping it kills the program.
struct Agent {
    process: Child,
    log: Arc<Mutex<String>>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Agent {
    fn start(folder: &Path) -> Self {
        let mut program = command(&["agent", "--node-name", "n", "--gpus", "simulated:dgx1.txt"]);
        program.args(["--listen", "off", "--probes-listen", "127.0.0.1:0"]);
        program.arg("--kubeconfig").arg(folder.join("kubeconfig")).arg("--grants").arg(folder.join("grants"));
        program.arg("--kubelet-root").arg(folder.join("kubelet"));
        let mut process = program.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, logged) = (BufReader::new(process.stderr.take().unwrap()).lines(), Arc::clone(&log));
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                *logged.lock().unwrap() += &(line + "\n");
            }
        });
        Self { process, log }
    }

    fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Waits until the agent can serve pods.
    fn until_ready(&self) {
        let is_ready = || {
            let log = self.log();
            let address =
                log.lines().find(|line| line.contains("answering probes"))?.split_once("http://")?.1;
            let mut stream = TcpStream::connect(address.split('/').next()?).ok()?;
            write!(stream, "GET /readyz HTTP/1.0\r\n\r\n").ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            answer.starts_with("HTTP/1.0 200").then_some(())
        };
        until("the agent to be ready", || is_ready().is_some());
    }
}

fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is_true() {
        assert!(Instant::now() < end, "waited for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_resource_of_another_plugin_is_left_to_it() {
    let host = Host::new();
    host.start_other_plugin();
    let agent = Agent::start(host.folder.path());
    agent.until_ready();
    let log = agent.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains(WARNING)).collect();
    assert_eq!(warnings.len(), 1, "{log}");
    assert!(warnings[0].contains("resource=\"nvidia.com/gpu\"") && warnings[0].contains("WARN"), "{log}");
    for (resource, count) in [("aliyun.com/gpu", 8), ("tencent.com/vcuda-core", 800), ("nvidia.com/gpu", 2)] {
        host.until_allocatable(resource, count);
    }
}

/// The devices of the agent before this one are no other plugin's, however it ended.
#[test]
fn the_own_devices_are_served_again_after_a_restart() {
    let host = Host::new();
    for _ in 0..2 {
        let agent = Agent::start(host.folder.path());
        agent.until_ready();
        assert!(!agent.log().contains(WARNING), "{}", agent.log());
        host.until_allocatable("nvidia.com/gpu", 8);
        host.until_allocatable("aliyun.com/gpu", 8);
        // The next agent starts at once after this one was killed.
    }
}
