//! The same picture in the words of each project.

mod cadvisor;
mod dcgm;
mod exporters;
mod gpu_manager;
mod hami;
mod native;
mod processes;

use std::{collections::BTreeSet, str::FromStr};

use tessera_wire::metrics::{Format, Labels, Page};

use super::{ContainerSnapshot, GpuSnapshot, Snapshot};

/// A project whose families are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Vocabulary {
    /// Ours, in base units.
    Native,
    /// Which pod has which GPU: `pod_and_gpu_map_info`.
    Map,
    /// Memory by process: `pod_used_gpu_mem_MB`.
    PodMemory,
    /// The four families of gpu-manager.
    GpuManager,
    /// Names and labels of dcgm-exporter, by GPU.
    Dcgm,
    /// The two of them that can be told by container, also by container.
    DcgmPods,
    /// `container_accelerator_*`.
    Cadvisor,
    /// `hami_*`.
    Hami,
    /// What these were called before.
    HamiLegacy,
}

/// Every vocabulary by its name.
pub const VOCABULARIES: [(&str, Vocabulary); 9] = [
    ("native", Vocabulary::Native),
    ("map", Vocabulary::Map),
    ("pod-memory", Vocabulary::PodMemory),
    ("gpu-manager", Vocabulary::GpuManager),
    ("dcgm", Vocabulary::Dcgm),
    ("dcgm-pods", Vocabulary::DcgmPods),
    ("cadvisor", Vocabulary::Cadvisor),
    ("hami", Vocabulary::Hami),
    ("hami-legacy", Vocabulary::HamiLegacy),
];

/// The name of no vocabulary.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown metrics {0:?}; there are native, map, pod-memory, gpu-manager, dcgm, dcgm-pods, cadvisor, hami and hami-legacy"
)]
pub struct UnknownVocabulary(String);

impl FromStr for Vocabulary {
    type Err = UnknownVocabulary;

    fn from_str(text: &str) -> Result<Self, UnknownVocabulary> {
        let found = VOCABULARIES.iter().find(|(name, _)| *name == text);
        found.map(|(_, vocabulary)| *vocabulary).ok_or_else(|| UnknownVocabulary(text.to_owned()))
    }
}

/// Which families are written, and how.
#[derive(Clone, Debug)]
pub struct MetricsOptions {
    /// Whose.
    pub vocabularies: BTreeSet<Vocabulary>,
    /// Whether ours also tell of each process.
    pub processes: bool,
    /// How many processes are told apart at most; the others are summed up.
    pub most_processes: usize,
    /// Whether `pod_used_gpu_mem_MB` has the labels of its first versions.
    pub old_pod_memory_labels: bool,
    /// The label with the node's name in DCGM's families: `Hostname`, or `hostname` as its newest versions write.
    pub hostname_label: String,
    /// The version to tell of ourselves.
    pub version: &'static str,
}

impl Default for MetricsOptions {
    fn default() -> Self {
        use Vocabulary::{GpuManager, Map, Native, PodMemory};
        Self {
            vocabularies: [Native, Map, PodMemory, GpuManager].into(),
            processes: false,
            most_processes: 256,
            old_pod_memory_labels: false,
            hostname_label: "Hostname".to_owned(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// `/metrics`: all that is wanted.
#[must_use]
pub fn metrics(picture: &Snapshot, wanted: &MetricsOptions, format: Format) -> String {
    let mut page = Page::new(format);
    let wants = |vocabulary| wanted.vocabularies.contains(&vocabulary);
    if wants(Vocabulary::Native) {
        native::write(picture, wanted, &mut page);
    }
    if wants(Vocabulary::Map) {
        exporters::map(picture, &mut page);
    }
    if wants(Vocabulary::PodMemory) {
        exporters::pod_memory(picture, wanted, &mut page);
    }
    if wants(Vocabulary::GpuManager) {
        gpu_manager::write(picture, &mut page);
    }
    if wants(Vocabulary::Dcgm) || wants(Vocabulary::DcgmPods) {
        dcgm::write(picture, wanted, wants(Vocabulary::DcgmPods), &mut page);
    }
    if wants(Vocabulary::Cadvisor) {
        cadvisor::write(picture, &mut page);
    }
    if wants(Vocabulary::Hami) {
        hami::write(picture, &mut page);
    }
    if wants(Vocabulary::HamiLegacy) {
        hami::write_before(picture, &mut page);
    }
    page.finish()
}

/// `/metrics/nodes`: which pod has which GPU, in a family named after the node.
#[must_use]
pub fn metrics_of_nodes(picture: &Snapshot, format: Format) -> String {
    let mut page = Page::new(format);
    exporters::nodes(picture, &mut page);
    page.finish()
}

/// `/metric`: what gpu-manager answers there.
#[must_use]
pub fn metric(picture: &Snapshot, format: Format) -> String {
    let mut page = Page::new(format);
    gpu_manager::write(picture, &mut page);
    page.finish()
}

/// Which GPU, in our labels.
fn gpu_labels(card: &GpuSnapshot) -> Labels {
    Labels::new(&[("gpu", &card.gpu.index.to_string()), ("uuid", &card.gpu.uuid.0)])
}

/// Which container, in our labels.
fn container_labels(container: &ContainerSnapshot) -> Labels {
    Labels::new(&[
        ("namespace", &container.namespace),
        ("pod", &container.pod),
        ("container", &container.key.container),
    ])
}
