//! What is compared: a stock kube-scheduler, the shipped configuration, and any other extender whose
//! configuration is given as files.

use std::{fmt, fs, net::SocketAddr, path::PathBuf};

use anyhow::{Context, Result};
use axum::http::Uri;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tessera_wire::foreign::dialect::hami;
use tokio::net::TcpStream;

use super::super::{
    SOON, Site,
    pods::{GPU_MEMORY_MIB, asking, gpu_node, share, split_into_slots},
};
use crate::harness::{Component, Program};

/// A quarter of a GPU.
const SHARE_PERCENT: u64 = 25;

/// GPUs of a node.
const GPUS: u64 = 8;

/// Devices of `nvidia.com/gpu` for each GPU.
const SLOTS: u64 = 10;

/// Name of the profile for GPU pods in the shipped configuration.
const PROFILE: &str = "tessera";

/// A configuration of kube-scheduler with its extender.
pub(super) struct Contender {
    pub(super) name: String,
    extender: Extender,
}

enum Extender {
    None,
    /// Ours, as shipped in `deploy/`.
    Shipped,
    /// The same, with pods that use the profile `tessera` of the shipped configuration.
    ShippedProfile,
    /// The same as shipped, with pods in HAMi's resources.
    ShippedHami,
    Peer(Box<Peer>),
}

/// Another extender, given as a folder of files.
struct Peer {
    /// A `KubeSchedulerConfiguration`.
    configuration: Value,
    /// Template of the pods that request GPUs.
    pod: Pod,
    /// Merge patch of the nodes, in which `NODE` stands for the name. Empty if the file is missing.
    node: String,
    /// Program that serves the extender. Absent if kube-scheduler has none.
    start: Option<PathBuf>,
}

/// Kind of pods that a measurement schedules.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PodKind {
    Gpu,
    /// Pods without GPUs, for which kube-scheduler does not call the extender.
    Plain,
}

/// The programs of one measurement.
pub(super) struct Running {
    pub(super) scheduler: Component,
    pub(super) extender: Option<Component>,
    /// Address of our extender, which counts its calls.
    pub(super) counts_calls_at: Option<SocketAddr>,
}

impl Contender {
    /// Returns the stock kube-scheduler first, then the shipped configuration, then the folder in the
    /// environment variable `TESSERA_E2E_PEER`.
    pub(super) fn all() -> Result<Vec<Self>> {
        let ours = [
            ("stock", Extender::None),
            ("tessera", Extender::Shipped),
            ("tessera-profile", Extender::ShippedProfile),
            ("tessera-hami", Extender::ShippedHami),
        ];
        let mut all: Vec<Self> =
            ours.into_iter().map(|(name, extender)| Self { name: name.into(), extender }).collect();
        if let Some(folder) = std::env::var_os("TESSERA_E2E_PEER").map(PathBuf::from) {
            let name = folder.file_name().context("TESSERA_E2E_PEER names no folder")?;
            let name = name.to_string_lossy().to_lowercase();
            all.push(Self { name, extender: Extender::Peer(Box::new(Peer::read(&folder)?)) });
        }
        Ok(all)
    }

    pub(super) fn is_shipped(&self) -> bool {
        matches!(self.extender, Extender::Shipped | Extender::ShippedProfile | Extender::ShippedHami)
    }

    /// Returns whether a measurement of these pods tells something that others do not.
    pub(super) fn is_measured(&self, kind: PodKind) -> bool {
        kind == PodKind::Gpu || !matches!(self.extender, Extender::ShippedProfile | Extender::ShippedHami)
    }

    /// Returns the pod with this name.
    pub(super) fn pod(&self, name: &str, kind: PodKind) -> Pod {
        match (&self.extender, kind) {
            (_, PodKind::Plain) => asking(name, &[("cpu", "100m"), ("memory", "64Mi")]),
            (Extender::Peer(peer), PodKind::Gpu) => {
                let mut pod = peer.pod.clone();
                pod.metadata.name = Some(name.to_owned());
                pod.metadata.namespace = None;
                pod
            }
            (Extender::ShippedProfile, PodKind::Gpu) => {
                let mut pod = share(name, SHARE_PERCENT);
                pod.spec.get_or_insert_default().scheduler_name = Some(PROFILE.to_owned());
                pod
            }
            (Extender::ShippedHami, PodKind::Gpu) => {
                let memory = (SHARE_PERCENT * GPU_MEMORY_MIB / 100).to_string();
                let cores = SHARE_PERCENT.to_string();
                asking(name, &[(hami::COUNT, "1"), (hami::MEMORY, &memory), (hami::CORES, &cores)])
            }
            (_, PodKind::Gpu) => share(name, SHARE_PERCENT),
        }
    }

    /// Starts the extender and then kube-scheduler.
    pub(super) async fn start(&self, site: &Site, name: &str) -> Result<Running> {
        Ok(match &self.extender {
            Extender::None => {
                let scheduler = site.cluster.start_scheduler(name, json!({}))?;
                Running { scheduler, extender: None, counts_calls_at: None }
            }
            Extender::Shipped | Extender::ShippedProfile | Extender::ShippedHami => {
                let replica = site.replica(&format!("{name}-extender"), None)?;
                site.ready(&replica).await?;
                let scheduler = site.shipped_kube_scheduler(name, replica.addresses.verbs).await?;
                let counts_calls_at = Some(replica.addresses.pages);
                Running { scheduler, extender: Some(replica.component), counts_calls_at }
            }
            Extender::Peer(peer) => {
                let extender = peer.start_extender(site, name).await?;
                let scheduler = site.cluster.start_scheduler(name, peer.configuration.clone())?;
                Running { scheduler, extender, counts_calls_at: None }
            }
        })
    }
}

impl Peer {
    fn read(folder: &std::path::Path) -> Result<Self> {
        let start = Some(folder.join("start")).filter(|start| start.exists());
        let node = fs::read_to_string(folder.join("node.yaml")).unwrap_or_default();
        Ok(Self {
            configuration: yaml(&read(folder, "kube-scheduler.yaml")?)?,
            pod: yaml(&read(folder, "pod.yaml")?)?,
            node,
            start,
        })
    }

    /// Starts the program and waits until its port in the configuration accepts connections.
    async fn start_extender(&self, site: &Site, name: &str) -> Result<Option<Component>> {
        let Some(start) = &self.start else { return Ok(None) };
        let kubeconfig = site.cluster.kubeconfig("admin", "system:masters")?;
        let program = Program::new(start).environment("KUBECONFIG", kubeconfig);
        let extender = site.harness.start(&format!("{name}-extender"), program)?;
        let url = self.configuration["extenders"][0]["urlPrefix"].as_str().unwrap_or_default();
        let address: Uri = url.parse().with_context(|| format!("kube-scheduler.yaml: urlPrefix {url:?}"))?;
        let address =
            address.authority().context("kube-scheduler.yaml: urlPrefix has no address")?.to_string();
        site.harness
            .wait_for(&format!("{name} to listen at {address}"), SOON, async || {
                Ok(Some(TcpStream::connect(&address).await?))
            })
            .await?;
        Ok(Some(extender))
    }
}

/// Returns a node for all contenders.
pub(super) fn node(number: usize, contenders: &[Contender]) -> Result<Node> {
    let name = format!("node-{number:04}");
    let mut node = serde_json::to_value(split_into_slots(gpu_node(&name, GPUS, "GiB"), GPUS, SLOTS)?)?;
    for contender in contenders {
        if let Extender::Peer(peer) = &contender.extender
            && !peer.node.is_empty()
        {
            merge(&mut node, yaml(&peer.node.replace("NODE", &name))?);
        }
    }
    Ok(serde_json::from_value(node)?)
}

/// Applies a merge patch that deletes nothing.
fn merge(target: &mut Value, patch: Value) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(target.entry(key).or_insert(Value::Null), value);
            }
        }
        (target, patch) => *target = patch,
    }
}

fn read(folder: &std::path::Path, file: &str) -> Result<String> {
    let path = folder.join(file);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

fn yaml<T: DeserializeOwned>(text: &str) -> Result<T> {
    Ok(serde_saphyr::from_str(text)?)
}

impl PodKind {
    pub(super) const ALL: [Self; 2] = [Self::Gpu, Self::Plain];
}

impl fmt::Display for PodKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpu => "gpu",
            Self::Plain => "plain",
        })
    }
}
