//! One node: an embedded kubelet, simulated GPUs and the real agent.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tessera_agent::controller::{
    AgentSettings, InstalledLibrary, Isolation, MigStrategy, OnEscape, WithoutLibrary,
};
use tessera_agent::shell::{self, PagesAccess, PagesPort, Ports, RunError, Sampling};
use tessera_cluster::node_agent::NodeClient;
use tessera_core::gpu::Gpu;
use tessera_core::placement::Policy;
use tessera_core::units::NodeName;
use tessera_limits::limits::ShareMeaning;
use tessera_node::device_plugin::RegistrationMode;
use tessera_node::gpus::{Simulated, describe};
use tessera_sim::apiserver::ApiServer;
use tessera_sim::kubelet::node::{SimulatedNode, SimulatedNodeSettings};
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit};
use tessera_wire::kubelet::container_response::InjectionSettings;
use tessera_wire::tessera::agent_address::AgentAddress;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::DemoError;
use crate::machine_model::MachineModel;

/// A node of the demo.
pub(crate) struct DemoNode {
    pub(crate) name: String,
    pub(crate) gpus: Vec<Gpu>,
    /// URL of the agent.
    pub(crate) agent_url: String,
    pub(crate) node: SimulatedNode,
    description: std::path::PathBuf,
    agent: JoinHandle<Result<(), RunError>>,
    stop: CancellationToken,
}

/// Node label by which pods choose between [`SHARED`] and [`RESERVED`]. The quota calls it a pool.
pub(crate) const POOL: &str = "pool";
pub(crate) const SHARED: &str = "shared";
pub(crate) const RESERVED: &str = "reserved";

/// Node label by which the quota distinguishes GPU models.
pub(crate) const MODEL: &str = "gaia.tencent.com/gpu-model";

impl DemoNode {
    pub(crate) async fn start(
        api: &Arc<ApiServer>,
        client: tessera_cluster::Client,
        directory: &Path,
        machine_model: &MachineModel,
        number: usize,
        pool: &str,
    ) -> Result<Self, DemoError> {
        let name = format!("node-{number:02}");
        let directory = directory.join(number.to_string());
        std::fs::create_dir_all(&directory)
            .map_err(DemoError::io(format!("make {}", directory.display())))?;
        let (description, proc_root) = (directory.join("gpus"), directory.join("proc"));
        let gpus = machine_model.gpus(number);
        describe(&description, gpus.clone(), machine_model.topology.clone())
            .map_err(DemoError::io(format!("write {}", description.display())))?;
        let label = machine_model.model.replace(' ', "-");
        let root = directory.join("kubelet");
        let settings = SimulatedNodeSettings {
            name: name.clone(),
            labels: BTreeMap::from([(POOL.to_owned(), pool.to_owned()), (MODEL.to_owned(), label)]),
            root: root.clone(),
            gpu_file: description.clone(),
            gpus: gpus.clone(),
            proc_root: proc_root.clone(),
            seed: number as u64,
        };
        let node = SimulatedNode::start(Arc::clone(api), settings)
            .map_err(DemoError::io(format!("start the kubelet of {name}")))?;
        let no_port = || DemoError::io(format!("listen for the agent of {name}"));
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(no_port())?;
        let agent_url = format!("http://{}", listener.local_addr().map_err(no_port())?);
        let settings = agent_settings(&name, &root, &directory.join("grants"), &agent_url);
        let ports = Ports {
            gpus: Arc::new(Simulated::new(description.clone())),
            watch_health: true,
            cluster: Arc::new(NodeClient::new(client, name.clone())),
            pod_resources: root.join("pod-resources/kubelet.sock"),
            // The demo is on one host, and its API server has no users.
            pages: Some(PagesPort { listener, access: PagesAccess::Open }),
            probes: None,
            display_socket: None,
            sampling: Sampling { proc_root, ..Sampling::default() },
            leave: CancellationToken::new(),
            on_start: Box::new(|| ()),
        };
        let stop = CancellationToken::new();
        let agent = tokio::spawn(shell::run(settings, ports, stop.clone()));
        Ok(Self { name, gpus, agent_url, node, description, agent, stop })
    }

    /// Verifies that the sockets of all nodes can be created in a directory. A plugin whose socket
    /// cannot be created would retry forever.
    pub(crate) fn check_sockets(directory: &Path, nodes: usize) -> Result<(), DemoError> {
        let longest = "kubelet/plugins_registry/tencent.com-vcuda-memory.sock";
        let longest = directory.join(nodes.to_string()).join(longest);
        let named = std::os::unix::net::SocketAddr::from_pathname(longest);
        named.map(|_| ()).map_err(|_| DemoError::DeepDirectory(directory.to_owned()))
    }

    /// Injects an event into a GPU, such as `xid 79` or `back`.
    pub(crate) fn incident(&self, gpu: u8, what: &str) -> std::io::Result<()> {
        use std::io::Write as _;
        let mut path = self.description.clone().into_os_string();
        path.push(".events");
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
        writeln!(file, "{gpu} {what}")
    }

    /// Returns whether the agent has ended by itself.
    pub(crate) fn has_died(&self) -> bool {
        self.agent.is_finished()
    }

    /// Stops the node. Returns its name and the error if the agent had ended by itself.
    pub(crate) async fn stop(self) -> Option<(String, RunError)> {
        self.stop.cancel();
        let ended = self.agent.await;
        self.node.stop().await;
        ended.ok()?.err().map(|why| (self.name, why))
    }
}

/// Returns the settings of an agent that serves every dialect and registers with the kubelet in
/// `kubelet`.
fn agent_settings(name: &str, kubelet: &Path, grants: &Path, url: &str) -> AgentSettings {
    AgentSettings {
        node: NodeName(name.to_owned()),
        dialects: vec![Dialect::Nvidia, Dialect::Gputopology, Dialect::Gpushare, Dialect::Vcuda],
        memory_unit: MemoryUnit::GiB,
        left_to_others: Vec::new(),
        nvidia_slots: 10,
        policy: Policy::Tessera(Arc::default()),
        injection: InjectionSettings::default(),
        registration: RegistrationMode::PluginsRegistry(kubelet.join("plugins_registry")),
        claims: None,
        isolation: Isolation {
            // No container loads the library here, so it counts as installed.
            library: Ok(InstalledLibrary {
                folder: grants.join(".library").display().to_string(),
                by_cdi: false,
            }),
            without_library: WithoutLibrary::Refuse,
            serve_shares: true,
            allow_opt_out: false,
            allow_ceiling_changes: false,
            lend_memory: true,
            meaning: ShareMeaning::Time,
            on_escape: OnEscape::Report,
        },
        grants: grants.display().to_string(),
        instance_type: None,
        labels: BTreeMap::new(),
        quiet_time: Duration::from_secs(10),
        ignored_xids: std::collections::BTreeSet::new(),
        ignore_pending_reset: false,
        withdraw_held: true,
        mig_strategy: MigStrategy::None,
        advertise: Some(AgentAddress { url: url.to_owned(), certificate: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_too_deep_for_sockets_is_rejected_with_a_remedy() {
        let check = |directory: &str| DemoNode::check_sockets(Path::new(directory), 50);
        assert!(check("/tmp/tessera-demo-123456").is_ok());
        let deep = format!("/tmp/{}", "deep/".repeat(10));
        let error = check(&deep).unwrap_err().to_string();
        assert!(error.contains(&deep) && error.contains("set TMPDIR"), "{error}");
    }
}
