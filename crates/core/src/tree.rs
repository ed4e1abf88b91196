//! The GPUs of a node as a tree of groups, from near to far.

use crate::gpu_set::GpuSet;
use crate::topology::{Link, PcieLevel, Topology};
use crate::units::GpuIndex;

/// The kind of link that joins a group; a lesser level is nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupLevel {
    /// An island of GPUs that reach each other over NVLink.
    NvLink,
    /// `PSB`
    SameBoard,
    /// `PIX`
    SingleSwitch,
    /// `PXB`
    MultiSwitch,
    /// `PHB`
    HostBridge,
    /// `NODE`: between host bridges of one NUMA node.
    Node,
    /// `SYS`
    System,
    /// The whole node, whatever links its GPUs.
    Root,
}

/// A node of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopologyTree {
    /// One GPU.
    Leaf(GpuIndex),
    /// A group of GPUs joined by links.
    Group(Group),
}

/// GPUs joined by links of one level or nearer ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The farthest level needed to reach every member.
    pub level: GroupLevel,
    /// All GPUs of the group.
    pub gpus: GpuSet,
    /// The nearer groups and single GPUs, by lowest index.
    pub children: Vec<TopologyTree>,
}

// === impl GroupLevel ===

impl GroupLevel {
    /// The levels that come from links, nearest first.
    const LINKED: [Self; 7] = [
        Self::NvLink,
        Self::SameBoard,
        Self::SingleSwitch,
        Self::MultiSwitch,
        Self::HostBridge,
        Self::Node,
        Self::System,
    ];

    fn of(link: Link) -> Option<Self> {
        if link.nvlinks > 0 {
            return Some(Self::NvLink);
        }
        link.pcie.map(|level| match level {
            PcieLevel::SameBoard => Self::SameBoard,
            PcieLevel::SingleSwitch => Self::SingleSwitch,
            PcieLevel::MultiSwitch => Self::MultiSwitch,
            PcieLevel::HostBridge => Self::HostBridge,
            PcieLevel::Node => Self::Node,
            PcieLevel::System => Self::System,
        })
    }
}

// === impl TopologyTree ===

impl TopologyTree {
    /// Groups the GPUs level by level, nearest first. The GPUs of a linked pair share a group, even
    /// where the matrix is not transitive. GPUs without links are direct children of the root.
    #[must_use]
    pub fn of(topology: &Topology) -> Group {
        let mut parts: Vec<Self> = topology.gpus().iter().map(Self::Leaf).collect();
        for level in GroupLevel::LINKED {
            for (a, b) in topology.gpus().pairs() {
                if GroupLevel::of(topology.link(a, b)) == Some(level) {
                    join(&mut parts, level, a, b);
                }
            }
        }
        Group { level: GroupLevel::Root, gpus: topology.gpus(), children: parts }
    }

    /// Returns all GPUs of this part.
    #[must_use]
    pub fn gpus(&self) -> GpuSet {
        match self {
            Self::Leaf(gpu) => GpuSet::EMPTY.with(*gpu),
            Self::Group(group) => group.gpus,
        }
    }
}

/// Joins the parts that contain `a` and `b` to one group of `level`. The parts stay ordered by
/// lowest index.
fn join(parts: &mut Vec<TopologyTree>, level: GroupLevel, a: GpuIndex, b: GpuIndex) {
    let part_of = |gpu| parts.iter().position(|part| part.gpus().contains(gpu));
    let (Some(one), Some(other)) = (part_of(a), part_of(b)) else {
        return;
    };
    if one == other {
        return;
    }
    let second = parts.remove(one.max(other));
    let first = parts.remove(one.min(other));
    let gpus = first.gpus().union(second.gpus());
    let mut children = Vec::new();
    for part in [first, second] {
        match part {
            TopologyTree::Group(group) if group.level == level => children.extend(group.children),
            nearer => children.push(nearer),
        }
    }
    children.sort_by_key(|child| child.gpus().lowest());
    parts.insert(one.min(other), TopologyTree::Group(Group { level, gpus, children }));
}

// === impl Group ===

impl Group {
    /// Returns this group and every group below it, outermost first.
    pub fn groups(&self) -> Vec<&Self> {
        let mut found = vec![self];
        for child in &self.children {
            if let TopologyTree::Group(group) = child {
                found.extend(group.groups());
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `SYS(PIX(0 1) 2)`
    fn shape(tree: &TopologyTree) -> String {
        match tree {
            TopologyTree::Leaf(gpu) => gpu.to_string(),
            TopologyTree::Group(group) => group_shape(group),
        }
    }

    fn group_shape(group: &Group) -> String {
        let children: Vec<String> = group.children.iter().map(shape).collect();
        format!("{:?}({})", group.level, children.join(" "))
    }

    fn check(count: usize, links: &[(u8, u8, Link)], rest: Link, expected: &str) {
        let topology = Topology::from_pairs(count, |a, b| {
            let known = links.iter().find(|(x, y, _)| (*x, *y) == (a.0, b.0));
            known.map_or(rest, |(_, _, link)| *link)
        });
        assert_eq!(group_shape(&TopologyTree::of(&topology)), expected);
    }

    const PIX: Link = Link { pcie: Some(PcieLevel::SingleSwitch), nvlinks: 0 };
    const PHB: Link = Link { pcie: Some(PcieLevel::HostBridge), nvlinks: 0 };
    const SYS: Link = Link { pcie: Some(PcieLevel::System), nvlinks: 0 };
    const NV2: Link = Link { pcie: None, nvlinks: 2 };

    #[test]
    fn switches_below_sockets() {
        let pairs = [(0, 1, PIX), (2, 3, PIX), (0, 2, PHB), (0, 3, PHB), (1, 2, PHB), (1, 3, PHB)];
        check(5, &pairs, SYS, "Root(System(HostBridge(SingleSwitch(0 1) SingleSwitch(2 3)) 4))");
    }

    #[test]
    fn a_matrix_that_is_not_transitive_counts_no_gpu_twice() {
        let pairs = [(0, 3, PIX), (1, 2, PIX), (2, 3, PIX)];
        check(4, &pairs, PHB, "Root(SingleSwitch(0 1 2 3))");
    }

    #[test]
    fn nvlink_islands_across_sockets() {
        check(4, &[(0, 3, NV2), (1, 2, NV2)], SYS, "Root(System(NvLink(0 3) NvLink(1 2)))");
    }

    #[test]
    fn one_gpu_and_unknown_links_hang_under_the_root() {
        check(1, &[], SYS, "Root(0)");
        check(3, &[(0, 1, PIX)], Link::default(), "Root(SingleSwitch(0 1) 2)");
        check(0, &[], SYS, "Root()");
    }
}
