//! Evictions that make room: which pods to evict so that pods that wait find their places together.
//!
//! The waiting pods are those of a gang. Pods that end anyway count as gone. The plan evicts pods of
//! the lowest levels first; the caller states what a level is, such as a priority. Of the pods that
//! remain to choose from it spares as many as possible, those of the highest level first. The pods
//! of a gang are one unit, which is evicted as a whole on all nodes or spared. Disruption budgets
//! are never exceeded, and no namespace falls below its guarantee. Nothing is carried out here, and the ledger is not changed.

mod search;

use std::collections::BTreeMap;

use self::search::Search;
use crate::defragment::HeldPod;
use crate::disruption::DisruptionBudget;
use crate::gang::{GangClass, GangNode, GangPlan, TopologyWish};
use crate::grant::PodGrant;
use crate::quota::{GpuAmount, GuaranteedUse};
use crate::units::PodUid;

/// Pods that are evicted together: one pod, or all pods of a gang on all nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictionUnit {
    /// The pods. Units have no pod in common.
    pub pods: Vec<PodUid>,
    /// Units of lower levels are evicted first.
    pub level: i64,
    /// What the namespace of the pods uses less afterwards.
    pub released: GpuAmount,
}

/// A node as evictions can change it.
#[derive(Clone, Debug)]
pub struct EvictionNode<'a> {
    /// The node as it is after all units and all pods that end anyway are gone.
    pub node: GangNode<'a>,
    /// What the units hold on the node, with the position of each unit.
    pub held: Vec<(usize, &'a PodGrant)>,
}

/// The cluster, and what evictions must respect.
#[derive(Clone, Copy, Debug)]
pub struct EvictionScene<'a> {
    /// All nodes.
    pub nodes: &'a [EvictionNode<'a>],
    /// The units in the order in which they are evicted, by ascending levels.
    pub units: &'a [EvictionUnit],
    /// The pods of the units. A unit with a pod that is missing here or must stay is spared.
    pub pods: &'a BTreeMap<PodUid, HeldPod>,
    /// All disruption budgets.
    pub budgets: &'a [DisruptionBudget],
    /// The namespaces that must not fall below their guarantees.
    pub guarantees: &'a BTreeMap<String, GuaranteedUse>,
}

/// The evictions that make room, and the places of the waiting pods after them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictionPlan {
    /// The positions of the units to evict, in the order of eviction.
    pub units: Vec<usize>,
    /// The places of the waiting pods.
    pub placed: GangPlan,
}

/// Returns the evictions after which all waiting pods have places, or `None` if none suffice. No
/// unit is evicted where the pods that end anyway leave enough room.
///
/// ```
/// # use std::collections::BTreeMap;
/// # use std::sync::Arc;
/// # use std::time::Duration;
/// use tessera_core::defragment::HeldPod;
/// use tessera_core::eviction::{EvictionNode, EvictionScene, EvictionUnit, plan};
/// use tessera_core::gang::{GangClass, GangNode, TopologyWish};
/// # use tessera_core::gpu::Gpu;
/// # use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
/// # use tessera_core::node::{Node, NodeState};
/// # use tessera_core::placement::Policy;
/// # use tessera_core::quota::GpuAmount;
/// # use tessera_core::request::{ContainerRole, PodRequest, Request};
/// # use tessera_core::topology::Topology;
/// # use tessera_core::units::{GpuIndex, MiB, MilliCpu, PodUid};
/// # let state = |name: &str| {
/// #     let gpu = Gpu::new(GpuIndex(0), "GPU-x".into(), "T4".into(), MiB(15_360));
/// #     let node = Node::new(name.into(), vec![gpu], Topology::unknown(1), MilliCpu(8000), MiB(32_768));
/// #     NodeState::empty(Arc::new(node.unwrap()))
/// # };
/// # let held = |node: &str| PodGrant {
/// #     pod: PodUid(format!("low-{node}")),
/// #     node: node.into(),
/// #     cpu: MilliCpu::ZERO,
/// #     memory: MiB::ZERO,
/// #     containers: vec![ContainerGrant {
/// #         container: "main".to_owned(),
/// #         role: ContainerRole::Main,
/// #         holds: vec![(GpuIndex(0), Hold::Whole)],
/// #     }],
/// # };
/// # let grants = ["a", "b", "c"].map(held);
/// # let states = ["a", "b", "c"].map(state);
/// # let request = PodRequest::of_mains([Request::Whole(1)]);
/// # let pod = |uid: &PodUid| HeldPod {
/// #     namespace: "team".to_owned(),
/// #     name: uid.0.clone(),
/// #     labels: BTreeMap::new(),
/// #     priority: 0,
/// #     cost: Duration::ZERO,
/// #     fixed: None,
/// # };
/// // Each of three nodes has one GPU, which a pod holds. A gang of two pods waits.
/// let pods: BTreeMap<PodUid, HeldPod> = grants.iter().map(|held| (held.pod.clone(), pod(&held.pod))).collect();
/// let units: Vec<EvictionUnit> = (grants.iter().zip([0, 1, 2]))
///     .map(|(held, level)| EvictionUnit { pods: vec![held.pod.clone()], level, released: GpuAmount::default() })
///     .collect();
/// let nodes: Vec<EvictionNode<'_>> = (states.iter().zip(&grants).enumerate())
///     .map(|(unit, (state, held))| {
///         let requests = vec![Some(&request)];
///         let node = GangNode { state, domains: Vec::new(), wished: None, requests, has_member: false };
///         EvictionNode { node, held: vec![(unit, held)] }
///     })
///     .collect();
/// let guarantees = BTreeMap::new();
/// let scene = EvictionScene { nodes: &nodes, units: &units, pods: &pods, budgets: &[], guarantees: &guarantees };
/// let gang = [GangClass { count: 2, policy: &Policy::Simple }];
/// let planned = plan(scene, &gang, &TopologyWish::Any).unwrap();
/// assert_eq!(planned.units, [0, 1], "the pod of the highest level is spared");
/// ```
#[must_use]
pub fn plan(
    scene: EvictionScene<'_>,
    classes: &[GangClass<'_>],
    wish: &TopologyWish,
) -> Option<EvictionPlan> {
    Search::new(scene, classes, wish).run()
}
