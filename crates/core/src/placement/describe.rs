//! The reason for a placement, as a sentence for people.

use std::borrow::Cow;

use super::containers::take;
use super::static_table::{StaticTable, TableSource};
use super::{Placement, Policy, best_effort, whole};
use crate::bandwidth::Sets;
use crate::gpu_set::GpuSet;
use crate::grant::Hold;
use crate::node::NodeState;
use crate::request::{ContainerRole, PodRequest, Request, Share};
use crate::tree::{Group, GroupLevel};
use crate::units::{GpuIndex, Percent};

/// Describes why each container got its GPUs, in the order of the choice. Init containers are left
/// out.
#[must_use]
pub fn describe(node: &NodeState, pod: &PodRequest, policy: &Policy, placement: &Placement) -> String {
    let mut beside = Cow::Borrowed(node);
    let mut reasons = Vec::new();
    for (container, gpus) in pod.containers.iter().zip(&placement.gpus) {
        let Some(request) = container.request.filter(|_| container.role != ContainerRole::Init) else {
            continue;
        };
        reasons.push((container.name.as_str(), policy.reason(&beside, request, *gpus)));
        take(&mut beside, *gpus, request);
    }
    match reasons.as_slice() {
        [] => "no container keeps a GPU".to_owned(),
        [(_, only)] => only.clone(),
        several => {
            let each: Vec<String> =
                several.iter().map(|(name, reason)| format!("{name}: {reason}")).collect();
            each.join(" / ")
        }
    }
}

impl Policy {
    fn reason(&self, node: &NodeState, request: Request, gpus: GpuSet) -> String {
        match request {
            Request::Whole(_) => self.reason_for_set(node, gpus),
            Request::Share(Share { count: 1, .. }) => self.reason_for_share(node, request, gpus),
            Request::Share(_) => self.reason_for_shares(node, gpus),
        }
    }

    fn reason_for_set(&self, node: &NodeState, gpus: GpuSet) -> String {
        let (topology, free, count) = (node.node().topology(), node.idle(), gpus.len());
        let tree = topology.tree();
        // The chosen GPUs take the place of the required ones: they lead to the same group and the
        // same listed set.
        let nearest = || words("nearest group", whole::link_group(tree, free, gpus, count));
        let fullest = || words("fullest branch", whole::fragment_group(tree, free, gpus, count));
        match self {
            Self::Pair(pair) => pair.gpus.reason_for_set(node, gpus),
            Self::Tessera(_) => by_links(node, gpus),
            Self::Link => nearest(),
            Self::Fragment => fullest(),
            Self::Share if count == 1 => fullest(),
            Self::Share => nearest(),
            Self::Simple | Self::Binpack => "lowest idle indexes".to_owned(),
            Self::Spread => "as far apart as the idle GPUs allow".to_owned(),
            Self::BestEffort => {
                let points = best_effort::set_score(topology, gpus);
                format!("{points} points, the best group when all idle GPUs are divided into such groups")
            }
            Self::Static(table) => by_table(table, node.node().instance_type.as_deref(), free, gpus),
        }
    }

    fn reason_for_shares(&self, node: &NodeState, gpus: GpuSet) -> String {
        let model = node.node().topology().bandwidth_model();
        let (bandwidth, best) = (model.bandwidth(gpus), model.best(gpus.len()).gb_per_second());
        match self {
            Self::Pair(pair) => pair.gpus.reason_for_shares(node, gpus),
            Self::Tessera(_) => {
                format!("least lost for the pods expected, with {bandwidth} of at most {best:.1}")
            }
            Self::Simple => "lowest indexes with enough left".to_owned(),
            Self::Binpack => "least memory left that suffices".to_owned(),
            Self::Spread => "most left".to_owned(),
            Self::Link | Self::Fragment | Self::Share | Self::Static(_) | Self::BestEffort => {
                "best links among the GPUs with enough left".to_owned()
            }
        }
    }

    fn reason_for_share(&self, node: &NodeState, request: Request, gpus: GpuSet) -> String {
        let gpu = gpus.lowest().unwrap_or(GpuIndex(0));
        let (room, hold) = (node.room(gpu), node.node().hold(request, gpu));
        let had = format!("{} and {}", room.compute_percent, room.memory);
        match self {
            Self::Pair(pair) => pair.gpus.reason_for_share(node, request, gpus),
            Self::Tessera(_) => {
                let (compute_percent, memory) = match hold {
                    Hold::Whole => (Percent::WHOLE, room.memory),
                    Hold::Share { compute_percent, memory } => (compute_percent, memory),
                };
                let (compute_percent, memory) = (
                    room.compute_percent.saturating_sub(compute_percent),
                    room.memory.saturating_sub(memory),
                );
                format!("least lost for the pods expected; {compute_percent} and {memory} stay free on it")
            }
            Self::Simple => "lowest index with enough left".to_owned(),
            Self::Binpack => format!("least memory left that suffices: {}", room.memory),
            Self::Spread => format!("most left: {had}"),
            Self::Link | Self::Fragment | Self::Share | Self::Static(_) | Self::BestEffort => {
                format!("least compute left that suffices: {had}")
            }
        }
    }
}

/// Describes the bandwidth of the set and of the GPUs that stay idle.
fn by_links(node: &NodeState, gpus: GpuSet) -> String {
    let machine = node.node().topology().bandwidth_model();
    let left = node.idle().difference(gpus);
    let leaves = match left.len() {
        0 => "leaves no idle GPU".to_owned(),
        1 => format!("leaves GPU {left}"),
        _ => format!("leaves {left} with {}", machine.bandwidth(left)),
    };
    let count = gpus.len();
    let (bandwidth, best) = (machine.bandwidth(gpus), machine.best(count));
    match machine.sets() {
        _ if count < 2 => format!("the GPU that later sets miss least; {leaves}"),
        Sets::Alike(_) => format!("{bandwidth} as any {count} GPUs here; {leaves}"),
        Sets::Known(..) | Sets::Searched(_) => {
            format!("{bandwidth} of at most {:.1} for {count} GPUs; {leaves}", best.gb_per_second())
        }
    }
}

fn by_table(table: &StaticTable, instance_type: Option<&str>, free: GpuSet, gpus: GpuSet) -> String {
    let source = table.choose(instance_type, free, gpus, gpus.len()).map(|(_, source)| source);
    let instance_type = instance_type.unwrap_or("this node");
    match source {
        Some(TableSource::Listed) => format!("first idle set listed for {instance_type}"),
        Some(TableSource::PartOfListed) => format!("part of a larger idle set listed for {instance_type}"),
        Some(TableSource::Unlisted) | None => "no listed set is idle: lowest idle indexes".to_owned(),
    }
}

/// `nearest group with enough idle GPUs: PIX 4,5`
fn words(which: &str, group: &Group) -> String {
    let level = match group.level {
        GroupLevel::NvLink => "NVLink island",
        GroupLevel::SameBoard => "PSB",
        GroupLevel::SingleSwitch => "PIX",
        GroupLevel::MultiSwitch => "PXB",
        GroupLevel::HostBridge => "PHB",
        GroupLevel::Node => "NODE",
        GroupLevel::System => "SYS",
        GroupLevel::Root => "the whole node",
    };
    format!("{which} with enough idle GPUs: {level} {}", group.gpus)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::fixtures::{bridged_pairs, dgx1_v100, node, pcie_pairs, switched};
    use crate::placement::place;
    use crate::topology::Topology;
    use crate::units::MiB;

    fn check(topology: &Topology, policy: &Policy, requests: &[Request], expected: &str) {
        let node = node(topology, &[]);
        let pod = PodRequest::of_mains(requests.iter().copied());
        let placement = place(&node, &pod, policy, GpuSet::EMPTY).unwrap();
        assert_eq!(describe(&node, &pod, policy, &placement), expected);
    }

    fn tessera() -> Policy {
        Policy::Tessera(Arc::default())
    }

    #[test]
    fn describes_sets_by_their_links() {
        let leaves = "40.0 GB/s of at most 40.0 for 2 GPUs; leaves 1,2,4,5,6,7 with 40.0 GB/s";
        check(&dgx1_v100(), &tessera(), &[Request::Whole(2)], leaves);
        let one = "the GPU that later sets miss least; leaves 1,2,3,4,5,6,7 with 6.0 GB/s";
        check(&bridged_pairs(), &tessera(), &[Request::Whole(1)], one);
        let alike = "370.8 GB/s as any 7 GPUs here; leaves GPU 7";
        check(&switched(8, 18), &tessera(), &[Request::Whole(7)], alike);
        let all = "120.0 GB/s of at most 120.0 for 8 GPUs; leaves no idle GPU";
        check(&dgx1_v100(), &tessera(), &[Request::Whole(8)], all);
    }

    #[test]
    fn describes_sets_by_the_rules_of_other_projects() {
        let sets =
            |policy, count, expected| check(&pcie_pairs(), &policy, &[Request::Whole(count)], expected);
        sets(Policy::Link, 2, "nearest group with enough idle GPUs: PIX 0,1");
        sets(Policy::Link, 3, "nearest group with enough idle GPUs: PHB 0,1,2,3");
        sets(Policy::Fragment, 1, "fullest branch with enough idle GPUs: PIX 0,1");
        sets(Policy::Share, 5, "nearest group with enough idle GPUs: SYS 0,1,2,3,4,5,6,7");
        sets(Policy::Simple, 3, "lowest idle indexes");
        sets(Policy::Spread, 2, "as far apart as the idle GPUs allow");
        let divided = "50 points, the best group when all idle GPUs are divided into such groups";
        sets(Policy::BestEffort, 2, divided);
        sets(Policy::Static(Arc::default()), 2, "no listed set is idle: lowest idle indexes");
    }

    #[test]
    fn describes_sets_by_a_static_table() {
        let gpus = |indexes: [u8; 4]| indexes.map(GpuIndex).into_iter().collect::<GpuSet>();
        let sizes = BTreeMap::from([(4, vec![gpus([4, 5, 6, 7])])]);
        let table = StaticTable { sets: BTreeMap::from([("big".to_owned(), sizes)]), strict: false };
        let all = GpuSet::first(8);
        let described = |set| by_table(&table, Some("big"), all, set);
        assert_eq!(described(gpus([4, 5, 6, 7])), "first idle set listed for big");
        assert_eq!(described(gpus([4, 5, 6, 6])), "part of a larger idle set listed for big");
        assert_eq!(described(gpus([0, 1, 2, 3])), "no listed set is idle: lowest idle indexes");
    }

    #[test]
    fn describes_shares_and_several_containers() {
        let share = Request::share(Percent(30), MiB(4096));
        let part = |policy, expected| check(&pcie_pairs(), &policy, &[share], expected);
        part(tessera(), "least lost for the pods expected; 70% and 12288 MiB stay free on it");
        part(Policy::Share, "least compute left that suffices: 100% and 16384 MiB");
        part(Policy::Binpack, "least memory left that suffices: 16384 MiB");
        part(Policy::Spread, "most left: 100% and 16384 MiB");
        let two =
            "c0: least memory left that suffices: 16384 MiB / c1: least memory left that suffices: 12288 MiB";
        check(&pcie_pairs(), &Policy::Binpack, &[share, share], two);
        check(&pcie_pairs(), &Policy::Simple, &[], "no container keeps a GPU");
    }
}
