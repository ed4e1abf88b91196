//! Members of a gang are placed together or not at all, on the fewest and nearest nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use tessera_core::gang::{GangClass, GangNode, GangPlan, TopologyWish, plan};
use tessera_core::gpu::Gpu;
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::Policy;
use tessera_core::request::{ContainerRole, PodRequest, Request};
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, Percent};

/// A node with this many GPUs, of which the first ones are in use, in a rack of a block.
#[derive(Clone, Copy, Debug)]
struct Host {
    gpus: u8,
    used: u8,
    rack: Option<u8>,
    block: u8,
}

fn host() -> impl Strategy<Value = Host> {
    (1..5u8, 0..5u8, prop::option::weighted(0.9, 0..3u8), 0..2u8).prop_map(|(gpus, used, rack, block)| Host {
        gpus,
        used: used.min(gpus),
        rack,
        block,
    })
}

fn state(number: usize, host: Host) -> NodeState {
    let gpu = |index| Gpu::new(GpuIndex(index), "GPU-x".into(), "T4".into(), MiB(16_384));
    let count = usize::from(host.gpus);
    let node = Node::new(
        format!("node-{number}").as_str().into(),
        (0..host.gpus).map(gpu).collect(),
        Topology::unknown(count),
        MilliCpu(64_000),
        MiB(262_144),
    );
    let mut state = NodeState::empty(Arc::new(node.unwrap()));
    if host.used > 0 {
        let holds = (0..host.used).map(|gpu| (GpuIndex(gpu), Hold::Whole)).collect();
        state.add(&PodGrant {
            pod: "running".into(),
            node: state.node().name.clone(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers: vec![ContainerGrant { container: "c".into(), role: ContainerRole::Main, holds }],
        });
    }
    state
}

/// A cluster with the names of its racks and blocks.
struct Cluster {
    hosts: Vec<Host>,
    states: Vec<NodeState>,
    racks: Vec<Option<String>>,
    blocks: Vec<String>,
}

impl Cluster {
    fn new(hosts: Vec<Host>) -> Self {
        let states = hosts.iter().enumerate().map(|(number, host)| state(number, *host)).collect();
        let racks = hosts.iter().map(|host| host.rack.map(|rack| format!("rack-{rack}"))).collect();
        let blocks = hosts.iter().map(|host| format!("block-{}", host.block)).collect();
        Self { hosts, states, racks, blocks }
    }

    fn nodes<'a>(&'a self, requests: &'a [PodRequest]) -> Vec<GangNode<'a>> {
        let node = |(number, state): (usize, &'a NodeState)| GangNode {
            state,
            domains: vec![self.racks[number].as_deref(), Some(&self.blocks[number])],
            wished: Some(&self.blocks[number]),
            requests: requests.iter().map(Some).collect(),
            has_member: false,
        };
        self.states.iter().enumerate().map(node).collect()
    }

    fn plan(&self, members: &[(usize, Request)], wish: &TopologyWish) -> Option<GangPlan> {
        let requests: Vec<PodRequest> =
            members.iter().map(|(_, request)| PodRequest::of_mains([*request])).collect();
        let classes: Vec<GangClass<'_>> =
            members.iter().map(|(count, _)| GangClass { count: *count, policy: &Policy::Simple }).collect();
        plan(&classes, &self.nodes(&requests), wish)
    }

    /// Returns how many members of `gpus` GPUs fit on each node of a group.
    fn rooms(&self, gpus: u8, in_group: impl Fn(&Host) -> bool) -> Vec<usize> {
        let hosts = self.hosts.iter().filter(|host| in_group(host));
        let mut rooms: Vec<usize> = hosts.map(|host| usize::from((host.gpus - host.used) / gpus)).collect();
        rooms.sort_unstable_by(|a, b| b.cmp(a));
        rooms
    }

    /// Checks that all members have their GPUs and that no GPU is used twice.
    fn check(&self, plan: &GangPlan, members: &[(usize, Request)]) {
        let mut states = self.states.clone();
        let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
        for place in &plan.places {
            let (_, request) = members[place.class];
            let held: usize = place.containers.iter().map(|grant| grant.holds.len()).sum();
            assert_eq!(held, request.gpu_count());
            *counts.entry(place.class).or_default() += 1;
            let state = &mut states[place.node];
            state.add(&PodGrant {
                pod: "member".into(),
                node: state.node().name.clone(),
                cpu: MilliCpu::ZERO,
                memory: MiB::ZERO,
                containers: place.containers.clone(),
            });
        }
        for (class, (count, _)) in members.iter().enumerate() {
            assert_eq!(counts.get(&class).copied().unwrap_or(0), *count, "all members or none");
        }
        for state in &states {
            for gpu in state.node().gpus() {
                assert!(!state.used(gpu.index).exceeds(gpu.memory), "a GPU is used twice");
            }
        }
    }
}

fn used_nodes(plan: &GangPlan) -> BTreeSet<usize> {
    plan.places.iter().map(|place| place.node).collect()
}

/// Returns the fewest nodes that take `count` members, by the rooms in descending order.
fn fewest(rooms: &[usize], count: usize) -> Option<usize> {
    let mut placed = 0;
    let position = rooms.iter().position(|room| {
        placed += room;
        placed >= count
    });
    position.map(|position| position + 1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn equal_members_take_the_fewest_nodes_wherever_they_fit(
        hosts in vec(host(), 1..12),
        count in 1..8usize,
        gpus in 1..4u8,
    ) {
        let cluster = Cluster::new(hosts);
        let members = [(count, Request::Whole(gpus))];
        let expected = fewest(&cluster.rooms(gpus, |_| true), count);
        let plan = cluster.plan(&members, &TopologyWish::Any);
        prop_assert_eq!(plan.as_ref().map(|plan| used_nodes(plan).len()), expected);
        if let Some(plan) = plan {
            cluster.check(&plan, &members);
        }
    }

    #[test]
    fn a_required_level_is_never_broken_and_never_missed(
        hosts in vec(host(), 1..12),
        count in 1..8usize,
        gpus in 1..4u8,
    ) {
        let cluster = Cluster::new(hosts);
        let members = [(count, Request::Whole(gpus))];
        let key = || "block".to_owned();
        let in_block = |block: u8| fewest(&cluster.rooms(gpus, |host| host.block == block), count);
        let best = (0..2).filter_map(in_block).min();
        let required = cluster.plan(&members, &TopologyWish::Required(key()));
        prop_assert_eq!(required.as_ref().map(|plan| used_nodes(plan).len()), best);
        let preferred = cluster.plan(&members, &TopologyWish::Preferred(key()));
        prop_assert_eq!(preferred.is_some(), fewest(&cluster.rooms(gpus, |_| true), count).is_some());
        for plan in required.iter().chain(preferred.iter().filter(|_| best.is_some())) {
            let blocks: BTreeSet<u8> = used_nodes(plan).iter().map(|node| cluster.hosts[*node].block).collect();
            prop_assert_eq!(blocks.len(), 1);
            cluster.check(plan, &members);
        }
    }

    #[test]
    fn different_members_are_placed_together_or_not_at_all(
        hosts in vec(host(), 1..10),
        large in 1..4usize,
        small in 1..4usize,
        percent in 1..100u32,
    ) {
        let cluster = Cluster::new(hosts);
        let share = Request::share(Percent(percent), MiB(1024));
        let members = [(small, share), (large, Request::Whole(2))];
        if let Some(plan) = cluster.plan(&members, &TopologyWish::Any) {
            cluster.check(&plan, &members);
        } else {
            // With one more idle GPU for each small member, the gang would fit if the large members do.
            let idle: usize = cluster.rooms(1, |_| true).iter().sum();
            let pairs: usize = cluster.rooms(2, |_| true).iter().sum();
            prop_assert!(pairs < large || idle < 2 * large + small, "the gang fits and was refused");
        }
    }
}

fn hosts(racks: &[(u8, u8)], used: u8) -> Vec<Host> {
    racks.iter().map(|(rack, block)| Host { gpus: 4, used, rack: Some(*rack), block: *block }).collect()
}

#[test]
fn near_nodes_are_taken_before_far_ones() {
    // Racks of the same name in different blocks are different racks.
    let cluster = Cluster::new(hosts(&[(0, 0), (1, 0), (0, 1), (1, 1), (1, 1)], 0));
    let workers = |count| cluster.plan(&[(count, Request::Whole(4))], &TopologyWish::Any).unwrap();
    assert_eq!((used_nodes(&workers(2)), workers(2).level), (BTreeSet::from([3, 4]), Some(0)));
    assert_eq!((used_nodes(&workers(3)), workers(3).level), (BTreeSet::from([2, 3, 4]), Some(1)));
    assert_eq!(workers(5).level, None);
    // The rack that is left with the least room comes first.
    assert_eq!(used_nodes(&workers(1)), BTreeSet::from([0]));
}

#[test]
fn a_missing_member_goes_near_the_others() {
    let cluster = Cluster::new(hosts(&[(0, 0), (0, 0), (1, 1), (1, 1)], 0));
    let request = [PodRequest::of_mains([Request::Whole(4)])];
    let mut nodes = cluster.nodes(&request);
    nodes[2].has_member = true;
    nodes[2].requests = vec![None];
    let one = GangClass { count: 1, policy: &Policy::Simple };
    for wish in [TopologyWish::Any, TopologyWish::Required("block".to_owned())] {
        assert_eq!(used_nodes(&plan(&[one], &nodes, &wish).unwrap()), BTreeSet::from([3]));
    }
    let two = GangClass { count: 2, policy: &Policy::Simple };
    assert_eq!(plan(&[two], &nodes, &TopologyWish::Required("block".to_owned())), None);
}
