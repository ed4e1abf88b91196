use std::path::Path;

use tessera_core::topology::{Link, PcieLevel};
use tessera_wire::foreign::smi_matrix;

use super::*;

/// Returns the topology of a DGX-1 with V100.
fn dgx1() -> Topology {
    smi_matrix::parse(include_str!("../../../tessera/tests/fixtures/dgx1.txt")).unwrap().topology
}

/// Returns two sockets with two PCIe switches of two GPUs each.
fn two_sockets() -> Topology {
    let topology = Topology::from_pairs(8, |a, b| {
        Link::pcie(match (a.0 / 2 == b.0 / 2, a.0 / 4 == b.0 / 4) {
            (true, _) => PcieLevel::SingleSwitch,
            (false, true) => PcieLevel::HostBridge,
            (false, false) => PcieLevel::System,
        })
    });
    topology.with_numa(&[0, 0, 0, 0, 1, 1, 1, 1].map(Some))
}

fn share(topology: &Topology, policy: StreamPolicy) -> f64 {
    bandwidth_share(topology, policy, 300, 5).unwrap()
}

#[test]
fn reproduces_the_published_results() {
    let check = |topology: &Topology, policy, expected: f64| {
        let share = share(topology, policy);
        assert!((share - expected).abs() < 0.004, "{policy}: {share:.4}, published {expected}");
    };
    check(&dgx1(), StreamPolicy::Lowest, 0.573);
    check(&dgx1(), StreamPolicy::Tree, 0.692);
    check(&dgx1(), StreamPolicy::Gpuallocator, 0.748);
    check(&dgx1(), StreamPolicy::Greedy, 0.861);
    check(&dgx1(), StreamPolicy::Preserve, 0.873);
}

#[test]
fn policy_tessera_reaches_the_highest_share() {
    for topology in [dgx1(), two_sockets()] {
        let ours = share(&topology, StreamPolicy::Tessera);
        for policy in StreamPolicy::ALL {
            assert!(share(&topology, policy) <= ours + 0.0005, "{policy} is better");
        }
    }
}

#[test]
fn corrected_claims_reach_the_share_of_policy_tessera() {
    for topology in [dgx1(), two_sockets()] {
        let (claims, ours) =
            (share(&topology, StreamPolicy::Claims), share(&topology, StreamPolicy::Tessera));
        assert!(claims > ours - 0.005, "claims reach {claims:.4}, {ours:.4} are possible");
    }
}

#[test]
fn serves_hosts_of_every_size() {
    for count in [1, 2, 3, 17] {
        let topology = Topology::from_pairs(count, |_, _| Link::nvlink(4));
        for policy in StreamPolicy::ALL.into_iter().filter(|policy| policy.serves(&topology)) {
            let share = bandwidth_share(&topology, policy, 20, 1).unwrap();
            assert!((share - 1.0).abs() < 1e-9, "{policy} on {count} GPUs: {share}");
        }
    }
    let error = bandwidth_share(&Topology::unknown(17), StreamPolicy::Greedy, 20, 1).unwrap_err();
    let expected = "policy greedy compares every set of GPUs, which takes too long for more than 16";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn every_policy_parses_from_its_name() {
    for policy in StreamPolicy::ALL {
        assert_eq!(policy.name().parse(), Ok(policy));
    }
    for name in StreamPolicy::COMPARED {
        assert!(name.parse::<StreamPolicy>().is_ok(), "{name}");
    }
    let error = "best".parse::<StreamPolicy>().unwrap_err().to_string();
    assert_eq!(
        error,
        "unknown policy \"best\"; choose from random, lowest, tree, gpuallocator, greedy, preserve, claims, tessera"
    );
}

/// The best published result for each host whose matrix may lie beside the repository.
const PUBLISHED: [(&str, f64); 10] = [
    ("dgx1-v100", 0.873),
    ("v100-cloud-permuted", 0.868),
    ("dgx1-p100", 0.888),
    ("rtx8000x4-bridge", 1.0),
    ("a100-pcie-bridge8", 0.984),
    ("pcie8-2socket-pix", 0.984),
    ("pcie8-1root-p40", 0.998),
    ("pcie8-phb-cloud", 1.0),
    ("dgx-a100", 1.0),
    ("dgx-h100", 1.0),
];

#[test]
fn policy_tessera_reaches_the_best_published_result() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/topologies");
    if !folder.is_dir() {
        println!("skipped: {} does not exist", folder.display());
        return;
    }
    for (name, published) in PUBLISHED {
        let text = std::fs::read_to_string(folder.join(format!("{name}.txt"))).unwrap();
        let topology = smi_matrix::parse(&text).unwrap().topology;
        let share = share(&topology, StreamPolicy::Tessera);
        assert!(share >= published - 0.005, "{name}: {share:.4}, published {published}");
    }
}
