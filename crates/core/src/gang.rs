//! Gangs: the joint placement of pods that need all their GPUs at the same time.
//!
//! One decision places all members that have no node yet, or none of them. Among the placements that
//! are possible it takes the one with the fewest nodes, then the one whose nodes are nearest to each
//! other by the labels of the cluster's topology, then the one that leaves the least room behind.
//! The GPUs inside each node are chosen by the pods' own policy, so by the best links.

pub(crate) mod capacity;
mod fill;

use std::collections::BTreeMap;

use self::capacity::capacity;
use crate::grant::ContainerGrant;
use crate::node::NodeState;
use crate::placement::Policy;
use crate::quota::OverQuota;
use crate::request::PodRequest;
use crate::units::Count;

/// The topology level that a gang wants: all its nodes have the same value of one label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum TopologyWish {
    /// The gang takes the nearest nodes that are free.
    #[default]
    Any,
    /// The gang prefers nodes with one value of this label, and takes others where that is
    /// impossible.
    Preferred(String),
    /// The gang waits until nodes with one value of this label are free.
    Required(String),
}

/// Members of a gang that request the same and may use the same nodes.
#[derive(Clone, Copy, Debug)]
pub struct GangClass<'a> {
    /// Number of members that have no node yet.
    pub count: usize,
    /// The policy that chooses the GPUs of each member.
    pub policy: &'a Policy,
}

/// A node as the members of a gang meet it.
#[derive(Clone, Debug)]
pub struct GangNode<'a> {
    /// The node and what its pods use of it.
    pub state: &'a NodeState,
    /// The node's value of each topology label, the narrowest level first.
    pub domains: Vec<Option<&'a str>>,
    /// The node's value of the label that the gang wishes, if the gang wishes one.
    pub wished: Option<&'a str>,
    /// The request of each class on this node; `None` where the node may not take the class.
    pub requests: Vec<Option<&'a PodRequest>>,
    /// True if a member of the gang is on the node already.
    pub has_member: bool,
}

/// Where one member goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GangPlace {
    /// The class of the member.
    pub class: usize,
    /// The position of the node in the list of nodes.
    pub node: usize,
    /// The GPUs of the member.
    pub containers: Vec<ContainerGrant>,
}

/// The placement of all members of a gang that had no node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GangPlan {
    /// One place for each member of each class.
    pub places: Vec<GangPlace>,
    /// The narrowest topology level that all nodes of the plan have in common, counted from the
    /// narrowest; `None` if there is none.
    pub level: Option<usize>,
}

/// Groups of nodes that are tried with the members of several classes. The sums of a group say
/// whether one class fits, and most groups that pass for each class fit all of them.
const MAX_TRIED_GROUPS: usize = 32;

/// Places all members, or returns `None` where they do not fit together.
///
/// ```
/// use std::sync::Arc;
/// use tessera_core::gang::{GangClass, GangNode, TopologyWish, plan};
/// use tessera_core::gpu::Gpu;
/// use tessera_core::node::{Node, NodeState};
/// use tessera_core::placement::Policy;
/// use tessera_core::request::{PodRequest, Request};
/// use tessera_core::topology::Topology;
/// use tessera_core::units::{GpuIndex, MiB, MilliCpu};
///
/// let state = |name: &str| {
///     let gpu = |index| Gpu::new(GpuIndex(index), "GPU-x".into(), "T4".into(), MiB(15_360));
///     let gpus = vec![gpu(0), gpu(1)];
///     let node = Node::new(name.into(), gpus, Topology::unknown(2), MilliCpu(8000), MiB(32_768));
///     NodeState::empty(Arc::new(node.unwrap()))
/// };
/// let (states, racks) = (["a", "b", "c"].map(state), ["rack-1", "rack-2", "rack-2"]);
/// let two_gpus = PodRequest::of_mains([Request::Whole(2)]);
/// let nodes: Vec<GangNode<'_>> = (states.iter().zip(racks))
///     .map(|(state, rack)| GangNode {
///         state,
///         domains: vec![Some(rack)],
///         wished: None,
///         requests: vec![Some(&two_gpus)],
///         has_member: false,
///     })
///     .collect();
/// let workers = GangClass { count: 2, policy: &Policy::Simple };
/// let placed = plan(&[workers], &nodes, &TopologyWish::Any).unwrap();
/// assert_eq!(placed.places.iter().map(|place| place.node).collect::<Vec<_>>(), [1, 2]);
/// assert_eq!(placed.level, Some(0), "both nodes are in rack-2");
/// assert_eq!(plan(&[GangClass { count: 4, ..workers }], &nodes, &TopologyWish::Any), None);
/// ```
#[must_use]
pub fn plan(classes: &[GangClass<'_>], nodes: &[GangNode<'_>], wish: &TopologyWish) -> Option<GangPlan> {
    let planner = Planner::new(classes, nodes);
    let all: Vec<usize> = (0..nodes.len()).collect();
    match wish {
        TopologyWish::Any => planner.best(vec![all]),
        TopologyWish::Required(_) => planner.best(planner.partitions()),
        TopologyWish::Preferred(_) => planner.best(planner.partitions()).or_else(|| planner.best(vec![all])),
    }
}

/// Returns the nodes, by their positions, that could take all members once their pods have ended, with the fewest GPUs in
/// use. The result is empty if no nodes could.
#[must_use]
pub fn nodes_to_empty(classes: &[GangClass<'_>], nodes: &[GangNode<'_>], wish: &TopologyWish) -> Vec<usize> {
    let in_use = |node: &GangNode<'_>| node.state.node().gpus().len() - node.state.idle().len();
    let empty: Vec<NodeState> = nodes.iter().map(|node| NodeState::empty(node.state.shared_node())).collect();
    let mut order: Vec<usize> = (0..nodes.len()).collect();
    order.sort_by_key(|node| (in_use(&nodes[*node]), &nodes[*node].state.node().name));
    let mut count = 1;
    loop {
        let first = order.iter().take(count);
        let emptied: Vec<GangNode<'_>> =
            first.map(|node| GangNode { state: &empty[*node], ..nodes[*node].clone() }).collect();
        if let Some(found) = plan(classes, &emptied, wish) {
            let mut used: Vec<usize> = found.places.iter().map(|place| order[place.node]).collect();
            used.sort_unstable();
            used.dedup();
            return used;
        }
        if count >= order.len() {
            return Vec::new();
        }
        count *= 2;
    }
}

/// The nodes with the number of members that each can take alone.
struct Planner<'a> {
    classes: &'a [GangClass<'a>],
    nodes: &'a [GangNode<'a>],
    /// The classes, those with the largest members first.
    order: Vec<usize>,
    /// For each node the number of members of each class that fit on it alone.
    capacities: Vec<Vec<usize>>,
    /// For each node the number of its domain at each level.
    domain_numbers: Vec<Vec<Option<usize>>>,
}

/// A group of nodes that may take the whole gang, in the order of preference.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    /// Fewest nodes that the largest class needs.
    node_count: usize,
    /// True if no member of the gang is in the group yet.
    is_apart: bool,
    /// Topology level of the group. The number of levels stands for nodes without a common domain.
    level: usize,
    /// Members of the largest class for which room would be left.
    left: usize,
    nodes: Vec<usize>,
}

impl<'a> Planner<'a> {
    fn new(classes: &'a [GangClass<'a>], nodes: &'a [GangNode<'a>]) -> Self {
        let capacities = nodes.iter().map(|node| {
            let alone = classes.iter().zip(&node.requests).map(|(class, request)| {
                request.map_or(0, |request| capacity(node.state, request, class.count))
            });
            alone.collect()
        });
        let size = |class: usize| {
            let request = nodes.iter().find_map(|node| node.requests.get(class).copied().flatten());
            request.map_or(0, gpu_count)
        };
        let mut order: Vec<usize> = (0..classes.len()).collect();
        order.sort_by_key(|class| std::cmp::Reverse(size(*class)));
        let mut planner =
            Self { classes, nodes, order, capacities: capacities.collect(), domain_numbers: Vec::new() };
        planner.domain_numbers = vec![vec![None; planner.levels()]; nodes.len()];
        let all: Vec<usize> = (0..nodes.len()).collect();
        for level in 0..planner.levels() {
            let domains = planner.domains(&all, level).into_iter().filter(|(key, _)| key[0].is_some());
            for (number, (_, group)) in domains.enumerate() {
                group.iter().for_each(|node| planner.domain_numbers[*node][level] = Some(number));
            }
        }
        planner
    }

    /// Returns the groups of nodes with the same value of the wished label. If members have nodes
    /// already, only their groups count.
    fn partitions(&self) -> Vec<Vec<usize>> {
        let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (position, node) in self.nodes.iter().enumerate() {
            if let Some(value) = node.wished {
                groups.entry(value).or_default().push(position);
            }
        }
        let is_started = self.nodes.iter().any(|node| node.has_member);
        let has_member = |group: &Vec<usize>| group.iter().any(|node| self.nodes[*node].has_member);
        groups.into_values().filter(|group| !is_started || has_member(group)).collect()
    }

    /// Returns the best plan inside one of these groups.
    fn best(&self, groups: Vec<Vec<usize>>) -> Option<GangPlan> {
        let mut candidates: Vec<Candidate> = Vec::new();
        for group in groups {
            self.add_candidates(group, &mut candidates);
        }
        candidates.sort();
        let placed = candidates.iter().take(MAX_TRIED_GROUPS).find_map(|group| self.fill(&group.nodes))?;
        let level = self.common_level(&placed);
        Some(GangPlan { places: placed, level })
    }

    /// Adds the group and all its topology domains that may take the gang.
    fn add_candidates(&self, group: Vec<usize>, candidates: &mut Vec<Candidate>) {
        let levels = self.levels();
        for level in 0..levels {
            for (_, nodes) in self.domains(&group, level).into_iter().filter(|(key, _)| key[0].is_some()) {
                candidates.extend(self.candidate(nodes, level));
            }
        }
        candidates.extend(self.candidate(group, levels));
    }

    fn candidate(&self, nodes: Vec<usize>, level: usize) -> Option<Candidate> {
        for (class, GangClass { count, .. }) in self.classes.iter().enumerate() {
            let total: usize = nodes.iter().map(|node| self.capacities[*node][class]).sum();
            if total < *count {
                return None;
            }
        }
        let largest = *self.order.first()?;
        let count = self.classes[largest].count;
        let mut rooms: Vec<usize> = nodes.iter().map(|node| self.capacities[*node][largest]).collect();
        rooms.sort_unstable_by(|a, b| b.cmp(a));
        let (mut need, mut node_count) = (count, 0);
        for room in &rooms {
            if need == 0 {
                break;
            }
            need = need.saturating_sub(*room);
            node_count += 1;
        }
        let is_apart = !nodes.iter().any(|node| self.nodes[*node].has_member);
        let left = rooms.iter().sum::<usize>() - count;
        Some(Candidate { node_count, is_apart, level, left, nodes })
    }

    /// Groups nodes by their domain at a level. Domains of equal names inside different wider
    /// domains are different.
    fn domains(&self, group: &[usize], level: usize) -> BTreeMap<Vec<Option<&'a str>>, Vec<usize>> {
        let mut domains: BTreeMap<Vec<Option<&'a str>>, Vec<usize>> = BTreeMap::new();
        for node in group {
            let key = self.nodes[*node].domains.get(level..).unwrap_or_default().to_vec();
            domains.entry(key).or_default().push(*node);
        }
        domains
    }

    fn levels(&self) -> usize {
        self.nodes.first().map_or(0, |node| node.domains.len())
    }

    fn common_level(&self, places: &[GangPlace]) -> Option<usize> {
        let mut used: Vec<usize> = places.iter().map(|place| place.node).collect();
        used.sort_unstable();
        used.dedup();
        (0..self.levels()).find(|level| {
            let domains = self.domains(&used, *level);
            domains.len() == 1 && domains.keys().all(|key| key[0].is_some())
        })
    }
}

/// Returns the number of GPUs that a pod requests.
fn gpu_count(request: &PodRequest) -> usize {
    let requests = request.containers.iter().filter_map(|container| container.request);
    requests.map(crate::request::Request::gpu_count).sum()
}

/// The reason why a pod waits for the other pods of its gang.
///
/// The text names the gang and never a node, because kube-scheduler counts nodes by equal messages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GangWait {
    /// An object states the size of the gang, such as a PodGroup that the pod names, and the object does not exist.
    #[error("gang {gang} waits for its {kind}, which does not exist")]
    NoGroup {
        /// The gang of the pod.
        gang: String,
        /// Kind of the object.
        kind: &'static str,
    },
    /// Pods of the gang do not exist yet.
    #[error("gang {gang} waits for its pods: {present} of {size} exist")]
    Incomplete {
        /// The gang of the pod.
        gang: String,
        /// Number of pods that exist.
        present: usize,
        /// Number of pods in the gang.
        size: usize,
    },
    /// The members do not fit together.
    #[error("gang {gang} waits for GPUs for all of its {} at the same time{}", Count(*.missing, "pod"), level(.topology))]
    NoRoom {
        /// The gang of the pod.
        gang: String,
        /// Number of pods without a node.
        missing: usize,
        /// The topology level that the gang wants.
        topology: TopologyWish,
    },
    /// The quota of the namespace does not allow all members.
    #[error("gang {gang} as a whole: {over}")]
    Quota {
        /// The gang of the pod.
        gang: String,
        /// The limit that the gang would exceed.
        over: OverQuota,
    },
    /// The place of the pod is on a node that kube-scheduler does not offer for it.
    #[error("gang {gang} has GPUs for this pod only on nodes that kube-scheduler does not offer for it")]
    NotOffered {
        /// The gang of the pod.
        gang: String,
    },
    /// The last reservation of the gang ended before all members were bound.
    #[error("gang {gang} was not complete in time and gave its GPUs back; it tries again soon")]
    Paused {
        /// The gang of the pod.
        gang: String,
    },
    /// The gang has more pods than its size, and the others come first.
    #[error("gang {gang} has more pods than its size; this one waits until the others are bound")]
    Surplus {
        /// The gang of the pod.
        gang: String,
    },
}

fn level(topology: &TopologyWish) -> String {
    match topology {
        TopologyWish::Required(key) => format!(", on nodes with one value of {key}"),
        TopologyWish::Any | TopologyWish::Preferred(_) => String::new(),
    }
}
