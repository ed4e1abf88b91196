//! The node annotation `tessera.dev/inventory`, in which an agent publishes the GPUs of its node.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tessera_core::gpu::{Gpu, Health};
use tessera_core::gpu_set::GpuSet;
use tessera_core::topology::{Link, Topology};
use tessera_core::units::{GpuIndex, MiB};

use crate::foreign::dialect::MemoryUnit;
use crate::foreign::link;

/// Key of the annotation.
pub const KEY: &str = "tessera.dev/inventory";

/// The GPUs of a node and the unit in which it counts memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inventory {
    /// GPUs by index, without gaps.
    pub gpus: Vec<Gpu>,
    /// Links between the GPUs.
    pub topology: Topology,
    /// Size of one unit of `aliyun.com/gpu-mem` on the node.
    pub memory_unit: MemoryUnit,
    /// Number of `nvidia.com/gpu` devices per GPU, if pods may request a part of each GPU by HAMi's names.
    pub nvidia_slots: Option<u16>,
    /// True if the node serves no shares of GPUs.
    pub whole_gpus_only: bool,
    /// Resources that another device plugin serves, while pods hold GPUs without the knowledge of that plugin. It could
    /// give the same GPUs to further pods, so schedulers must not bind pods that request these resources.
    pub withheld: Vec<String>,
}

/// An annotation that cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub enum BadInventory {
    /// The annotation is not JSON of the expected form.
    #[error("{KEY}: {0}")]
    Json(#[from] serde_json::Error),
    /// The memory unit is unknown.
    #[error("{KEY}: {0}")]
    Unit(#[from] crate::foreign::dialect::gpushare::UnknownUnit),
    /// A link has the wrong form or names GPUs that do not exist.
    #[error(
        "{KEY}: found link {0}, expected [i, j, PCIe level or null, NVLinks] with i < j among the GPUs listed"
    )]
    Link(String),
    /// Two GPUs have the same UUID, so grants by UUID would be ambiguous.
    #[error("{KEY}: found GPU {0} twice, expected a UUID of its own for each GPU")]
    Duplicate(String),
    /// A GPU has implausibly much memory.
    #[error("{KEY}: GPU {uuid} has {memory_mib} MiB, expected at most {}", MAX_GPU_MEMORY.0)]
    Memory {
        /// UUID of the GPU.
        uuid: String,
        /// Memory in the annotation.
        memory_mib: u64,
    },
}

/// Largest accepted memory of one GPU, 1 PiB. The sum over all GPUs of a node cannot overflow.
pub(crate) const MAX_GPU_MEMORY: MiB = MiB(1 << 30);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    memory_unit: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nvidia_slots: Option<u16>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    whole_gpus_only: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    withheld: Vec<String>,
    gpus: Vec<GpuEntry>,
    #[serde(default)]
    links: Vec<Pair>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct GpuEntry {
    uuid: String,
    minor: u32,
    model: String,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    numa: Option<u16>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    unhealthy: bool,
    /// Why the GPU is unhealthy, where the agent knows more. Readers that do not know a reason ignore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Values of `reason`.
const MIG_MODE: &str = "mig-mode";
const PENDING_RESET: &str = "pending-reset";

/// Returns the value of `reason` for a problem of a GPU, or `None` if the annotation has none for it.
#[must_use]
pub fn reason_of(problem: &str) -> Option<&'static str> {
    let is = |health: Health| health.problem() == Some(problem);
    match () {
        () if is(Health::InMigMode) => Some(MIG_MODE),
        () if is(Health::AwaitingReset) => Some(PENDING_RESET),
        () => None,
    }
}

/// Two GPU indexes, their PCIe level, and their number of NVLinks.
#[derive(Debug, Serialize, Deserialize)]
struct Pair(u8, u8, Option<String>, u8);

/// Writes the annotation, with the GPUs in the order of their indexes.
#[must_use]
pub fn print(inventory: &Inventory) -> String {
    let entry = |gpu: &Gpu| GpuEntry {
        uuid: gpu.uuid.to_string(),
        minor: gpu.minor,
        model: gpu.model.to_string(),
        memory_mib: gpu.memory.0,
        numa: gpu.numa,
        unhealthy: !gpu.health.is_healthy(),
        reason: gpu.health.problem().and_then(reason_of).map(str::to_owned),
    };
    let pair = |(a, b): (GpuIndex, GpuIndex)| {
        let Link { pcie, nvlinks } = inventory.topology.link(a, b);
        let level = pcie.and_then(|level| link::abbreviation(Link::pcie(level)));
        Pair(a.0, b.0, level, nvlinks)
    };
    let known = |(a, b): &(GpuIndex, GpuIndex)| !inventory.topology.link(*a, *b).is_unknown();
    let document = Document {
        memory_unit: inventory.memory_unit.to_string(),
        nvidia_slots: inventory.nvidia_slots,
        whole_gpus_only: inventory.whole_gpus_only,
        withheld: inventory.withheld.clone(),
        gpus: inventory.gpus.iter().map(entry).collect(),
        links: inventory.topology.gpus().pairs().filter(known).map(pair).collect(),
    };
    // Serializing numbers and strings cannot fail.
    serde_json::to_string(&document).unwrap_or_default()
}

/// Parses the annotation.
pub fn parse(json: &str) -> Result<Inventory, BadInventory> {
    let document: Document = serde_json::from_str(json)?;
    let count = document.gpus.len().min(GpuSet::CAPACITY);
    let mut links = vec![Link::default(); count * count];
    for pair in &document.links {
        let bad = || BadInventory::Link(format!("{pair:?}"));
        let Pair(a, b, level, nvlinks) = pair;
        let pcie = match level.as_deref().map(link::parse) {
            None => None,
            Some(Some(Link { pcie: Some(level), .. })) => Some(level),
            Some(_) => return Err(bad()),
        };
        let place = links.get_mut(usize::from(*a) * count + usize::from(*b));
        match place.filter(|_| a < b && usize::from(*b) < count && *nvlinks <= link::MAX_NVLINKS) {
            Some(place) => *place = Link { pcie, nvlinks: *nvlinks },
            None => return Err(bad()),
        }
    }
    if let Some(GpuEntry { uuid, memory_mib, .. }) =
        document.gpus.iter().find(|entry| entry.memory_mib > MAX_GPU_MEMORY.0)
    {
        return Err(BadInventory::Memory { uuid: uuid.clone(), memory_mib: *memory_mib });
    }
    let mut seen = BTreeSet::new();
    if let Some(entry) = document.gpus.iter().find(|entry| !seen.insert(entry.uuid.as_str())) {
        return Err(BadInventory::Duplicate(entry.uuid.clone()));
    }
    let entries = (0u8..).zip(document.gpus).take(count);
    let gpus: Vec<Gpu> = entries
        .map(|(index, entry)| Gpu {
            index: GpuIndex(index),
            uuid: entry.uuid.as_str().into(),
            minor: entry.minor,
            model: entry.model.as_str().into(),
            memory: MiB(entry.memory_mib),
            numa: entry.numa,
            health: match entry.reason.as_deref() {
                _ if !entry.unhealthy => Health::Healthy,
                Some(MIG_MODE) => Health::InMigMode,
                Some(PENDING_RESET) => Health::AwaitingReset,
                _ => Health::Unhealthy,
            },
        })
        .collect();
    let numa: Vec<Option<u16>> = gpus.iter().map(|gpu| gpu.numa).collect();
    let topology = Topology::from_pairs(count, |a, b| links[a.position() * count + b.position()]);
    Ok(Inventory {
        topology: topology.with_numa(&numa),
        gpus,
        memory_unit: document.memory_unit.parse()?,
        nvidia_slots: document.nvidia_slots,
        whole_gpus_only: document.whole_gpus_only,
        withheld: document.withheld,
    })
}

#[cfg(test)]
mod tests {
    use tessera_core::topology::PcieLevel;

    use super::*;

    fn inventory(count: u8) -> Inventory {
        let gpu = |index: u8| Gpu {
            index: GpuIndex(index),
            uuid: format!("GPU-{index}").as_str().into(),
            minor: u32::from(index) + 1,
            model: "NVIDIA H200".into(),
            memory: MiB(143_771),
            numa: Some(u16::from(index / 4)),
            health: match index {
                3 => Health::Unhealthy,
                4 => Health::InMigMode,
                5 => Health::AwaitingReset,
                _ => Health::Healthy,
            },
        };
        let numa: Vec<Option<u16>> = (0..count).map(|index| Some(u16::from(index / 4))).collect();
        let topology = Topology::from_pairs(usize::from(count), |a, b| Link {
            pcie: (a.0 > 0).then_some(PcieLevel::Node),
            nvlinks: if b.0 < 6 { 18 } else { 0 },
        });
        Inventory {
            gpus: (0..count).map(gpu).collect(),
            topology: topology.with_numa(&numa),
            memory_unit: MemoryUnit::MiB,
            nvidia_slots: (count > 8).then_some(10),
            whole_gpus_only: count == 8,
            withheld: (count == 16).then(|| "nvidia.com/gpu".to_owned()).into_iter().collect(),
        }
    }

    #[test]
    fn parses_its_own_output() {
        for count in [0, 1, 8, 16] {
            let written = inventory(count);
            assert_eq!(parse(&print(&written)).unwrap(), written);
        }
    }

    /// A newer agent may have reasons that this reader does not know.
    #[test]
    fn an_unknown_reason_means_unhealthy() {
        let text = print(&inventory(5)).replace("mig-mode", "other");
        assert_eq!(parse(&text).unwrap().gpus[4].health, Health::Unhealthy);
    }

    #[test]
    fn writes_the_documented_text() {
        let text = r#"{"memoryUnit":"MiB","gpus":[{"uuid":"GPU-0","minor":1,"model":"NVIDIA H200","memoryMiB":143771,"numa":0}],"links":[]}"#;
        assert_eq!(print(&inventory(1)), text);
    }

    #[test]
    fn every_error_says_what_was_expected() {
        let gpus = r#""memoryUnit":"GiB","gpus":[{"uuid":"a","minor":0,"model":"x","memoryMiB":1}]"#;
        let error = |json: &str| parse(json).unwrap_err().to_string();
        assert!(error("{}").starts_with("tessera.dev/inventory: missing field"));
        assert!(error(r#"{"memoryUnit":"GB","gpus":[]}"#).contains("write GiB or MiB"));
        let vast =
            r#"{"memoryUnit":"GiB","gpus":[{"uuid":"a","minor":0,"model":"x","memoryMiB":1073741825}]}"#;
        assert!(error(vast).ends_with("GPU a has 1073741825 MiB, expected at most 1073741824"));
        let twice = r#"{"memoryUnit":"GiB","gpus":[{"uuid":"a","minor":0,"model":"x","memoryMiB":1},{"uuid":"a","minor":1,"model":"x","memoryMiB":1}]}"#;
        assert!(error(twice).ends_with("found GPU a twice, expected a UUID of its own for each GPU"));
        for link in [r#"[0,1,"SYS",0]"#, r#"[0,0,"SYS",0]"#, r#"[0,1,"FAST",0]"#, r#"[9,200,null,1]"#] {
            assert!(
                error(&format!("{{{gpus},\"links\":[{link}]}}")).contains("expected [i, j, PCIe level"),
                "{link}"
            );
        }
    }
}
