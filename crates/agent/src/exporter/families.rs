//! Metric families: one snapshot in the names of each supported project.

mod cadvisor;
mod dcgm;
mod exporters;
mod gpu_manager;
mod hami;
mod native;
mod processes;

use std::{collections::BTreeSet, str::FromStr};

use tessera_wire::metrics::{Format, Labels, MetricsPage};

use super::{ContainerSnapshot, GpuSnapshot, Snapshot};

/// A project whose metric names are supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Vocabulary {
    /// Tessera's own families, in base units.
    Native,
    /// Pods with their GPUs: `pod_and_gpu_map_info`.
    Map,
    /// Memory by process: `pod_used_gpu_mem_MB`.
    PodMemory,
    /// The four families of gpu-manager.
    GpuManager,
    /// Families of dcgm-exporter, by GPU.
    Dcgm,
    /// Families of dcgm-exporter, and the two that can be measured by container also by container.
    DcgmPods,
    /// Families `container_accelerator_*` of cAdvisor.
    Cadvisor,
    /// Families `hami_*` of HAMi.
    Hami,
    /// Families of HAMi under their earlier names.
    HamiLegacy,
}

/// All vocabularies by their name on the command line.
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

/// A name that is not in [`VOCABULARIES`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown metrics {0:?}; choose from native, map, pod-memory, gpu-manager, dcgm, dcgm-pods, cadvisor, hami and hami-legacy"
)]
pub struct UnknownVocabulary(String);

impl FromStr for Vocabulary {
    type Err = UnknownVocabulary;

    fn from_str(text: &str) -> Result<Self, UnknownVocabulary> {
        let found = VOCABULARIES.iter().find(|(name, _)| *name == text);
        found.map(|(_, vocabulary)| *vocabulary).ok_or_else(|| UnknownVocabulary(text.to_owned()))
    }
}

/// Labels of `pod_used_gpu_mem_MB`. Its project renamed them between its first version, which its
/// documentation describes, and its last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodMemoryLabels {
    /// All labels of both versions, so that queries for either one work.
    #[default]
    Both,
    /// `gpu_uuid`, `pod_name`, `pod_namespace`.
    Old,
    /// `hostIP`, `UUID`, `gpu`, `pod`, `namespace`.
    New,
}

/// Selects the families of `/metrics` and their form.
#[derive(Clone, Debug)]
pub struct MetricsOptions {
    /// Projects whose families are written.
    pub vocabularies: BTreeSet<Vocabulary>,
    /// True to add native series for each process.
    pub processes: bool,
    /// Largest number of processes with series of their own. The others are summed up.
    pub max_processes: usize,
    /// Labels of `pod_used_gpu_mem_MB`.
    pub pod_memory_labels: PodMemoryLabels,
    /// Label with the node's name in DCGM's families: `Hostname`, or `hostname` as in its latest versions.
    pub hostname_label: String,
    /// Version reported in `tessera_agent_build_info`.
    pub version: &'static str,
}

impl Default for MetricsOptions {
    fn default() -> Self {
        use Vocabulary::{GpuManager, Map, Native, PodMemory};
        Self {
            vocabularies: [Native, Map, PodMemory, GpuManager].into(),
            processes: false,
            max_processes: 256,
            pod_memory_labels: PodMemoryLabels::default(),
            hostname_label: "Hostname".to_owned(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// Returns the page `/metrics` with all selected families.
#[must_use]
pub fn metrics(snapshot: &Snapshot, options: &MetricsOptions, format: Format) -> String {
    let mut page = MetricsPage::new(format);
    let wants = |vocabulary| options.vocabularies.contains(&vocabulary);
    if wants(Vocabulary::Native) {
        native::write(snapshot, options, &mut page);
    }
    if wants(Vocabulary::Map) {
        exporters::map(snapshot, &mut page);
    }
    if wants(Vocabulary::PodMemory) {
        exporters::pod_memory(snapshot, options, &mut page);
    }
    if wants(Vocabulary::GpuManager) {
        gpu_manager::write(snapshot, &mut page);
    }
    if wants(Vocabulary::Dcgm) || wants(Vocabulary::DcgmPods) {
        dcgm::write(snapshot, options, wants(Vocabulary::DcgmPods), &mut page);
    }
    if wants(Vocabulary::Cadvisor) {
        cadvisor::write(snapshot, &mut page);
    }
    if wants(Vocabulary::Hami) {
        hami::write(snapshot, &mut page);
    }
    if wants(Vocabulary::HamiLegacy) {
        hami::write_legacy(snapshot, &mut page);
    }
    page.finish()
}

/// Returns the page `/metrics/nodes`: pods with their GPUs, in a family named after the node.
#[must_use]
pub fn metrics_of_nodes(snapshot: &Snapshot, format: Format) -> String {
    let mut page = MetricsPage::new(format);
    exporters::nodes(snapshot, &mut page);
    page.finish()
}

/// Returns the page `/metric` as gpu-manager serves it.
#[must_use]
pub fn metric(snapshot: &Snapshot, format: Format) -> String {
    let mut page = MetricsPage::new(format);
    gpu_manager::write(snapshot, &mut page);
    page.finish()
}

/// Returns the native labels of a GPU.
fn gpu_labels(gpu: &GpuSnapshot) -> Labels {
    Labels::new(&[("gpu", &gpu.info.index.to_string()), ("uuid", &gpu.info.uuid.0)])
}

/// Returns the native labels of a container.
fn container_labels(container: &ContainerSnapshot) -> Labels {
    Labels::new(&[
        ("namespace", &container.namespace),
        ("pod", &container.pod),
        ("container", &container.key.container),
    ])
}
