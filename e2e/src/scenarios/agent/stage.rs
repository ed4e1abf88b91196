//! A cluster with a node and its agent.

use std::{fs, path::PathBuf, process::Command, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api,
    api::{DeleteParams, ListParams, LogParams, PostParams},
};
use tessera_cluster::Binding;
use tessera_core::{
    gpu::{Gpu, Health},
    grant::ContainerGrant,
    node,
    topology::{Link, PcieLevel, Topology},
    units::{GpuIndex, MiB, MilliCpu},
};
use tessera_limits::{GrantLimits, UuidBytes, files};
use tessera_node::pod_resources::PodResources;
use tessera_wire::{
    foreign::{dialect::MemoryUnit, objects},
    tessera::{grant, inventory},
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::harness::{Cluster, Component, Harness, KUBELET_ROOT, Parts, RealNode, deploy};

/// The GPU with the UUID of the simulated driver's GPU.
pub(super) const SIMULATED: u8 = 7;
const SIMULATED_UUID: &str = "GPU-73696d75-6c61-7465-642d-6770752d3030";

pub(super) const SOON: Duration = Duration::from_secs(60);

/// Service account of the agent in `deploy/agent`.
const ACCOUNT: &str = "tessera-agent";

/// Flag that adds HAMi's dialect to those of the agent, and the devices per GPU that follow from it.
pub(in crate::scenarios) const HAMI: &str = "--dialects=hami";
const SLOTS: u16 = 10;

/// Flags of an agent that serves claims only, and of one that also serves device plugins.
const CLAIMS: &str = "--offer=dra";
const BOTH: &str = "--offer=both";

/// A control plane without kube-scheduler.
const CONTROLLERS: Parts = Parts { scheduler: false, controllers: true };

/// Address of the agent's pages inside the enclosure.
const PAGES: &str = "127.0.0.1:5678";

pub(in crate::scenarios) struct Stage {
    pub(in crate::scenarios) harness: Harness,
    pub(in crate::scenarios) agent: Component,
    pub(in crate::scenarios) node: RealNode,
    pub(in crate::scenarios) cluster: Arc<Cluster>,
    /// File that describes the simulated GPUs.
    pub(super) gpus: PathBuf,
    pub(super) grants: PathBuf,
    pub(in crate::scenarios) pod_resources: PodResources,
    /// Devices of `nvidia.com/gpu` per GPU, if the agent serves HAMi's dialect.
    pub(super) slots: Option<u16>,
    offered: Offered,
}

/// Resources of a node without pods, with their amounts.
pub(in crate::scenarios) type Offered = Vec<(&'static str, String)>;

impl Stage {
    pub(in crate::scenarios) async fn start(harness: &Harness, registration: &str) -> Result<Self> {
        Self::start_with(harness, registration, &[]).await
    }

    /// Starts the agent with more flags.
    pub(in crate::scenarios) async fn start_with(
        harness: &Harness,
        registration: &str,
        flags: &[String],
    ) -> Result<Self> {
        Self::start_beside(harness, registration, flags, Parts::NONE).await
    }

    /// Starts the agent in a cluster with kube-controller-manager.
    pub(in crate::scenarios) async fn start_with_controllers(harness: &Harness) -> Result<Self> {
        Self::start_beside(harness, "auto", &[], CONTROLLERS).await
    }

    async fn start_beside(
        harness: &Harness,
        registration: &str,
        flags: &[String],
        parts: Parts,
    ) -> Result<Self> {
        let gpus = harness.state("gpus")?.join("gpus.json");
        fs::write(&gpus, inventory::print(&eight_gpus()))?;
        let more = [format!("--gpus=simulated:{}", gpus.display()), format!("--registration={registration}")];
        Self::launch(harness, parts, gpus, offered(8, 81_920), &[flags, &more].concat()).await
    }

    /// Starts the agent with the GPUs of this host.
    pub(in crate::scenarios) async fn start_on_host(
        harness: &Harness,
        offered: Offered,
        flags: &[String],
    ) -> Result<Self> {
        let parts = Parts::NONE;
        Self::launch(harness, parts, PathBuf::new(), offered, flags).await
    }

    /// Starts an agent that serves claims only, with kube-scheduler and the controllers that claims need.
    pub(in crate::scenarios) async fn start_with_claims(harness: &Harness) -> Result<Self> {
        let gpus = harness.state("gpus")?.join("gpus.json");
        fs::write(&gpus, inventory::print(&eight_gpus()))?;
        let flags = [format!("--gpus=simulated:{}", gpus.display()), CLAIMS.to_owned()];
        Self::launch(harness, Parts::ALL, gpus, Vec::new(), &flags).await
    }

    /// The same with the GPUs of this host.
    pub(in crate::scenarios) async fn start_with_claims_on_host(
        harness: &Harness,
        flags: &[String],
    ) -> Result<Self> {
        let flags = [flags, &[CLAIMS.to_owned()]].concat();
        Self::launch(harness, Parts::ALL, PathBuf::new(), Vec::new(), &flags).await
    }

    /// Starts an agent that serves device plugins and claims, with the controllers that claims need. Pods of both kinds
    /// must come through Tessera's scheduler, which the scenario starts.
    pub(in crate::scenarios) async fn start_with_both(harness: &Harness) -> Result<Self> {
        Self::start_beside(harness, "auto", &[BOTH.to_owned()], CONTROLLERS).await
    }

    async fn launch(
        harness: &Harness,
        parts: Parts,
        gpus: PathBuf,
        mut offered: Offered,
        flags: &[String],
    ) -> Result<Self> {
        let slots = flags.iter().any(|flag| flag == HAMI).then_some(SLOTS);
        for (_, amount) in offered.iter_mut().filter(|(resource, _)| *resource == "nvidia.com/gpu") {
            *amount = (amount.parse::<u16>()? * slots.unwrap_or(1)).to_string();
        }
        let has_claims = flags.iter().any(|flag| flag == CLAIMS || flag == BOTH);
        let cluster = Cluster::start(harness, parts).await?;
        // The node copies the mounts that exist when it starts.
        let grants = harness.state("grants")?;
        let mounted = harness
            .tessera()?
            .arguments(["mount-grants", "--size-mib=64"])
            .argument(format!("--grants={}", grants.display()))
            .command()
            .output()?;
        ensure!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        let node = cluster.add_node(1).await?;
        cluster.create_shipped("agent/rbac.yaml").await?;
        cluster.create_shipped("agent/admission-policy.yaml").await?;
        cluster.create_shipped("agent/pod-policy.yaml").await?;
        let mut kubelet_root = node.kubelet_root();
        if has_claims {
            cluster.create_shipped("agent-dra/dra.yaml").await?;
            // The kubelet opens the socket of the driver at the path that the agent names.
            kubelet_root = PathBuf::from(KUBELET_ROOT);
            fs::create_dir_all(&kubelet_root)?;
            let mut mount = Command::new("mount");
            let mounted = mount.arg("--bind").arg(node.kubelet_root()).arg(&kubelet_root).output()?;
            ensure!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        }
        let kubeconfig = cluster.service_account_kubeconfig("kube-system", ACCOUNT, Some(&node.name)).await?;
        let program = harness
            .tessera()?
            .arguments([
                "agent",
                "--dialects=nvidia,gputopology,gpushare,vcuda",
                "--quiet-time=3",
                "--allow-ceiling-changes",
            ])
            .argument(format!("--node-name={}", node.name))
            .argument(format!("--kubeconfig={}", kubeconfig.display()))
            .argument(format!("--grants={}", grants.display()))
            .argument(format!("--library={}", harness.for_containers("libtessera.so")?.display()))
            .argument(format!("--kubelet-root={}", kubelet_root.display()))
            .argument(format!("--cdi-directory={}", node.cdi().display()))
            // Processes of the enclosure, which include those of the containers.
            .argument("--proc-root=/proc")
            // The scenario rights reads pages with tokens.
            .argument("--pages-access=open")
            .argument(format!("--listen={PAGES}"));
        let program = flags.iter().fold(program, |program, flag| program.argument(flag));
        let program = shipped_settings()?
            .iter()
            .fold(program, |program, (name, value)| program.environment(name, value.as_str()));
        let agent = harness.start("tessera-agent", program)?;
        let pod_resources = PodResources::at(&node.pod_resources())?;
        let stage = Self {
            harness: harness.clone(),
            agent,
            node,
            cluster: Arc::new(cluster),
            gpus,
            grants,
            pod_resources,
            slots,
            offered,
        };
        stage.wait_until_served().await?;
        harness.note("the agent offers its GPUs");
        Ok(stage)
    }

    /// Waits until the kubelet offers all resources.
    pub(in crate::scenarios) async fn wait_until_served(&self) -> Result<()> {
        for (resource, amount) in &self.offered {
            self.wait_for_allocatable(resource, amount).await?;
        }
        // The node's status may still be that of a killed agent.
        self.wait_until_ready().await
    }

    /// Waits until the kubelet has asked the agent for all resources.
    pub(in crate::scenarios) async fn wait_until_ready(&self) -> Result<()> {
        self.harness
            .wait_for("the agent to be ready", SOON, async || {
                let answer = self.page("/readyz").await?;
                ensure!(answer == "ok\n", "{answer}");
                Ok(Some(()))
            })
            .await
    }

    pub(in crate::scenarios) async fn wait_for_allocatable(
        &self,
        resource: &str,
        amount: &str,
    ) -> Result<()> {
        self.harness
            .wait_for(&format!("{amount} of {resource} to be allocatable"), SOON, async || {
                let found = self.node.allocatable(&self.cluster, resource).await?;
                ensure!(found.as_deref() == Some(amount), "the node has {found:?} of {resource}");
                Ok(Some(()))
            })
            .await
    }

    pub(in crate::scenarios) async fn node_object(&self) -> Result<Node> {
        let nodes: Api<Node> = Api::all(self.cluster.client());
        Ok(nodes.get(&self.node.name).await?)
    }

    pub(super) async fn node_publishes_its_gpus(&self) -> Result<()> {
        self.wait_for_allocatable("aliyun.com/gpu-count", "8").await?;
        let metadata = self.node_object().await?.metadata;
        let annotations = metadata.annotations.unwrap_or_default();
        let published = annotations.get(inventory::KEY).context("no inventory")?;
        ensure!(inventory::parse(published)? == eight_gpus(), "the node publishes {published}");
        let topology = annotations.get("GPU_TOPOLOGY").context("no GPU_TOPOLOGY")?;
        ensure!(topology.contains("\"GPU_PIX_0_1\":\"Single PCI switch\""), "the node publishes {topology}");
        let model = metadata.labels.unwrap_or_default().remove("gaia.tencent.com/gpu-model");
        ensure!(model.as_deref() == Some("A100-SXM4-80GB"), "the model is {model:?}");
        ensure!(self.page("/readyz").await?.starts_with("ok"), "the agent is not ready");
        let graph = self.page("/graph").await?;
        ensure!(graph.contains("ROOT:8"), "the graph is {graph}");
        self.harness.note("the node publishes its GPUs, links, model and GPU count");
        Ok(())
    }

    pub(in crate::scenarios) fn uuid(&self, gpu: u8) -> String {
        eight_gpus().gpus[usize::from(gpu)].uuid.to_string()
    }

    /// Returns the GPU with these UUID bytes.
    pub(super) fn gpu(&self, uuid: &UuidBytes) -> Option<GpuIndex> {
        let gpus = eight_gpus().gpus;
        gpus.iter().find(|gpu| UuidBytes::parse(&gpu.uuid.0).as_ref() == Some(uuid)).map(|gpu| gpu.index)
    }

    /// Returns the limits of a container, as the container reads them.
    pub(in crate::scenarios) fn limits(&self, uid: &str, container: &str) -> Result<GrantLimits> {
        let directory = self.grants.join(uid).join(container);
        let control = files::open_control(&directory).with_context(|| directory.display().to_string())?;
        control.read().map_err(|damage| anyhow!("{}: {damage}", directory.display()))
    }

    pub(in crate::scenarios) async fn create(&self, pod: Pod) -> Result<Pod> {
        Ok(self.cluster.pods().create(&PostParams::default(), &pod).await?)
    }

    pub(super) async fn create_bound(&self, pod: Pod, grants: &[(&str, &[u8])]) -> Result<()> {
        let name = self.create(pod).await?.metadata.name.unwrap_or_default();
        self.bind(&name, grants).await
    }

    /// Binds a pod like our scheduler: with the grant in the same write.
    pub(super) async fn bind(&self, name: &str, grants: &[(&str, &[u8])]) -> Result<()> {
        let pod = self.pod(name).await?;
        let claims = pod.spec.claims(MemoryUnit::GiB)?;
        let mut granted = Vec::new();
        for claim in &claims {
            let Some((_, gpus)) = grants.iter().find(|(container, _)| *container == claim.container) else {
                continue;
            };
            let gpus = gpus.iter().copied().map(GpuIndex).collect();
            granted.push(ContainerGrant {
                container: claim.container.clone(),
                role: claim.role,
                holds: core_node()?.holds(claim.request, gpus),
            });
        }
        let annotations = grant::annotations(&pod.spec, &granted, &core_node()?, MemoryUnit::GiB, 1)?;
        let binding = Binding {
            namespace: pod.metadata.namespace,
            pod: name.into(),
            uid: pod.metadata.uid,
            node: self.node.name.clone(),
            annotations,
        };
        Ok(binding.send(&self.cluster.client()).await?)
    }

    /// Returns a pod as the agent reads it.
    pub(in crate::scenarios) async fn pod(&self, name: &str) -> Result<objects::Pod> {
        as_agent_reads(&self.cluster.pods().get(name).await?)
    }

    pub(super) async fn all_pods(&self) -> Result<Vec<objects::Pod>> {
        let pods = self.cluster.pods().list(&ListParams::default()).await?;
        pods.items.iter().map(as_agent_reads).collect()
    }

    /// Waits until a container's log is complete and returns it.
    pub(in crate::scenarios) async fn log(&self, pod: &str, container: &str) -> Result<String> {
        let parameters = LogParams { container: Some(container.into()), ..LogParams::default() };
        self.harness
            .wait_for(&format!("the log of {pod}"), SOON, async || {
                let log = self.cluster.pods().logs(pod, &parameters).await?;
                Ok(log.ends_with("end\n").then_some(log))
            })
            .await
    }

    /// Waits until the pod's annotations confirm its GPUs.
    pub(super) async fn wait_until_confirmed(&self, name: &str) -> Result<()> {
        self.harness
            .wait_for(&format!("the annotations of {name} to confirm its GPUs"), SOON, async || {
                let pod = self.pod(name).await?;
                let annotations = &pod.metadata.annotations;
                let handed = grant::assigned(&pod.spec, annotations, MemoryUnit::GiB)?;
                let all = annotations.contains_key(grant::KEY)
                    && handed.iter().all(|(key, value)| annotations.get(key) == Some(value));
                ensure!(all, "the annotations are {annotations:?}");
                Ok(Some(()))
            })
            .await
    }

    /// Waits until the pod's annotations confirm these GPUs for a container.
    pub(super) async fn wait_for_annotations(&self, name: &str, container: &str, gpus: &[u8]) -> Result<()> {
        self.wait_until_confirmed(name).await?;
        let pod = self.pod(name).await?;
        let in_annotations =
            grant::parse(&pod.spec, &pod.metadata.annotations, &core_node()?, MemoryUnit::GiB)?;
        let in_annotations = in_annotations.unwrap_or_default();
        let in_annotations =
            in_annotations.iter().find(|grant| grant.container == container).context("no grant")?;
        let in_annotations: Vec<u8> = in_annotations.holds.iter().map(|(gpu, _)| gpu.0).collect();
        ensure!(in_annotations == gpus, "{name}: the annotations name {in_annotations:?}, expected {gpus:?}");
        Ok(())
    }

    /// Waits until the pod's annotations agree with the kubelet.
    pub(in crate::scenarios) async fn wait_for_kubelet_agreement(&self, name: &str) -> Result<()> {
        self.harness
            .wait_for(&format!("the annotations of {name} to agree with the kubelet"), SOON, async || {
                super::allocations::pod_agrees(self, &self.pod(name).await?).await?;
                Ok(Some(()))
            })
            .await
    }

    pub(in crate::scenarios) async fn delete(&self, name: &str) -> Result<()> {
        self.cluster.pods().delete(name, &DeleteParams::default()).await?;
        self.harness
            .wait_for(&format!("{name} to be gone"), SOON, async || {
                Ok(self.cluster.pods().get_opt(name).await?.is_none().then_some(()))
            })
            .await
    }

    pub(in crate::scenarios) async fn delete_all(&self) -> Result<()> {
        let everything = ListParams::default();
        self.cluster.pods().delete_collection(&DeleteParams::default(), &everything).await?;
        self.harness
            .wait_for("all pods to be gone", SOON, async || {
                Ok(self.cluster.pods().list(&everything).await?.items.is_empty().then_some(()))
            })
            .await?;
        // A pod that bypasses kube-scheduler must not come before the kubelet knows the released devices.
        self.wait_until_served().await
    }

    /// Returns a page of the agent.
    pub(in crate::scenarios) async fn page(&self, path: &str) -> Result<String> {
        let (head, body) = fetch(PAGES, path).await?;
        ensure!(head.contains(" 200 "), "{path} answers {head:?} {body:?}");
        Ok(body)
    }
}

/// Returns what a node offers with GPUs of so much memory each.
pub(in crate::scenarios) fn offered(gpu_count: u64, memory_mib: u64) -> Offered {
    let amounts = [
        ("nvidia.com/gpu", gpu_count),
        ("aliyun.com/gpu", gpu_count),
        ("aliyun.com/gpu-mem", gpu_count * (memory_mib / 1024)),
        ("tencent.com/vcuda-core", gpu_count * 100),
        ("tencent.com/vcuda-memory", gpu_count * memory_mib / 256),
    ];
    amounts.map(|(resource, amount)| (resource, amount.to_string())).to_vec()
}

/// Returns head and body of an answer.
pub(super) async fn fetch(address: &str, path: &str) -> Result<(String, String)> {
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    Ok((head.to_owned(), body.to_owned()))
}

/// Returns the variables of `deploy/agent/agent.yaml` that configure the memory allocator.
fn shipped_settings() -> Result<Vec<(String, String)>> {
    let manifest = fs::read_to_string(deploy().join("agent/agent.yaml"))?;
    let variable = |line: &str| {
        let (name, value) = line.trim().strip_prefix("- { name: ")?.split_once(", value: \"")?;
        name.starts_with("MALLOC_").then(|| (name.to_owned(), value.trim_end_matches("\" }").to_owned()))
    };
    let settings: Vec<_> = manifest.lines().filter_map(variable).collect();
    ensure!(!settings.is_empty(), "deploy/agent sets no variables of the memory allocator");
    Ok(settings)
}

fn as_agent_reads(pod: &Pod) -> Result<objects::Pod> {
    Ok(serde_json::from_value(serde_json::to_value(pod)?)?)
}

/// Returns eight GPUs of 80 GiB on two sockets, in pairs behind switches.
pub(in crate::scenarios) fn eight_gpus() -> inventory::Inventory {
    let numa: Vec<Option<u16>> = (0..8).map(|gpu| Some(gpu / 4)).collect();
    let topology = Topology::from_pairs(8, |a, b| {
        Link::pcie(match (a.0 / 2 == b.0 / 2, a.0 / 4 == b.0 / 4) {
            (true, _) => PcieLevel::SingleSwitch,
            (false, true) => PcieLevel::HostBridge,
            (false, false) => PcieLevel::System,
        })
    });
    let gpu = |index: u8| Gpu {
        index: GpuIndex(index),
        uuid: match index {
            SIMULATED => SIMULATED_UUID.into(),
            _ => format!("GPU-{index:x}a11ce5{index:x}-1d5c-4f3a-9b1e-0242ac1200{index:02x}").as_str().into(),
        },
        minor: u32::from(7 - index),
        model: "NVIDIA A100-SXM4-80GB".into(),
        memory: MiB(81_920),
        numa: numa[usize::from(index)],
        health: Health::Healthy,
    };
    inventory::Inventory {
        gpus: (0..8).map(gpu).collect(),
        topology: topology.with_numa(&numa),
        memory_unit: MemoryUnit::GiB,
        nvidia_slots: None,
        whole_gpus_only: false,
        withheld: Vec::new(),
    }
}

pub(super) fn core_node() -> Result<node::Node> {
    let inventory::Inventory { gpus, topology, .. } = eight_gpus();
    Ok(node::Node::new("node-1".into(), gpus, topology, MilliCpu::ZERO, MiB::ZERO)?)
}
