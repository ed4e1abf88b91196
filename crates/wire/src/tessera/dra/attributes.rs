//! Attributes of devices, which the expressions of claims and classes can name.

use std::collections::BTreeMap;

use tessera_core::gpu::Gpu;
use tessera_core::topology::Topology;
use tessera_core::units::GpuIndex;

use crate::foreign::dra::Attribute;

/// Longest text and version that the API server accepts, in bytes.
const MAX_VALUE_BYTES: usize = 64;

/// What a driver reports about a GPU beside its inventory. Empty texts are unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuDetails {
    /// PCI address, such as `00000000:3B:00.0`.
    pub pci_address: String,
    /// PCI root complex, such as `pci0000:3a`.
    pub pcie_root: String,
    /// Name of the architecture, such as `Hopper`.
    pub architecture: String,
    /// CUDA compute capability, such as `9.0`.
    pub compute_capability: String,
}

/// Returns the attributes of a GPU.
pub(super) fn of_gpu(
    gpu: &Gpu,
    details: &GpuDetails,
    driver_version: Option<&str>,
    link_domain: GpuIndex,
) -> BTreeMap<String, Attribute> {
    let text = |value: &str| (!value.is_empty()).then(|| Attribute::text(cut(value)));
    let version = |value: &str| semantic_version(value).map(Attribute::version);
    let all = [
        ("uuid", text(&gpu.uuid.0)),
        ("index", Some(Attribute::int(i64::from(gpu.index.0)))),
        ("productName", text(&gpu.model.0)),
        ("architecture", text(&details.architecture)),
        ("cudaComputeCapability", version(&details.compute_capability)),
        ("driverVersion", driver_version.and_then(version)),
        ("numaNode", gpu.numa.map(|numa| Attribute::int(i64::from(numa)))),
        ("linkDomain", Some(Attribute::int(i64::from(link_domain.0)))),
        ("resource.kubernetes.io/pcieRoot", text(&details.pcie_root)),
        ("resource.kubernetes.io/pciBusID", pci_bus_id(&details.pci_address).map(Attribute::text)),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// Returns for each GPU the lowest index among the GPUs that it can reach over NVLinks. GPUs without an NVLink
/// are alone in their domain.
pub(super) fn link_domains(topology: &Topology) -> Vec<GpuIndex> {
    let mut domains: Vec<GpuIndex> = topology.gpus().iter().collect();
    loop {
        let mut changed = false;
        for (a, b) in topology.gpus().pairs() {
            let lower = domains[a.position()].min(domains[b.position()]);
            if topology.link(a, b).nvlinks > 0
                && (domains[a.position()], domains[b.position()]) != (lower, lower)
            {
                (domains[a.position()], domains[b.position()]) = (lower, lower);
                changed = true;
            }
        }
        if !changed {
            return domains;
        }
    }
}

/// Returns the longest start of a text that the API server accepts.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_VALUE_BYTES)).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
}

/// Returns the first three numbers of a version as a semantic version, which has no leading zeros.
fn semantic_version(text: &str) -> Option<String> {
    let mut numbers = [0u32; 3];
    let mut parts = text.split('.');
    for (position, number) in numbers.iter_mut().enumerate() {
        match parts.next() {
            Some(part) => *number = part.parse().ok()?,
            None if position > 0 => {}
            None => return None,
        }
    }
    let [major, minor, patch] = numbers;
    Some(format!("{major}.{minor}.{patch}"))
}

/// Returns a PCI address as Kubernetes writes it: four digits of the domain, in lower case.
fn pci_bus_id(address: &str) -> Option<String> {
    let (domain, rest) = address.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    (!rest.is_empty()).then(|| format!("{domain:04x}:{}", rest.to_lowercase()))
}
