//! The topology: which links join the GPUs of a node.

use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock};

use crate::bandwidth::BandwidthModel;
use crate::gpu_set::GpuSet;
use crate::tree::{Group, TopologyTree};
use crate::units::GpuIndex;

/// How near two GPUs are on PCIe; a greater level is nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PcieLevel {
    /// `SYS`: across CPU sockets.
    System,
    /// `NODE`: across host bridges of one NUMA node.
    Node,
    /// `PHB`: through one host bridge.
    HostBridge,
    /// `PXB`: through several PCIe switches.
    MultiSwitch,
    /// `PIX`: through one PCIe switch.
    SingleSwitch,
    /// `PSB`: on one board.
    SameBoard,
}

/// The connection of two GPUs: their PCIe level, where known, and the number of NVLinks.
///
/// `nvidia-smi topo -m` shows only one of the two; NVML reports both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Link {
    /// The PCIe level; `None` where it is unknown.
    pub pcie: Option<PcieLevel>,
    /// The number of NVLinks between the two GPUs.
    pub nvlinks: u8,
}

/// All links of a node and the NUMA nodes of its GPUs.
///
/// Clones are cheap and share the values derived from the links.
///
/// ```
/// use tessera_core::gpu_set::GpuSet;
/// use tessera_core::topology::{Link, Topology};
/// use tessera_core::units::GpuIndex;
///
/// // Four GPUs; two NVLinks join 0 with 1 and 2 with 3.
/// let topology = Topology::from_pairs(4, |a, b| {
///     if a.0 / 2 == b.0 / 2 { Link::nvlink(2) } else { Link::default() }
/// });
/// let pair: GpuSet = [GpuIndex(0), GpuIndex(1)].into_iter().collect();
/// let across: GpuSet = [GpuIndex(0), GpuIndex(2)].into_iter().collect();
/// let model = topology.bandwidth_model();
/// assert!(model.bandwidth(pair) > model.bandwidth(across));
/// ```
#[derive(Clone, Debug)]
pub struct Topology(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    matrix: Matrix,
    tree: OnceLock<Group>,
    bandwidth_model: OnceLock<BandwidthModel>,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Matrix {
    count: usize,
    /// The links, row-major and symmetric; the diagonal holds the default link.
    links: Vec<Link>,
    numa: Vec<Option<u16>>,
}

/// The NVLinks of the best-connected GPU made so far (Hopper and Blackwell). A GPU whose pairs add
/// up to more than this cannot be wired point to point: its links go to a switch.
pub(crate) const MAX_NVLINKS_PER_GPU: u32 = 18;

// === impl PcieLevel ===

impl PcieLevel {
    /// All levels, farthest first.
    pub const ALL: [Self; 6] =
        [Self::System, Self::Node, Self::HostBridge, Self::MultiSwitch, Self::SingleSwitch, Self::SameBoard];
}

// === impl Link ===

impl Link {
    /// Returns a link over PCIe alone.
    #[must_use]
    pub fn pcie(level: PcieLevel) -> Self {
        Self { pcie: Some(level), nvlinks: 0 }
    }

    /// Returns NVLinks between GPUs whose PCIe level is unknown.
    #[must_use]
    pub fn nvlink(count: u8) -> Self {
        Self { pcie: None, nvlinks: count }
    }

    /// Returns whether no connection is known.
    #[must_use]
    pub fn is_unknown(self) -> bool {
        self == Self::default()
    }
}

// === impl Topology ===

impl Topology {
    /// Returns a topology of `count` GPUs; `link` returns the link of each pair (lower index
    /// first). GPUs past [`GpuSet::CAPACITY`] are left out.
    #[must_use]
    pub fn from_pairs(count: usize, link: impl Fn(GpuIndex, GpuIndex) -> Link) -> Self {
        let count = count.min(GpuSet::CAPACITY);
        let mut links = vec![Link::default(); count * count];
        for (a, b) in GpuSet::first(count).pairs() {
            let joined = link(a, b);
            links[a.position() * count + b.position()] = joined;
            links[b.position() * count + a.position()] = joined;
        }
        Self::of(Matrix { count, links, numa: vec![None; count] })
    }

    /// Returns a topology of `count` GPUs without known links.
    #[must_use]
    pub fn unknown(count: usize) -> Self {
        Self::from_pairs(count, |_, _| Link::default())
    }

    /// Returns the same links with the NUMA node of each GPU; GPUs without an entry have none.
    #[must_use]
    pub fn with_numa(&self, numa: &[Option<u16>]) -> Self {
        let numa = (0..self.count()).map(|gpu| numa.get(gpu).copied().flatten()).collect();
        Self::of(Matrix { count: self.count(), links: self.0.matrix.links.clone(), numa })
    }

    /// Returns the same GPUs with unknown PCIe levels and NUMA nodes filled in from
    /// `other`. `None` where the two have different numbers of GPUs.
    #[must_use]
    pub fn completed_by(&self, other: &Self) -> Option<Self> {
        if self.count() != other.count() {
            return None;
        }
        let merged = Self::from_pairs(self.count(), |a, b| {
            let (mine, theirs) = (self.link(a, b), other.link(a, b));
            let nvlinks = if mine.nvlinks > 0 { mine.nvlinks } else { theirs.nvlinks };
            Link { pcie: mine.pcie.or(theirs.pcie), nvlinks }
        });
        let numa: Vec<_> = self.gpus().iter().map(|gpu| self.numa(gpu).or_else(|| other.numa(gpu))).collect();
        Some(merged.with_numa(&numa))
    }

    fn of(matrix: Matrix) -> Self {
        Self(Arc::new(Shared { matrix, tree: OnceLock::new(), bandwidth_model: OnceLock::new() }))
    }

    /// Returns whether another clone exists.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Returns the number of GPUs.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.matrix.count
    }

    /// Returns all GPUs.
    #[must_use]
    pub fn gpus(&self) -> GpuSet {
        GpuSet::first(self.count())
    }

    /// Returns the link of two GPUs; unknown for a GPU with itself and for GPUs that do not exist.
    #[must_use]
    pub fn link(&self, a: GpuIndex, b: GpuIndex) -> Link {
        let Matrix { count, links, .. } = &self.0.matrix;
        if a.position() >= *count || b.position() >= *count {
            return Link::default();
        }
        links[a.position() * count + b.position()]
    }

    /// Returns the NUMA node of a GPU, where known.
    #[must_use]
    pub fn numa(&self, gpu: GpuIndex) -> Option<u16> {
        self.0.matrix.numa.get(gpu.position()).copied().flatten()
    }

    /// Returns the GPUs grouped by nearness.
    #[must_use]
    pub fn tree(&self) -> &Group {
        self.0.tree.get_or_init(|| TopologyTree::of(self))
    }

    /// Returns the predicted bandwidth of sets of GPUs. The first call takes up to some tenths of a
    /// second for 16 GPUs, and microseconds for eight; the [ledger](crate::ledger) makes it when it
    /// first sees such a host.
    #[must_use]
    pub fn bandwidth_model(&self) -> &BandwidthModel {
        self.0.bandwidth_model.get_or_init(|| BandwidthModel::of(self))
    }

    /// Returns the NVLinks of each GPU into the NVLink switches, where every GPU reaches every
    /// other through switches.
    #[must_use]
    pub fn nvswitch_links(&self) -> Option<u8> {
        let mut pairs = self.gpus().pairs().map(|(a, b)| self.link(a, b).nvlinks);
        let links = pairs.next()?;
        let others = u32::try_from(self.count()).ok()?.checked_sub(1)?;
        let too_many_for_wires = u32::from(links) * others > MAX_NVLINKS_PER_GPU;
        (too_many_for_wires && pairs.all(|other| other == links)).then_some(links)
    }
}

// The derived values follow from the matrix, so equality compares the matrix alone.

impl PartialEq for Topology {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.matrix == other.0.matrix
    }
}

impl Eq for Topology {}

impl Hash for Topology {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.matrix.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearer_levels_are_greater() {
        assert!(PcieLevel::ALL.is_sorted());
    }

    #[test]
    fn a_full_mesh_of_four_is_wired_and_one_of_eight_is_switched() {
        assert_eq!(Topology::from_pairs(4, |_, _| Link::nvlink(4)).nvswitch_links(), None);
        assert_eq!(Topology::from_pairs(8, |_, _| Link::nvlink(12)).nvswitch_links(), Some(12));
        assert_eq!(Topology::unknown(1).nvswitch_links(), None);
        assert_eq!(Topology::unknown(8).nvswitch_links(), None);
    }

    #[test]
    fn a_second_source_fills_in_the_layer_below_the_nvlinks() {
        let nvlink = Topology::from_pairs(2, |_, _| Link::nvlink(2));
        let pcie = Topology::from_pairs(2, |_, _| Link::pcie(PcieLevel::SingleSwitch)).with_numa(&[Some(0)]);
        let both = nvlink.completed_by(&pcie).unwrap();
        let link = both.link(GpuIndex(1), GpuIndex(0));
        assert_eq!(link, Link { pcie: Some(PcieLevel::SingleSwitch), nvlinks: 2 });
        assert_eq!((both.numa(GpuIndex(0)), both.numa(GpuIndex(1))), (Some(0), None));
        assert_eq!(nvlink.completed_by(&Topology::unknown(3)), None);
    }
}
