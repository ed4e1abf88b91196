//! Policy `tessera` for whole GPUs: it misses no faster set and is deterministic.

use proptest::collection::vec;
use proptest::prelude::*;
use tessera_core::gpu_set::GpuSet;
use tessera_core::ledger::Ledger;
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::{Policy, describe, place};
use tessera_core::request::{LinkSensitivity, PodRequest, Request};
use tessera_core::topology::{Link, PcieLevel, Topology};
use tessera_core::units::GpuIndex;

use crate::arbitrary;

fn tessera() -> Policy {
    "tessera".parse().unwrap()
}

/// Generates a node on which some pods hold GPUs already.
fn busy_node() -> impl Strategy<Value = NodeState> {
    (arbitrary::node(), vec(arbitrary::pod_grant(), 0..4)).prop_map(|(node, grants)| {
        let name = node.name.clone();
        let mut ledger = Ledger::default();
        ledger.set_node(node);
        for mut grant in grants {
            grant.node = name.clone();
            ledger.observe(grant);
        }
        ledger.node(&name).unwrap().clone()
    })
}

fn pod(count: usize, link_sensitivity: LinkSensitivity) -> PodRequest {
    PodRequest { link_sensitivity, ..PodRequest::of_mains([Request::Whole(u8::try_from(count).unwrap())]) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn no_faster_set_is_passed_over(node in busy_node(), count in 1usize..6, required in 0u64..256) {
        let required = GpuSet::from_mask(required).intersection(node.idle()).lowest_n(count / 2);
        let Ok(placement) = place(&node, &pod(count, LinkSensitivity::Sensitive), &tessera(), required) else {
            prop_assert!(node.idle().len() < count);
            return Ok(());
        };
        let chosen = placement.gpus[0];
        prop_assert_eq!(chosen.len(), count);
        prop_assert!(node.idle().is_superset(chosen) && chosen.is_superset(required));
        let machine = node.node().topology().bandwidth_model();
        for other in node.idle().subsets(count).filter(|other| other.is_superset(required)) {
            prop_assert!(machine.bandwidth(other) <= machine.bandwidth(chosen), "{} beats {}", other, chosen);
        }
    }

    #[test]
    fn a_job_that_does_not_care_still_gets_its_gpus(node in busy_node(), count in 1usize..6) {
        let pod = pod(count, LinkSensitivity::Insensitive);
        match place(&node, &pod, &tessera(), GpuSet::EMPTY) {
            Ok(placement) => {
                prop_assert_eq!(placement.gpus[0].len(), count);
                prop_assert!(node.idle().is_superset(placement.gpus[0]));
                prop_assert_eq!(place(&node, &pod, &tessera(), GpuSet::EMPTY), Ok(placement));
            }
            Err(_) => prop_assert!(node.idle().len() < count),
        }
    }

    #[test]
    fn every_placement_has_a_reason(
        node in busy_node(),
        pod in arbitrary::pod_request(),
        policy in prop::sample::select(Policy::NAMES.to_vec()),
    ) {
        let policy: Policy = policy.parse().unwrap();
        if let Ok(placement) = place(&node, &pod, &policy, GpuSet::EMPTY) {
            let reason = describe(&node, &pod, &policy, &placement);
            prop_assert!(!reason.is_empty() && reason.is_ascii(), "{}", reason);
        }
    }

    #[test]
    fn large_hosts_return_the_requested_number(
        links in vec(arbitrary::link(), 20 * 20),
        free in 0u64..1 << 20,
        required in 0u64..1 << 20,
        count in 1usize..20,
        sensitive in any::<bool>(),
    ) {
        let topology = Topology::from_pairs(20, |a, b| links[a.position() * 20 + b.position()]);
        let node = node_of(&topology, GpuSet::from_mask(free));
        let link_sensitivity = if sensitive { LinkSensitivity::Sensitive } else { LinkSensitivity::Insensitive };
        let required = GpuSet::from_mask(required).intersection(node.idle()).lowest_n(count);
        match place(&node, &pod(count, link_sensitivity), &tessera(), required) {
            Ok(placement) => {
                prop_assert_eq!(placement.gpus[0].len(), count);
                prop_assert!(node.idle().is_superset(placement.gpus[0]));
                prop_assert!(placement.gpus[0].is_superset(required));
            }
            Err(_) => prop_assert!(node.idle().len() < count),
        }
    }

    #[test]
    fn equals_go_to_the_lowest_index(count in 1usize..8, free in 0u64..256, nvlinks in 0u8..13) {
        let alike = Topology::from_pairs(8, |_, _| Link { pcie: Some(PcieLevel::HostBridge), nvlinks });
        let node = node_of(&alike, GpuSet::from_mask(free));
        let placement = place(&node, &pod(count, LinkSensitivity::Sensitive), &tessera(), GpuSet::EMPTY);
        let chosen = placement.ok().map(|placement| placement.gpus[0]);
        prop_assert_eq!(chosen, node.idle().lowest_with(GpuSet::EMPTY, count));
    }
}

/// Returns a node with these links, on which the GPUs that are not free are unhealthy.
fn node_of(topology: &Topology, free: GpuSet) -> NodeState {
    use tessera_core::gpu::{Gpu, Health};
    let gpu = |index: GpuIndex| Gpu {
        health: if free.contains(index) { Health::Healthy } else { Health::Unhealthy },
        ..Gpu::new(index, "GPU-x".into(), "T4".into(), Default::default())
    };
    let gpus = topology.gpus().iter().map(gpu).collect();
    let node = Node::new("n".into(), gpus, topology.clone(), Default::default(), Default::default()).unwrap();
    NodeState::empty(node.into())
}
